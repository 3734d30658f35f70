"""The account of a save: each planned item has exactly one result, or nothing is committed."""

from collections import Counter
from collections.abc import Sequence

from holdfast.errors import IncompleteWriteError
from holdfast.planner import SavePlan
from holdfast.storage import WriteResult

__all__ = ["check_results"]


def check_results(written: Sequence[tuple[SavePlan, Sequence[WriteResult]]]) -> None:
    """Compare what each rank planned with what it reports.

    Raises:
        IncompleteWriteError: An item has no result, two, or one that nobody planned.
    """
    for rank, (plan, results) in enumerate(written):
        if len(plan.items) == len(results):
            planned = {item.index for item in plan.items}
            if len(planned) == len(results) and planned == {result.index for result in results}:
                continue
        due, done = Counter(item.index for item in plan.items), Counter(r.index for r in results)
        wrong = [*(due - done), *(done - due)]
        names = ", ".join(sorted({index.fqn for index in wrong})[:20])
        raise IncompleteWriteError(
            f"rank {rank} planned {len(plan.items)} items and reports {len(results)}; they differ in: "
            f"{names}. Nothing was committed.",
            rank=rank,
            key=wrong[0].fqn if wrong else None,
            expected=len(plan.items),
            found=len(results),
        )
