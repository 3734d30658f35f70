"""Whether ranks that save a value under one key save the same value.

Each rank sends one fingerprint of all its values that are not sharded. Only where these differ, the single
fingerprints are compared: ranks may have other keys, as the stages of a pipeline do, or other values.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast._ranks.exchange import Exchange
from holdfast.errors import PlanError

__all__ = ["Replicas"]

_MOST_NAMED = 10


class Replicas:
    """This rank's values that are not sharded, as fingerprints, for one save.

    Args:
        planner: The planner; one that has no ``fingerprints`` is not asked, and nothing is compared.
        exchange: The ranks.
    """

    def __init__(self, planner: Any, exchange: Exchange) -> None:
        self.exchange = exchange
        self._ask: Callable[[], Mapping[str, bytes]] | None = getattr(planner, "fingerprints", None)
        self._marks: Mapping[str, bytes] = {}

    def together(self) -> bytes | None:
        """One fingerprint of them all; None if this rank is alone, or its planner does not tell."""
        if self._ask is None or self.exchange.world_size == 1:
            return None
        self._marks = self._ask()
        joined = hashlib.blake2b(digest_size=16)
        for key in sorted(self._marks):
            name = key.encode("utf-8", "surrogatepass")
            joined.update(len(name).to_bytes(4, "little") + name + self._marks[key])
        return joined.digest()

    def compare(self) -> None:
        """Compare value by value; on every rank, if the fingerprints of all together differ.

        Raises:
            CheckpointException: Ranks have different values under one key; also a PlanError.
        """
        self.exchange.agree("compare replicas", lambda: dict(self._marks), _refuse_differences)


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
        "equal first. check_replicas=False keeps any one of them.",
        key=next(iter(different)),
    )


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"{shown} and {len(ranks) - 4} more" if len(ranks) > 4 else shown
