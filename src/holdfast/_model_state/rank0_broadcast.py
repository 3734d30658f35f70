"""Rank 0 sends values to all ranks: first a description of everything, then tensor by tensor.

A tensor that is made of other tensors is sent as these, one after the other, and put together again.
"""

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from holdfast._model_state.whole_tensors import changed_leaves
from holdfast._tensors.tensor_parts import TensorParts, is_made_of_parts, take_apart

WINDOW = 32 << 20
"""Bytes sent at once: tensors that are smaller travel together, and a larger one alone."""
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class SentTensor:
    """Stands for a tensor of rank 0 that is not here yet.

    Attributes:
        number: Its place in the order in which tensors are sent.
        shape: Its shape.
        dtype: Its dtype.
        parts: If it is made of other tensors: what stands for these. Its number is that of the last of them.
    """

    number: int
    shape: torch.Size
    dtype: torch.dtype
    parts: TensorParts | None = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return math.prod(self.shape) * self.dtype.itemsize


class SentState:
    """A tree of values that rank 0 has, on all ranks.

    Every rank of the default process group must make one, with the same ``device`` up to its number, and then
    call ``agree`` and ``tensors``. What goes wrong before ``agree`` is raised there, on all ranks.

    Attributes:
        tree: The values of rank 0, with a SentTensor for each tensor; empty if they could not be sent.
    """

    def __init__(self, tree: Any, device: torch.device | None) -> None:
        self._device = _device_of_group(device)
        self._sources: list[torch.Tensor] = []
        self._forms: list[SentTensor] = []
        self._wholes: list[SentTensor] = []  # those that are made of others
        self._problem: Exception | None = None
        self.tree: Any = {}
        message: list[Any] = [self._packed(tree) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(message, src=0)
        if isinstance(message[0], str):
            if dist.get_rank() != 0:
                self._problem = _problem_of(0, message[0])
            return
        try:
            self.tree, self._forms, self._wholes = pickle.loads(message[0])
            for whole in self._wholes:
                # What cannot be put together is found before tensors are on their way.
                _put_together(whole, {form.number: _without_values(form) for form in self._forms})
        except Exception as error:  # noqa: BLE001 - such as a class that this rank cannot import
            self._problem = error

    def _packed(self, tree: Any) -> bytes | str:
        """On rank 0: the description, pickled here, so that the ranks that wait hear of a failure as text."""
        try:
            described = self._described(tree)
            self._refuse_unsendable()
            return pickle.dumps((described, self._forms, self._wholes))
        except Exception as error:  # noqa: BLE001 - all ranks raise it
            self._problem = error
            return _as_text(error)

    def _described(self, tree: Any) -> Any:
        def describe(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
                return value
            if is_made_of_parts(value) and not isinstance(value, DTensor):
                return self._described_whole(value)
            self._sources.append(value.detach())
            self._forms.append(SentTensor(len(self._forms), value.shape, value.dtype))
            return self._forms[-1]

        return changed_leaves(tree, describe)

    def _described_whole(self, value: torch.Tensor) -> SentTensor:
        count = len(self._forms)
        parts = take_apart(value, "broadcast_from_rank0").with_parts(self._described)
        if len(self._forms) == count:
            raise TypeError(f"broadcast_from_rank0 cannot send a {type(value).__name__}: it has no parts")
        self._wholes.append(SentTensor(len(self._forms) - 1, value.shape, value.dtype, parts))
        return self._wholes[-1]

    def _refuse_unsendable(self) -> None:
        for source in self._sources:
            is_sharded = isinstance(source, DTensor | ShardedTensor)
            if is_sharded:
                raise ValueError("broadcast_from_rank0 needs a whole state dict; rank 0 has sharded tensors")
            if source.is_meta:
                raise ValueError("broadcast_from_rank0 needs values; rank 0 has tensors on the meta device")

    def agree(self, problem: Exception | None, note: Any = None) -> list[Any]:
        """Raise on all ranks if any rank has a problem.

        Call it before tensors are on their way, and after them if something can go wrong with them.

        Returns:
            The ``note`` of each rank.

        Raises:
            RuntimeError: Another rank has a problem; its own problem on a rank that has one.
        """
        problem = self._problem or problem
        text = None if problem is None else _as_text(problem)
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (text, note))
        if problem is not None:
            raise problem
        for rank, (found, _) in enumerate(answers):
            if found is not None:
                raise _problem_of(rank, found)
        return [said for _, said in answers]

    def tensors(self) -> Iterator[tuple[SentTensor, torch.Tensor]]:
        """All tensors in their order, on the device of the process group.

        A tensor may be overwritten or let go of as soon as the next one is asked for: copy what you keep. Ask
        for all of them, as the other ranks do.
        """
        wholes = {whole.number: whole for whole in self._wholes}
        are_parts = {number for whole in self._wholes for number in _numbers_in(whole.parts)}
        arrived: dict[int, torch.Tensor] = {}
        for form, tensor in self._plain_tensors():
            if form.number not in are_parts:
                yield form, tensor
                continue
            arrived[form.number] = tensor.clone()
            if form.number in wholes:
                yield wholes[form.number], _put_together(wholes[form.number], arrived)
                arrived = {}

    def _plain_tensors(self) -> Iterator[tuple[SentTensor, torch.Tensor]]:
        windows = list(_windows(self._forms))
        is_sender = dist.get_rank() == 0
        # One buffer for all windows: many that come and go leave holes that the kept parts do not fill. The
        # sender needs none for a tensor that travels alone.
        sizes = [sum(map(_aligned_size, window)) for window in windows if len(window) > 1 or not is_sender]
        buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self._device)
        for window in windows:
            if is_sender and len(window) == 1:
                tensor = self._source(window[0])
                if window[0].nbytes:
                    dist.broadcast(_bytes_of(tensor), src=0)
                yield window[0], tensor
            else:
                yield from self._send_together(window, buffer)

    def _send_together(
        self, window: Sequence[SentTensor], buffer: torch.Tensor
    ) -> Iterator[tuple[SentTensor, torch.Tensor]]:
        parts, begin = [], 0
        for form in window:
            parts.append(buffer[begin : begin + form.nbytes].view(form.dtype).view(form.shape))
            begin += _aligned_size(form)
        if dist.get_rank() == 0:
            for form, part in zip(window, parts, strict=True):
                _bytes_of(part).copy_(_bytes_of(self._source(form)))
        # A tensor that travels alone is sent without the padding behind it.
        size = window[0].nbytes if len(window) == 1 else begin
        if size:
            dist.broadcast(buffer[:size], src=0)
        yield from zip(window, parts, strict=True)

    def _source(self, form: SentTensor) -> torch.Tensor:
        return self._sources[form.number].resolve_conj().resolve_neg().to(self._device).contiguous()


