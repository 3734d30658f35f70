"""Owns the storage writer of safetensors files: all ranks write the final files of a model, in one pass."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.futures import Future

from holdfast._contents.safetensors_manifest import ModelChunk
from holdfast._format.safetensors_index import INDEX, temporary_file
from holdfast._io.blocks import BLOCK_SIZE
from holdfast._io.range_sums import join_sums
from holdfast._plan.global_plan import find_problems
from holdfast._plan.write_columns import columns_of
from holdfast._storage.cleanup import files_of_index
from holdfast._storage.safetensors_alone import finish_alone, write_alone
from holdfast._storage.safetensors_commit import ModelCommit, names_there
from holdfast._storage.safetensors_layout import (
    ExportOptions,
    ModelLayout,
    RankPlaces,
    for_streams,
    lay_out,
    places_of_rank,
    refuse_what_is_no_tensor,
)
from holdfast._storage.safetensors_metadata import metadata_of_chunks
from holdfast._storage.safetensors_owners import StreamPlaces, tell_owners, tell_owners_of_columns
from holdfast._storage.safetensors_streams import write_streams
from holdfast._storage.safetensors_writing import write_chunks
from holdfast._storage.store_writer import StoreWriter, fill_metadata
from holdfast._torch_compat.torch_plugins import our_save_planner
from holdfast._torch_compat.torch_records import to_ours, to_torch
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
        told: Sequence[RankPlaces]
        if self.store.traits.random_writes and self._reserve(layout):
            may_send = self.context.open_broadcast is not None and not self.context.writes_elsewhere
            told = (
                tell_owners_of_columns(layout, ours)
                if may_send and len(plans) > 1
                else [places_of_rank(layout, plan) for plan in ours]
            )
        else:
            self._refuse_strangers(len(plans))
            layout = for_streams(layout, names_there(self.store, layout), self.save_id)
            if self._lease is not None:
                # They may have their usual names already, which do not tell the save if it is killed.
                self._lease.note_replaced([file.temporary for file in layout.files])
            told = tell_owners(layout, ours, self.save_id)
        self._layout, self._written = layout, [file.temporary for file in layout.files]
        return [
            dataclasses.replace(plan, storage_data=places) for plan, places in zip(plans, told, strict=True)
        ]

    def _reserve(self, layout: ModelLayout) -> bool:
        """Make the files, for ranks to write to; False if this place takes files from front to back only."""
        if not self.store.takes_ranges(temporary_file(len(layout.files), self.save_id)):
            return False
        for file in layout.files:
            self.store.reserve(file.temporary, file.nbytes)
        return True

    def _refuse_strangers(self, world_size: int) -> None:
        if world_size > 1 and self.context.open_broadcast is None:
            raise UsageError(
                f"{self.store.url} takes files from front to back only. There ranks send each other what "
                "they have, and whoever runs this save gives them no connections. Call holdfast.save.",
                path=self.store.url,
            )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write every chunk at its place, and wait until the storage has it.

        A plan that ``prepare_global_plan`` has not seen is written into files of this rank alone.
        """
        self.expect_files(plan)
        ours, values = to_ours(plan), our_save_planner(planner)
        places, context = plan.storage_data, self.context
        write = partial(
            write_chunks,
            self.store,
            planner=values,
            threads=self.thread_count,
            budget=self.memory_budget,
            progress=context.progress,
        )
        results = []
        if not isinstance(places, RankPlaces):
            self.store.make()
            results = write_alone(self.store, ours, self.options, self.save_id, write)
            ours = dataclasses.replace(ours, items=[])
        if isinstance(places, StreamPlaces):
            results = write_streams(
                self.store,
                ours,
                values,
                rank=context.rank,
                open_broadcast=context.open_broadcast,
                progress=context.progress,
            )
            items = [item for item in ours.items if item.index.fqn not in places.owners]
            ours = dataclasses.replace(ours, items=items)
        if ours.items:
            results += write(ours)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def needs_other_ranks(self, plan: SavePlan) -> bool:
        """Whether ``write_data`` sends to other ranks or receives from them, which only the trainer can."""
        return isinstance(plan.storage_data, StreamPlaces) and self.context.world_size > 1

    def expect_files(self, plan: SavePlan) -> None:
        """Keep the right to write there while a plan is written, here or in another process."""
        self._keep_lease(plan)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, then remove what the model replaces; of files that ranks wrote alone, write the index."""
        if self._layout is None or self._lease is None:
            finish_alone(self.store, to_ours(results))
            return
        layout, ours = self._layout, to_ours(metadata)
        problems = find_problems(ours, whole=True)
        if problems:
            raise IncompleteWriteError(f"the plan does not write all of its tensors: {problems[0]}")
        checksums = _join_checksums(layout, results)
        confirm = self.context.confirm_commit
        commit = ModelCommit(self.store, self._lease, layout, self.save_id, confirm, self._written)
        with self._discarding_on_failure():
            commit.run(checksums)
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

    def _files_in_use(self) -> set[str]:
        return files_of_index(self.store, {INDEX} if self.store.exists(INDEX) else set())

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
