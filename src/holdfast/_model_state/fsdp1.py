"""Models of FSDP's first version, whose flat parameters only torch's own helpers understand."""

import dataclasses
import sys
from types import ModuleType
from typing import Any

from torch import nn

from holdfast._model_state.state_dict_options import StateDictOptions
from holdfast.errors import UsageError


def has_flat_parameters(model: nn.Module) -> bool:
    """Whether the model, or a part of it, is a FullyShardedDataParallel.

    Raises:
        UsageError: It is no module.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model must be a torch.nn.Module, and is of the class {type(model).__name__}: pass the "
            "model first, then optimizers or state dicts"
        )
    defining = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if defining is None:
        return False
    return any(isinstance(module, defining.FullyShardedDataParallel) for module in model.modules())


def torchs_helpers() -> ModuleType:
    """The module of torch with the same functions."""
    # It imports torch's whole checkpoint package, which is needed for nothing else.
    from torch.distributed.checkpoint import state_dict  # noqa: PLC0415

    return state_dict


def torchs_options(options: StateDictOptions) -> Any:
    """The same options for torch's helpers; older versions know fewer."""
    theirs = torchs_helpers().StateDictOptions
    return theirs(**{one.name: getattr(options, one.name) for one in dataclasses.fields(theirs)})
