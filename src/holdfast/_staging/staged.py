"""Owns the result of staging: the copy of a state, and how long its memory stays as it is."""

from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from holdfast._staging.arenas import Lease
from holdfast._staging.handover import Descriptors, describe
from holdfast.errors import UsageError

__all__ = ["StagedState"]


class StagedState:
    """A copy of a state, and the lease of the memory that it lies in.

    The memory is not used for anything else until ``release`` is called, or until this object and every
    tensor of the copy are gone.

    Attributes:
        state: The copy: the same structure, with tensors on the host that require no gradient.
        nbytes: How much of the arena it takes.
        arena: The name of the memory, which ``handover.rebuild`` looks up the descriptor by.
        fd: The descriptor of that memory, to be sent to another process; None if it is not shared. It is the
            stager's: duplicate it to keep it.
    """

    def __init__(self, state: Any, base: torch.Tensor, nbytes: int, lease: Lease, event: Any) -> None:
        self.state = state
        self.nbytes = nbytes
        self.arena = lease.arena.identity
        self.fd = lease.arena.fd
        self._base = base
        self._lease = lease
        self._event = event

    @property
    def is_complete(self) -> bool:
        """Whether all values have arrived and the originals may change. Always so for a state on the host."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Return when all values have arrived."""
        if self._event is not None:
            self._event.synchronize()

    def descriptors(self) -> Descriptors:
        """What another process needs to build the state from the same memory; values have arrived by then.

        Raises:
            UsageError: The memory is not shared.
            PlanError: An object cannot be pickled, or a sharded tensor not be described; it is named.
        """
        if self.fd is None:
            raise UsageError("only a stager with shared memory can hand a state to another process")
        self.wait()
        return describe(self.state, self._base, self.arena)

    def release(self) -> None:
        """The memory may be used again: nobody reads the copy any more. Twice is fine."""
        self.wait()
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
