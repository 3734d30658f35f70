"""Object collectives that pass failures on, values by index, and views of files, under torch's names."""

import functools
import inspect
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import add, sub
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from holdfast._names_elsewhere import names_of
from holdfast._tensors.chunks import find_chunk, is_sharded, is_tensor
from holdfast._user_warning import warn_user
from holdfast.api import _is_wrapped_exception, _wrap_exception
from holdfast.errors import WRAPPED_EXCEPTION, CheckpointException, PlanError, portable_failure
from holdfast.metadata import MetadataIndex

__all__ = ["CheckpointException", "find_state_dict_object", "find_tensor_shard"]

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__, "metadata")

T = TypeVar("T")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def _get_failure_dict(results: list[Any]) -> dict[int, WRAPPED_EXCEPTION]:
    """The failures among the results of all ranks, by rank."""
    return {rank: result for rank, result in enumerate(results) if _is_wrapped_exception(result)}


def _all_gather_keys(local_dict: dict[str, Any], group: dist.ProcessGroup | None = None) -> set[str]:
    """The keys that the ranks of a group have in their dicts, all together."""
    keys: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(keys, list(local_dict), group=group)
    return set().union(*keys)


def _assert_same_keys(state_dict: dict[str, Any], process_group: dist.ProcessGroup | None = None) -> None:
    """Raise AssertionError if another rank has a key that this one does not have; on every rank."""
    missing = _all_gather_keys(state_dict, process_group) - state_dict.keys()
    if missing:
        raise AssertionError(f"other ranks have keys that this one does not have: {sorted(missing)}")


class _DistWrapper:
    """Collectives of Python objects over a group, and steps whose failure every rank hears of.

    If a function that is called in a step raises on any rank, all ranks that wait for its result raise
    CheckpointException, which is also an instance of the class of its cause.

    Args:
        group: The ranks; None for all.
        use_dist: False if there is this process only: then nothing is sent.
        coordinator_rank: The rank of the group that gathers and decides.

    Attributes:
        rank: This rank in the group.
        is_coordinator: Whether it is the coordinator.
        global_coordinator_rank: The coordinator's rank among all.
    """

    def __init__(self, group: dist.ProcessGroup | None, use_dist: bool, coordinator_rank: int) -> None:
        self.group = group
        self.use_dist = use_dist
        self.coordinator_rank = coordinator_rank
        self.rank = dist.get_rank(group) if use_dist else 0
        self.is_coordinator = not use_dist or self.rank == coordinator_rank
        self.global_coordinator_rank = 0
        if use_dist:
            self.global_coordinator_rank = (
                coordinator_rank if group is None else dist.get_global_rank(group, coordinator_rank)
            )

    def get_rank(self) -> int:
        """This rank in the group."""
        return self.rank

    def get_world_size(self) -> int:
        """How many ranks the group has."""
        return dist.get_world_size(self.group) if self.use_dist else 1

    def broadcast_object(self, object: T | None) -> T:
        """The coordinator's object, on every rank."""
        objects = [object]
        if self.use_dist:
            dist.broadcast_object_list(objects, src=self.global_coordinator_rank, group=self.group)
        return cast("T", objects[0])

    def gather_object(self, object: T) -> list[T] | None:
        """The objects of all ranks in rank order, on the coordinator; None on the others."""
        if not self.use_dist:
            return [object]
        gathered: list[Any] | None = [None] * self.get_world_size() if self.is_coordinator else None
        dist.gather_object(object, gathered, dst=self.global_coordinator_rank, group=self.group)
        return gathered

    def all_gather_object(self, object: T) -> list[T]:
        """The objects of all ranks in rank order, on every rank."""
        gathered: list[Any] = [object] * self.get_world_size()
        if self.use_dist:
            dist.all_gather_object(gathered, object, group=self.group)
        return gathered

    def scatter_object(self, object_list: list[T] | None) -> T:
        """The object that the coordinator's list has for this rank; other ranks pass None."""
        if not self.use_dist:
            assert object_list is not None
            return object_list[0]
        received: list[Any] = [None]
        dist.scatter_object_list(
            received,
            object_list if self.is_coordinator else None,
            src=self.global_coordinator_rank,
            group=self.group,
        )
        return cast("T", received[0])

    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        if self.use_dist:
            dist.barrier(group=self.group)

    def reduce_scatter(
        self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], list[R]]
    ) -> R:
        """Call ``map_fun`` on every rank, and ``reduce_fun`` on the coordinator for an answer to each rank.

        Raises:
            CheckpointException: One of the calls failed, on any rank.
        """
        result = self._reduced(step, map_fun, reduce_fun)
        if isinstance(result, CheckpointException):
            result = [result] * self.get_world_size()
        return cast("R", _checked(self.scatter_object(result)))

    def all_reduce(self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], R]) -> R:
        """As ``reduce_scatter``, but every rank gets all that ``reduce_fun`` returns."""
        return cast("R", _checked(self.broadcast_object(self._reduced(step, map_fun, reduce_fun))))

    def all_gather(self, step: str, map_fun: Callable[[], T]) -> list[T]:
        """What ``map_fun`` returns on each rank, in rank order. It raises as ``reduce_scatter`` does."""
        results = self.all_gather_object(self._attempt(map_fun))
        failures = _get_failure_dict(results)
        if failures:
            raise CheckpointException.of(step, failures)
        return cast("list[T]", results)

    def broadcast(self, step: str, map_fun: Callable[[], T]) -> T:
        """What ``map_fun`` returns on the coordinator, where alone it is called; on every rank.

        Raises:
            CheckpointException: The call failed.
        """
        result: Any = self._attempt(map_fun) if self.is_coordinator else None
        if _is_wrapped_exception(result):
            result = CheckpointException.of(step, {self.rank: result})
        return cast("T", _checked(self.broadcast_object(result)))

    def _attempt(self, function: Callable[[], T]) -> T | WRAPPED_EXCEPTION:
        try:
            return function()
        except BaseException as error:  # noqa: BLE001 - a rank that leaves would let the others hang
            failure = _wrap_exception(error)
            return portable_failure(failure) if self.use_dist else failure

    def _reduced(self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], R]) -> Any:
        """On the coordinator: what ``reduce_fun`` returns, or the failure; None on the other ranks."""
        values = self.gather_object(self._attempt(map_fun))
        if values is None:
            return None
        failures = _get_failure_dict(values)
        if not failures:
            result = self._attempt(lambda: reduce_fun(cast("list[T]", values)))
            if not _is_wrapped_exception(result):
                return result
            failures = {self.rank: cast("WRAPPED_EXCEPTION", result)}
        return CheckpointException.of(step, failures)


