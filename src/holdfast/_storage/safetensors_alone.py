"""Owns the files that a rank writes of its own plan, for programs that make no plan of all ranks.

Such a program calls ``write_data`` and ``finish`` itself, with plans that say what torch's writer puts into
them. Then nothing commits a model as a whole: a file gets its name when it is complete, and the index comes
last.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from holdfast._format.item_table import StorageInfo
from holdfast._format.safetensors import StoredTensor
from holdfast._format.safetensors_index import INDEX, build_index, is_shard, save_of_temporary, temporary_file
from holdfast._hf_utils import (
    _gen_file_name,
)
from holdfast._io.store import ByteStore
from holdfast._storage.cleanup import delete_quietly
from holdfast._storage.safetensors_commit import replaced_files
from holdfast._storage.safetensors_layout import (
    ExportFile,
    ExportOptions,
    ModelLayout,
    header_attributes,
    places_of_rank,
    refuse_what_is_no_tensor,
    stored_tensor,
)
from holdfast.errors import IncompleteWriteError, UsageError
from holdfast.metadata import ChunkStorageMetadata
from holdfast.planner import SavePlan, TensorWriteData, WriteItem
from holdfast.storage import WriteResult


def write_alone(
    store: ByteStore,
    plan: SavePlan,
    options: ExportOptions,
    save_id: str,
    write_chunks: Callable[[SavePlan], list[WriteResult]],
) -> list[WriteResult]:
    """Write the tensors of a plan into files of their own.

    Args:
        store: The folder.
        plan: What to write. Its ``storage_data`` may say ``fqn_to_index_mapping``, and ``shard_index``, the
            number of the rank from 1 on: then files have parts of tensors, and the number in their names.
            Without it each tensor must be whole.
        options: How tensors are cast and renamed.
        save_id: The save.
        write_chunks: Writes the chunks of a plan at their places in files that have their sizes.

    Returns:
        The file of each item, without the place in it.

    Raises:
        UsageError, InvalidPlanError: The files cannot hold the plan. Nothing was written.
    """
    refuse_what_is_no_tensor(plan)
    if not (store.traits.random_writes and store.takes_ranges(temporary_file(0, save_id))):
        raise UsageError(
            f"{store.url} takes files from front to back only, which needs a plan of all ranks. Call "
            "holdfast.save, or prepare_global_plan before write_data.",
            path=store.url,
        )
    told: Mapping[str, Any] = plan.storage_data or {}
    shard = told.get("shard_index")
    items = [_as_tensor(item, may_be_part=shard is not None) for item in plan.items]
    names = {item.index.fqn: options.new_name(item.index.fqn) for item in items}
    offsets = {names[item.index.fqn]: _offsets(item) for item in plan.items}
    files: list[ExportFile] = []
    for name, tensors in _files(items, options, told, shard).items():
        parts = None if shard is None else {tensor.key: offsets[tensor.key] for tensor in tensors}
        temporary = temporary_file(len(files), save_id)
        files.append(ExportFile.of(name, temporary, tensors, header_attributes(parts)))
    whole = replace(plan, items=items)
    whole = replace(whole, storage_data=places_of_rank(ModelLayout(files, names), whole))
    results = _write_files(store, files, partial(write_chunks, whole))
    final = {file.temporary: file.name for file in files}
    written = {result.index: result for result in results}
    return [_without_place(written[item.index], final) for item in plan.items]


def _without_place(result: WriteResult, final: Mapping[str, str]) -> WriteResult:
    """A result that names the file as it is called in the end, and no place in it."""
    name = final[result.storage_data.relative_path]
    return replace(result, storage_data=StorageInfo(name, 0, result.size_in_bytes))


def _write_files(
    store: ByteStore,
    files: Sequence[ExportFile],
    write_chunks: Callable[[], list[WriteResult]],
) -> list[WriteResult]:
    """Make the files, have them filled, and give them their names; none of them is left after a failure."""
    try:
        for file in files:
            store.reserve(file.temporary, file.nbytes)
            with store.open_ranges(file.temporary) as output:
                output.write_at(0, memoryview(file.header()))
        results = write_chunks()
        for file in files:
            store.rename(file.temporary, file.name)
        store.sync()
    except BaseException:
        delete_quietly(store, {file.temporary for file in files})
        raise
    return results


def _as_tensor(item: WriteItem, *, may_be_part: bool) -> WriteItem:
    """An item as if its chunk were a whole tensor, which it is in a file of its own."""
    data = item.tensor_data
    assert data is not None, "what is no tensor is refused before"
    chunk = data.chunk
    if chunk.sizes != data.size and not may_be_part:
        raise UsageError(
            f"{item.index.fqn}: the plan has a part of shape {list(chunk.sizes)} of this tensor of shape "
            f"{list(data.size)}, and no plan of all ranks says where the rest is. Call holdfast.save, or put "
            "shard_index into storage_data of the plan.",
            key=item.index.fqn,
        )
    chunk = ChunkStorageMetadata(torch.Size([0] * len(chunk.sizes)), chunk.sizes)
    return replace(item, tensor_data=TensorWriteData(chunk, data.properties, chunk.sizes))


def _offsets(item: WriteItem) -> list[int]:
    assert item.tensor_data is not None
    return list(item.tensor_data.chunk.offsets)


def _files(
    items: Sequence[WriteItem], options: ExportOptions, told: Mapping[str, Any], shard: int | None
) -> dict[str, list[StoredTensor]]:
    """The tensors of each file, by its name."""
    mapping: Mapping[str, Any] | None = told.get("fqn_to_index_mapping", options.mapping)
    count = max((place for place in (mapping or {}).values() if isinstance(place, int)), default=1)
    files: dict[str, dict[str, StoredTensor]] = {}
    for item in items:
        data, key = item.tensor_data, item.index.fqn
        assert data is not None
        tensor = stored_tensor(key, data.properties.dtype, data.size, options)
        place = 1 if mapping is None else mapping.get(tensor.key)
        if place is None:
            raise UsageError(f"{key}: fqn_to_index_mapping has no file for it", key=key)
        name = place if isinstance(place, str) else _gen_file_name(place, count, shard)
        of_file = files.setdefault(name, {})
        if tensor.key in of_file:
            raise UsageError(
                f"{key}: the plan has two values that are called {tensor.key!r} in {name}, which has room "
                "for one of a name",
                key=key,
            )
        of_file[tensor.key] = tensor
    return {name: list(of_file.values()) for name, of_file in files.items()}


def finish_alone(store: ByteStore, results: Sequence[Sequence[WriteResult]]) -> None:
    """Write the index of files that ``write_alone`` has written, and remove what the index replaces.

    Parts of tensors have no index: readers find them by the names of their files.

    Raises:
        UsageError: The files belong to a save with a plan of all ranks, which only its own writer can finish.
        IncompleteWriteError: Two ranks have written the same file.
    """
    written_by: dict[str, int] = {}
    for rank, of_rank in enumerate(results):
        for name in {result.storage_data.relative_path for result in of_rank}:
            if save_of_temporary(name):
                raise UsageError("finish was called on a writer without the global plan of these files")
            if written_by.setdefault(name, rank) != rank:
                raise IncompleteWriteError(
                    f"ranks {written_by[name]} and {rank} both wrote {name}, so that one has replaced the "
                    "other's. Call holdfast.save, or put shard_index into storage_data of the plans.",
                    path=f"{store.url}/{name}",
                )
    if any(map(is_shard, written_by)):
        return
    lines = [result for of_rank in results for result in of_rank]
    weight_map = {line.index.fqn: line.storage_data.relative_path for line in lines}
    there = store.names() if store.can_list else set()
    replaced = replaced_files(store, there)
    store.replace(INDEX, build_index(weight_map, sum(line.storage_data.length for line in lines)))
    store.delete(replaced - written_by.keys())
