"""The state dict of a model, read and set under names that do not depend on what wraps the model."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from holdfast._model_state.module_loading import ModuleLoading
from holdfast._model_state.parameter_names import ModelNames, frozen_names
from holdfast._model_state.patched_methods import unpatched_method
from holdfast._model_state.rank0_broadcast import SentState, SentTensor
from holdfast._model_state.state_dict_options import StateDictOptions
from holdfast._model_state.values_to_load import ValuesToLoad
from holdfast._model_state.whole_tensors import (
    changed_leaves,
    copied,
    delivered,
    is_left_to_rank0,
)
from holdfast._user_warning import warn_user

IncompatibleKeys: TypeAlias = _IncompatibleKeys


@torch.no_grad()
def read_model(
    model: nn.Module, submodules: Iterable[nn.Module] | None, options: StateDictOptions
) -> dict[str, Any]:
    """The entries of ``model.state_dict()`` by name. The versions of modules (``_metadata``) are kept."""
    names = ModelNames(model)
    own = _state_dict_to_change(model)
    versions = _versions_in(own)
    found = _renamed(own, names.name_of)
    if submodules:
        found = OrderedDict(_of_submodules(found, model, set(submodules), names, options))
    if options.ignore_frozen_params:
        for name in frozen_names(model):
            found.pop(name, None)
    if options.full_state_dict or options.cpu_offload:
        deliver = functools.partial(delivered, options=options)
        for name, value in found.items():
            found[name] = changed_leaves(value, deliver)
    if is_left_to_rank0(options):
        return {}
    if versions is not None:
        vars(found)["_metadata"] = _renamed(versions, names.name_of_module, may_merge=True)
    return found


def _state_dict_to_change(model: nn.Module) -> "OrderedDict[str, Any]":
    """``model.state_dict()``; a copy of it if a method or a hook of the model may keep what it returns."""
    state_dict = unpatched_method(model, "state_dict")
    is_torchs = getattr(state_dict, "__func__", None) is nn.Module.state_dict
    own: Any = state_dict()
    if is_torchs and not vars(model)["_state_dict_hooks"]:
        return own  # type: ignore[no-any-return]
    entries, versions = OrderedDict(own), _versions_in(own)
    vars(entries)["_metadata"] = None if versions is None else OrderedDict(versions)
    return entries


def _renamed(
    own: "OrderedDict[str, Any]", name_of: Callable[[str], str], *, may_merge: bool = False
) -> "OrderedDict[str, Any]":
    """The entries by name. They are taken out of ``own``, so that there are never two dicts of them."""
    if all(name_of(key) == key for key in own):
        return own
    keys, values = list(own), list(own.values())
    own.clear()
    keys.reverse()
    values.reverse()
    found: OrderedDict[str, Any] = OrderedDict()
    while keys:
        key = keys.pop()
        name = name_of(key)
        if name in found and not may_merge:
            raise RuntimeError(f"the state dict of the model has two keys of the name {name}: one is {key}")
        found[name] = values.pop()
    return found


def _of_submodules(
    found: Mapping[str, Any],
    model: nn.Module,
    submodules: set[nn.Module],
    names: ModelNames,
    options: StateDictOptions,
) -> dict[str, Any]:
    paths = [path for path, module in model.named_modules(remove_duplicate=False) if module in submodules]
    prefixes = tuple({f"{names.name_of_module(path)}.".removeprefix(".") for path in paths})
    kept = {name: value for name, value in found.items() if name.startswith(prefixes)}
    if options.keep_submodule_prefixes:
        return kept
    return {
        name.removeprefix(prefix): value
        for prefix in prefixes
        for name, value in kept.items()
        if name.startswith(prefix)
    }


def names_of_submodules(model: nn.Module, state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """A state dict with modules as keys, and their state dicts as values, as one state dict of the model."""
    if not any(isinstance(key, nn.Module) for key in state):
        return state
    warn_user(
        "Passing model_state_dict as a dict from modules to their state dicts is deprecated in torch; pass "
        "one dict with the names of the whole model",
        FutureWarning,
    )
    names = ModelNames(model)
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{names.name_of_module(path)}.".removeprefix(".")
        found |= {f"{prefix}{name}": value for name, value in state.get(module, {}).items()}
    return found


@torch.no_grad()
def set_model(model: nn.Module, state: Mapping[str, Any], options: StateDictOptions) -> IncompatibleKeys:
    """Load ``state`` into the model by ``model.load_state_dict``; ``state`` stays as it is."""
    if options.broadcast_from_rank0:
        loading = _received(model, state, options)
    else:
        loading = _start_loading(model, options)
        if not options.full_state_dict:
            loading.give_memory(state)
        for name, value in state.items():
            loading.take(name, value)
    if options.ignore_frozen_params:
        for name in frozen_names(model):
            loading.leave_alone(name)
    return _load(model, state, loading, options)


def _start_loading(model: nn.Module, options: StateDictOptions) -> ValuesToLoad:
    targets = _own_tensors(model)
    device, needs_memory = None, False
    if options.full_state_dict:
        device = _one_device(targets)
        needs_memory = any(isinstance(one, torch.Tensor) and one.is_meta for one in targets.values())
    return ValuesToLoad(ModelNames(model), targets, device, assign=needs_memory)


def _own_tensors(model: nn.Module) -> dict[str, Any]:
    """The entries of the model's own state dict; parameters are the parameters themselves."""
    state_dict = unpatched_method(model, "state_dict")
    has_own = type(model).state_dict is not nn.Module.state_dict
    # A plain dict: the versions of all modules, which torch attaches, take as much memory as the entries.
    return dict(state_dict() if has_own else state_dict(keep_vars=True))


