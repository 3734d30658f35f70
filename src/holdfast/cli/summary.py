"""A checkpoint in numbers: the document that ``holdfast show`` prints, as JSON or drawn."""

import os
import time
from typing import Any

from holdfast._contents.inventory import Inventory
from holdfast._format.names import parse_data_file
from holdfast._io.store import FileSource
from holdfast.cli.small_objects import as_json
from holdfast.cli.tree import entry_nbytes

__all__ = ["states_of_files", "summarize"]


def summarize(part: Inventory, store: FileSource, sizes: dict[str, int]) -> dict[str, Any]:
    """Summarize one metadata file, and which of its data files are there.

    Args:
        part: The metadata.
        store: Where it is.
        sizes: The files that are there, with their sizes.
    """
    tensors, objects = part.tensors, part.objects
    # Headers of safetensors, and the pickle of torch.save, lie in the data files.
    name = os.path.basename(part.path) if part.nbytes else ""
    created_ns, source, created = part.created_ns, "metadata", None
    if created_ns is None:
        # torch does not say when; its last act was to write this file.
        dated = name or next(iter(part.files), "")
        created_ns, source = store.modified_ns(dated) if dated else None, "file time"
    if created_ns is not None:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created_ns // 1_000_000_000))
    return {
        "rank": part.rank,
        "written_by": part.source,
        "format": part.format,
        "software": part.software,
        "created": created,
        "created_source": source,
        "world_size": part.world_size,
        "ranks_with_data": len({file.rank for name in part.files if (file := parse_data_file(name))}),
        "save_id": part.save_id,
        "checkpoint_id": part.checkpoint_id,
        "torch_readable": part.torch_readable,
        "block_size": part.block_size,
        "transforms": [{"descriptors": stack, "items": count} for stack, count in part.transforms.items()],
        "tensors": len(tensors),
        "tensor_nbytes": sum(map(entry_nbytes, tensors)),
        "chunks": sum(tensor.chunk_count for tensor in tensors),
        "dtypes": _by_dtype(part),
        "objects": len(objects),
        "object_nbytes": sum(map(entry_nbytes, objects)),
        "metadata": {"name": name, "nbytes": part.nbytes},
        "files": states_of_files(part, sizes),
        "user_metadata": {key: as_json(value) for key, value in part.user_metadata.items()},
    }


def _by_dtype(part: Inventory) -> list[dict[str, Any]]:
    totals: dict[str, list[int]] = {}
    for tensor in part.tensors:
        total = totals.setdefault(tensor.dtype, [0, 0])
        total[0] += 1
        total[1] += entry_nbytes(tensor)
    return [
        {"dtype": dtype, "tensors": count, "nbytes": nbytes}
        for dtype, (count, nbytes) in sorted(totals.items(), key=lambda pair: (-pair[1][1], pair[0]))
    ]


def states_of_files(part: Inventory, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Each data file that the metadata names, and whether it is there with its size."""
    files = []
    for name, expected in sorted(part.files.items(), key=lambda pair: _place_of(pair[0])):
        found = sizes.get(name)
        if found is None:
            state = "missing"
        elif found < expected:
            state = "too short"
        # torch records no sizes of files: one must hold every item, and may hold more.
        elif found > expected and part.source != "torch":
            state = "too long"
        else:
            state = "present"
        files.append({"name": name, "nbytes": found, "expected_nbytes": expected, "state": state})
    return files


def _place_of(name: str) -> tuple[int, int, str]:
    """Sorts the files of rank 10 behind those of rank 9."""
    file = parse_data_file(name)
    return (file.rank, file.number, name) if file else (-1, -1, name)