def _numbers_in(parts: Any) -> Iterator[int]:
    if isinstance(parts, SentTensor):
        yield parts.number
    elif isinstance(parts, TensorParts):
        for part in parts.values():
            yield from _numbers_in(part)


def _put_together(whole: SentTensor, arrived: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The tensor that is made of parts that have arrived."""
    assert whole.parts is not None
    return whole.parts.with_parts(
        lambda part: arrived[part.number] if isinstance(part, SentTensor) else part
    ).rebuild()


def _without_values(form: SentTensor) -> torch.Tensor:
    return torch.empty(form.shape, dtype=form.dtype, device="meta")


def _as_text(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}"


def _problem_of(rank: int, text: str) -> Exception:
    return RuntimeError(f"the state dict was not set, because of rank {rank}: {text}")


def _windows(forms: Sequence[SentTensor]) -> Iterator[list[SentTensor]]:
    window: list[SentTensor] = []
    size = 0
    for form in forms:
        if window and size + _aligned_size(form) > WINDOW:
            yield window
            window, size = [], 0
        window.append(form)
        size += _aligned_size(form)
    if window:
        yield window


def _aligned_size(form: SentTensor) -> int:
    return -(-form.nbytes // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _device_of_group(preferred: torch.device | None) -> torch.device:
    """A device whose tensors the default process group can send: the preferred one, or the CPU if it can."""
    kinds = [part.partition(":")[0] for part in dist.get_backend_config().split(",")]
    if preferred is not None and preferred.type in kinds:
        return preferred
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