def _one_device(targets: Mapping[str, Any]) -> torch.device | None:
    """The device of the model's tensors; None if all are on the meta device."""
    tensors = [one for one in targets.values() if isinstance(one, torch.Tensor) and not is_lazy(one)]
    devices = {one.device for one in tensors if one.dim() > 0}
    devices.discard(torch.device("meta"))
    if len(devices) > 1:
        raise ValueError(f"Multiple devices found in the model: {', '.join(sorted(map(str, devices)))}")
    return next(iter(devices), None)


def _received(model: nn.Module, state: Mapping[str, Any], options: StateDictOptions) -> ValuesToLoad:
    """Take the values of rank 0, tensor by tensor.

    The other ranks wait for this one, so it takes part to the end whatever goes wrong, and tells them.
    """
    loading: ValuesToLoad | None = None
    problem: Exception | None = None
    try:
        loading = _start_loading(model, options)
    except Exception as error:  # noqa: BLE001 - all ranks raise it
        problem = error
    sent = SentState(dict(state), None if loading is None else loading.device)
    if loading is None:
        sent.agree(problem)
        raise AssertionError("ranks agreed although one has a problem")
    by_number = _expect(sent, loading)
    inner: dict[SentTensor, torch.Tensor] = {}  # tensors inside of values, such as extra state
    for form, tensor in sent.tensors():
        key = by_number.get(form.number)
        if problem is not None or (key is not None and not loading.fits(key, form.shape)):
            continue
        try:
            if key is None:
                inner[form] = copied(tensor)
            else:
                loading.values[key] = loading.placed(key, tensor)
        except Exception as error:  # noqa: BLE001 - all ranks raise it
            problem = error
    sent.agree(problem)
    if inner:
        loading.values = changed_leaves(
            loading.values, lambda value: inner[value] if isinstance(value, SentTensor) else value
        )
    return loading


def _expect(sent: SentState, loading: ValuesToLoad) -> dict[int, str]:
    """Agree on what is loaded; returns the key for each tensor that will come, by its number.

    Ranks may have different models, as the stages of a pipeline are. A key that another rank has a place for
    is not unexpected here.
    """
    keys = {name: loading.key_for(name) for name in sent.tree}
    without_place = {name for name, key in keys.items() if not loading.has(key)}
    unexpected = set.intersection(*sent.agree(None, without_place))
    by_number: dict[int, str] = {}
    for name, value in sent.tree.items():
        key = keys[name]
        if isinstance(value, SentTensor):
            by_number[value.number] = key
        if name in without_place and name not in unexpected:
            continue
        is_tensor = isinstance(value, SentTensor)
        # If no place fits, load_state_dict reports it. It looks only at the shape.
        loading.load(
            name, key, torch.empty(value.shape, dtype=value.dtype, device="meta") if is_tensor else value
        )
    return by_number


def _versions_in(state: Mapping[str, Any]) -> Any:
    """The versions of modules, which ``Module.state_dict`` attaches to its result; None if there are none."""
    return getattr(state, "_metadata", None)


def _load(
    model: nn.Module, state: Mapping[str, Any], loading: ValuesToLoad, options: StateDictOptions
) -> IncompatibleKeys:
    versions = _versions_in(state)
    values = loading.values
    if versions is not None:
        paths = (path for path, _ in model.named_modules(remove_duplicate=False))
        by_path = ((path, versions.get(loading.names.name_of_module(path))) for path in paths)
        versions = {path: version for path, version in by_path if version is not None}
        vars(values)["_metadata"] = versions
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        # Only passed where it is needed: methods of users may not know it.
        more: dict[str, Any] = {"assign": True} if loading.assign else {}
        result = unpatched_method(model, "load_state_dict")(values, strict=options.strict, **more)
        return result if isinstance(result, _IncompatibleKeys) else _IncompatibleKeys([], [])
    done = ModuleLoading(versions, assign=loading.assign)
    done.load(model, values)
    keys = _IncompatibleKeys(
        [loading.names.name_of(key) for key in done.missing],
        [loading.unexpected.get(key) or loading.names.name_of(key) for key in done.unexpected],
    )
    if done.errors or (options.strict and (keys.missing_keys or keys.unexpected_keys)):
        raise RuntimeError(_misfit(model, keys, done.errors, options))
    return keys


def _misfit(model: nn.Module, found: IncompatibleKeys, errors: list[str], options: StateDictOptions) -> str:
    lines = [f"The state dict does not fit the {type(model).__name__}. Everything else was loaded."]
    if options.strict and found.missing_keys:
        lines.append(f"Missing key(s): {', '.join(found.missing_keys)}.")
    if options.strict and found.unexpected_keys:
        lines.append(f"Unexpected key(s): {', '.join(found.unexpected_keys)}.")
    if options.strict and not errors:
        lines.append("To load anyway, use StateDictOptions(strict=False).")
    return "\n\t".join([*lines, *errors])
