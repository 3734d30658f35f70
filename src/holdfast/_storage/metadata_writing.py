"""From results to the bytes of ``.metadata``: the manifest of a save, and the pickle for torch beside it."""

import itertools
import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch

from holdfast._format import metadata_file
from holdfast._format.description import Description, Directory, column, concatenated
from holdfast._format.manifest import Manifest, encode
from holdfast._format.paths import encode_containers, encode_paths
from holdfast._format.torch_pickle_writer import write_torch_metadata
from holdfast._io.blocks import BLOCK_SIZE
from holdfast._plan.entries import description_of, directory_of
from holdfast._plan.structure import Container, Path
from holdfast._storage.results import ResultColumns
from holdfast._version import __version__
from holdfast.errors import IncompleteWriteError
from holdfast.metadata import Metadata, StorageMeta

__all__ = ["VERSION", "dump_manifest", "make_manifest"]

VERSION = "1.0.0"
"""The version of torch's storage data that our pickles follow."""


def make_manifest(metadata: Metadata, results: Sequence[ResultColumns], *, world_size: int) -> Manifest:
    """The manifest of what the metadata describes and the results have written.

    Raises:
        IncompleteWriteError: An item has no result, or two, or one that the metadata does not describe.
    """
    description, directory = description_of(metadata), directory_of(metadata)
    written = _joined(results)
    order = _order(written, description, directory)

    def sorted_by_row(values: Sequence[int]) -> Sequence[int]:
        return values if order is None else [values[number] for number in order]

    descriptors, transforms = _transforms(results)
    blocks = sorted_by_row(written.blocks)
    file_ends = dict.fromkeys(written.files, 0)
    for number, start, nbytes in zip(written.file, written.start, written.nbytes, strict=True):
        name = written.files[number]
        file_ends[name] = max(file_ends[name], start + nbytes)
    numbers = {name: number for number, name in enumerate(file_ends)}
    of_file = [numbers[name] for name in written.files]
    meta = metadata.storage_meta or StorageMeta()
    paths, containers, extra = _split_planner_data(metadata)
    return Manifest(
        save_id=meta.save_id or "",
        created_ns=time.time_ns(),
        software=f"holdfast {__version__}, torch {torch.__version__}",
        world_size=world_size,
        block_size=BLOCK_SIZE,
        checkpoint_id=None if meta.checkpoint_id is None else str(meta.checkpoint_id),
        modules=list(meta.modules),
        file_names=list(file_ends),
        file_nbytes=column(file_ends.values(), "q"),
        keys=description.keys,
        kinds=description.kinds,
        properties=description.properties,
        tensor_properties=description.tensor_properties,
        tensor_ndims=description.tensor_ndims,
        tensor_shapes=description.tensor_shapes,
        tensor_chunks=description.tensor_chunks,
        chunk_offsets=description.chunk_offsets,
        chunk_lengths=description.chunk_lengths,
        transforms=[list(stack) for stack in descriptors] or [[]],
        item_files=column(map(of_file.__getitem__, sorted_by_row(written.file)), "I"),
        item_offsets=column(sorted_by_row(written.start), "q"),
        item_nbytes=column(sorted_by_row(written.nbytes), "q"),
        item_payload_offsets=column(sorted_by_row(written.payload_start), "q"),
        item_payload_nbytes=column(sorted_by_row(written.payload_nbytes), "q"),
        item_raw_nbytes=column(sorted_by_row(written.raw_nbytes), "q"),
        item_transforms=column(sorted_by_row(transforms), "I"),
        item_blocks=column(blocks, "I"),
        item_wrap_checksums=column(sorted_by_row(written.wraps), "I"),
        checksums=_checksums(written, order),
        paths=encode_paths(description.keys, paths),
        containers=encode_containers(containers),
        planner_pickle=extra,
    )


def _joined(results: Sequence[ResultColumns]) -> ResultColumns:
    if len(results) == 1:
        return results[0]
    joined = ResultColumns()
    for of_rank in results:
        joined.extend(of_rank)
    return joined


