"""From results to the bytes of ``.metadata``: the manifest of a save, and the pickle for torch beside it."""

import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch

from holdfast._contents.nested_state import Container, Path
from holdfast._format import metadata_file
from holdfast._format.description import Description, Directory
from holdfast._format.item_table import COLUMNS
from holdfast._format.manifest import Manifest, encode
from holdfast._format.paths import encode_containers, encode_paths
from holdfast._format.stored_record import store_record
from holdfast._format.torch_pickle_writer import write_torch_metadata
from holdfast._io.blocks import BLOCK_SIZE
from holdfast._plan.flatten import containers_of
from holdfast._plan.metadata_entries import boxes_column, column_of, description_of, directory_of
from holdfast._storage.results import ResultColumns
from holdfast._transfer_record import TransferRecord
from holdfast._version import __version__
from holdfast.errors import IncompleteWriteError
from holdfast.metadata import Metadata, StorageMeta

VERSION = "1.0.0"
"""The version of torch's storage data that our pickles follow."""


def _as_text(place: Any) -> str:
    """How the user named a place. It is for people only, so characters that are not UTF-8 are replaced."""
    return str(place).encode("utf-8", "replace").decode()


def make_manifest(
    metadata: Metadata,
    results: Sequence[ResultColumns],
    *,
    world_size: int,
    record: TransferRecord | None = None,
    user_metadata: bytes = b"",
) -> Manifest:
    """The manifest of what the metadata describes and the results have written.

    ``record`` is what the save has done until now, ``user_metadata`` what its caller wants to keep with it.

    Raises:
        IncompleteWriteError: An item has no result, or two, or one that the metadata does not describe.
    """
    description, directory = description_of(metadata), directory_of(metadata)
    written = _Written(results, directory)
    order = written.order(description)
    numbers = dict(zip(written.columns, torch.stack(list(written.columns.values()))[:, order], strict=True))
    file_nbytes = torch.zeros(len(written.lists["file_names"]), dtype=torch.int64, device="cpu")
    file_nbytes.scatter_reduce_(0, numbers["files"], numbers["offsets"] + numbers["nbytes"], "amax")
    meta = metadata.storage_meta or StorageMeta()
    paths, containers, extra = _split_planner_data(metadata)
    described: dict[str, Any] = {name: getattr(description, name) for name in Description.__struct_fields__}
    items: dict[str, Any] = {
        column.in_manifest: b""
        if column.may_be_left_out and not numbers[column.name].any()
        else column_of(numbers[column.name], small=column.typecode == "I")
        for column in COLUMNS.values()
    }
    return Manifest(
        save_id=meta.save_id or "",
        created_ns=time.time_ns(),
        software=f"holdfast {__version__}, torch {torch.__version__}",
        world_size=world_size,
        block_size=BLOCK_SIZE,
        checkpoint_id=None if meta.checkpoint_id is None else _as_text(meta.checkpoint_id),
        modules=list(meta.modules),
        file_names=list(written.lists["file_names"]),
        file_nbytes=column_of(file_nbytes),
        transforms=[list(stack or ()) for stack in written.lists["transforms"]],
        saves=list(written.lists["saves"]),
        checksums=written.checksums(order),
        paths=encode_paths(description.keys, paths),
        containers=encode_containers(containers),
        planner_pickle=extra,
        record=None if record is None else store_record(record),
        user_metadata=user_metadata,
        **described,
        **items,
    )


