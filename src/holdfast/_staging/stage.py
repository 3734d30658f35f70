"""Staging: copies a state into reused buffers during the call, at the speed of memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast._collector import paused_collector
from holdfast._staging.buffer_layout import BufferLayout, fact_of, lay_out, place_in
from holdfast._staging.buffer_pool import BufferLease, BufferPool, WhenBusy
from holdfast._staging.staged import StagedState
from holdfast._staging.staging_copy import HostCopy, copy_spans, default_threads
from holdfast._staging.state_tensors import StateTensors
from holdfast._staging.state_tree import copy_around

_LARGE = 256 << 10
"""Smaller tensors of the host are copied at once."""


class Staging:
    """Copies states into buffers that are allocated once, grown when a state needs it, and reused.

    It holds one copy of the state, unless ``when_busy`` is "another" or somebody holds tensors of earlier
    copies. Any thread may call it. The system gets free memory back by ``close``, and when this object is
    dropped.

    Args:
        shared_memory: Let another process map the copy.
        pinned_memory: Register the buffers with CUDA, if there is a device.
        compare: After copying, compare with the originals and raise if one was changed meanwhile. For
            debugging: it reads everything once more.
        threads: How many threads copy; by default one for each core, 8 at most.
    """

    def __init__(
        self,
        *,
        shared_memory: bool = False,
        pinned_memory: bool = False,
        compare: bool = False,
        threads: int | None = None,
    ) -> None:
        self._compare = compare
        self._threads = threads or default_threads()
        pinned = pinned_memory and torch.cuda.is_available()
        self._pool = BufferPool(shared=shared_memory, pinned=pinned, threads=self._threads)
        self._layout: BufferLayout | None = None
        self._stream: Any = None

    def prepare(self, state: Mapping[Any, Any]) -> None:
        """Allocate the memory for such a state now, so that the first ``stage`` does not have to."""
        layout = self._layout_of(StateTensors(state))
        lease = self._pool.take(when_busy="wait", timeout=None)
        try:
            lease.base(layout.nbytes)
        finally:
            lease.release()

    def stage(
        self,
        state: Mapping[Any, Any],
        *,
        when_busy: WhenBusy = "wait",
        timeout: float | None = None,
        wait: bool = True,
        overlap: bool = False,
    ) -> StagedState:
        """Copy a state. When this returns, the originals on the host may change.

        Args:
            state: What to copy.
            when_busy: What to do while an earlier ``StagedState`` is neither released nor dropped: "wait" for
                that, "raise", or take "another" buffer, which is freed again when two are free. Tensors that
                are held without their ``StagedState`` are neither waited for nor overwritten.
            timeout: How many seconds to wait at most for an earlier copy to be released.
            wait: Return only when values on devices have arrived too.
            overlap: Copy large tensors of the host in a thread: the originals must not change before the
                result is complete. Small tensors and other values are copied when this returns.

        Raises:
            PlanError: A value cannot be copied; the error has its key.
            UsageError: An earlier copy is in use and ``when_busy`` is "raise", or this stager is closed.
            TimeoutError: An earlier copy is still in use.
            MemoryError: There is not enough memory.
        """
        lease = self._pool.take(when_busy=when_busy, timeout=timeout)
        try:
            with paused_collector():
                staged = self._staged(state, lease, overlap=overlap)
            if wait:
                staged.wait()
        except BaseException:
            self._finish_device_copies()
            lease.release()
            raise
        return staged

    def _staged(self, state: Any, lease: BufferLease, *, overlap: bool) -> StagedState:
        found = StateTensors(state)
        layout = self._layout_of(found)
        base = lease.base(layout.nbytes)
        event = self._copy(found.tensors, layout, base, overlap=overlap)
        made = place_in(base, layout.places)
        staged = StagedState(copy_around(state, found.memo(made)), base, layout.nbytes, lease, event)
        if self._compare:
            staged.wait()
            found.refuse_changed(made)
        return staged

    def _layout_of(self, found: StateTensors) -> BufferLayout:
        facts = [fact_of(tensor) for tensor in found.tensors]
        known = self._layout
        if known is not None and known.facts == facts:
            return known
        found.refuse_without_memory()
        self._layout = made = lay_out(facts)
        return made

    @torch.no_grad()
    def _copy(
        self, tensors: Sequence[torch.Tensor], layout: BufferLayout, base: torch.Tensor, *, overlap: bool
    ) -> Any:
        """Copy everything; returns the event that ends what is still being copied, None if nothing is."""
        # An earlier user may have given the buffer back while a device still copied into it.
        self._finish_device_copies()
        from_device = [number for number in layout.written_out if not tensors[number].is_cpu]
        event = self._copy_from_device(tensors, layout, base, from_device) if from_device else None
        large = [span for span in layout.spans if span[2] >= _LARGE] if overlap else []
        spans = [span for span in layout.spans if span[2] < _LARGE] if large else layout.spans
        copy_spans(spans, base.data_ptr(), threads=self._threads)
        for number in layout.written_out:
            source = tensors[number]
            if source.is_cpu:
                place_in(base, [layout.places[number]])[0].copy_(source)
        return HostCopy(large, tensors, base, self._threads, event) if large else event

    def _copy_from_device(
        self, tensors: Sequence[torch.Tensor], layout: BufferLayout, base: torch.Tensor, numbers: list[int]
    ) -> Any:
        """Copy on a stream of its own, after the work of the caller's stream. Our tests never run this."""
        current = torch.accelerator.current_stream()
        if self._stream is None:
            self._stream = torch.Stream(device=current.device)
        self._stream.wait_stream(current)
        with self._stream:
            for number in numbers:
                source = tensors[number]
                place_in(base, [layout.places[number]])[0].copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            return self._stream.record_event()

    def _finish_device_copies(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Free all memory that no staged state uses; the rest follows when that is dropped."""
        self._layout = None
        self._pool.close()
