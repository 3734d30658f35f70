"""What is to be checked of one metadata file: its own sense, its files, and the jobs for their bytes."""

from collections.abc import Callable, Iterator

from holdfast._contents.checking import CheckedFile, KeyedItem, holdfast_jobs, safetensors_jobs
from holdfast._contents.checking_torch import torch_jobs
from holdfast._contents.findings import Findings
from holdfast._contents.inventory import Inventory, TensorEntry
from holdfast._geometry import Box, check_cover
from holdfast._human_units import shape_text
from holdfast._io.store import FileSource


def part_jobs(
    store: FileSource, part: Inventory, sizes: dict[str, int], report: Findings
) -> Iterator[Callable[[], None]]:
    """Report what metadata and folder alone tell, and make the jobs that read the rest.

    Args:
        store: The checkpoint's folder.
        part: What should be in it.
        sizes: What files are in it.
        report: Takes what is found, here and in the jobs.
    """
    _check_entries(part, report)
    dtypes = {tensor.key: tensor.dtype for tensor in part.tensors}
    by_file: dict[str, list[KeyedItem]] = {name: [] for name in part.files}
    for key, chunk, item in part.items():
        if item is not None:
            by_file[item.relative_path].append(KeyedItem(key, item, chunk, dtypes.get(key, "")))
    for name, items in by_file.items():
        size = sizes.get(name, -1)
        lost = [keyed for keyed in items if keyed.item.end > size]
        _check_size(part, name, size, lost, report)
        if size < 0:
            continue
        file = CheckedFile(store, name, part.rank, report)
        present = [keyed for keyed in items if keyed.item.end <= size]
        if part.source == "torch":
            yield from torch_jobs(file, present)
        elif part.source == "safetensors":
            yield from safetensors_jobs(file, present)
        else:
            # Where the file is cut off, the rest of an item is neither zeros nor to be checked.
            nbytes = min([size, part.files[name], *(keyed.item.offset for keyed in lost)])
            yield from holdfast_jobs(file, present, nbytes)


def _check_size(part: Inventory, name: str, size: int, lost: list[KeyedItem], report: Findings) -> None:
    """Report what is wrong with a file as a whole; one that is missing has a size of -1."""
    expected = part.files[name]
    message = f"it has {size:,} bytes, expected {expected:,}"
    if size < expected:
        kind = "file too short"
        if size < 0:
            kind, message = "missing file", "there is no such regular file"
        keys = list(dict.fromkeys(keyed.key for keyed in lost))
        report.damage(kind, message, file=name, keys=keys, rank=part.rank)
    elif size > expected:
        if part.source in ("holdfast", "safetensors"):
            report.damage(
                "file too long", message, file=name, offset=expected, nbytes=size - expected, rank=part.rank
            )
        else:
            # Earlier versions of torch left items behind that a later one of the same name replaced.
            report.note(f"{name} is longer than its items need: {message}")


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
