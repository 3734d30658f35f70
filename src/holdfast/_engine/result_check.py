"""The account of a save: each planned item has exactly one result, or nothing is committed."""

import logging
from collections import Counter
from collections.abc import Sequence

from holdfast._human_units import some_of
from holdfast._plan.write_columns import columns_of, is_open
from holdfast._storage.results import Results
from holdfast.errors import IncompleteWriteError
from holdfast.planner import SavePlan
from holdfast.storage import WriteResult

logger = logging.getLogger(__name__)


def check_results(plan: SavePlan, results: Sequence[WriteResult], *, rank: int) -> None:
    """Compare what this rank planned with what its storage reports.

    A storage plugin that reports nothing of the items, or records of its own, cannot be held to account;
    that is logged.

    Raises:
        IncompleteWriteError: An item has no result, two, or one that nobody planned.
    """
    if not _tells_of_items(results):
        if plan.items:
            logger.warning(
                "the storage reports nothing of the %d items that it was told to write; whether they were "
                "written cannot be checked",
                len(plan.items),
            )
        return
    if isinstance(results, Results) and results.columns is not None and not is_open(plan):
        lines, written = columns_of(plan), results.columns
        offsets = written.column("chunk_offsets").tolist()
        if lines.offsets is written.chunk_offsets and (
            (lines.keys == written.keys and lines.offset.tolist() == offsets)
            or sorted(zip(lines.keys, lines.offset, strict=True))
            == sorted(zip(written.keys, offsets, strict=True))
        ):
            return
    due, done = Counter(item.index for item in plan.items), Counter(result.index for result in results)
    if due == done and (not due or max(due.values()) == 1):
        return
    wrong = [*(due - done), *(done - due)]
    names = some_of(sorted({index.fqn for index in wrong}), 20)
    raise IncompleteWriteError(
        f"rank {rank} planned {len(plan.items)} items and reports {len(results)}; they differ in: "
        f"{names}. Nothing was committed.",
        rank=rank,
        key=wrong[0].fqn if wrong else None,
        expected=len(plan.items),
        found=len(results),
    )


def check_counts(plans: Sequence[SavePlan], results: Sequence[Sequence[WriteResult]]) -> None:
    """On the coordinator: whether each rank reports as many items as it was told to write.

    Raises:
        IncompleteWriteError: One does not.
    """
    for rank, (plan, written) in enumerate(zip(plans, results, strict=True)):
        # A plan "as last time" is empty; what the rank made of it was compared there.
        if plan.usable and _tells_of_items(written) and len(plan.items) != len(written):
            raise IncompleteWriteError(
                f"rank {rank} was told to write {len(plan.items)} items and reports {len(written)}. "
                "Nothing was committed.",
                rank=rank,
                expected=len(plan.items),
                found=len(written),
            )


def nbytes_reported(results: Sequence[WriteResult]) -> int:
    """How many bytes the storage says that it has written."""
    return sum(result.size_in_bytes or 0 for result in results) if _tells_of_items(results) else 0


def _tells_of_items(results: Sequence[WriteResult]) -> bool:
    """Whether the results are those of items: plugins may return an empty list, or anything else."""
    if isinstance(results, Results):
        return True
    return bool(results) and all(hasattr(result, "size_in_bytes") for result in results)
