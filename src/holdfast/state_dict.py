"""State dicts of models and optimizers, under torch's names: names that no wrapper changes, and exact values.

The functions are those of ``torch.distributed.checkpoint.state_dict``, with the same arguments. They differ
where torch's change what they read or lose values:

- Reading never changes anything. No step is taken, so an optimizer that has not stepped yet has no state to
  read. ``holdfast.load`` makes the state that is missing, from the checkpoint.
- Setting restores every value with the dtype that it was saved with, also for frozen parameters.

They read and set models that are plain, or wrapped in DistributedDataParallel, ``torch.compile`` or
activation checkpointing, or sharded by ``fully_shard`` or ``parallelize_module``, in any combination. Models
of FullyShardedDataParallel, FSDP's first version, go through torch's own helpers.
"""

import functools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast._collector import paused_collector
from holdfast._model_state.fsdp1 import has_flat_parameters, torchs_helpers, torchs_options
from holdfast._model_state.model_state_dict import (
    IncompatibleKeys,
    names_of_submodules,
    read_model,
    set_model,
)
from holdfast._model_state.optimizer_loading import set_optimizers
from holdfast._model_state.optimizer_state_dict import as_tuple, read_optimizers
from holdfast._model_state.patched_methods import patch_method
from holdfast._model_state.state_dict_options import StateDictOptions, checked_options
from holdfast._user_warning import warn_user

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = Optimizer | Iterable[Optimizer]


def __getattr__(name: str) -> Any:
    """The rest of torch's module, as it is in the torch that is installed."""
    return getattr(torchs_helpers(), name)


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return what ``model.state_dict()`` has, by names that do not depend on how the model is wrapped.

    The tensors are those of the model, unless the options ask for whole tensors or for the CPU. All ranks
    must call it if ``full_state_dict`` is True and tensors are sharded.

    Args:
        model: The whole model. Its state-dict hooks, and its own ``state_dict`` if it has one, are used.
        submodules: Only entries of these modules. Deprecated in torch.
        options: See ``StateDictOptions``.

    Returns:
        The state dict; an empty one on ranks other than 0 if the options leave it to rank 0.

    Raises:
        RuntimeError: Two keys of the model's own state dict have one name.
        ValueError: The options contradict each other.
    """
    chosen = checked_options(options)
    _warn_of_submodules(submodules)
    if has_flat_parameters(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            found: dict[str, Any] = torchs_helpers().get_model_state_dict(
                model, submodules=submodules, options=torchs_options(chosen)
            )
        return found
    with paused_collector():
        return read_model(model, submodules, chosen)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the state of optimizers as it is, by the names of the parameters.

    No step is taken, and nothing is made that is not there. ``holdfast.load`` into the result also loads what
    the checkpoint has and the optimizers do not have yet.

    A tied parameter has the first of its names. If several optimizers have a parameter, its name in the
    second one ends with ``@2``.

    Args:
        model: The whole model.
        optimizers: One optimizer or several. All their parameters must be parameters of the model.
        submodules: Has no effect on optimizers. Deprecated in torch.
        options: See ``StateDictOptions``.

    Returns:
        A dict with ``state`` (by name) and ``param_groups`` (with names as ``params``), or a flat one. You
        may change it; only its tensors are those of the optimizers.

    Raises:
        ValueError: A parameter of an optimizer is not in the model, or the options contradict each other.
        RuntimeError: There is no optimizer.
    """
    chosen = checked_options(options)
    _warn_of_submodules(submodules)
    listed = _listed(optimizers)
    if has_flat_parameters(model):
        found: dict[str, Any] = torchs_helpers().get_optimizer_state_dict(
            model, listed, options=torchs_options(chosen)
        )
        return found
    with paused_collector():
        return read_optimizers(model, listed, chosen)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of ``get_model_state_dict`` and ``get_optimizer_state_dict``.

    The second one is empty if there are no optimizers.
    """
    listed = as_tuple(optimizers)
    model_state = get_model_state_dict(model, submodules=submodules, options=options)
    return model_state, get_optimizer_state_dict(model, listed, options=options) if listed else {}


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, Any] | None,
    *,
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Load a state dict into a model, by ``model.load_state_dict`` with its hooks.

    Whole tensors go into sharded ones as well: each rank takes its part.

    Args:
        model: The whole model. It may be on the meta device, and gets memory.
        model_state_dict: What ``get_model_state_dict`` returned, or a checkpoint of it. It stays as it is. A
            dict from submodules to their state dicts is accepted, as in torch. With
            ``broadcast_from_rank0`` that of rank 0 counts; other ranks may pass None.
        options: See ``StateDictOptions``.

    Returns:
        The missing and the unexpected keys, by name.

    Raises:
        RuntimeError: Keys are missing or unexpected, and ``strict`` is True; or shapes differ. Everything
            else has been loaded then. With ``broadcast_from_rank0`` also: another rank cannot take or send
            the values.
        ValueError: The options contradict each other, or the model is on several devices and
            ``full_state_dict`` is True.
    """
    chosen = checked_options(options)
    state = names_of_submodules(model, model_state_dict or {})
    if has_flat_parameters(model):
        keys: IncompatibleKeys = torchs_helpers().set_model_state_dict(
            model, dict(state), options=torchs_options(chosen)
        )
        return keys
    with paused_collector():
        return set_model(model, state, chosen)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any] | None,
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load a state dict into optimizers, which need not have taken a step.

    Every value is restored with the dtype that it has in the state dict. The optimizers use its tensors; do
    not change them afterwards. ``step`` goes where torch wants it: to the device of the parameter if the
    group is fused or capturable. An optimizer that has its own ``load_state_dict`` decides for itself.

    A parameter that the state dict lists without state has none afterwards. Options of a group come from the
    saved group of its first parameter. Options that were not saved stay as they are.

    Args:
        model: The whole model.
        optimizers: One optimizer or several.
        optim_state_dict: What ``get_optimizer_state_dict`` returned, ours or torch's, in either form; or
            ``state_dict()`` of one optimizer, whose numbers follow the order of its parameters. With
            ``broadcast_from_rank0`` that of rank 0 counts; other ranks may pass None.
        options: See ``StateDictOptions``.

    Raises:
        RuntimeError: ``strict`` is True, and a parameter that requires gradients is in no group of the state
            dict; or the state dict is empty. Nothing has been changed.
        ValueError: A parameter of an optimizer is not in the model, numbers do not fit its groups, or the
            state dict is that of another kind of optimizer, such as an SGD's for an AdamW. Nothing has been
            changed.
    """
    chosen = checked_options(options)
    listed = _listed(optimizers)
    state = optim_state_dict or {}
    if has_flat_parameters(model):
        torchs_helpers().set_optimizer_state_dict(model, listed, dict(state), options=torchs_options(chosen))
        return
    if not state and not chosen.broadcast_from_rank0:
        if chosen.full_state_dict and chosen.cpu_offload:
            return
        raise RuntimeError("the state dict of the optimizers is empty")
    with paused_collector():
        set_optimizers(model, listed, state, chosen)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any] | None,
    optim_state_dict: Mapping[str, Any] | None,
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Call ``set_optimizer_state_dict`` and ``set_model_state_dict``.

    The optimizers are left alone if there are none. The model is left alone if its state dict is empty and
    is not broadcast.
    """
    chosen = checked_options(options)
    listed = as_tuple(optimizers)
    if listed:
        set_optimizer_state_dict(model, listed, optim_state_dict, options=chosen)
    if not model_state_dict and not chosen.broadcast_from_rank0:
        return IncompatibleKeys([], [])
    return set_model_state_dict(model, model_state_dict, options=chosen)


