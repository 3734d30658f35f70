"""The helper: a process of low priority beside each trainer that writes what the trainer has staged.

Names are loaded on first use, because the helper's own first steps come before it imports torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast._helper.keeper import kill_helper, start_helper, stop_helper
    from holdfast._helper.remote import Progress, RemoteWriter, remote_writer

__all__ = ["Progress", "RemoteWriter", "kill_helper", "remote_writer", "start_helper", "stop_helper"]

_HOME = {
    "Progress": "remote",
    "RemoteWriter": "remote",
    "kill_helper": "keeper",
    "remote_writer": "remote",
    "start_helper": "keeper",
    "stop_helper": "keeper",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"holdfast._helper.{_HOME[name]}"), name)
    raise AttributeError(f"module 'holdfast._helper' has no attribute {name!r}")
