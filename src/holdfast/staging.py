"""Stagers, under torch's names: they copy a state, so that training can go on while the copy is saved.

``holdfast._staging`` does the copying.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch

from holdfast._names_elsewhere import names_of
from holdfast._staging.buffer_pool import WhenBusy
from holdfast._staging.stage import Staging
from holdfast._staging.staged import StagedState
from holdfast._staging.state_tree import leaves_of
from holdfast.errors import PlanError

__all__ = ["AsyncStager", "BlockingAsyncStager", "DefaultStager", "StagingOptions"]

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__, "_state_dict_stager", "metadata", "torch.distributed._state_dict_utils")

State: TypeAlias = dict[str, Any]


@runtime_checkable
class AsyncStager(Protocol):
    """Makes the copy of a state for ``async_save``, which calls it on every rank, in the calling thread.

    The order of calls: ``stage``; then the background save of the returned state begins; then
    ``synchronize_staging``, if ``should_synchronize_after_execute`` is True; ``close`` after the last save.

    The copy must not change when training goes on. If ``stage`` returns a state, this holds from its return
    on; if it returns a future, from the completion of the future on. Subclasses may set
    ``_synchronize_after_execute``.
    """

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether ``async_save`` calls ``synchronize_staging`` before it returns."""
        return bool(getattr(self, "_synchronize_after_execute", True))

    def stage(self, state_dict: State) -> Future[State] | State:
        """Copy the state; returns the copy, or a future of it."""
        raise NotImplementedError(f"{type(self).__name__} must say how a state is staged: implement stage()")

    def synchronize_staging(self) -> None:
        """Wait until the last ``stage`` is complete, so that the original may change."""
        return None  # noqa: RET501 - without it a type checker takes the method for abstract

    def close(self) -> None:
        """Free everything that the stager holds. No other call may follow."""
        return None  # noqa: RET501 - as above


@dataclass
class StagingOptions:
    """How a DefaultStager stages. Options for a device have no effect on a machine without one.

    Attributes:
        use_pinned_memory: Stage into pinned memory, which a CUDA device copies into directly.
        use_shared_memory: Stage into memory that another process can map. Saving in a process needs it.
        use_async_staging: ``stage`` returns a future. Values on the host are already copied when it returns;
            only copies from a device go on.
        use_non_blocking_copy: Let copies from a device go on after ``stage`` has returned its future.
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = True
    use_non_blocking_copy: bool = True


class DefaultStager(AsyncStager):
    """Copies states into buffers that are allocated once and reused, at the speed of memory.

    A staged state does not change as long as somebody holds a tensor of it: a later ``stage`` reuses the
    buffers only if nobody does. Any thread may call it.

    Args:
        config: The kind of memory, and whether ``stage`` returns a future.
        compare: After copying, compare each copy with its original and raise if the original was changed
            meanwhile. For debugging.
        threads: How many threads copy; by default one for each core, 8 at most.
        overlap_host: Copy large tensors of the host after ``stage`` has returned its future, too. Nothing may
            change them before the future is done. Needs ``use_async_staging``.
    """

    def __init__(
        self,
        config: StagingOptions | None = None,
        *,
        compare: bool = False,
        threads: int | None = None,
        overlap_host: bool = False,
    ) -> None:
        self._overlap_host = overlap_host
        self._config = config or StagingOptions()
        self._staging = Staging(
            shared_memory=self._config.use_shared_memory,
            pinned_memory=self._config.use_pinned_memory,
            compare=compare,
            threads=threads,
        )
        self._last: Future[State] | None = None

    @property
    def is_asynchronous(self) -> bool:
        """Whether ``stage`` returns a future."""
        return self._config.use_async_staging

    def prepare(self, state_dict: State) -> None:
        """Allocate the memory for such a state now, so that the first save does not have to."""
        self._staging.prepare(state_dict)

    def stage(self, state_dict: State, **_: Any) -> State | Future[State]:
        """Copy a state; returns the copy, or with ``use_async_staging`` a future of it.

        Raises:
            PlanError: A value cannot be copied; the error has its key. With ``use_async_staging`` the future
                raises this, and the errors below.
            UsageError: The stager is closed.
            MemoryError: There is not enough memory.
        """
        if not self.is_asynchronous:
            state: State = self._staged_dict(state_dict).state
            return state
        future: Future[State] = Future()
        future.set_running_or_notify_cancel()
        try:
            staged = self._staged_dict(state_dict)
        except Exception as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        else:
            _complete(future, staged)
        self._last = future
        return future

    def _staged_dict(self, state_dict: State) -> StagedState:
        # It must not wait for a buffer: only the caller can drop the tensors that it would wait for.
        return self.stage_leased(state_dict, when_busy="another")

    def stage_leased(
        self, state_dict: State, *, when_busy: WhenBusy = "wait", timeout: float | None = None
    ) -> StagedState:
        """Copy a state and lease its buffer until ``release`` is called.

        Args:
            state_dict: What to copy.
            when_busy: What to do while an earlier lease lasts: "wait" for its end, "raise", or take "another"
                buffer.
            timeout: How many seconds to wait at most.

        Raises:
            TimeoutError: An earlier lease still lasts.
            UsageError: An earlier lease lasts and ``when_busy`` is "raise", or the stager is closed.
        """
        overlap = self._config.use_async_staging and self._config.use_non_blocking_copy
        return self._staging.stage(
            state_dict,
            when_busy=when_busy,
            timeout=timeout,
            wait=not overlap,
            overlap=overlap and self._overlap_host,
        )

    def synchronize_staging(self) -> None:
        """Wait until the last ``stage`` is complete; raises the error if it failed."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Free the buffers; a staged state that is still held keeps its own. May be called twice."""
        self._last = None
        self._staging.close()


def _complete(future: Future[State], staged: StagedState) -> None:
    """Complete the future when all values have arrived from their devices."""

    def arrive() -> None:
        try:
            staged.wait()
        except Exception as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        else:
            future.set_result(staged.state)

    if staged.is_complete:
        arrive()
    else:
        threading.Thread(target=arrive, name="holdfast-staging", daemon=True).start()


class BlockingAsyncStager(AsyncStager):
    """Copies states into the memory of the host, completely, before ``stage`` returns.

    Args:
        cache_staged_state_dict: Keep the buffers for the next ``stage``. This is faster, and uses the memory
            as long as the stager lives. A staged state that is still held is never overwritten.
        type_check: Refuse values other than tensors, numbers, strings, bytes, None and containers of them.
    """

    _synchronize_after_execute = False
    # Of the class, because subclasses that are storage writers may never call our __init__.
    _staging: Staging | None = None

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check

    def stage(self, state_dict: State) -> State:
        """Copy a state.

        Raises:
            PlanError: A value cannot be copied, or ``type_check`` refuses it; the error has its key.
        """
        if self.type_check:
            _refuse_unusual_types(state_dict)
        staging = self._staging or Staging()
        staged = staging.stage(state_dict, when_busy="another")
        if self.cache_staged_state_dict:
            self._staging = staging
        else:
            staging.close()
        state: State = staged.state
        return state

    def synchronize_staging(self) -> None:
        """Does nothing: ``stage`` has already waited."""

    def close(self) -> None:
        """Free the buffers. May be called twice."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None


def _refuse_unusual_types(state_dict: State) -> None:
    for key, value in leaves_of(state_dict):
        if value is not None and not isinstance(value, torch.Tensor | int | float | complex | str | bytes):
            raise PlanError(
                f"{key}: a {type(value).__module__}.{type(value).__qualname__} was found by type_check, "
                "which lets pass tensors, numbers, strings, bytes and None",
                key=key,
            )
