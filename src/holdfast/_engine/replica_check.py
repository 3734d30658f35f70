"""Whether ranks that save a value under one key save the same value.

Each rank sends one fingerprint of all its values that are not sharded, and one of all chunks that it holds
together with certain other ranks. Only where these differ, the single fingerprints are compared: ranks may
have other keys, as the stages of a pipeline do, or other values.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from holdfast._engine.ports import Fingerprints, SavePlannerPort
from holdfast._ranks.exchange import Exchange
from holdfast.errors import PlanError

_MOST_NAMED = 10
_BUFFERS_OF_BATCH_NORM = ("running_mean", "running_var")

Holders = tuple[int, ...] | None
"""The ranks that should have the same; None for all."""


class Replicas:
    """This rank's values that others have too, as fingerprints, for one save.

    Args:
        planner: The planner. If it makes no fingerprints, nothing is compared.
        exchange: The ranks.
    """

    def __init__(self, planner: SavePlannerPort, exchange: Exchange) -> None:
        self.exchange = exchange
        self._planner = planner
        self._marks: Fingerprints = {}

    def together(self) -> dict[Holders, bytes]:
        """One fingerprint for all that certain ranks hold; nothing if this rank is alone, or is not told."""
        if self.exchange.world_size == 1:
            return {}
        self._marks = self._planner.fingerprints()
        return {holders: _joined(marks) for holders, marks in self._marks.items()}

    def compare(self) -> None:
        """Compare value by value; on every rank, if the fingerprints of all together differ.

        Raises:
            CheckpointException: Ranks have different values under one key; also a PlanError.
        """
        self.exchange.agree(
            "compare replicas",
            lambda: {name: mark for marks in self._marks.values() for name, mark in marks.items()},
            _refuse_differences,
        )


def differ(marks: Iterable[Mapping[Holders, bytes]]) -> bool:
    """Whether ranks that should have the same do not, or not under the same keys."""
    first: dict[Holders, bytes] = {}
    return any(
        first.setdefault(holders, mark) != mark for of_rank in marks for holders, mark in of_rank.items()
    )


def _joined(marks: Mapping[str, bytes]) -> bytes:
    joined = hashlib.blake2b(digest_size=16)
    for key in sorted(marks):
        name = key.encode("utf-8", "surrogatepass")
        joined.update(len(name).to_bytes(4, "little") + name + marks[key])
    return joined.digest()


def _refuse_differences(ranks: Sequence[Mapping[str, bytes]]) -> None:
    seen: dict[str, dict[bytes, list[int]]] = defaultdict(dict)
    for rank, marks in enumerate(ranks):
        for key, mark in marks.items():
            seen[key].setdefault(mark, []).append(rank)
    different = {key: groups for key, groups in seen.items() if len(groups) > 1}
    if not different:
        return
    lines = [
        f"{key}: ranks {' and '.join(map(_some, groups.values()))} have different values"
        for key, groups in list(different.items())[:_MOST_NAMED]
    ]
    if len(different) > len(lines):
        lines.append(f"and {len(different) - len(lines)} more")
    raise PlanError(
        "ranks save different values under one key, and only one could be kept:\n  "
        + "\n  ".join(lines)
        + "\nSave one value per rank with PerRank(value), give each rank a key of its own, or make them "
        "equal first. check_replicas=False keeps any one of them."
        + (_HINT if any(key.rpartition(".")[2] in _BUFFERS_OF_BATCH_NORM for key in different) else ""),
        key=next(iter(different)),
    )


_HINT = (
    " The running statistics of BatchNorm differ wherever each rank sees data of its own: broadcast the "
    "buffers of one rank before the save (DDP does so before its next forward pass), or use SyncBatchNorm."
)


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"{shown} and {len(ranks) - 4} more" if len(ranks) > 4 else shown
