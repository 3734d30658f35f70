"""Stagers, under torch's names: what copies a state so that training goes on while the copy is saved.

The copying itself is ``holdfast._staging``.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from holdfast._staging.arenas import WhenBusy
from holdfast._staging.stage import Staging
from holdfast._staging.staged import StagedState
from holdfast._staging.structure import leaves_of
from holdfast.errors import PlanError

__all__ = ["AsyncStager", "BlockingAsyncStager", "DefaultStager", "StagingOptions"]

State: TypeAlias = dict[str, Any]


@runtime_checkable
class AsyncStager(Protocol):
    """What ``async_save`` asks for the copy of a state. Called on every rank, by the thread that saves.

    The order of calls: ``stage``; then the save of what it returned begins in the background; then
    ``synchronize_staging``, if ``should_synchronize_after_execute``; ``close`` when no more saves come.

    A stager promises that what it returns does not change when the trainer goes on: at once if it returns a
    state, and from the completion of the future if it returns one. Subclasses may set
    ``_synchronize_after_execute``.
    """

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether ``async_save`` waits by ``synchronize_staging`` before it returns."""
        return bool(getattr(self, "_synchronize_after_execute", True))

    def stage(self, state_dict: State) -> Future[State] | State:
        """A copy of the state that does not change any more, or a future of it."""
        raise NotImplementedError(f"{type(self).__name__} must say how a state is staged: implement stage()")

    def synchronize_staging(self) -> None:
        """Return when the last ``stage`` is complete, so that the original may change."""
        return None  # noqa: RET501 - without it a type checker takes the method for abstract

    def close(self) -> None:
        """Let go of everything that the stager holds. No call comes after it."""
        return None  # noqa: RET501 - as above


@dataclass
class StagingOptions:
    """How a DefaultStager stages. An option that needs a device has no effect where there is none.

    Attributes:
        use_pinned_memory: Stage into memory that a CUDA device copies into by itself.
        use_shared_memory: Stage into memory that another process can map: what saving in a process needs.
        use_async_staging: ``stage`` returns a future. Values on the host have been copied by then; only
            copies from a device go on.
        use_non_blocking_copy: Let copies from a device go on while ``stage`` returns its future.
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = True
    use_non_blocking_copy: bool = True


class DefaultStager(AsyncStager):
    """Stages into buffers that are taken once and used again, at the speed of memory.

    A staged state stays as it is for as long as anybody holds a tensor of it: a later ``stage`` takes the
    same buffers only if nobody does. Any thread may call it.

    Args:
        config: What kind of memory, and whether ``stage`` returns a future.
        compare: Compare each copy with its original after copying, and raise if that was changed meanwhile.
            For debugging.
        threads: How many copy at a time; as many as there are cores (8 at most) if None.
    """

    def __init__(
        self, config: StagingOptions | None = None, *, compare: bool = False, threads: int | None = None
    ) -> None:
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
        """Take the memory for such a state now, so that the first save need not."""
        self._staging.prepare(state_dict)

    def stage(self, state_dict: State, **_: Any) -> State | Future[State]:
        """The copy of a state, or with ``use_async_staging`` a future of it, which raises what went wrong.

        Raises:
            PlanError: A value cannot be copied; it is named.
            UsageError: The stager is closed.
            MemoryError: The system has not that much memory.
        """
        if not self.is_asynchronous:
            state: State = self._staged_dict(state_dict).state
            return state
        future: Future[State] = Future()
        future.set_running_or_notify_cancel()
        try:
            staged = self._staged_dict(state_dict)
        except Exception as error:  # noqa: BLE001 - whoever asks the future is told
            future.set_exception(error)
        else:
            _complete(future, staged)
        self._last = future
        return future

    def _staged_dict(self, state_dict: State) -> StagedState:
        # Another buffer rather than waiting: only the caller could drop the tensors that it would wait for.
        return self.stage_leased(state_dict, when_busy="another")

    def stage_leased(
        self, state_dict: State, *, when_busy: WhenBusy = "wait", timeout: float | None = None
    ) -> StagedState:
        """The copy of a state with the lease of its memory, which lasts until ``release``.

        Args:
            state_dict: What to copy.
            when_busy: What to do while an earlier copy is in use: "wait" for it, "raise", or take "another"
                buffer.
            timeout: The most to wait, in seconds.

        Raises:
            TimeoutError: An earlier copy is still in use.
            UsageError: The same, with ``when_busy="raise"``; or the stager is closed.
        """
        overlap = self._config.use_async_staging and self._config.use_non_blocking_copy
        return self._staging.stage(state_dict, when_busy=when_busy, timeout=timeout, wait=not overlap)

    def synchronize_staging(self) -> None:
        """Return when the last ``stage`` is complete; raises what went wrong in it."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Let go of the buffers; those of a staged state that is still held go with that. Twice is fine."""
        self._last = None
        self._staging.close()


def _complete(future: Future[State], staged: StagedState) -> None:
    """Fulfil the future when all values have arrived."""

    def arrive() -> None:
        try:
            staged.wait()
        except Exception as error:  # noqa: BLE001 - whoever asks the future is told
            future.set_exception(error)
        else:
            future.set_result(staged.state)

    if staged.is_complete:
        arrive()
    else:
        threading.Thread(target=arrive, name="holdfast-staging", daemon=True).start()


class BlockingAsyncStager(AsyncStager):
    """Stages into the memory of the host before ``stage`` returns.

    Args:
        cache_staged_state_dict: Keep the buffers for the next ``stage``: faster, and takes the memory for as
            long as the stager lives. A staged state that is still held is never overwritten.
        type_check: Refuse values other than tensors, numbers, strings, bytes, None and containers of them.
    """

    _synchronize_after_execute = False

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        self._staging: Staging | None = None

    def stage(self, state_dict: State) -> State:
        """The copy of a state.

        Raises:
            PlanError: A value cannot be copied, or is refused by ``type_check``; it is named.
        """
        if self.type_check:
            _refuse_unusual_types(state_dict)
        # The lazy attribute: subclasses that are storage writers may never call our __init__.
        staging = getattr(self, "_staging", None) or Staging()
        staged = staging.stage(state_dict, when_busy="another")
        if self.cache_staged_state_dict:
            self._staging = staging
        else:
            staging.close()
        state: State = staged.state
        return state

    def synchronize_staging(self) -> None:
        """Nothing: ``stage`` has waited."""

    def close(self) -> None:
        """Let go of the buffers. Twice is fine."""
        staging: Staging | None = getattr(self, "_staging", None)
        if staging is not None:
            staging.close()
            self._staging = None


def _refuse_unusual_types(state_dict: State) -> None:
    for key, value in leaves_of(state_dict):
        if value is not None and not isinstance(value, torch.Tensor | int | float | complex | str | bytes):
            raise PlanError(
                f"{key}: a {type(value).__module__}.{type(value).__qualname__} was found by type_check, "
                "which lets pass tensors, numbers, strings, bytes and None",
                key=key,
            )
