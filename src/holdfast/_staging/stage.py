"""Owns staging: a state copied into memory of our own, at the moment of the call and as fast as memory is."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast._collector import paused_collector
from holdfast._staging.arenas import Arenas, Lease, WhenBusy
from holdfast._staging.copying import copy_spans, default_threads
from holdfast._staging.layout import Layout, fact_of, lay_out, place_in
from holdfast._staging.parts import Parts
from holdfast._staging.staged import StagedState
from holdfast._staging.structure import copy_around
from holdfast.errors import UsageError

__all__ = ["Staging"]


class Staging:
    """Copies states into buffers that are taken once, grown when a state needs it, and used again.

    One copy of the state is all that it holds, unless ``when_busy`` is "another" or tensors of earlier copies
    are held by others. Any thread may call it. Memory that nobody uses returns to the system by ``close``,
    and when the object is dropped.

    Args:
        shared_memory: Let another process map the copy.
        pinned_memory: Register the buffers with CUDA, if there is a device.
        when_busy: What ``stage`` does while an earlier ``StagedState`` is neither released nor dropped:
            "wait" for that, "raise", or take "another" buffer, which is let go of again when two are idle.
            Tensors that are held without their ``StagedState`` are neither waited for nor overwritten.
        compare: After copying compare with the originals, and raise if one was changed meanwhile. For
            debugging: it reads everything once more.
        threads: How many copy at a time; as many as there are cores (8 at most) if None.
    """

    def __init__(
        self,
        *,
        shared_memory: bool = False,
        pinned_memory: bool = False,
        when_busy: WhenBusy = "wait",
        compare: bool = False,
        threads: int | None = None,
    ) -> None:
        if when_busy not in ("wait", "raise", "another"):
            raise UsageError(f"when_busy is 'wait', 'raise' or 'another', not {when_busy!r}", found=when_busy)
        self._when_busy = when_busy
        self._compare = compare
        self._threads = threads or default_threads()
        pinned = pinned_memory and torch.cuda.is_available()
        self._arenas = Arenas(shared=shared_memory, pinned=pinned, threads=self._threads)
        self._layout: Layout | None = None
        self._stream: Any = None

    def prepare(self, state: Mapping[Any, Any]) -> None:
        """Take the memory that staging such a state needs, so that the first call has not to."""
        layout = self._layout_of(Parts(state))
        lease = self._arenas.take(when_busy=self._when_busy, timeout=None)
        try:
            lease.base(layout.nbytes)
        finally:
            lease.release()

    def stage(
        self,
        state: Mapping[Any, Any],
        *,
        when_busy: WhenBusy | None = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> StagedState:
        """Copy a state. When this returns, the originals on the host may change.

        Args:
            state: What to copy.
            when_busy: For this call, instead of what the constructor was given.
            timeout: The most to wait for an earlier copy to be released, in seconds.
            wait: Return only when values on devices have arrived too. If False, ask the result.

        Raises:
            PlanError: A value cannot be copied; it is named.
            UsageError: An earlier copy is in use and ``when_busy`` is "raise", or this is closed.
            TimeoutError: An earlier copy is still in use.
            MemoryError: The system has not that much memory.
        """
        lease = self._arenas.take(when_busy=when_busy or self._when_busy, timeout=timeout)
        try:
            with paused_collector():
                staged = self._staged(state, lease)
            if wait:
                staged.wait()
        except BaseException:
            self._finish_device_copies()
            lease.release()
            raise
        return staged

    def _staged(self, state: Any, lease: Lease) -> StagedState:
        parts = Parts(state)
        layout = self._layout_of(parts)
        base = lease.base(layout.nbytes)
        event = self._copy(parts, layout, base)
        made = place_in(base, layout.places)
        staged = StagedState(copy_around(state, parts.memo(made)), base, layout.nbytes, lease, event)
        if self._compare:
            staged.wait()
            parts.refuse_changed(made)
        return staged

    def _layout_of(self, parts: Parts) -> Layout:
        facts = [fact_of(tensor) for tensor in parts.tensors]
        known = self._layout
        if known is not None and known.facts == facts:
            return known
        parts.refuse_without_memory()
        self._layout = lay_out(facts)
        return self._layout

    @torch.no_grad()
    def _copy(self, parts: Parts, layout: Layout, base: torch.Tensor) -> Any:
        """Copy everything; returns the event of what is still on its way from a device, if anything is."""
        # The memory may have been given back by one who did not wait for what was on its way into it.
        self._finish_device_copies()
        from_device = [number for number in layout.written_out if not parts.tensors[number].is_cpu]
        event = self._copy_from_device(parts.tensors, layout, base, from_device) if from_device else None
        copy_spans(layout.spans, base.data_ptr(), threads=self._threads)
        for number in layout.written_out:
            source = parts.tensors[number]
            if source.is_cpu:
                place_in(base, [layout.places[number]])[0].copy_(source)
        return event

    def _copy_from_device(
        self, tensors: Sequence[torch.Tensor], layout: Layout, base: torch.Tensor, numbers: list[int]
    ) -> Any:
        """On a stream of its own, after what the caller's stream has to do. Never run by the tests."""
        current = torch.accelerator.current_stream()
        if self._stream is None:
            self._stream = torch.Stream(device=current.device)
        self._stream.wait_stream(current)
        with self._stream:
            for number in numbers:
                source = tensors[number]
                place_in(base, [layout.places[number]])[0].copy_(source, non_blocking=True)
                if hasattr(source, "record_stream"):
                    source.record_stream(self._stream)
            return self._stream.record_event()

    def _finish_device_copies(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Let go of all memory that no staged state uses; of the rest when that is dropped. Twice is fine."""
        self._layout = None
        self._arenas.close()
