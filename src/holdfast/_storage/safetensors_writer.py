"""Owns the storage writer of safetensors files: all ranks write the final files of a model, in one pass."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.futures import Future

from holdfast._contents.safetensors_manifest import ModelChunk
from holdfast._io.blocks import BLOCK_SIZE
from holdfast._io.range_sums import join_sums
from holdfast._plan.global_plan import find_problems
from holdfast._plan.write_columns import columns_of
from holdfast._storage.safetensors_commit import (
    ModelCommit,
    discard_model,
    names_there,
    remove_dead_models,
)
from holdfast._storage.safetensors_layout import (
    ExportOptions,
    ModelLayout,
    for_streams,
    lay_out,
    places_in_streams,
    places_of_rank,
    refuse_what_is_no_tensor,
)
from holdfast._storage.safetensors_metadata import metadata_of_chunks
from holdfast._storage.safetensors_writing import write_chunks
from holdfast._storage.store_writer import StoreWriter, fill_metadata
from holdfast._torch_compat import our_save_planner, to_ours, to_torch
from holdfast.errors import IncompleteWriteError, UsageError
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, SavePlanner
from holdfast.storage import WriteResult


class SafetensorsWriter(StoreWriter):
    """Writes a model as safetensors files: what ``HuggingFaceStorageWriter`` promises.

    Attributes:
        options: How the model becomes files.
    """

    options: ExportOptions
    _layout: ModelLayout | None = None
    _key_order: Sequence[str] = ()

    def __getstate__(self) -> dict[str, Any]:
        # What only the coordinator needs, and perhaps cannot be pickled, stays with it.
        return {**super().__getstate__(), "_layout": None, "options": ExportOptions()}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what safetensors files cannot keep, and make the folder."""
        if self._own_rank is not None:
            raise UsageError(
                "use_collectives=False is not for safetensors files: the ranks write the files of a model "
                "together. With no_dist=True one process writes a model that it has all of."
            )
        if not self.store.traits.random_writes and self.context.world_size > 1:
            raise UsageError(
                f"{self.store.url}: ranks write safetensors files together at any place of them, which this "
                "storage cannot do. Let one rank save whole tensors with no_dist=True, or save to a local or "
                "shared folder, and copy the files from there.",
                path=self.store.url,
            )
        ours: SavePlan = to_ours(plan)
        refuse_what_is_no_tensor(ours)
        self._key_order = columns_of(ours).keys
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide where every tensor lies, make the files, and tell each rank."""
        ours: list[SavePlan] = to_ours(plans)
        self._world_size = len(plans)
        layout = lay_out(ours, self._key_order, self.options, self.save_id)
        self._take_lease()
        if self.store.traits.random_writes:
            told = [places_of_rank(layout, plan) for plan in ours]
            for file in layout.files:
                self.store.reserve(file.temporary, file.nbytes)
        else:
            layout = for_streams(layout, names_there(self.store, layout), self.save_id)
            told = [places_in_streams(layout, plan, self.save_id) for plan in ours]
        self._layout = layout
        return [
            dataclasses.replace(plan, storage_data=places) for plan, places in zip(plans, told, strict=True)
        ]

    def _take_lease(self) -> None:
        is_new = self._lease is None
        super()._take_lease()
        if is_new and self._lease is not None:
            remove_dead_models(self.store, self._lease)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write every chunk at its place, and wait until the storage has it."""
        self.expect_files(plan)
        results = write_chunks(
            self.store,
            to_ours(plan),
            our_save_planner(planner),
            threads=self.thread_count,
            budget=self.memory_budget,
            progress=self.context.progress,
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def expect_files(self, plan: SavePlan) -> None:
        """Keep the right to write there while a plan is written, here or in another process."""
        self._keep_lease(plan)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, then remove what the model replaces."""
        if self._layout is None or self._lease is None:
            raise UsageError("finish was called without prepare_global_plan: nothing was written")
        layout, ours = self._layout, to_ours(metadata)
        problems = find_problems(ours, whole=True)
        if problems:
            raise IncompleteWriteError(f"the plan does not write all of its tensors: {problems[0]}")
        checksums = _join_checksums(layout, results)
        commit = ModelCommit(self.store, self._lease, layout, self.save_id, self.context.confirm_commit)
        try:
            commit.run(checksums)
        finally:
            self._release()
        written = metadata_of_chunks(
            self.store.url,
            {commit.names[file.name]: file.nbytes for file in layout.files},
            [
                ModelChunk(tensor, (0,) * len(tensor.shape), commit.names[file.name], checksums[tensor.key])
                for file in layout.files
                for tensor in file.tensors
            ],
        )
        written.storage_meta = self.storage_meta()
        if ours is not metadata:
            written = to_torch(written)
        fill_metadata(metadata, written, ("state_dict_metadata", "version", "storage_meta", "storage_data"))

    def abandon(self, *, outcome_is_known: bool = True) -> None:
        """After a save that failed: the coordinator removes what all ranks have written for it."""
        if outcome_is_known and self._lease is not None:
            files = self._layout.files if self._layout else ()
            if not discard_model(self.store, self.save_id, [file.temporary for file in files]):
                self._lease.leave()
        self._release()

    def _release(self) -> None:
        self._layout = None
        super()._release()

    def how_to_find_metadata(self, metadata: Metadata) -> Any:
        """The metadata itself: it is as large as the headers of the files."""
        return metadata


def _join_checksums(layout: ModelLayout, results: Sequence[Sequence[WriteResult]]) -> dict[str, bytes]:
    """The checksums of each tensor, from the sums of the ranges that ranks have written."""
    tensors = {tensor.key: tensor for file in layout.files for tensor in file.tensors}
    parts: dict[str, list[tuple[int, bytes]]] = {key: [] for key in tensors}
    for of_rank in results:
        for result in of_rank:
            name, info = layout.names[result.index.fqn], result.storage_data
            if info.checksums:
                first_block = (info.offset - tensors[name].begin) // BLOCK_SIZE
                parts[name].append((first_block, info.checksums))
    return {key: join_sums(tensors[key].nbytes, of_key) for key, of_key in parts.items()}
