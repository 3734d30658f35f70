"""Planners and storages of torch that work with ours, and the other way round: records are converted."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from torch.futures import Future

from holdfast._torch_compat.torch_records import in_plain_types, is_torchs, to_ours, to_torch
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlanner, SavePlan, SavePlanner
from holdfast.storage import StorageReader, StorageWriter, WriteResult

T = TypeVar("T")


def _works_as_torchs(plugin: Any, module: str, name: str) -> bool:
    """Whether a plugin is one of torch's, or hands out the methods of one without inheriting from it."""
    called = ("create_global_plan", "finish_plan", "prepare_local_plan", "prepare_global_plan")
    owners = (getattr(getattr(plugin, method, None), "__self__", None) for method in called)
    return any(is_torchs(owner, module, name) for owner in (plugin, *owners))


def our_save_planner(planner: Any) -> SavePlanner:
    """The planner, or one of torch's wrapped so that it works with our records."""
    return _SavePlannerOfTorch(planner) if _works_as_torchs(planner, "planner", "SavePlanner") else planner


def our_load_planner(planner: Any) -> LoadPlanner:
    """The planner, or one of torch's wrapped so that it works with our records."""
    return _LoadPlannerOfTorch(planner) if _works_as_torchs(planner, "planner", "LoadPlanner") else planner


def our_storage_writer(writer: Any) -> StorageWriter:
    """The writer, or one of torch's wrapped so that it works with our records."""
    return _WriterOfTorch(writer) if is_writer_of_torch(writer) else writer


def our_storage_reader(reader: Any) -> StorageReader:
    """The reader, or one of torch's wrapped so that it works with our records."""
    return _ReaderOfTorch(reader) if is_reader_of_torch(reader) else reader


def is_writer_of_torch(writer: Any) -> bool:
    """Whether a writer was made for torch."""
    return _works_as_torchs(writer, "storage", "StorageWriter")


def is_reader_of_torch(reader: Any) -> bool:
    """Whether a reader was made for torch."""
    return _works_as_torchs(reader, "storage", "StorageReader")


def _then(future: "Future[Any]", convert: Callable[[Any], T]) -> "Future[T]":
    done: Future[T] = Future()
    future.wait()
    done.set_result(convert(future.value()))
    return done


def _as_usable_as(plan: SavePlan, prepared: SavePlan) -> SavePlan:
    """The prepared plan, which says "as last time" if ``plan`` does: plans of torch 2.6 cannot say it."""
    return prepared if plan.usable else dataclasses.replace(prepared, usable=False)


class _OfTorch:
    """One of torch's plugins, ``inner``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        raise NotImplementedError(
            f"{cls.__name__} stands for one instance; {checkpoint_id} was not looked at"
        )


def _converting(name: str) -> Any:
    """The method of the inner plugin, which gets torch's records and whose own become ours."""

    def method(self: _OfTorch, *args: Any, **kwargs: Any) -> Any:
        return to_ours(getattr(self.inner, name)(*map(to_torch, args), **kwargs))

    return method


class _SavePlannerOfTorch(_OfTorch, SavePlanner):
    create_local_plan = _converting("create_local_plan")
    finish_plan = _converting("finish_plan")
    resolve_data = _converting("resolve_data")

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Called as ``inner`` wants it, which the caller has found out."""
        if "storage_meta" in kwargs:
            kwargs["storage_meta"] = to_torch(kwargs["storage_meta"])
        self.inner.set_up_planner(*args, **kwargs)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = self.inner.create_global_plan(to_torch(all_plans))
        return to_ours(plans), to_ours(metadata)


class _LoadPlannerOfTorch(_OfTorch, LoadPlanner):
    create_local_plan = _converting("create_local_plan")
    create_global_plan = _converting("create_global_plan")
    finish_plan = _converting("finish_plan")
    load_bytes = _converting("load_bytes")
    resolve_bytes = _converting("resolve_bytes")
    resolve_tensor = _converting("resolve_tensor")
    commit_tensor = _converting("commit_tensor")

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.inner.set_up_planner(state_dict, to_torch(metadata), is_coordinator)


class _WriterOfTorch(_OfTorch, StorageWriter):
    reset = _converting("reset")
    storage_meta = _converting("storage_meta")
    set_up_storage_writer = _converting("set_up_storage_writer")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return _as_usable_as(plan, to_ours(self.inner.prepare_local_plan(to_torch(plan))))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        prepared: list[SavePlan] = to_ours(self.inner.prepare_global_plan(to_torch(plans)))
        return [_as_usable_as(plan, new) for plan, new in zip(plans, prepared, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        results = self.inner.write_data(to_torch(plan), _planner_for_torch(planner))
        return _then(results, to_ours)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        theirs = to_torch(metadata)
        # torch pickles it as it is, and must be able to read it where holdfast is not installed.
        theirs.planner_data = in_plain_types(metadata.planner_data)
        self.inner.finish(theirs, to_torch(results))
        metadata.storage_data = to_ours(theirs.storage_data)


class _ReaderOfTorch(_OfTorch, StorageReader):
    reset = _converting("reset")
    read_metadata = _converting("read_metadata")
    set_up_storage_reader = _converting("set_up_storage_reader")
    prepare_local_plan = _converting("prepare_local_plan")
    prepare_global_plan = _converting("prepare_global_plan")

    def read_data(self, plan: Any, planner: LoadPlanner) -> "Future[None]":
        done: Future[None] = self.inner.read_data(to_torch(plan), _planner_for_torch(planner))
        return done


def _planner_for_torch(planner: Any) -> Any:
    """The planner for a storage of torch's. One of torch's own is passed as it is: the two may share more."""
    if isinstance(planner, _SavePlannerOfTorch | _LoadPlannerOfTorch):
        return planner.inner
    return _PlannerForTorch(planner)


class _PlannerForTorch:
    """A planner of ours for a storage of torch's: it takes torch's items."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __reduce__(self) -> Any:
        """Some writers send the planner to processes of their own; an empty copy has no ``_inner`` to ask."""
        return _PlannerForTorch, (self._inner,)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name in ("resolve_data", "load_bytes", "resolve_bytes", "resolve_tensor", "commit_tensor"):
            return lambda item, *rest: method(to_ours(item), *rest)
        return method
