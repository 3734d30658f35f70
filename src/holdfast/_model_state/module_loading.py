"""``nn.Module.load_state_dict`` for models of many modules: the same calls and hooks, in linear time."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys


class ModuleLoading:
    """One load of a state dict into the modules of a model.

    torch looks through all keys of a module for each of its children. For a list of 5,000 layers that takes
    many seconds. Here every module looks at its keys once. Overridden ``_load_from_state_dict`` methods and
    all hooks are called as torch calls them.

    Attributes:
        missing: The keys of the model that the state dict has not.
        unexpected: The keys of the state dict that the model has not.
        errors: What else was wrong, such as other shapes.
    """

    def __init__(self, versions: Mapping[str, Any] | None, *, assign: bool) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.errors: list[str] = []
        self._versions = versions or {}
        self._assign = assign

    def load(self, module: nn.Module, values: dict[str, Any], prefix: str = "") -> None:
        """Load ``values``, whose keys begin with ``prefix``, into a module and its children.

        Hooks may change ``values``.
        """
        strict = True  # note unexpected keys
        about = dict(self._versions.get(prefix.removesuffix("."), {}))
        if self._assign:
            about["assign_to_params_buffers"] = True
        module._load_from_state_dict(  # noqa: SLF001
            values, prefix, about, strict, self.missing, self.unexpected, self.errors
        )
        keys_of: dict[str, list[str]] = {}
        for key in values:
            child, dot, _ = key[len(prefix) :].partition(".")
            if dot and key.startswith(prefix):
                keys_of.setdefault(child, []).append(key)
        for name, child_module in vars(module)["_modules"].items():
            if child_module is not None:
                own = {key: values[key] for key in keys_of.get(name, ())}
                self.load(child_module, own, f"{prefix}{name}.")
        keys = _IncompatibleKeys(self.missing, self.unexpected)
        for hook in vars(module)["_load_state_dict_post_hooks"].values():
            if hook(module, keys) is not None:
                raise AssertionError(
                    "a load_state_dict post-hook must change the keys in place and return None"
                )
