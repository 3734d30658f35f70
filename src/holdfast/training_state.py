"""Everything that a training run needs to go on, as one object that can be saved and loaded."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ParamSpec, TypeAlias, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from holdfast._training_parts import DataPart, ModelPart, OptimizerPart, RandomPart, SchedulerPart
from holdfast.errors import UsageError
from holdfast.state_dict import StateDictOptions
from holdfast.stateful import Stateful

__all__ = ["TrainingState"]

T = TypeVar("T")
OneOrMore: TypeAlias = T | Sequence[T] | Mapping[str, T]


P = ParamSpec("P")


def _known_keywords(make: Callable[P, None]) -> Callable[P, None]:
    """Name the arguments that there are if one is passed that there is not."""
    known = [*inspect.signature(make).parameters][1:]

    @functools.wraps(make)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs.keys() - set(known):
            raise TypeError(f"TrainingState has no argument {name!r}{_nearest(name, known)}")
        make(*args, **kwargs)

    return checked


class TrainingState:
    """Model, optimizers, schedules, step, random numbers and the position in the data of a run.

    Make it once, with everything that the run consists of, and hand it to ``save``, ``async_save`` and
    ``load``. After a load every object has its state, and ``step`` and ``extra`` have the loaded values. It
    works for plain, DDP, FSDP2 and tensor-parallel models, compiled or not: parameters have the same names
    however the model is wrapped, and the optimizer's state is kept by these names. An optimizer that has not
    taken a step yet gets its state all the same, and a model on the meta device its memory. So a run can go
    on with another number of ranks, in another wrapping, or with groups in another order.

    Random numbers (Python's, numpy's if it is in use, torch's, and the accelerator's) are kept for each rank.
    If fewer ranks go on, each of them gets its own back. If more go on, each new rank gets a state that is
    made from the state of rank 0 and its own rank: the same each time, and another for each rank.

    The position in the data is kept for each rank too. If another number of ranks goes on, a load raises,
    unless all ranks had the same position or ``data_resize`` says what to do.

    Args:
        model: The model; several models by name; or a list of parts of one model, such as the stages of a
            pipeline that this rank holds, whose parameters have different names. A pipeline can be resumed
            with other stages, on any number of ranks.
        optimizer: One optimizer or several, by name or in a list. Those in a list must not share parameters.
        schedulers: Learning rate schedulers: one, a list, or several by name.
        step: How many steps are done. Keep the attribute ``step`` up to date, or leave it at 0.
        rng: Whether to keep the states of the random number generators.
        data: What knows the position in the data: an object with ``state_dict`` and ``load_state_dict``, such
            as a StatefulDataLoader of torchdata.
        data_resize: ``data_resize(states, rank, world_size)`` returns the state of this rank's ``data`` if
            another number of ranks goes on, given the states of all ranks that saved.
        extra: Other values and Stateful objects, by name. Values are replaced in this dict by a load.
        trainable_only: Keep only parameters that require gradients, such as those of LoRA adapters, and leave
            all others of the model alone.

    Attributes:
        step: How many steps are done.
        extra: The other values.

    Raises:
        UsageError: Something is not of a kind that can be saved here.

    Example:
        >>> state = holdfast.TrainingState(model, optimizer, scheduler, data=loader)
        >>> holdfast.load({"training": state}, checkpoint_id="checkpoints/last")
        >>> for state.step in range(state.step + 1, 1001):
        ...     train()
        ...     holdfast.save({"training": state}, checkpoint_id="checkpoints/last")
    """

    @_known_keywords
    def __init__(
        self,
        model: OneOrMore[nn.Module],
        optimizer: OneOrMore[Optimizer] | None = None,
        schedulers: OneOrMore[Any] | None = None,
        step: int = 0,
        *,
        rng: bool = True,
        data: Any = None,
        data_resize: Callable[[list[Any], int, int], Any] | None = None,
        extra: dict[str, Any] | None = None,
        trainable_only: bool = False,
    ) -> None:
        options = StateDictOptions(ignore_frozen_params=trainable_only, strict=not trainable_only)
        whole = ModelPart(_modules(model), options)
        self.step = step
        self.extra = {} if extra is None else extra
        self._parts: dict[str, Any] = {"model": whole}
        if optimizer is not None:
            self._parts["optimizer"] = OptimizerPart(_optimizers(optimizer), whole)
        if schedulers is not None:
            self._parts["schedulers"] = SchedulerPart(_schedulers(schedulers))
        if data is not None:
            if not isinstance(data, Stateful):
                raise UsageError(
                    f"data must have state_dict and load_state_dict; a {type(data).__name__} does not"
                    + _STATEFUL_LOADER * isinstance(data, DataLoader)
                )
            self._parts["data"] = DataPart(data, data_resize)
        if rng:
            # The last one: what is called before may draw random numbers.
            self._parts["rng"] = RandomPart()

    def state_dict(self) -> dict[str, Any]:
        """The state of everything. Nothing is changed by asking for it."""
        extra = {"extra": self.extra} if self.extra else {}
        return {name: part.state_dict() for name, part in self._parts.items()} | {"step": self.step} | extra

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give every object its state. A part that is not in ``state_dict`` is left alone."""
        # The model comes first: if it is refused, nothing else has changed.
        for name, part in self._parts.items():
            if name in state_dict:
                part.load_state_dict(state_dict[name])
        self.step = state_dict.get("step", self.step)
        # Objects in it have their state already.
        self.extra.update(state_dict.get("extra", {}))

    def only(self, *parts: str) -> Stateful:
        """A Stateful object that saves and loads only these parts.

        Args:
            *parts: Any of ``"model"``, ``"optimizer"``, ``"schedulers"``, ``"step"``, ``"rng"``, ``"data"``
                and ``"extra"``.

        Example:
            >>> holdfast.load({"training": state.only("model")}, checkpoint_id="pretrained")
        """
        for part in parts:
            if part not in _PARTS:
                raise UsageError(f"a TrainingState has no part {part!r}{_nearest(part, _PARTS)}", found=part)
        return _SomeParts(self, parts)

    def without(self, *parts: str) -> Stateful:
        """A Stateful object that saves and loads everything but these parts; see :meth:`only`."""
        self.only(*parts)  # checks the names
        return _SomeParts(self, [part for part in _PARTS if part not in parts])


