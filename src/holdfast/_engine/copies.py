"""The copy that a save in the background is made from: taken by whatever stager there is, given back once."""

import inspect
from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any

from holdfast._engine.request import Same
from holdfast._engine.save_future import SaveFuture
from holdfast._helper import remote_writer
from holdfast._staging.stage import Staging
from holdfast._staging.staged import StagedState
from holdfast.staging import BlockingAsyncStager
from holdfast.storage import StorageWriter

__all__ = ["Copy", "Source", "is_stager", "stager_keys", "take_copy"]

_ours: dict[bool, Staging] = {}
"""For callers who bring no stager. Kept for the next save: touching new memory costs more than copying."""


def is_stager(candidate: Any) -> bool:
    """Whether a storage writer stages in a way of its own, as torch's and those written after it do.

    One that only inherits what ``BlockingAsyncStager`` does is served better by the buffers that we keep.
    """
    if isinstance(candidate, BlockingAsyncStager) and not getattr(candidate, "type_check", False):
        inherited = ("stage", "synchronize_staging", "should_synchronize_after_execute")
        return any(
            inspect.getattr_static(candidate, name) is not inspect.getattr_static(BlockingAsyncStager, name)
            for name in inherited
        )
    return all(hasattr(candidate, name) for name in ("stage", "should_synchronize_after_execute"))


def stager_keys(stager: Any, *, shared: bool) -> frozenset[Hashable]:
    """What a save has to itself, so that there is one copy at a time."""
    own: Hashable = ("our staging", shared) if stager is None else Same(stager)
    # What was not staged into shared memory is copied into ours once more.
    return frozenset([own, ("our staging", True)] if shared else [own])


class Copy:
    """A state that does not change any more, or will not from some moment on.

    Attributes:
        is_asynchronous: Whether the stager gives futures, so that ``async_save`` returns two.
    """

    def __init__(self, *, is_asynchronous: bool) -> None:
        self.is_asynchronous = is_asynchronous
        self._staged: StagedState | None = None
        self._state: Any = None
        self._error: Exception | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the original may change."""
        if self._staged is not None:
            return self._staged.is_complete
        return self._error is None and not isinstance(self._state, Future)

    def wait(self) -> dict[str, Any]:
        """The state, once it is complete; raises why there is none."""
        if self._error is not None:
            raise self._error
        if self._staged is not None:
            self._staged.wait()
            state: dict[str, Any] = self._staged.state
            return state
        if isinstance(self._state, Future):
            self._state = self._state.result()
        taken: dict[str, Any] = self._state
        return taken

    def wait_shared(self) -> StagedState:
        """The same in memory that another process can map; copied once more if the stager has used other."""
        state = self.wait()
        if self._staged is None or self._staged.fd is None:
            before, self._staged = self._staged, _our_staging(shared=True).stage(state, when_busy="another")
            self._state = None
            if before is not None:
                before.release()
        return self._staged

    def release(self) -> None:
        """Nobody reads the state any more. Waits for what is still on its way into it. Twice is fine."""
        staged, self._staged, self._state = self._staged, None, None
        if staged is not None:
            staged.release()


def take_copy(stager: Any, state: dict[str, Any], *, shared: bool) -> Copy:
    """Stage a state. When this returns, the original may change unless the copy says otherwise.

    Args:
        stager: The caller's; None for ours.
        state: What to copy.
        shared: Whether another process will read it.

    Raises:
        PlanError: A value cannot be copied. An asynchronous stager's failure is raised by the copy instead.
    """
    if stager is None:
        copy = Copy(is_asynchronous=False)
        copy._staged = _our_staging(shared=shared).stage(state, when_busy="another")  # noqa: SLF001
        return copy
    if _gives_leases(stager):
        copy = Copy(is_asynchronous=stager.is_asynchronous)
        try:
            copy._staged = stager.stage_leased(state, when_busy="another")  # noqa: SLF001
        except Exception as error:
            if not copy.is_asynchronous:
                raise
            copy._error = error  # noqa: SLF001
        return copy
    staged = stager.stage(state)
    copy = Copy(is_asynchronous=isinstance(staged, Future))
    copy._state = staged  # noqa: SLF001
    return copy


class Source:
    """Where the thread of a save gets what it writes, and what it writes with."""

    def __init__(self, copy: Copy, writer: StorageWriter, future: SaveFuture, *, in_process: bool) -> None:
        self._copy = copy
        self._writer = writer
        self._staged = future.staged
        self._in_process = in_process

    def __call__(self) -> tuple[dict[str, Any], StorageWriter]:
        """Wait for the copy, and say that it is complete."""
        state = self._copy.wait()
        if not self._staged.done():
            self._staged.complete(None)
        if not self._in_process:
            return state, self._writer
        staged = self._copy.wait_shared()
        return staged.state, remote_writer(self._writer, staged)


def _our_staging(*, shared: bool) -> Staging:
    if shared not in _ours:
        _ours[shared] = Staging(shared_memory=shared, pinned_memory=True)
    return _ours[shared]


def _gives_leases(stager: Any) -> bool:
    """Whether it is our DefaultStager, with its own way of staging: a subclass may have changed ``stage``."""
    owner = next((cls for cls in type(stager).__mro__ if "stage_leased" in vars(cls)), None)
    return owner is not None and inspect.getattr_static(stager, "stage") is vars(owner).get("stage")
