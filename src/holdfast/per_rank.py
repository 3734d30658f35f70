"""Values of each rank under one name of the state, and the names that they have in a checkpoint."""

import copy
import functools
import re
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from typing_extensions import Self

__all__ = ["KEPT", "PerRank", "RankKey", "kept_key", "kept_name", "rank_key", "rank_name"]

T = TypeVar("T")


class PerRank(Generic[T]):
    """A value that each rank has for itself: a state of random numbers, a position in the data.

    It may stand anywhere in the dicts and lists of a state, and hold whatever can be saved: tensors, nested
    containers, Stateful objects, other values. A save keeps the value of every rank. A load into a PerRank at
    the same place gives each rank its own back: tensors are filled where they are, a Stateful object gets its
    state, anything else is in ``value`` afterwards. If the checkpoint has one value for all ranks at this
    place, every rank gets that.

    A load by more or fewer ranks than saved needs a rule, ``resize``. Without it such a load raises before
    anything is changed. The rule is called on each rank with the values of all saving ranks, in rank order,
    with the rank that loads, and with how many load; what it returns becomes this rank's value. If it
    returns a tensor for a tensor, shape and dtype must be equal. Every rank holds all values in the memory of
    the host for that time. If the number of ranks is the same, the rule is not called.

    In the checkpoint it is a dict with one entry for each rank, called ``@rank-0-of-4`` and so on. Stock
    torch sees it like that, and so does a state that has such a dict in the place of the PerRank.

    Args:
        value: What this rank saves; for a load what is to be filled or replaced.
        resize: ``resize(values, rank, world_size)``, the rule for another number of ranks.

    Example:
        >>> state = {"model": model, "rng": PerRank(torch.get_rng_state())}
        >>> holdfast.save(state, checkpoint_id="checkpoints/100")
    """

    def __init__(self, value: T, *, resize: Callable[[list[T], int, int], T] | None = None) -> None:
        self.value = value
        self.resize = resize

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    def __copy__(self) -> Self:
        return type(self)(self.value, resize=self.resize)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(copy.deepcopy(self.value, memo), resize=self.resize)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # Inside of a tuple or another object it would be stored as part of a value that all ranks share.
        raise TypeError(
            "a PerRank can only stand in the dicts and lists of a state, not inside of other values"
        )


_OF_RANK = "@rank-"
KEPT = "@kept-for-rank-"
"""How the first part of a flat key begins that was kept for one rank because ranks differed. Reserved."""

_NAME = re.compile(rf"({_OF_RANK}|{KEPT})(\d{{1,9}})-of-(\d{{1,9}})")


def rank_name(rank: int, world_size: int, prefix: str = _OF_RANK) -> str:
    """The name of a rank's value below the place of its PerRank; names sort in rank order."""
    return f"{prefix}{rank:0{len(str(world_size - 1))}}-of-{world_size}"


def kept_name(rank: int, world_size: int) -> str:
    """The first part of the flat keys that are kept for a rank; names sort in rank order."""
    return rank_name(rank, world_size, KEPT)


class RankKey(NamedTuple):
    """A flat key of a value that one rank saved for itself, or of something in it.

    Attributes:
        key: The flat key of the PerRank. Or, of a value that was kept though no PerRank asked for it, the
            flat key under which the rank saved it: the checkpoint has another rank's value there.
        rank: The rank that saved it.
        world_size: How many ranks saved.
    """

    key: str
    rank: int
    world_size: int


def rank_key(key: str) -> RankKey | None:
    """Take a flat key apart; None if it is not in the value of a PerRank."""
    if _OF_RANK not in key:
        # Nearly all of 100,000 keys: 40 nanoseconds each instead of a microsecond.
        return None
    steps = key.split(".")
    for depth, name in enumerate(steps):
        if (told := _numbers_in(name, _OF_RANK)) is not None:
            return RankKey(".".join(steps[:depth]), *told)
    return None


def kept_key(key: str) -> RankKey | None:
    """Take a flat key apart; None if it is not one that was kept for a rank."""
    if not key.startswith(KEPT):
        return None
    name, dot, inner = key.partition(".")
    told = _numbers_in(name, KEPT) if dot else None
    return None if told is None else RankKey(inner, *told)


@functools.lru_cache(maxsize=4096)
def _numbers_in(name: str, prefix: str) -> tuple[int, int] | None:
    """The rank and the number of ranks in a name; None if ``rank_name`` does not make such a name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    rank, world_size = int(found[2]), int(found[3])
    return (rank, world_size) if rank < world_size and name == rank_name(rank, world_size, prefix) else None
