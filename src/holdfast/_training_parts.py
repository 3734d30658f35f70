"""The parts of a TrainingState: each gives its state in the form that is saved, and takes it back."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast._objects.object_fingerprint import fingerprint
from holdfast._parameter_states import ModuleStates, ParameterStates
from holdfast._random_state import get_random_state, resize_random_state, set_random_state
from holdfast.errors import PlanError, UsageError
from holdfast.per_rank import PerRank
from holdfast.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from holdfast.stateful import Stateful


class ModelPart:
    """A model, or the parts of one that this rank holds.

    Args:
        modules: The parts; their parameters have different names.
        options: For ``get_model_state_dict`` and its like.
    """

    def __init__(self, modules: Sequence[nn.Module], options: StateDictOptions) -> None:
        self.modules, self.options = modules, options

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for module in self.modules:
            for key, value in get_model_state_dict(module, options=self.options).items():
                if key in found:
                    raise UsageError(
                        f"two parts of the model both have {key!r}; pass models by name", key=key
                    )
                found[key] = value
        return ModuleStates(found, modules=self.modules)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for module in self.modules:
            own = state_dict
            if len(self.modules) > 1:
                own = {key: state_dict[key] for key in get_model_state_dict(module, options=self.options)}
            set_model_state_dict(module, own, options=self.options)

    def by_home(self, optimizers: Sequence[Optimizer]) -> list[tuple[nn.Module, list[Optimizer]]]:
        """The modules that have the parameters of some optimizers, each with its optimizers."""
        numbered = reversed(list(enumerate(self.modules)))
        homes = {id(parameter): number for number, module in numbered for parameter in module.parameters()}
        found: dict[int, list[Optimizer]] = {}
        for optimizer in optimizers:
            wanted = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
            own = {homes[number] for number in wanted if number in homes} or {0}
            lost = sum(number not in homes for number in wanted)
            if lost or len(own) > 1:
                raise _homeless(optimizer, lost, len(wanted))
            found.setdefault(own.pop(), []).append(optimizer)
        return [(self.modules[number], found[number]) for number in sorted(found)]


def _homeless(optimizer: Optimizer, lost: int, every: int) -> UsageError:
    kind = type(optimizer).__name__
    if not lost:
        return UsageError(
            f"an optimizer ({kind}) has parameters that are in several parts of the model: make one for each"
        )
    return UsageError(
        f"an optimizer ({kind}) has parameters that are not in the model: {lost} of {every}. Either it was "
        "made before the model got the parameters that it has now (by fully_shard, parallelize_module, "
        "to_empty or a wrapper): make the optimizer after that. Or it belongs to another model: pass that "
        'model too, as in TrainingState({"a": model, "b": other}, {"a": optimizer, "b": its_optimizer}).'
    )


class OptimizerPart:
    """Optimizers, by names of parameters.

    Every group has a name of its own, which is the same on every rank and in every run that has a group of
    these parameters. So ranks that hold other layers, such as the stages of a pipeline, save other groups,
    and a load finds the options of each parameter whatever ranks and stages there are.

    Args:
        optimizers: Lists of optimizers by name. The optimizers of a list are saved as one, so that their
            number may change; one list without a name, under ``""``, is saved without a level for names.
        model: What has their parameters.
    """

    def __init__(self, optimizers: Mapping[str, Sequence[Optimizer]], model: ModelPart) -> None:
        self.optimizers, self.model = optimizers, model

    def state_dict(self) -> dict[str, Any]:
        states = {name: self._join(optimizers) for name, optimizers in self.optimizers.items()}
        return states.get("", states)

    def _join(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        groups: list[dict[str, Any]] = []
        joined, parameters, beside = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        _refuse_shared(optimizers, self.model.modules)
        for home, some in self.model.by_home(optimizers):
            state = get_optimizer_state_dict(home, some, options=self.model.options)
            parameters.update(state["state"].parameters)
            joined.update(state["state"])
            groups += state["param_groups"]
            others = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
            for key in beside.keys() & others.keys():
                raise UsageError(
                    f"two optimizers both have {key!r} beside their state and groups; pass them by name",
                    key=str(key),
                )
            beside |= others
        states = ParameterStates(joined, parameters=parameters, optimizers=optimizers)
        return {**beside, "state": states, "param_groups": _named_groups(groups)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for name, optimizers in self.optimizers.items():
            state = dict(state_dict[name] if name else state_dict)
            if isinstance(state["param_groups"], Mapping):
                # A list is what earlier versions saved.
                state["param_groups"] = list(state["param_groups"].values())
            for home, some in self.model.by_home(optimizers):
                own = state if len(optimizers) == 1 else self._share_of(home, some, state)
                set_optimizer_state_dict(home, some, own, options=self.model.options)

    def _share_of(
        self, home: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> dict[str, Any]:
        own = get_optimizer_state_dict(home, optimizers, options=self.model.options)
        names = own["state"].parameters.keys()
        return {
            **state,
            "state": {name: entry for name, entry in state["state"].items() if name in names},
            "param_groups": [
                group for group in state["param_groups"] if not names.isdisjoint(group["params"])
            ],
        }


def _refuse_shared(optimizers: Sequence[Optimizer], modules: Sequence[nn.Module]) -> None:
    seen: set[int] = set()
    for optimizer in optimizers:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if shared := seen & own:
            named = (pair for module in modules for pair in module.named_parameters())
            name = min((name for name, parameter in named if id(parameter) in shared), default="parameters")
            raise UsageError(
                f"two optimizers both have {name!r}; if they share parameters, pass them by name", key=name
            )
        seen |= own


def _named_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Groups by names that tell them from all groups of other parameters, also from those of other ranks."""
    found: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(groups):
        names = sorted(group["params"])
        digest = hashlib.blake2b("\0".join(names).encode(), digest_size=4).hexdigest()
        options = {key: value for key, value in group.items() if key != "param_names"}
        found[f"{names[0]}@{digest}" if names else f"empty@{number}"] = {**options, "params": names}
    return found


