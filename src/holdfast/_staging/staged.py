"""The result of staging: the copy of a state, and the lease of its buffer."""

from typing import Any

import torch
from typing_extensions import Self

from holdfast._staging.buffer_pool import BufferLease


class StagedState:
    """A copy of a state, and the lease of the buffer that it lies in.

    The buffer is not reused until ``release`` is called, or until this object and every tensor of the copy
    are gone.

    Attributes:
        state: The copy: the same structure, with tensors on the host that require no gradient.
        base: The whole buffer, as a tensor of bytes.
        nbytes: How much of the buffer the copy takes.
        fd: The descriptor of the buffer, to be sent to another process; None if it is not shared. It belongs
            to the stager: duplicate it to keep it.
    """

    def __init__(self, state: Any, base: torch.Tensor, nbytes: int, lease: BufferLease, event: Any) -> None:
        self.state = state
        self.base = base
        self.nbytes = nbytes
        self.fd = lease.buffer.fd
        self._lease = lease
        self._event = event

    @property
    def is_complete(self) -> bool:
        """Whether all values have arrived, so that the originals may change. Always True without a device."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Return when all values have arrived."""
        if self._event is not None:
            self._event.synchronize()

    def release(self) -> None:
        """Say that nobody reads the copy any more, so that its buffer can be reused. May be called twice."""
        self.wait()
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
