"""The copy of a state that a save in the background writes, whichever stager made it."""

from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any

from holdfast._background.running_save import IdentityKey, RunningSave
from holdfast._background.save_future import SaveFuture
from holdfast._engine.adapt import gives_leases
from holdfast._engine.ports import WriterPort
from holdfast._staging.stage import Staging
from holdfast._staging.staged import StagedState
from holdfast._writer_process.process_writer import ProcessWriter

_ours: dict[bool, Staging] = {}
"""For callers who bring no stager. Kept for the next save: touching new memory costs more than copying."""


def stager_keys(stager: Any, *, shared: bool) -> frozenset[Hashable]:
    """The keys by which saves that use the same staging buffers run one after the other."""
    own: Hashable = ("our staging", shared) if stager is None else IdentityKey(stager)
    # What was not staged into shared memory is copied into ours once more.
    return frozenset([own, ("our staging", True)] if shared else [own])


class StateCopy:
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


def take_copy(stager: Any, state: dict[str, Any], *, shared: bool) -> StateCopy:
    """Stage a state. When this returns, the original may change unless the copy says otherwise.

    Args:
        stager: The caller's; None for ours.
        state: What to copy.
        shared: Whether another process will read it.

    Raises:
        PlanError: A value cannot be copied. An asynchronous stager's failure is raised by the copy instead.
    """
    if stager is None:
        copy = StateCopy(is_asynchronous=False)
        copy._staged = _our_staging(shared=shared).stage(state, when_busy="another")  # noqa: SLF001
        return copy
    if gives_leases(stager):
        copy = StateCopy(is_asynchronous=stager.is_asynchronous)
        try:
            copy._staged = stager.stage_leased(state, when_busy="another")  # noqa: SLF001
        except Exception as error:
            if not copy.is_asynchronous:
                raise
            copy._error = error  # noqa: SLF001
        return copy
    staged = stager.stage(state)
    copy = StateCopy(is_asynchronous=isinstance(staged, Future))
    copy._state = staged  # noqa: SLF001
    return copy


class CopySource:
    """Gives the thread of a save the copied state and the writer, once the copy is complete."""

    def __init__(
        self,
        copy: StateCopy,
        writer: WriterPort,
        future: SaveFuture,
        running: RunningSave,
        *,
        in_process: bool,
    ) -> None:
        self._copy = copy
        self._writer = writer
        self._staged = future.staged
        self._running = running
        self._in_process = in_process

    def __call__(self) -> tuple[dict[str, Any], WriterPort]:
        """Wait for the copy, and report that it is complete."""
        state = self._copy.wait()
        if not self._staged.done():
            self._staged.complete(None)
        if not self._in_process:
            return state, self._writer
        staged = self._copy.wait_shared()
        writer = ProcessWriter(self._writer, staged)
        self._running.writes_elsewhere(writer)
        return staged.state, writer


def _our_staging(*, shared: bool) -> Staging:
    if shared not in _ours:
        _ours[shared] = Staging(shared_memory=shared, pinned_memory=True)
    return _ours[shared]