class SchedulerPart:
    """Learning rate schedulers, by name."""

    def __init__(self, schedulers: Mapping[str, Any]) -> None:
        self.schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        # A tuple is saved as one value. Versions of torch differ in what they keep in it.
        return {name: (scheduler.state_dict(),) for name, scheduler in self.schedulers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for name, scheduler in self.schedulers.items():
            scheduler.load_state_dict(state_dict[name][0])


class RandomPart:
    """The random number generators of this rank."""

    def state_dict(self) -> "PerRank[Any]":
        return PerRank(get_random_state(), resize=resize_random_state)

    def load_state_dict(self, state_dict: "PerRank[Any]") -> None:
        set_random_state(state_dict.value)


class DataPart:
    """The position of this rank in the data.

    Args:
        data: What knows it.
        resize: The rule for another number of ranks; None if there is none.
    """

    def __init__(self, data: Stateful, resize: Callable[[list[Any], int, int], Any] | None) -> None:
        self.data, self.resize = data, resize

    def state_dict(self) -> "PerRank[Any]":
        # One value, as with schedulers: a loader that has begun keeps more than a new one.
        return PerRank((self.data.state_dict(),), resize=self._resized)

    def load_state_dict(self, state_dict: "PerRank[Any]") -> None:
        self.data.load_state_dict(state_dict.value[0])

    def _resized(self, values: list[tuple[Any]], rank: int, world_size: int) -> tuple[Any]:
        states = [state for (state,) in values]
        if self.resize is not None:
            return (self.resize(states, rank, world_size),)
        prints = {fingerprint(state) for state in states}
        if len(prints) == 1 and None not in prints:
            return (states[0],)
        raise PlanError(
            f"data: {len(states)} ranks saved their positions in the data, which differ, and now there are "
            f"{world_size} ranks. Pass data_resize= to TrainingState to say how the positions change, or "
            'load state.without("data") and set the position yourself.',
            key="data",
            expected=world_size,
            found=len(states),
        )
