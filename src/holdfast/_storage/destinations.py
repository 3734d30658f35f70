"""Owns how values that were read reach the planner: one call at a time, each destination once."""

import threading
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from holdfast._contents.box_target import BoxTarget
from holdfast._contents.inventory import Ints
from holdfast._contents.item_bytes import ItemRules
from holdfast._objects.torch_archive import load_tensor
from holdfast._plan.dtype_fit import FLOAT4
from holdfast._plan.planner_values import own_values
from holdfast._tensors.dtensors import narrowed
from holdfast._tensors.host import elements_of, is_plain_memory, memory_of
from holdfast.errors import InvalidPlanError
from holdfast.planner import LoadPlanner, ReadItem


class PlannerCalls:
    """How the planner is called: by one thread at a time, which holds ``lock``.

    Planners are only promised that each item is resolved and committed once; keeping the calls apart
    spares their authors the question of threads.

    Attributes:
        planner: The planner.
        finds_only: Whether the planner does nothing for a tensor but find it in the state. Threads need not
            wait for each other then: with tensors of 128 KiB that took half of the time.
        lock: Held by whoever calls it. The thread that holds it may take it again.
        touched: The keys of values that have been changed, or may have been.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self.planner = planner
        self.finds_only = own_values(planner, "resolve_tensor") is not None
        self.lock = threading.RLock()
        self.touched: list[str] = []


@dataclass(frozen=True, kw_only=True)
class ReadContext(ItemRules):
    """What all jobs of one load share.

    Attributes:
        calls: How the planner is called.
    """

    calls: PlannerCalls


class TensorTarget(BoxTarget):
    """A tensor that a box goes to.

    Args:
        key: Its flat name.
        tensor: The tensor; None if ``target`` finds it.
        dtype: The dtype of what is stored.
    """

    def __init__(self, key: str, tensor: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.key = key
        self.dtype = dtype
        self.lengths = () if tensor is None else tuple(tensor.shape)
        self._target = tensor

    def target(self) -> torch.Tensor:
        """The tensor to be filled, of the shape of the box."""
        assert self._target is not None
        return self._target.detach()

    def memory(self) -> memoryview | None:
        """The tensor's own bytes, if what is stored can be written there; see ``BoxTarget``."""
        target = self.target()
        if target.dtype == self.dtype and is_plain_memory(target):
            return memory_of(target)
        return None

    def put(self, offsets: Ints, lengths: Ints, content: memoryview, strides: Ints, first: int) -> None:
        """Copy a part of the box into the tensor, casting and moving it as needed."""
        part = elements_of(content, self.dtype, lengths, strides, first)
        target = narrowed(self.target(), offsets, lengths)
        if part.dtype == target.dtype == FLOAT4:
            # Some versions of torch have this dtype, but no copy of it.
            target, part = target.view(torch.uint8), part.view(torch.uint8)
        self.touch()
        target.copy_(part)

    def put_loaded(self, content: bytes, shape: Ints, at: Ints) -> None:
        """Let torch read a container under its weights-only rules; see ``BoxTarget``."""
        tensor, target = load_tensor(content, shape, self.dtype), self.target()
        self.touch()
        target.copy_(narrowed(tensor, at, target.shape))


class Destination(TensorTarget):
    """Where one tensor item goes: asked for when the first part of it is about to arrive.

    Args:
        calls: How the planner is called.
        item: The line of the plan.
        dtype: The dtype of what is stored.
    """

    def __init__(self, calls: PlannerCalls, item: ReadItem, dtype: torch.dtype) -> None:
        super().__init__(item.dest_index.fqn, None, dtype)
        self.calls = calls
        self.item = item
        self.lengths = tuple(item.lengths)
        self._lock = threading.Lock() if calls.finds_only else calls.lock

    def target(self) -> torch.Tensor:
        """The tensor that the planner gives, of the shape that the line has."""
        if self._target is None:
            with self._lock:
                if self._target is None:
                    self._target = self._resolve()
        return super().target()

    def _resolve(self) -> torch.Tensor:
        target = self.calls.planner.resolve_tensor(self.item)
        if target.shape != self.item.lengths:
            raise InvalidPlanError(
                f"{self.key}: the planner gave a destination of shape {tuple(target.shape)} for a "
                f"box of {tuple(self.item.lengths)}",
                key=self.key,
                expected=tuple(self.item.lengths),
                found=tuple(target.shape),
            )
        return target

    def touch(self) -> None:
        """Note that the destination is about to be changed: here, and for autograd."""
        self.calls.touched.append(self.key)
        increment_version(self.target())

    def arrived(self) -> None:
        """Count one part; the last one commits."""
        with self._lock:
            self.waiting -= 1
            if self.waiting == 0:
                # The planner is asked for a box without elements, too.
                target = self._resolve() if self._target is None else self._target
                self.calls.planner.commit_tensor(self.item, target)
                self._target = None
