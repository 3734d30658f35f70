"""Tensors of an optimizer's state dict as the optimizer of this rank needs them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from holdfast._model_state.flat_optimizer_state import GROUPS, PARAMS, STATE
from holdfast._model_state.optimizer_state_dict import NamedOptimizer
from holdfast._model_state.rank0_broadcast import SentState, SentTensor
from holdfast._model_state.whole_tensors import changed_leaves, copied, replicated, shared_out


def placed_state(value: Any, key: Any, parameter: DTensor, current: Any) -> Any:
    """The state of a sharded parameter, with whole tensors shared out as the parameter is.

    Args:
        value: The state, or an entry of it.
        key: The key of the entry.
        parameter: The parameter.
        current: What the optimizer has in that place now. It shows which tensors are sharded, and how.
    """
    if isinstance(value, dict):
        inside = current if isinstance(current, dict) else {}
        return {inner: placed_state(one, inner, parameter, inside.get(inner)) for inner, one in value.items()}
    is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return _placed(value, key, parameter, current) if is_whole else value


def _placed(value: torch.Tensor, key: Any, parameter: torch.Tensor | None, current: Any) -> torch.Tensor:
    if not isinstance(parameter, DTensor) or key == "step":
        return value
    if isinstance(current, torch.Tensor) and current.shape == value.shape:
        return shared_out(value, current, parameter.device) if isinstance(current, DTensor) else value
    if value.shape == parameter.shape:
        return shared_out(value, parameter, parameter.device)
    # Optimizers make sums over rows or columns out of the parameter, and so replicated. Numbers are plain.
    return replicated(value, parameter) if value.dim() > 0 else value


class _Destination(NamedTuple):
    """Where a value goes: its key, its parameter, and what the optimizer has there; None for no parameter."""

    key: Any = None
    parameter: torch.Tensor | None = None
    current: Any = None


def received_states(
    sent: SentState, fitted: Sequence[tuple[NamedOptimizer, dict[str, Any]]]
) -> list[tuple[NamedOptimizer, dict[str, Any]]]:
    """The state dicts of ``fitted`` with the tensors of rank 0 in place of what stands for them.

    Of each tensor a rank keeps only its part, and nothing if it has not that parameter.
    """
    wanted = {form.number: destination for form, destination in _destinations(fitted)}
    made = {
        form.number: _kept(tensor, wanted[form.number])
        for form, tensor in sent.tensors()
        if form.number in wanted
    }
    used: set[int] = set()

    def arrived(value: Any) -> Any:
        if not isinstance(value, SentTensor):
            return value
        if value.number in used:
            # Two optimizers share the parameter, and the state dict has one state for both.
            return copied(made[value.number])
        used.add(value.number)
        return made[value.number]

    found = []
    for one, loaded in fitted:
        groups = [
            {key: value if key == PARAMS else changed_leaves(value, arrived) for key, value in group.items()}
            for group in loaded[GROUPS]
        ]
        found.append((one, {**changed_leaves({**loaded, GROUPS: []}, arrived), GROUPS: groups}))
    return found


def refuse_indivisible(fitted: Sequence[tuple[NamedOptimizer, dict[str, Any]]]) -> None:
    """Raise if a tensor that is made of others would have to be shared out to ranks.

    Raises:
        TypeError: It would.
    """
    for form, place in _destinations(fitted):
        if form.parts is not None and isinstance(place.parameter, DTensor) and form.shape:
            raise TypeError(
                f"broadcast_from_rank0 cannot divide a {form.parts.class_name} over the ranks of a "
                "parameter. Load it from a checkpoint instead"
            )


def _destinations(
    fitted: Sequence[tuple[NamedOptimizer, dict[str, Any]]],
) -> Iterator[tuple[SentTensor, _Destination]]:
    for one, loaded in fitted:
        for number, state in loaded[STATE].items():
            place = _Destination()
            if isinstance(number, int) and number < len(one.parameters):
                place = _Destination(None, one.parameters[number], one.state_of(number))
            yield from _inside(state, place)
        options = [value for group in loaded[GROUPS] for key, value in group.items() if key != PARAMS]
        beside = [value for key, value in loaded.items() if key not in (STATE, GROUPS)]
        yield from _inside([*options, *beside], _Destination())


def _inside(value: Any, place: _Destination) -> Iterator[tuple[SentTensor, _Destination]]:
    if isinstance(value, SentTensor):
        yield value, place
    elif isinstance(value, dict):
        current = place.current if isinstance(place.current, dict) else {}
        for key, one in value.items():
            yield from _inside(one, _Destination(key, place.parameter, current.get(key)))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _inside(one, _Destination(None, place.parameter, None))


def _kept(tensor: torch.Tensor, place: _Destination) -> torch.Tensor:
    """A copy of a tensor that has arrived, of which only this rank's part is kept."""
    placed = _placed(tensor, *place)
    if placed is not tensor:
        return placed
    # Counters are on the CPU; the optimizer moves them to where it needs them.
    if place.parameter is None or tensor.dim() == 0:
        return copied(tensor, torch.device("cpu"))
    return copied(tensor, place.parameter.device)
