"""What is to be checked of one metadata file: its own sense, its files, and the jobs for their bytes."""

from collections.abc import Callable, Iterator

from holdfast._contents.checking import KeyedItem, holdfast_jobs, safetensors_jobs
from holdfast._contents.checking_torch import TorchItem, torch_jobs
from holdfast._contents.findings import Findings
from holdfast._contents.inventory import Inventory, StoredChunk, TensorEntry
from holdfast._format.item_table import StorageInfo
from holdfast._geometry import Box, check_cover
from holdfast._human_units import shape_text
from holdfast._io.store import FileSource

__all__ = ["part_jobs"]

Stored = tuple[str, StoredChunk | None, StorageInfo]


def part_jobs(
    store: FileSource, part: Inventory, sizes: dict[str, int], report: Findings
) -> Iterator[Callable[[], None]]:
    """Findings what metadata and folder alone tell, and make the jobs that read the rest.

    Args:
        store: The checkpoint's folder.
        part: What should be in it.
        sizes: What files are in it.
        report: Takes what is found, here and in the jobs.
    """
    _check_entries(part, report)
    by_file: dict[str, list[Stored]] = {name: [] for name in part.files}
    for key, chunk, item in part.items():
        if item is not None:
            by_file[item.relative_path].append((key, chunk, item))
    dtypes = {tensor.key: tensor.dtype for tensor in part.tensors} if part.source == "torch" else {}
    for name, expected in part.files.items():
        items, size = by_file[name], sizes.get(name, 0)
        lost = [stored[2] for stored in items if stored[2].offset + stored[2].length > size]
        present = [stored for stored in items if stored[2].offset + stored[2].length <= size]
        _check_size(part, name, sizes.get(name), items, report)
        if name not in sizes:
            continue
        if part.source == "torch":
            torch_items = [TorchItem(key, item, chunk, dtypes.get(key, "")) for key, chunk, item in present]
            yield from torch_jobs(store, torch_items, report, part.rank)
        elif part.source == "safetensors":
            keyed = [KeyedItem(key, item) for key, _, item in present]
            yield from safetensors_jobs(store, name, keyed, report=report)
        else:
            yield from holdfast_jobs(
                store,
                name,
                [KeyedItem(key, item) for key, _, item in present],
                # Where the file is cut off, the rest of an item is neither zeros nor to be checked.
                nbytes=min([sizes[name], expected, *(item.offset for item in lost)]),
                block_size=part.block_size or 1,
                report=report,
                rank=part.rank,
            )


def _check_size(part: Inventory, name: str, size: int | None, items: list[Stored], report: Findings) -> None:
    """Findings what is wrong with a file as a whole."""
    expected = part.files[name]
    if size is None:
        message = "there is no such regular file"
        report.damage("missing file", message, file=name, keys=_keys(items), rank=part.rank)
    elif size < expected:
        lost = [stored for stored in items if stored[2].offset + stored[2].length > size]
        message = f"it has {size:,} bytes, expected {expected:,}"
        report.damage("file too short", message, file=name, keys=_keys(lost), rank=part.rank)
    elif size > expected:
        message = f"it has {size:,} bytes, expected {expected:,}"
        if part.source in ("holdfast", "safetensors"):
            report.damage(
                "file too long", message, file=name, offset=expected, nbytes=size - expected, rank=part.rank
            )
        else:
            # Earlier versions of torch left items behind that a later one of the same name replaced.
            report.note(f"{name} is longer than its items need: {message}")


def _keys(items: list[Stored]) -> list[str]:
    return list(dict.fromkeys(key for key, _, _ in items))


def _check_entries(part: Inventory, report: Findings) -> None:
    for key, chunk, item in part.items():
        if item is None:
            where = "" if chunk is None else f"its chunk at {shape_text(chunk.offsets)} "
            message = (
                f"{where or 'it '}is named by the metadata, but stored nowhere: the save was not complete"
            )
            report.damage("not stored", message, keys=[key], rank=part.rank)
    # A rank's own part has that rank's shards only.
    for tensor in part.tensors if part.rank is None else ():
        _check_coverage(tensor, report)


def _check_coverage(tensor: TensorEntry, report: Findings) -> None:
    chunks = tensor.chunks
    if len(chunks) == 1 and chunks[0].lengths == tensor.shape:
        return
    boxes = [Box(chunk.offsets, chunk.lengths) for chunk in chunks]
    for problem in check_cover(tensor.shape, boxes):
        if problem.kind == "overlap":
            report.note(f"{tensor.key}: {problem}")
        else:
            report.damage("not covered", f"{problem}", keys=[tensor.key])