def _checked(result: T) -> T:
    if isinstance(result, CheckpointException):
        raise result
    return result


def find_tensor_shard(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    """The memory of the chunk of a tensor that ``index`` names by its offset, on this rank.

    A tensor that is not sharded is found without an offset, too.

    Raises:
        PlanError: This rank has no such chunk. It is a ValueError.
    """
    if isinstance(tensor, ShardedTensor) and index.offset is None:
        raise PlanError(f"{index.fqn}: it is a ShardedTensor, and no offset was provided", key=index.fqn)
    try:
        return find_chunk(tensor, index)
    except PlanError as error:
        what = "Could not find shard" if is_sharded(tensor) else "it is not a ShardedTensor"
        raise PlanError(f"{what}; {error}", key=index.fqn) from None


def find_state_dict_object(state_dict: dict[str, Any], index: MetadataIndex) -> Any:
    """The value of a flat state that ``index`` names; of a sharded tensor the chunk.

    Raises:
        PlanError: The state has no such value. It is a ValueError.
    """
    if index.fqn not in state_dict:
        raise PlanError(f"the state has no value with the FQN {index.fqn!r}", key=index.fqn)
    value = state_dict[index.fqn]
    if is_tensor(value):
        return find_tensor_shard(value, index)
    if index.offset is not None:
        raise PlanError(
            f"{index.fqn}: a {type(value).__name__} is no ShardedTensor that could have a chunk at "
            f"{tuple(index.offset)}",
            key=index.fqn,
        )
    return value


def _element_wise_add(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return list(map(add, a, b))


def _element_wise_sub(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return list(map(sub, a, b))


class _ReaderView(io.IOBase):
    """A part of a stream as a stream of its own. Reading moves the stream below it.

    Args:
        base_stream: The stream; it must be seekable.
        offset: Where the part begins.
        len: How many bytes it has.
    """

    def __init__(self, base_stream: io.IOBase, offset: int, len: int) -> None:
        super().__init__()
        self.base_stream: Any = base_stream
        self.offset = offset
        self.len = len
        self.seek(0)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move within the part; returns the position in it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self.len}[whence]
        position = start + offset
        self.base_stream.seek(self.offset + position)
        return position

    def tell(self) -> int:
        """The position in the part."""
        return int(self.base_stream.tell()) - self.offset

    def readable(self) -> bool:
        """Whether the stream below can be read."""
        return bool(self.base_stream.readable())

    def seekable(self) -> bool:
        """Whether the stream below can be moved in."""
        return bool(self.base_stream.seekable())

    def readinto(self, buffer: Any) -> int:
        """Read as much as fits and is left; returns how many bytes that was."""
        left = max(self.len - self.tell(), 0)
        return int(self.base_stream.readinto(memoryview(buffer).cast("B")[:left])) if left else 0

    def read(self, size: int | None = -1) -> bytes:
        """Read up to ``size`` bytes; all that is left if it is negative."""
        left = max(self.len - self.tell(), 0)
        wanted = left if size is None or size < 0 else min(size, left)
        data: bytes = self.base_stream.read(wanted)
        return data


def _create_file_view(file: io.IOBase, offset: int, length: int) -> io.IOBase:
    """A part of a file as a stream of its own."""
    return _ReaderView(file, offset, length)


def _normalize_device_info(device_type: str, device_id: int) -> str:
    """The name of a device; the CPU has no number."""
    return "cpu" if device_type == "cpu" else f"{device_type}:{device_id}"


@contextmanager
def _profile() -> Iterator[None]:
    """Nothing is measured: the record of a save or load tells where its time went."""
    yield


def _api_bc_check(func: F) -> F:
    """Let ``save`` and ``load`` of other programs take their storage second, as torch's did before 2.2."""
    keywords = inspect.signature(func).parameters.keys() & {"storage_writer", "storage_reader"}

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and keywords:
            (name,) = keywords
            warn_user(f"pass the second argument of {func.__name__} by its name: {name}=", FutureWarning)
            return func(args[0], **{**kwargs, name: args[1]})
        return func(*args, **kwargs)

    return cast("F", call)
