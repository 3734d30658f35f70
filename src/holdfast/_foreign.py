"""The door between our records and torch's: planners and storages of either side work with the other.

torch's checkpoint package is never imported from here. Whoever hands us one of its objects has imported it,
and only then its classes are looked up.
"""

import dataclasses
import enum
import functools
import io
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch.futures import Future

from holdfast import metadata as our_metadata_module
from holdfast import planner as our_planner_module
from holdfast import storage as our_storage_module
from holdfast._deferred import DeferredDict, DeferredList
from holdfast._format.typed_key import TypedKey
from holdfast.metadata import Metadata, StorageMeta
from holdfast.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from holdfast.storage import StorageReader, StorageWriter, WriteResult

__all__ = [
    "called_by_torch",
    "our_load_planner",
    "our_save_planner",
    "our_storage_reader",
    "our_storage_writer",
    "to_ours",
    "to_torch",
]

_PACKAGE = "torch.distributed.checkpoint"
_RECORDS = {
    "metadata": [
        "ChunkStorageMetadata",
        "TensorProperties",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "StorageMeta",
        "Metadata",
        "MetadataIndex",
    ],
    "planner": [
        "WriteItemType",
        "LoadItemType",
        "BytesIOWriteData",
        "TensorWriteData",
        "WriteItem",
        "ReadItem",
        "SavePlan",
        "LoadPlan",
    ],
    "storage": ["WriteResult"],
}
_OURS: dict[str, ModuleType] = {
    "metadata": our_metadata_module,
    "planner": our_planner_module,
    "storage": our_storage_module,
}

T = TypeVar("T")


def _torch_class(module: str, name: str) -> type | None:
    loaded = sys.modules.get(f"{_PACKAGE}.{module}")
    return getattr(loaded, name, None)


@functools.cache
def _tables(_: bool) -> tuple[dict[type, type], dict[type, type]]:
    """Our class for each of torch's, and torch's for each of ours."""
    ours: dict[type, type] = {}
    for module, names in _RECORDS.items():
        for name in names:
            theirs = _torch_class(module, name)
            if theirs is not None:
                ours[theirs] = getattr(_OURS[module], name)
    return ours, {mine: theirs for theirs, mine in ours.items()}


def _current_tables() -> tuple[dict[type, type], dict[type, type]]:
    return _tables(_torch_class("storage", "WriteResult") is not None)


def to_ours(value: Any) -> Any:
    """A record of torch's, with all records in it, as ours. Anything else comes back as it is."""
    return _convert(value, _current_tables()[0])


def to_torch(value: Any) -> Any:
    """A record of ours, with all records in it, as torch's."""
    return _convert(value, _current_tables()[1], opening=True)


def _convert(value: Any, table: dict[type, type], *, opening: bool = False) -> Any:
    """Replace records by those of the other side; what only we defer is ours already, unless ``opening``."""
    kind = type(value)
    if kind is list or (opening and isinstance(value, DeferredList)):
        return [_convert(entry, table, opening=opening) for entry in value]
    if kind is dict or (opening and isinstance(value, DeferredDict)):
        return {
            _convert(key, table, opening=opening): _convert(entry, table, opening=opening)
            for key, entry in value.items()
        }
    made = table.get(kind)
    if made is None:
        return value
    if issubclass(kind, enum.Enum):
        return made[value.name]  # type: ignore[index]
    fields = {
        field.name: _convert(getattr(value, field.name), table, opening=opening)
        for field in dataclasses.fields(value)
    }
    return made(**fields)


def _plain(planner_data: Any) -> Any:
    """Planner data in plain types: in torch's paths the keys of dicts are strings."""
    if not isinstance(planner_data, dict):
        return planner_data
    return {
        key: tuple(str(step) if isinstance(step, TypedKey) else step for step in path)
        if type(path) is tuple
        else path
        for key, path in planner_data.items()
    }


def called_by_torch(asking: object) -> bool:
    """Whether a method of ``asking`` was called by torch's checkpoint package, which wants its own records.

    Overriding methods of a subclass may stand in between.
    """
    frame = sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None and frame.f_locals.get("self") is asking:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith(_PACKAGE)


def _is_torchs(value: Any, module: str, name: str) -> bool:
    theirs = _torch_class(module, name)
    return theirs is not None and isinstance(value, theirs)


