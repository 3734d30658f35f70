"""State dicts of models and optimizers: torch's own helpers, which know FSDP's inside and write no files.

They are the same objects as in ``torch.distributed.checkpoint.state_dict``; see its documentation.
"""

from typing import Any

from torch.distributed.checkpoint import state_dict as _torchs
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]


def __getattr__(name: str) -> Any:
    """The rest of torch's module, as it is in the torch that is installed."""
    return getattr(_torchs, name)