def _patch_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> None:
    """Let ``model.state_dict()`` and ``model.load_state_dict(state)`` be the functions of this module."""
    if has_flat_parameters(model):
        torchs_helpers()._patch_model_state_dict(  # noqa: SLF001
            model, options=torchs_options(checked_options(options))
        )
        return
    patch_method(model, "state_dict", functools.partial(get_model_state_dict, model, options=options))
    patch_method(model, "load_state_dict", functools.partial(set_model_state_dict, model, options=options))


def _patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: Optimizers, options: StateDictOptions | None = None
) -> None:
    """Let ``state_dict()`` and ``load_state_dict(state)`` of each optimizer be our functions, for all."""
    listed = _listed(optimizers)
    if has_flat_parameters(model):
        torchs_helpers()._patch_optimizer_state_dict(  # noqa: SLF001
            model, optimizers=listed, options=torchs_options(checked_options(options))
        )
        return
    read = functools.partial(get_optimizer_state_dict, model, listed, options=options)
    load = functools.partial(set_optimizer_state_dict, model, listed, options=options)
    for optimizer in listed:
        patch_method(optimizer, "state_dict", read)
        patch_method(optimizer, "load_state_dict", load)


def _listed(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    listed = as_tuple(optimizers)
    if not listed:
        raise RuntimeError("there is no optimizer; pass at least one")
    return listed


def _warn_of_submodules(submodules: set[nn.Module] | None) -> None:
    if submodules:
        warn_user(
            "Getting submodules only model/optim state_dict is deprecated in torch; take the entries that "
            "you need out of the state dict of the whole model",
            FutureWarning,
        )
