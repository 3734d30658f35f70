"""What the fault tests share: states that can be told apart bit for bit, and edits of what is on disk."""

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

import holdfast as hf
from holdfast._format import metadata_file
from holdfast._format.manifest import Manifest, column, decode, encode, ints
from holdfast.errors import CheckpointException

MIB = 1 << 20
METADATA = ".metadata"


def small_state(seed: int) -> dict[str, Any]:
    """A state of a few KB with every kind of item; two seeds differ in every value that can differ."""
    bits = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(24, 8, generator=bits),
            "half": torch.randn(19, generator=bits).bfloat16(),
            "count": torch.tensor(seed),
            "nothing": torch.empty(0, 3),
        },
        "blob": random.Random(seed).randbytes(64),
        "step": seed,
        "names": [f"first-{seed}", {"second": (seed, 2.5 * seed)}],
    }


def large_state(seed: int, mib: int = 3) -> dict[str, Any]:
    """As ``small_state``, with tensors of more than one block."""
    bits = torch.Generator().manual_seed(seed)
    rows = {f"rows{n}": torch.randn(mib * MIB // 4 + n, generator=bits) for n in range(3)}
    return {**small_state(seed), "rows": rows}


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal in structure, in types and in every bit."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and _bits(left) == _bits(right)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def differing(left: Any, right: Any, prefix: str = "") -> set[str]:
    """The flat keys under which two states of the same structure differ."""
    if isinstance(left, list):
        left, right = dict(enumerate(left)), dict(enumerate(right))
    if not isinstance(left, dict):
        return set() if same(left, right) else {prefix}
    return {
        name
        for key in left
        for name in differing(left[key], right[key], f"{prefix}.{key}" if prefix else str(key))
    }


def failure_of(action: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What ``action`` raises, if it is the error that saves and loads promise; others pass through.

    It is a CheckpointException and of the class of its cause, for which there is no type; or None.
    """
    try:
        action(*args, **options)
    except CheckpointException as error:
        return error
    return None


def contents(folder: str | Path) -> dict[str, bytes]:
    """Every file of a folder, byte for byte."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def put_back(folder: str | Path, files: dict[str, bytes]) -> None:
    """Make a folder hold exactly these files."""
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True)
    for name, data in files.items():
        (Path(folder) / name).write_bytes(data)


def data_files(folder: str | Path) -> list[str]:
    """The names of the data files, sorted."""
    return sorted(name for name in os.listdir(folder) if name.endswith(".distcp"))


def committed_files(folder: str | Path) -> set[str]:
    """The names that a folder may have after a save: what its metadata names, and that itself."""
    return {METADATA, *read_manifest(folder).file_names}


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of the checkpoint in a folder."""
    sections = metadata_file.split((Path(folder) / METADATA).read_bytes(), path="a test's checkpoint")
    assert sections.manifest is not None
    return decode(sections.manifest, path="a test's checkpoint")


def write_manifest(folder: str | Path, manifest: Manifest | bytes, torch_part: bytes | None = None) -> None:
    """Commit another manifest with valid checksums, as somebody who knows the format would."""
    path = Path(folder) / METADATA
    if torch_part is None:
        torch_part = bytes(metadata_file.split(path.read_bytes(), path="").pickle)
    encoded = manifest if isinstance(manifest, bytes) else encode(manifest)
    path.write_bytes(b"".join(metadata_file.join(torch_part, encoded)))


def changed_column(manifest: Manifest, name: str, typecode: Any, row: int, value: int) -> None:
    """Put another number into a column of a manifest."""
    numbers = list(ints(getattr(manifest, name), typecode))
    numbers[row] = value
    setattr(manifest, name, column(numbers, typecode))


def living_threads() -> tuple[list[str], int]:
    """The threads that Python knows, without this one, and how many the system knows of this process."""
    mine = threading.current_thread()
    others = sorted(thread.name for thread in threading.enumerate() if thread is not mine)
    return others, len(os.listdir("/proc/self/task"))


def assert_no_more_threads_than(before: tuple[list[str], int]) -> None:
    """Compare with what ``living_threads`` returned earlier."""
    python, system = living_threads()
    assert python == before[0]
    # A thread that has ended for Python takes the system a moment more to put away.
    deadline = time.monotonic() + 5
    while system > before[1] and time.monotonic() < deadline:
        os.sched_yield()
        system = living_threads()[1]
    assert system <= before[1], "a thread that Python does not know goes on"


class PeakMemory:
    """How far the resident memory of this process rose in a with-block above where it was, in bytes."""

    def __enter__(self) -> Self:
        # Without this the peak of an earlier test would hide that of this one.
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _peak()
        self.nbytes = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = _peak() - self._before


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def load(folder: str | Path, like: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Load a checkpoint into ``like``, and return it."""
    hf.load(like, storage_reader=hf.FileSystemReader(folder), **options)
    return like
