"""Translates torch's own storages, planners and stagers into ours with the same settings.

Only the classes as torch has them are translated, and subclasses that change nothing that we would ignore.
Anything else is somebody's own plugin. It is used as it is, and ``Translator.strangers`` says why. Settings
that older versions of torch do not have are read with a default.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from holdfast._format.safetensors_index import LONE_SHARD
from holdfast._fsspec_filesystem import FsspecReader, FsspecWriter
from holdfast._install.door_table import PACKAGE
from holdfast._install.install_options import InstallOptions
from holdfast._install.own_metadata import ReaderWithOwnMetadata
from holdfast._storage.safetensors_layout import ExportOptions
from holdfast.default_planner import DefaultLoadPlanner, DefaultSavePlanner, EmptyStateDictLoadPlanner
from holdfast.extension import ExtensionRegistry
from holdfast.filesystem import FileSystemReader, FileSystemWriter
from holdfast.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from holdfast.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from holdfast.staging import BlockingAsyncStager, DefaultStager, StagingOptions


class Recipe(NamedTuple):
    """How one of our objects is made.

    Attributes:
        kind: The class.
        arguments: What it is called with.
        attributes: What is set afterwards.
    """

    kind: Callable[..., Any]
    arguments: dict[str, Any]
    attributes: dict[str, Any]

    def make(self) -> Any:
        """Make the object."""
        made = self.kind(**self.arguments)
        for name, value in self.attributes.items():
            setattr(made, name, value)
        return made


class _Untranslatable(Exception):  # noqa: N818 - a reason, not an error
    """Why an object stays what it is."""


class Translator:
    """Translates, and gives the same object of ours for the same object of torch's as long as it lives.

    Args:
        options: The options that our objects get, besides the settings of torch's.

    Attributes:
        strangers: The classes that were not translated, each with the reason.
    """

    def __init__(self, options: InstallOptions) -> None:
        self.options = options
        self.strangers: dict[str, str] = {}
        self._known: weakref.WeakKeyDictionary[Any, tuple[Recipe, Any]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def translate(self, value: Any) -> Any:
        """Our object for one of torch's; any other value as it is."""
        base = _stock_base(type(value))
        try:
            if base is None:
                _refuse_plugins(type(value))
                return value
            _refuse_changes(value, base)
            recipe = _RECIPES[_name_in_package(base)](value, self.options)
        except _Untranslatable as why:
            self.strangers[full_name(type(value))] = str(why)
            return value
        with self._lock:
            known = self._known.get(value)
            if known is None or known[0] != recipe:
                known = self._known[value] = (recipe, recipe.make())
        return known[1]


def is_stock(value: Any) -> bool:
    """Whether a value is, or inherits from, one of torch's classes that are translated."""
    return _stock_base(type(value)) is not None


def full_name(cls: type) -> str:
    """The module and the name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _name_in_package(cls: type) -> str:
    """The name of a class of torch's package within it; that of any other class as it is."""
    return full_name(cls).removeprefix(f"{PACKAGE}.")


def _stock_base(cls: type) -> type | None:
    """The nearest class of torch's that is translated; None if there is none."""
    for base in cls.__mro__:
        if _name_in_package(base) in _RECIPES:
            home = sys.modules.get(base.__module__)
            return base if getattr(home, base.__qualname__, None) is base else None
    return None


_INTERFACES = {
    *("storage.StorageWriter", "storage.StorageReader", "planner.SavePlanner", "planner.LoadPlanner"),
    "staging.AsyncStager",
}


def _refuse_plugins(cls: type) -> None:
    """Raise if a class implements an interface of torch's in a way of its own."""
    for base in cls.__mro__:
        if _name_in_package(base) in _INTERFACES:
            raise _Untranslatable(f"it is a {base.__name__} of its own, and works as a plugin")


# What every class has, and what says nothing of what its methods do.
_SILENT = {
    *("__init__", "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__"),
    *("__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__", "__static_attributes__"),
    *("__firstlineno__", "_is_protocol", "_is_runtime_protocol", "__protocol_attrs__", "__subclasshook__"),
    *("__non_callable_proto_members__", "__annotate_func__", "__annotations_cache__"),
}


