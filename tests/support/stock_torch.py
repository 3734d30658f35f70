"""Stock torch's checkpoint package, called in one way whatever its version."""

import dataclasses
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.torch_version import TorchVersion

IS_NEWEST = TorchVersion(torch.__version__) >= "2.13"
"""Whether this torch has the whole interface that ours copies; older ones lack parts of it."""

HAS_EXTENSIONS = importlib.util.find_spec("torch.distributed.checkpoint._extension") is not None
"""Whether this torch can transform what it writes, for example compress it."""

needs_extensions = pytest.mark.skipif(not HAS_EXTENSIONS, reason="this torch has no transforms")


def stock_hf_storage() -> Any:
    """torch's module of Hugging Face storages. Skips the test if this torch has none."""
    name = "torch.distributed.checkpoint.hf_storage"
    if not IS_NEWEST and importlib.util.find_spec(name) is None:
        pytest.skip("this torch has no storages of safetensors files")
    return importlib.import_module(name)


def stock_save(state: dict[str, Any], **options: Any) -> Any:
    """torch's ``save`` by this process alone; returns torch's Metadata."""
    return _alone(state_dict_saver.save, state, **options)


def stock_load(state: dict[str, Any], **options: Any) -> None:
    """torch's ``load`` by this process alone."""
    _alone(state_dict_loader.load, state, **options)


def _alone(call: Callable[..., Any], state: dict[str, Any], **options: Any) -> Any:
    # Older ones find out by themselves that there is no process group.
    if "no_dist" in inspect.signature(call).parameters:
        options["no_dist"] = True
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        return call(state, **options)


def stock_record(kind: Callable[..., Any], **fields: Any) -> Any:
    """A record of torch's, without the fields that this torch does not have."""
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in fields.items() if name in known})