class _Written:
    """The results of all ranks, one below the other, and the row of the manifest that each belongs to.

    Attributes:
        columns: The columns of the item table, and those that name an item. Numbers that refer to a list
            count over the lists of all ranks.
        lists: Those lists, each value once, with its number.
    """

    def __init__(self, results: Sequence[ResultColumns], directory: Directory) -> None:
        # A rank without items may have made a file, which does not belong to the checkpoint.
        self.results = [part for part in results if len(part)]
        self.directory = directory
        self.lists: dict[str, dict[Any, int]] = {}
        self.columns = {
            "hints": self._together("hints", None),
            "chunk_offsets": self._together("chunk_offsets", "chunk_offsets"),
        }
        for column in COLUMNS.values():
            self.columns[column.name] = self._together(column.name, column.listed_in)

    def _together(self, name: str, listed_in: str | None) -> torch.Tensor:
        """A column of all ranks. Numbers that refer to a list refer to the one of all ranks."""
        parts = [torch.empty(0, dtype=torch.int64, device="cpu")]
        known = self.lists.setdefault(listed_in, {}) if listed_in else {}
        for part in self.results:
            numbers = part.column(name)
            if listed_in:
                values = part.chunk_offsets if name == "chunk_offsets" else part.lists[listed_in]
                if bool((numbers < 0).any()):
                    # The number -1, of what is not a tensor, finds the None at the end.
                    values = [*values, None]
                counted = [known.setdefault(value, len(known)) for value in values]
                numbers = torch.tensor(counted, dtype=torch.int64, device="cpu")[numbers]
            parts.append(numbers)
        return torch.cat(parts)

    def order(self, description: Description) -> torch.Tensor:
        """The numbers of the results in the order of the manifest's rows.

        Raises:
            IncompleteWriteError: They are not one for each row.
        """
        rows, total = self._rows(), self.directory.row[-1]
        order = torch.argsort(rows, stable=True)
        found = rows[order]
        if len(rows) != total or not torch.equal(found, torch.arange(total, device="cpu")):
            raise self._wrong_account(found, total)
        boxes = [box or () for box in self.lists["chunk_offsets"]]
        used = self.columns["chunk_offsets"][order]
        if boxes_column(boxes, used[used != self._no_offset]) != description.chunk_offsets:
            raise IncompleteWriteError(
                "items report other chunks than the plan has. Nothing was committed. A planner that "
                "changes its plan after create_global_plan must keep the items' names."
            )
        return order

    @property
    def _no_offset(self) -> int:
        """The number that stands for the offset of what is not a tensor."""
        return self.lists["chunk_offsets"].get(None, -1)

    def _rows(self) -> torch.Tensor:
        """The row of the manifest that each result belongs to."""
        first, numbers = self.directory.row, self.directory.numbers
        starts, before = list[torch.Tensor](), None
        for part in self.results:
            if part.keys == before:
                starts.append(starts[-1])
                continue
            try:
                of_part = list(map(first.__getitem__, map(numbers.__getitem__, part.keys)))
            except KeyError as error:
                raise IncompleteWriteError(
                    f"{error.args[0]}: written, but not described by the plan. Nothing was committed.",
                    key=error.args[0],
                ) from None
            starts.append(torch.tensor(of_part, dtype=torch.int64, device="cpu"))
            before = part.keys
        hints = self.columns["hints"]
        is_tensor = self.columns["chunk_offsets"] != self._no_offset
        if bool(((hints < 0) & is_tensor).any()):
            hints = torch.tensor(self._search(), dtype=torch.int64, device="cpu")
        return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *starts]) + hints.clamp(min=0)

    def _search(self) -> list[int]:
        """For each result the place of its chunk among those of its key, found by its offset."""
        chunks: dict[str, dict[tuple[int, ...], int]] = {}
        found, offsets = [], list(self.lists["chunk_offsets"])
        keys = [key for part in self.results for key in part.keys]
        for key, number in zip(keys, self.columns["chunk_offsets"].tolist(), strict=True):
            if key not in chunks:
                boxes = self.directory.boxes(self.directory.numbers[key])
                chunks[key] = {tuple(at): chunk for chunk, (at, _) in enumerate(boxes)}
            # Of a chunk that the key does not have: a row that is not there.
            none = 0 if offsets[number] is None else 1 << 40
            found.append(chunks[key].get(tuple(offsets[number] or ()), none))
        return found

    def _wrong_account(self, found: torch.Tensor, total: int) -> IncompleteWriteError:
        rows, directory = found.tolist(), self.directory
        row = next((at for at, number in enumerate(rows) if at != number), len(rows))
        row = min(row, *rows[row : row + 1]) if row < len(rows) else row
        key = next((key for key, n in directory.numbers.items() if directory.row[n + 1] > row), None)
        return IncompleteWriteError(
            f"{key or 'an item'}: written by nobody, by two, or not described by the plan. The plan has "
            f"{total} items, and {len(rows)} were reported. Nothing was committed.",
            key=key,
            expected=total,
            found=len(rows),
        )

    def checksums(self, order: torch.Tensor) -> bytes:
        """The checksums of all blocks, in the order of the manifest's rows."""
        together = b"".join([part.checksums for part in self.results])
        blocks = self.columns["blocks"]
        if torch.equal(order, torch.arange(len(order), device="cpu")):
            return together
        if bool((blocks == 1).all()):
            return column_of(torch.frombuffer(bytearray(together), dtype=torch.int32)[order], small=True)
        ends = torch.cumsum(4 * blocks, 0)
        starts = (ends - 4 * blocks)[order].tolist()
        return b"".join([together[a:b] for a, b in zip(starts, ends[order].tolist(), strict=True)])


def _split_planner_data(
    metadata: Metadata,
) -> tuple[dict[str, Path], dict[Path, Container], bytes | None]:
    """Planner data as paths of keys and containers, and as a pickle whatever is not that."""
    data = metadata.planner_data
    if data is None:
        return {}, {}, None
    if not isinstance(data, dict):
        return {}, {}, pickle.dumps(data, protocol=4)
    known = metadata.state_dict_metadata
    if len(data) == len(known) and data.keys() == known.keys() and set(map(type, data.values())) <= {tuple}:
        paths, rest = data, {}
    else:
        paths = {key: path for key, path in data.items() if key in known and isinstance(path, tuple)}
        rest = {key: value for key, value in data.items() if key not in paths}
    containers = dict(containers_of(data))
    return paths, containers, pickle.dumps(rest, protocol=4)


def dump_manifest(manifest: Manifest, metadata: Metadata, *, torch_compatible: bool) -> list[bytes]:
    """The pieces of the ``.metadata`` file."""
    torch_part = b""
    if torch_compatible:
        modules = [*manifest.modules, metadata_file.MARK]
        torch_part = write_torch_metadata(
            manifest,
            directory=directory_of(metadata),
            planner_data=metadata.planner_data,
            modules=modules,
            version=VERSION,
        )
    return metadata_file.join(torch_part, encode(manifest))