def _refuse_changes(value: Any, base: type) -> None:
    """Raise if a subclass, a patch or the object itself has methods that we would not call."""
    cls = type(value)
    own = cls.__mro__[: cls.__mro__.index(base)]
    overridden = {name for one in own for name in vars(one) if hasattr(base, name)} - _SILENT
    if issubclass(base, _class("filesystem", "FileSystemReader")):
        overridden.discard("read_metadata")
    if overridden:
        names = ", ".join(sorted(overridden))
        raise _Untranslatable(f"it is a {base.__name__} with {names} of its own, and works as a plugin")
    for one in base.__mro__:
        if one.__module__.startswith(PACKAGE):
            patched = [name for name, method in vars(one).items() if _is_patched(name, method)]
            if patched:
                raise _Untranslatable(f"somebody has replaced {one.__name__}.{patched[0]}")
    patched = [name for name in vars(value) if callable(getattr(cls, name, None))]
    if patched:
        raise _Untranslatable(f"somebody has replaced {patched[0]} of this {base.__name__}")


def _is_patched(name: str, method: Any) -> bool:
    function = getattr(method, "__func__", method)
    if name.startswith("__") or not callable(function):
        return False
    return not str(getattr(function, "__module__", "")).startswith("torch.")


def _class(module: str, name: str) -> type:
    found: type = getattr(sys.modules[f"{PACKAGE}.{module}"], name)
    return found


def _place(storage: Any) -> tuple[str, dict[str, Any]]:
    """The path of a storage, and the attributes that keep a file system other than the local one."""
    fs = storage.fs
    if type(fs) is _class("filesystem", "FileSystem"):
        return storage.path, {}
    return storage.path, {"fs": fs, "path": storage.path}


def _writer(kind: Callable[..., Any], writer: Any, _: InstallOptions) -> Recipe:
    form = getattr(writer, "serialization_format", None)
    if form is not None and form.name != "TORCH_SAVE":
        raise _Untranslatable(f"it writes {form.name}, which ours does not")
    path, attributes = _place(writer)
    arguments = {
        "path": path,
        "single_file_per_rank": writer.single_file_per_rank,
        "sync_files": writer.sync_files,
        "thread_count": writer.thread_count,
        "per_thread_copy_ahead": writer.per_thread_copy_ahead,
        "overwrite": getattr(writer, "overwrite", True),
        "_extensions": tuple(getattr(getattr(writer, "transforms", None), "extensions", ())),
    }
    if kind is FileSystemWriter:
        arguments["cache_staged_state_dict"] = getattr(writer, "cache_staged_state_dict", False)
    return Recipe(kind, arguments, attributes)


def _hf_writer(writer: Any, _: InstallOptions) -> Recipe:
    attributes = _place(writer)[1]
    # With consolidation torch's class writes shards into a folder below first. Ours writes the whole files.
    path = getattr(writer, "consolidated_output_path", None) or writer.path
    names = ("thread_count", "save_distributed", "enable_consolidation", "thread_count_consolidation")
    arguments = {name: getattr(writer, name) for name in names if hasattr(writer, name)}
    mapping = arguments["fqn_to_index_mapping"] = getattr(writer, "fqn_to_index_mapping", None)
    if attributes:
        attributes["path"] = path
    if mapping is None and writer.save_distributed and not getattr(writer, "enable_consolidation", None):
        # Who asks for shards may look for their names, as transformers does.
        attributes["options"] = ExportOptions(lone_name=LONE_SHARD, as_shards=True)
    return Recipe(HuggingFaceStorageWriter, {"path": path, **arguments}, attributes)


def _reader(kind: Callable[..., Any], reader: Any, options: InstallOptions) -> Recipe:
    path, attributes = _place(reader)
    arguments = {"path": path, "allow_pickle": bool(options.allow_pickle)}
    registry = getattr(getattr(reader, "transforms", None), "extension_registry", None)
    if registry is not None:
        own = [one for one in registry.extensions.values() if not one.__module__.startswith(PACKAGE)]
        arguments["_extension_registry"] = _registry_with(tuple(own)) if own else None
    if _has_own_metadata(reader):
        return Recipe(ReaderWithOwnMetadata, arguments, {**attributes, "stranger": reader})
    return Recipe(kind, arguments, attributes)