class _SomeParts:
    """Some parts of a TrainingState."""

    def __init__(self, owner: TrainingState, parts: Sequence[str]) -> None:
        self._owner, self._parts = owner, parts

    def state_dict(self) -> dict[str, Any]:
        return {name: state for name, state in self._owner.state_dict().items() if name in self._parts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._owner.load_state_dict(
            {name: state for name, state in state_dict.items() if name in self._parts}
        )


_STATEFUL_LOADER = (
    ". torchdata.stateful_dataloader.StatefulDataLoader takes the same arguments and knows its position"
)
_PARTS = ("model", "optimizer", "schedulers", "step", "rng", "data", "extra")


def _nearest(name: str, known: Sequence[str]) -> str:
    alike = difflib.get_close_matches(name, known, n=1)
    meant = f" (did you mean {alike[0]!r}?)" if alike else ""
    return f"{meant}; it has {', '.join(known)}"


def _modules(model: Any) -> list[nn.Module]:
    if isinstance(model, Mapping):
        for name, module in model.items():
            if not isinstance(module, nn.Module):
                raise UsageError(
                    f"model must be a Module, or Modules by name; {name!r} is a {type(module).__name__}. "
                    "Pass the module itself, not its state_dict(): a load must give it its state.",
                    key=str(name),
                )
        return [nn.ModuleDict(model)]
    modules = list(model) if isinstance(model, Sequence) else [model]
    for module in modules:
        if not isinstance(module, nn.Module):
            order = "; the optimizer comes second" if isinstance(module, Optimizer) else ""
            raise UsageError(f"model must be a Module, or several, not {type(module).__name__}{order}")
    return modules


def _optimizers(optimizer: Any) -> dict[str, list[Optimizer]]:
    named = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
    lists = {name: list(one) if isinstance(one, Sequence) else [one] for name, one in named.items()}
    for one in chain.from_iterable(lists.values()):
        if not isinstance(one, Optimizer):
            raise UsageError(f"optimizer must be an Optimizer, or several, not {type(one).__name__}")
    return lists


def _schedulers(schedulers: Any) -> dict[str, Any]:
    if isinstance(schedulers, Mapping):
        return dict(schedulers)
    several = list(schedulers) if isinstance(schedulers, Sequence) else [schedulers]
    for scheduler in several:
        if not isinstance(scheduler, Stateful):
            raise UsageError(f"schedulers must have state_dict; a {type(scheduler).__name__} does not")
    return {str(number): scheduler for number, scheduler in enumerate(several)}
