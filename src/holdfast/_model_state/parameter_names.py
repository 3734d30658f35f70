"""Names of a model's parameters and buffers that do not depend on what wraps the model or its parts."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast._model_state.state_dict_options import StateDictOptions

_PLACES_KEPT = 256
"""Keys come in the order of the modules: only the places of the last ones are needed again."""


class _NamedPlace(NamedTuple):
    """A module that a key leads through.

    Attributes:
        module: The module; None if the key leads to no module, as keys do that a hook has renamed.
        name: How the names of its entries begin if nothing is wrapped.
        raw: How the keys of its entries begin in the model's own state dict.
    """

    module: nn.Module | None
    name: str
    raw: str


class ModelNames:
    """Translates between names, which do not show wrappers, and the keys of one model's own state dict.

    Wrappers are DistributedDataParallel, ``torch.compile`` and activation checkpointing, in any order and at
    any depth.
    """

    def __init__(self, model: nn.Module) -> None:
        self._root = _NamedPlace(model, "", "")
        self._by_key: dict[str, _NamedPlace] = {}
        self._by_name: dict[str, _NamedPlace] = {}

    def name_of(self, key: str) -> str:
        """The name of what has ``key`` in ``state_dict()`` or ``named_parameters()`` of the model."""
        prefix, _, last = key.rpartition(".")
        name = _unwrapped(self._find(self._by_key, prefix, _enter_by_key), last).name + last
        return key if name == key else name  # one string, not two equal ones

    def name_of_module(self, path: str) -> str:
        """The name of the module that has ``path`` in ``named_modules()``; without wrappers."""
        name = self._find(self._by_key, path, _enter_by_key).name.removesuffix(".")
        return path if name == path else name

    def key_of(self, name: str) -> str:
        """The key that ``name`` has in the state dict of the model; the model need not have such an entry."""
        prefix, _, last = name.rpartition(".")
        key = _unwrapped(self._find(self._by_name, prefix, _enter_by_name), last).raw + last
        return name if key == name else key

    def _find(
        self, known: dict[str, _NamedPlace], prefix: str, enter: Callable[[_NamedPlace, str], _NamedPlace]
    ) -> _NamedPlace:
        if not prefix:
            return self._root
        found = known.get(prefix)
        if found is None:
            parent, _, last = prefix.rpartition(".")
            found = enter(self._find(known, parent, enter), last)
            if len(known) == _PLACES_KEPT:
                known.clear()
            known[prefix] = found
        return found


def _enter_by_key(place: _NamedPlace, child: str) -> _NamedPlace:
    while place.module is not None:
        wrapped = wrapped_child(place.module)
        if wrapped is None or _has(place.module, child, wrapped):
            break
        place = _inside(place, place.module, wrapped)
        if child == wrapped:
            return place
    return _enter_by_name(place, child)


def _enter_by_name(place: _NamedPlace, child: str) -> _NamedPlace:
    place = _unwrapped(place, child)
    module = None if place.module is None else _children(place.module).get(child)
    return _NamedPlace(module, f"{place.name}{child}.", f"{place.raw}{child}.")


def _unwrapped(place: _NamedPlace, entry: str) -> _NamedPlace:
    """The place inside of all wrappers that do not have ``entry`` themselves."""
    while place.module is not None:
        child = wrapped_child(place.module)
        if child is None or _has(place.module, entry, child):
            break
        place = _inside(place, place.module, child)
    return place


def _has(wrapper: nn.Module, entry: str, wrapped: str) -> bool:
    own = vars(wrapper)
    return entry != wrapped and any(entry in own[kind] for kind in ("_modules", "_parameters", "_buffers"))


def _inside(place: _NamedPlace, wrapper: nn.Module, child: str) -> _NamedPlace:
    # Activation checkpointing has hooks that take its own name out of state dicts, and put it in again.
    shown = "" if child == "_checkpoint_wrapped_module" else f"{child}."
    return _NamedPlace(_children(wrapper)[child], place.name, place.raw + shown)


def _children(module: nn.Module) -> dict[str, nn.Module]:
    # named_children() would leave out the second name of a module that has two.
    children: dict[str, nn.Module] = vars(module)["_modules"]
    return children


def wrapped_child(module: nn.Module) -> str | None:
    """The name under which a wrapper has the module that it wraps; None if ``module`` is no wrapper."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "module"
    if _is_instance(module, "torch._dynamo.eval_frame", "OptimizedModule"):
        return "_orig_mod"
    wrappers = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    return "_checkpoint_wrapped_module" if _is_instance(module, wrappers, "ActivationWrapper") else None


def _is_instance(module: nn.Module, home: str, class_name: str) -> bool:
    """Whether it is an instance of a class that may not have been imported, and is slow to import."""
    defining = sys.modules.get(home)
    return defining is not None and isinstance(module, getattr(defining, class_name))


class ParameterNames:
    """The names of a model's parameters.

    Attributes:
        first: The first name of each parameter, in the order of the model.
        others: The other names of those that have several: a tied parameter has one for each of its places.
            Last come the names that state dicts have for it because of ``dsd_fqn_modifiers``.
    """

    def __init__(self, model: nn.Module, options: StateDictOptions) -> None:
        self.first: dict[torch.Tensor, str] = {}
        self.others: dict[torch.Tensor, list[str]] = {}
        names = ModelNames(model)
        hidden = _hidden_children(model, names, options.dsd_fqn_modifiers)
        renamed: list[tuple[nn.Parameter, str]] = []
        for key, parameter in model.named_parameters(remove_duplicate=False):
            name = names.name_of(key)
            if self.first.setdefault(parameter, name) != name:
                self._add(parameter, name)
            for child in hidden:
                if name.startswith(f"{child}."):
                    left_out = child.rpartition(".")[0] + name[len(child) :]
                    renamed.append((parameter, left_out.removeprefix(".")))
        for parameter, name in renamed:
            self._add(parameter, name)

    def _add(self, parameter: torch.Tensor, name: str) -> None:
        self.others.setdefault(parameter, []).append(name)


def _hidden_children(model: nn.Module, names: ModelNames, modifiers: str) -> Sequence[str]:
    """The modules whose own name is left out of keys."""
    hidden = []
    for path, module in model.named_modules(remove_duplicate=False):
        method: Any = getattr(type(module), modifiers, None)
        if method is not None:
            name = names.name_of_module(path)
            hidden += [f"{name}.{child}".removeprefix(".") for child in method(module).values()]
    return hidden


def frozen_names(model: nn.Module) -> set[str]:
    """The names of all parameters that do not require gradients."""
    names = ModelNames(model)
    parameters = model.named_parameters(remove_duplicate=False)
    return {names.name_of(key) for key, parameter in parameters if not parameter.requires_grad}
