"""Lets accelerate shard on CPUs: its list of kinds that are sharded has only accelerators."""

import functools
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def shard_on_cpus() -> None:
    original = AcceleratorState.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init