def _transforms(results: Sequence[ResultColumns]) -> tuple[list[tuple[str, ...]], list[int]]:
    """The different stacks of transforms, and the number of its stack for each item."""
    stacks: dict[tuple[str, ...], int] = {}
    used = list[int]()
    for part in results:
        used += [stacks.setdefault(part.descriptors or (), len(stacks))] * len(part)
    return list(stacks), used


def _checksums(written: ResultColumns, order: list[int] | None) -> bytes:
    if order is None:
        return bytes(written.checksums)
    ends = list(itertools.accumulate(4 * blocks for blocks in written.blocks))
    starts = [0, *ends]
    return b"".join([written.checksums[starts[number] : ends[number]] for number in order])


def _order(written: ResultColumns, description: Description, directory: Directory) -> list[int] | None:
    """The numbers of the results in the order of the manifest's rows; None if they are in it already."""
    rows = _rows(written, directory)
    total = directory.row[-1]
    order: list[int] | None = None
    if rows != list(range(total)):
        order = _inverse(rows, total, directory)
    in_order = written.offset if order is None else [written.offset[number] for number in order]
    boxes = column(concatenated(box for n in in_order if n >= 0 and (box := written.offsets[n])), "q")
    if boxes != description.chunk_offsets:
        raise IncompleteWriteError(
            "items report other chunks than the plan has. Nothing was committed. A planner that changes "
            "its plan after create_global_plan must keep the items' names."
        )
    return order


def _rows(written: ResultColumns, directory: Directory) -> list[int]:
    """The row of the manifest that each result belongs to."""
    numbers, first = directory.numbers, directory.row
    try:
        starts = list(map(first.__getitem__, map(numbers.__getitem__, written.keys)))
    except KeyError as error:
        raise IncompleteWriteError(
            f"{error.args[0]}: written, but not described by the plan. Nothing was committed.",
            key=error.args[0],
        ) from None
    if min(written.hints, default=0) >= 0 or not any(count > 1 for count in directory.count):
        return [
            start + hint if hint > 0 else start for start, hint in zip(starts, written.hints, strict=True)
        ]
    found = []
    chunks: dict[str, dict[tuple[int, ...], int]] = {}
    offsets = [*written.offsets, None]
    for key, start, offset in zip(written.keys, starts, written.offset, strict=True):
        number = directory.numbers[key]
        if directory.count[number] <= 1:
            found.append(start)
            continue
        if key not in chunks:
            chunks[key] = {tuple(at): n for n, (at, _) in enumerate(directory.boxes(number))}
        # Of a chunk that the key does not have: a row that is not there.
        found.append(start + chunks[key].get(tuple(offsets[offset] or ()), 1 << 40))
    return found


def _inverse(rows: list[int], total: int, directory: Directory) -> list[int]:
    order = [-1] * total
    for number, row in enumerate(rows):
        if row >= total or order[row] >= 0:
            raise _wrong_account(row, total, directory, "reported twice, or not described by the plan")
        order[row] = number
    if len(rows) != total:
        raise _wrong_account(order.index(-1), total, directory, "never reported as written")
    return order


def _wrong_account(row: int, total: int, directory: Directory, what: str) -> IncompleteWriteError:
    key = next((key for key, n in directory.numbers.items() if directory.row[n + 1] > row), "an item")
    return IncompleteWriteError(
        f"{key}: {what}; the plan has {total} items. Nothing was committed.", key=key, expected=total
    )


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
    containers = dict(getattr(data, "containers", {}))
    return paths, containers, pickle.dumps(rest, protocol=4)


def dump_manifest(manifest: Manifest, planner_data: Any, *, torch_compatible: bool) -> list[bytes]:
    """The pieces of the ``.metadata`` file."""
    torch_part = b""
    if torch_compatible:
        modules = [*manifest.modules, metadata_file.MARK]
        torch_part = write_torch_metadata(
            manifest, planner_data=planner_data, modules=modules, version=VERSION
        )
    return metadata_file.join(torch_part, encode(manifest))