def our_save_planner(planner: Any) -> SavePlanner:
    """A planner that works with our records, whoever made it."""
    return _SavePlannerOfTorch(planner) if _is_torchs(planner, "planner", "SavePlanner") else planner


def our_load_planner(planner: Any) -> LoadPlanner:
    """A planner that works with our records, whoever made it."""
    return _LoadPlannerOfTorch(planner) if _is_torchs(planner, "planner", "LoadPlanner") else planner


def our_storage_writer(writer: Any) -> StorageWriter:
    """A writer that works with our records, whoever made it."""
    return _WriterOfTorch(writer) if _is_torchs(writer, "storage", "StorageWriter") else writer


def our_storage_reader(reader: Any) -> StorageReader:
    """A reader that works with our records, whoever made it."""
    return _ReaderOfTorch(reader) if _is_torchs(reader, "storage", "StorageReader") else reader


def _then(future: "Future[Any]", convert: Callable[[Any], T]) -> "Future[T]":
    done: Future[T] = Future()
    done.set_result(convert(future.wait()))
    return done


class _SavePlannerOfTorch(SavePlanner):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.inner.set_up_planner(
            state_dict=state_dict, storage_meta=to_torch(storage_meta), is_coordinator=is_coordinator
        )

    def create_local_plan(self) -> SavePlan:
        plan: SavePlan = to_ours(self.inner.create_local_plan())
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = self.inner.create_global_plan(to_torch(all_plans))
        return to_ours(plans), to_ours(metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan: SavePlan = to_ours(self.inner.finish_plan(to_torch(new_plan)))
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data: torch.Tensor | io.BytesIO = self.inner.resolve_data(to_torch(write_item))
        return data


class _LoadPlannerOfTorch(LoadPlanner):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.inner.set_up_planner(state_dict, to_torch(metadata), is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        plan: LoadPlan = to_ours(self.inner.create_local_plan())
        return plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        plans: list[LoadPlan] = to_ours(self.inner.create_global_plan(to_torch(global_plan)))
        return plans

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        plan: LoadPlan = to_ours(self.inner.finish_plan(to_torch(central_plan)))
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.inner.load_bytes(to_torch(read_item), value)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        stream: io.BytesIO = self.inner.resolve_bytes(to_torch(read_item))
        return stream

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor: torch.Tensor = self.inner.resolve_tensor(to_torch(read_item))
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.inner.commit_tensor(to_torch(read_item), tensor)


class _WriterOfTorch(StorageWriter):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def reset(self, checkpoint_id: Any = None) -> None:
        self.inner.reset(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        meta: StorageMeta | None = to_ours(self.inner.storage_meta())
        return meta

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.inner.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        prepared: SavePlan = to_ours(self.inner.prepare_local_plan(to_torch(plan)))
        return prepared

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        prepared: list[SavePlan] = to_ours(self.inner.prepare_global_plan(to_torch(plans)))
        return prepared

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        results = self.inner.write_data(to_torch(plan), PlannerForTorch(planner))
        return _then(results, to_ours)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        theirs = to_torch(metadata)
        # torch pickles it as it is, and must be able to read it where holdfast is not installed.
        theirs.planner_data = _plain(metadata.planner_data)
        self.inner.finish(theirs, to_torch(results))
        metadata.storage_data = to_ours(theirs.storage_data)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        raise NotImplementedError(
            f"{cls.__name__} stands for one instance; {checkpoint_id} was not looked at"
        )


class _ReaderOfTorch(StorageReader):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def reset(self, checkpoint_id: Any = None) -> None:
        self.inner.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata: Metadata = to_ours(self.inner.read_metadata(*args, **kwargs))
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self.inner.set_up_storage_reader(to_torch(metadata), is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        prepared: LoadPlan = to_ours(self.inner.prepare_local_plan(to_torch(plan)))
        return prepared

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        prepared: list[LoadPlan] = to_ours(self.inner.prepare_global_plan(to_torch(plans)))
        return prepared

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        done: Future[None] = self.inner.read_data(to_torch(plan), PlannerForTorch(planner))
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        raise NotImplementedError(
            f"{cls.__name__} stands for one instance; {checkpoint_id} was not looked at"
        )


class PlannerForTorch:
    """What a storage of torch's sees of a planner of ours: it takes torch's items."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name in ("resolve_data", "load_bytes", "resolve_bytes", "resolve_tensor", "commit_tensor"):
            return lambda item, *rest: method(to_ours(item), *rest)
        return method