def _registry_with(extensions: tuple[Any, ...]) -> ExtensionRegistry:
    made = ExtensionRegistry()
    for extension in extensions:
        made.register(extension)
    return made


def _has_own_metadata(reader: Any) -> bool:
    base = _stock_base(type(reader))
    return base is not None and type(reader).read_metadata is not base.read_metadata  # type: ignore[attr-defined]


def _model_reader(kind: Callable[..., Any], reader: Any, _: InstallOptions) -> Recipe:
    if _has_own_metadata(reader):
        raise _Untranslatable("it has a read_metadata of its own, and works as a plugin")
    path, attributes = _place(reader)
    names = ("thread_count", "target_dtype", "block_size")
    arguments = {name: getattr(reader, name) for name in names if hasattr(reader, name)}
    return Recipe(kind, {"path": path, **arguments}, attributes)


def _save_planner(planner: Any, options: InstallOptions) -> Recipe:
    arguments = {
        "flatten_state_dict": planner.flatten_state_dict,
        "flatten_sharded_tensors": planner.flatten_sharded_tensors,
        "dedup_save_to_lowest_rank": getattr(planner, "dedup_save_to_lowest_rank", False),
        "enable_plan_caching": getattr(planner, "_enable_plan_caching", False),
    }
    return Recipe(DefaultSavePlanner, {**arguments, **options.for_save_planner()}, {})


def _load_planner(kind: Callable[..., Any], planner: Any, options: InstallOptions) -> Recipe:
    arguments = {
        "flatten_state_dict": planner.flatten_state_dict,
        "flatten_sharded_tensors": planner.flatten_sharded_tensors,
        "allow_partial_load": getattr(planner, "allow_partial_load", False),
        **options.for_load_planner(),
    }
    if kind is EmptyStateDictLoadPlanner:
        arguments["keys"] = None if planner.keys is None else frozenset(planner.keys)
    return Recipe(kind, arguments, {})


def _default_stager(stager: Any, _: InstallOptions) -> Recipe:
    config = stager._config  # noqa: SLF001 - torch has no other name for it
    names = ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy")
    chosen = {_NEW_NAMES.get(name, name): value for name, value in vars(config).items()}
    options = StagingOptions(**{name: chosen[name] for name in names if name in chosen})
    return Recipe(DefaultStager, {"config": options}, {})


# What options are called in torch 2.9 and before.
_NEW_NAMES = {"use_cuda_non_blocking_copy": "use_non_blocking_copy"}


def _blocking_stager(stager: Any, _: InstallOptions) -> Recipe:
    arguments = {"cache_staged_state_dict": stager.cache_staged_state_dict, "type_check": stager.type_check}
    return Recipe(BlockingAsyncStager, arguments, {})


_RECIPES: dict[str, Callable[[Any, InstallOptions], Recipe]] = {
    "filesystem.FileSystemWriter": partial(_writer, FileSystemWriter),
    "filesystem.FileSystemReader": partial(_reader, FileSystemReader),
    "_fsspec_filesystem.FsspecWriter": partial(_writer, FsspecWriter),
    "_fsspec_filesystem.FsspecReader": partial(_reader, FsspecReader),
    "hf_storage.HuggingFaceStorageWriter": _hf_writer,
    "hf_storage.HuggingFaceStorageReader": partial(_model_reader, HuggingFaceStorageReader),
    "quantized_hf_storage.QuantizedHuggingFaceStorageReader": partial(
        _model_reader, QuantizedHuggingFaceStorageReader
    ),
    "default_planner.DefaultSavePlanner": _save_planner,
    "default_planner.DefaultLoadPlanner": partial(_load_planner, DefaultLoadPlanner),
    "default_planner._EmptyStateDictLoadPlanner": partial(_load_planner, EmptyStateDictLoadPlanner),
    "staging.DefaultStager": _default_stager,
    "staging.BlockingAsyncStager": _blocking_stager,
}
"""By the name of a class in torch's package: what makes ours of an object of it, and of the options."""
