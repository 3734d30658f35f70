"""A copy of large tensors on the host that goes on in a thread while the trainer does something else."""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from holdfast._staging.staging_copy import Span, copy_spans


class HostCopy:
    """Copies spans in a thread. It has the methods of a device's event, so that both are waited for alike.

    Args:
        spans: What to copy.
        sources: The tensors that the spans lie in; they live as long as the copy goes on.
        base: The buffer to copy to.
        threads: How many threads copy.
        event: The end of the copies from a device, which belong to the same state; None if there are none.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        sources: Sequence[torch.Tensor],
        base: torch.Tensor,
        threads: int,
        event: Any,
    ) -> None:
        self._error: BaseException | None = None
        self._event = event
        self._sources: Sequence[torch.Tensor] | None = sources
        self._thread = threading.Thread(
            target=self._copy, args=(spans, base, threads), name="holdfast-staging", daemon=True
        )
        self._thread.start()

    def _copy(self, spans: Sequence[Span], base: torch.Tensor, threads: int) -> None:
        try:
            copy_spans(spans, base.data_ptr(), threads=threads)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the copy raises it
            self._error = error
        self._sources = None  # they had to live until now

    def query(self) -> bool:
        """Whether everything has been copied."""
        if self._thread.is_alive() or self._error is not None:
            return False
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        """Return when everything has been copied; raise if that failed."""
        self._thread.join()
        if self._event is not None:
            self._event.synchronize()
        if self._error is not None:
            raise self._error
