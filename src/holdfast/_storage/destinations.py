"""Owns how values that were read reach the planner: one call at a time, each destination once."""

import threading

import torch

from holdfast._plan.dtype_fit import FLOAT4
from holdfast._tensors.host import is_plain_memory, memory_of
from holdfast.errors import InvalidPlanError
from holdfast.planner import LoadPlanner, ReadItem


class PlannerCalls:
    """How the planner is called: by one thread at a time, which holds ``lock``.

    Planners are only promised that each item is resolved and committed once; keeping the calls apart
    spares their authors the question of threads.

    Attributes:
        planner: The planner.
        lock: Held by whoever calls it. The thread that holds it may take it again.
        touched: The keys of values that have been changed, or may have been.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self.planner = planner
        self.lock = threading.RLock()
        self.touched: list[str] = []


class Destination:
    """Where one tensor item goes: asked for when the first part of it is about to arrive.

    Args:
        calls: How the planner is called.
        item: The line of the plan.
        dtype: The dtype of what is stored.

    Attributes:
        waiting: How many parts are still to arrive.
    """

    def __init__(self, calls: PlannerCalls, item: ReadItem, dtype: torch.dtype) -> None:
        self.calls = calls
        self.item = item
        self.dtype = dtype
        self.waiting = 1
        self._target: torch.Tensor | None = None

    @property
    def key(self) -> str:
        """The destination's flat name."""
        return self.item.dest_index.fqn

    def target(self) -> torch.Tensor:
        """The tensor to be filled, of the shape that the line has."""
        with self.calls.lock:
            if self._target is None:
                target = self.calls.planner.resolve_tensor(self.item)
                if target.shape != self.item.lengths:
                    raise InvalidPlanError(
                        f"{self.key}: the planner gave a destination of shape {tuple(target.shape)} for a "
                        f"box of {tuple(self.item.lengths)}",
                        key=self.key,
                        expected=tuple(self.item.lengths),
                        found=tuple(target.shape),
                    )
                self._target = target
            return self._target.detach()

    def touch(self) -> None:
        """Note that the destination is about to be changed."""
        self.calls.touched.append(self.key)

    def memory(self) -> memoryview | None:
        """The destination's own bytes, if what is stored can be written there as it is.

        Whoever writes there calls ``touch`` before.
        """
        target = self.target()
        if target.dtype == self.dtype and is_plain_memory(target):
            return memory_of(target)
        return None

    def put(self, offsets: tuple[int, ...], part: torch.Tensor) -> None:
        """Copy a part of the box into the destination, casting and moving it as needed."""
        target = self.target()
        if part.shape != target.shape:
            for dimension, (start, length) in enumerate(zip(offsets, part.shape, strict=True)):
                target = target.narrow(dimension, start, length)
        if part.dtype == target.dtype == FLOAT4:
            # Some versions of torch have this dtype, but no copy of it.
            target, part = target.view(torch.uint8), part.view(torch.uint8)
        self.touch()
        target.copy_(part)

    def arrived(self) -> None:
        """Count one part; the last one commits."""
        with self.calls.lock:
            self.waiting -= 1
            if self.waiting == 0:
                assert self._target is not None
                self.calls.planner.commit_tensor(self.item, self._target)
                self._target = None
