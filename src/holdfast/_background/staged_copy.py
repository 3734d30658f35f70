"""The copy of a state that a save in the background writes, whichever stager made it."""

from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from holdfast._background.running_save import IdentityKey
from holdfast._engine.adapt import gives_leases
from holdfast._staging.stage import Staging
from holdfast._staging.staged import StagedState

_ours: dict[bool, Staging] = {}
"""For callers who bring no stager. Kept for the next save: touching new memory costs more than copying."""


def stager_keys(stager: Any, *, shared: bool) -> frozenset[Hashable]:
    """The keys by which saves that use the same staging buffers run one after the other."""
    own: Hashable = ("our staging", shared) if stager is None else IdentityKey(stager)
    # What was not staged into shared memory is copied into ours once more.
    return frozenset([own, ("our staging", True)] if shared else [own])


@dataclass(eq=False)
class StateCopy:
    """A state that does not change any more, or will not from some moment on.

    Attributes:
        is_asynchronous: Whether the stager gives futures, so that ``async_save`` returns two.
        staged: The copy, if a stager of ours made it.
        state: The copy that another stager made, or its future.
        error: Why there is none.
    """

    is_asynchronous: bool
    staged: StagedState | None = None
    state: Any = None
    error: Exception | None = None

    @property
    def nbytes(self) -> int:
        """The size of the copy; 0 if another stager made it."""
        return 0 if self.staged is None else self.staged.nbytes

    @property
    def is_complete(self) -> bool:
        """Whether the original may change."""
        if self.staged is not None:
            return self.staged.is_complete
        return self.error is None and not isinstance(self.state, Future)

    def wait(self) -> Any:
        """The state, once it is complete; raises why there is none."""
        if self.error is not None:
            raise self.error
        if self.staged is not None:
            self.staged.wait()
            return self.staged.state
        if isinstance(self.state, Future):
            self.state = self.state.result()
        return self.state

    def wait_shared(self) -> StagedState:
        """The same in memory that another process can map; copied once more if the stager has used other."""
        state = self.wait()
        if self.staged is None or self.staged.fd is None:
            before, self.staged = self.staged, _our_staging(shared=True).stage(state, when_busy="another")
            self.state = None
            if before is not None:
                before.release()
        return self.staged

    def release(self) -> None:
        """Free the copy, once all is copied into it. It must not be read after this. Twice is fine."""
        staged, self.staged, self.state = self.staged, None, None
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
        return StateCopy(
            is_asynchronous=False, staged=_our_staging(shared=shared).stage(state, when_busy="another")
        )
    if gives_leases(stager):
        try:
            staged = stager.stage_leased(state, when_busy="another")
        except Exception as error:
            if not stager.is_asynchronous:
                raise
            return StateCopy(is_asynchronous=True, error=error)
        return StateCopy(stager.is_asynchronous, staged=staged)
    staged = stager.stage(state)
    return StateCopy(isinstance(staged, Future), state=staged)


def prepare_staging(state: dict[str, Any], *, shared: bool) -> None:
    """Take the memory for the copy of such a state now, for callers who bring no stager."""
    _our_staging(shared=shared).prepare(state)


def _our_staging(*, shared: bool) -> Staging:
    if shared not in _ours:
        _ours[shared] = Staging(shared_memory=shared, pinned_memory=True)
    return _ours[shared]
