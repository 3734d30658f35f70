"""Handing what was read to the planner: one at a time, each destination once, and who has been served."""

import threading

import torch

from holdfast._tensors.host import is_plain_memory, memory_of
from holdfast.errors import InvalidPlanError
from holdfast.planner import LoadPlanner, ReadItem

__all__ = ["Counter", "Delivery"]


class Counter:
    """Calls the planner from one thread at a time, and remembers what has been changed.

    Planners are only promised that each item is resolved and committed once; keeping the calls apart
    spares their authors the question of threads.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self.planner = planner
        self.lock = threading.Lock()
        self.touched: list[str] = []


class Delivery:
    """One tensor item: its destination, fetched when the first part of it is about to arrive.

    Args:
        counter: Where the planner is called.
        item: The line of the plan.
        dtype: The dtype of what is stored.
        parts: How many parts will arrive.
    """

    def __init__(self, counter: Counter, item: ReadItem, dtype: torch.dtype, parts: int = 1) -> None:
        self.counter = counter
        self.item = item
        self.dtype = dtype
        self.waiting = parts
        self._target: torch.Tensor | None = None

    @property
    def key(self) -> str:
        """The destination's flat name."""
        return self.item.dest_index.fqn

    def target(self) -> torch.Tensor:
        """Where it goes."""
        with self.counter.lock:
            if self._target is None:
                target = self.counter.planner.resolve_tensor(self.item)
                if target.shape != self.item.lengths:
                    raise InvalidPlanError(
                        f"{self.key}: the planner gave a destination of shape {tuple(target.shape)} for a "
                        f"box of {tuple(self.item.lengths)}",
                        key=self.key,
                        expected=tuple(self.item.lengths),
                        found=tuple(target.shape),
                    )
                self._target = target
                self.counter.touched.append(self.key)
            return self._target.detach()

    def memory(self) -> memoryview | None:
        """The destination's own bytes, if what is stored can be written there as it is."""
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
        target.copy_(part)

    def arrived(self) -> None:
        """Count one part; the last one commits."""
        with self.counter.lock:
            self.waiting -= 1
            if self.waiting == 0:
                assert self._target is not None
                self.counter.planner.commit_tensor(self.item, self._target)
                self._target = None
