"""Makes ports of plugins, ours, torch's and strangers': the one module that looks at what a plugin can do.

Everything is found out once, when a save or load begins.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from holdfast._engine.ports import (
    Fingerprints,
    LoadPlannerPort,
    ReaderPort,
    SavePlannerPort,
    WriterPort,
)
from holdfast._objects.decode import decode_object
from holdfast._storage.store_reader import StoreReader
from holdfast._storage.store_writer import StoreWriter
from holdfast._torch_compat.torch_plugins import (
    our_load_planner,
    our_save_planner,
    our_storage_reader,
    our_storage_writer,
)
from holdfast.staging import BlockingAsyncStager


def adapt_save_planner(planner: Any) -> SavePlannerPort:
    """Make the port of a save planner: ours, torch's or any other."""
    ours = our_save_planner(planner)
    fingerprints: Callable[[], Fingerprints] | None = getattr(ours, "fingerprints", None)
    return SavePlannerPort(
        ours,
        set_up=_set_up_of_save_planner(ours.set_up_planner, planner.set_up_planner),
        flattens=getattr(ours, "flatten_state_dict", True),
        fingerprints=fingerprints or dict,
        keep_for_rank=getattr(ours, "keep_for_rank", _keep_nothing),
    )


def adapt_load_planner(planner: Any) -> LoadPlannerPort:
    """Make the port of a load planner: ours, torch's or any other."""
    ours = our_load_planner(planner)
    return LoadPlannerPort(
        ours,
        flattens=getattr(ours, "flatten_state_dict", True),
        cast=getattr(ours, "cast", None),
        passes_plans_on=_has_known(ours, "create_global_plan"),
        flat_state=lambda: _flat_state_of(planner),
        key_paths=lambda: _mapping_of(planner, "mappings") or {},
        allows_partial=bool(getattr(planner, "allow_partial_load", False)),
        ignores_shapes=bool(getattr(planner, "ignore_mismatched_sizes", False)),
        decode=functools.partial(
            decode_object,
            allow_pickle=bool(getattr(planner, "allow_pickle", False)),
            safe_globals=tuple(getattr(planner, "safe_globals", ())),
        ),
    )


def adapt_writer(writer: Any) -> WriterPort:
    """Make the port of a storage writer: ours, torch's or any other."""
    ours: Any = our_storage_writer(writer)
    return WriterPort(
        ours,
        set_up_writer=_with_known_keywords(ours.set_up_storage_writer, writer.set_up_storage_writer),
        expect_files=getattr(ours, "expect_files", _do_nothing),
        summary_of=getattr(ours, "how_to_find_metadata", lambda metadata: metadata),
        abandon_save=getattr(ours, "abandon", _do_nothing),
        place=os.path.normpath(ours.checkpoint_id) if isinstance(ours, StoreWriter) else None,
        needs_other_ranks=getattr(ours, "needs_other_ranks", lambda plan: False),  # noqa: ARG005
    )


def adapt_reader(reader: Any) -> ReaderPort:
    """Make the port of a storage reader: ours, torch's or any other."""
    ours: Any = our_storage_reader(reader)
    return ReaderPort(
        ours,
        set_up_reader=_with_known_keywords(ours.set_up_storage_reader, reader.set_up_storage_reader),
        metadata_is_alike=_has_known(ours, "read_metadata"),
        has_rank_metadata=_takes_any_keyword(reader.read_metadata),
        passes_plans_on=_has_known(ours, "prepare_global_plan"),
        read_together=ours.read_data_together if _has_known(ours, "read_data") else None,
        read_ahead=ours.read_ahead if _has_known(ours, "read_data") else None,
        place=os.path.normpath(ours.checkpoint_id) if isinstance(ours, StoreReader) else None,
    )


def place_of(storage: Any) -> str | os.PathLike[str] | None:
    """Where a storage writes to or reads from, if it says so."""
    place = getattr(storage, "checkpoint_id", None) or getattr(storage, "path", None)
    return place if isinstance(place, str | os.PathLike) else None


def stages_itself(writer: Any) -> bool:
    """Whether a storage writer is also a stager with a way of its own, as some are that follow torch's.

    One that only inherits ``BlockingAsyncStager`` is served better by the buffers that we keep.
    """
    if isinstance(writer, BlockingAsyncStager) and not getattr(writer, "type_check", False):
        inherited = ("stage", "synchronize_staging", "should_synchronize_after_execute")
        return any(
            inspect.getattr_static(writer, name) is not inspect.getattr_static(BlockingAsyncStager, name)
            for name in inherited
        )
    return all(hasattr(writer, name) for name in ("stage", "should_synchronize_after_execute"))


def gives_leases(stager: Any) -> bool:
    """Whether a stager is our DefaultStager and stages in its way: a subclass may have changed ``stage``."""
    owner = next((cls for cls in type(stager).__mro__ if "stage_leased" in vars(cls)), None)
    return owner is not None and inspect.getattr_static(stager, "stage") is vars(owner).get("stage")


def _set_up_of_save_planner(method: Callable[..., Any], declared: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, called as the planner's own ``declared`` wants it.

    Planners from before ``storage_meta`` have two arguments, with names of their own.
    """
    if "storage_meta" in inspect.signature(declared).parameters or _takes_any_keyword(declared):
        return method
    return lambda state_dict, storage_meta, is_coordinator: method(state_dict, is_coordinator)  # noqa: ARG005


def _has_known(plugin: Any, method: str) -> bool:
    """Whether a method of a plugin is one that ``known_to_engine`` marks."""
    return bool(getattr(getattr(plugin, method), "is_known_to_engine", False))


def _keep_nothing(names: Mapping[str, str]) -> dict[str, str]:
    """Used for planners without ``keep_for_rank``: they cannot keep values for one rank."""
    return dict.fromkeys(names, "this planner cannot keep a value for each rank")


def _flat_state_of(planner: Any) -> Mapping[str, Any] | None:
    """The flat state of a planner that descends from a default planner, ours or torch's; None for others."""
    return _mapping_of(planner, "state_dict") if hasattr(planner, "flatten_state_dict") else None


def _mapping_of(planner: Any, name: str) -> Mapping[str, Any] | None:
    found = getattr(planner, name, None)
    return found if isinstance(found, Mapping) else None


def _do_nothing(*_: Any, **__: Any) -> None:
    """Used in place of an optional method that a plugin does not have."""


def _takes_any_keyword(method: Callable[..., Any]) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _with_known_keywords(method: Callable[..., Any], declared: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, called without the keyword arguments that the plugin's own ``declared`` does not have.

    Interfaces have gained keyword arguments over the years, which plugins from before do not take.
    """
    if _takes_any_keyword(declared):
        return method
    known = inspect.signature(declared).parameters.keys()

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **{name: value for name, value in kwargs.items() if name in known})

    return call
