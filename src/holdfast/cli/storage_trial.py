"""Owns what ``holdfast bench`` measures: how fast a place takes and gives a checkpoint, ours and torch's."""

import os
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

import holdfast
from holdfast._io.places import local_path, open_place
from holdfast.errors import UsageError

__all__ = ["Settings", "Trial", "model_like"]

_RAW_NBYTES = 256 << 20
_RAW_STEP = 8 << 20


class Settings(NamedTuple):
    """Settings of a writer that are tried beside the defaults."""

    thread_count: int | None = None

    def __str__(self) -> str:
        return "the defaults" if self.thread_count is None else f"thread_count={self.thread_count}"


def model_like(nbytes: int) -> dict[str, torch.Tensor]:
    """About so many bytes of bfloat16 in the shapes of a language model, with random content."""
    width = 1024
    layer = {"attention.qkv": 3, "attention.out": 1, "mlp.up": 4, "mlp.down": 4}
    state: dict[str, torch.Tensor] = {}
    left, number = nbytes // 2, 0
    while left > 0:
        for name, times in layer.items():
            rows = min(times * width, max(1, left // width))
            state[f"layers.{number}.{name}.weight"] = torch.randint(
                -(1 << 15), 1 << 15, (rows, width), dtype=torch.int16, device="cpu"
            ).view(torch.bfloat16)
            left -= rows * width
            if left <= 0:
                break
        number += 1
    return state


class Trial:
    """A folder of its own below a place, where a state is saved and loaded; removed at the end.

    Args:
        place: A folder, or a URL.
        state: What is saved.

    Attributes:
        is_local: Whether the place is a folder: only there torch is compared, and the page cache emptied.
        nbytes: The bytes of the state.
    """

    def __init__(self, place: str, state: dict[str, torch.Tensor]) -> None:
        folder = local_path(place)
        self.is_local = folder is not None
        self.nbytes = sum(tensor.nbytes for tensor in state.values())
        self._state = state
        self._root = (
            f"{(folder if folder is not None else place).rstrip('/')}/holdfast-bench-{uuid.uuid4().hex[:8]}"
        )
        if folder is not None:
            self._check_room(folder)

    def _check_room(self, folder: str) -> None:
        if not os.path.isdir(folder):
            what = "is a file, and not a" if os.path.exists(folder) else "there is no such folder. Name a"
            raise UsageError(f"{folder}: {what} folder on the storage to measure", path=folder)
        free = shutil.disk_usage(folder).free
        # An old and a new checkpoint of each side are there at the same time.
        if free < 4 * self.nbytes:
            raise UsageError(
                f"{folder}: {free >> 20} MiB are free, and this needs {4 * self.nbytes >> 20} MiB: "
                "give a smaller --size",
                path=folder,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_local:
            shutil.rmtree(self._root, ignore_errors=True)
            return
        store = open_place(f"{self._root}/holdfast")
        store.delete(sorted(store.names()))

    def warm_up(self) -> None:
        """Save and load once with each side, so that no measurement has the time of imports in it."""
        self.save(Settings())
        self.load(cold=False)
        if self.is_local:
            self.save_with_torch()
            self.load_with_torch(cold=False)

    def save(self, settings: Settings) -> float:
        """Seconds of a durable save of ours."""
        options: dict[str, Any] = {}
        if settings.thread_count is not None:
            options["storage_writer"] = holdfast.FileSystemWriter(
                f"{self._root}/holdfast", thread_count=settings.thread_count
            )
        else:
            options["checkpoint_id"] = f"{self._root}/holdfast"
        return _seconds(lambda: holdfast.save(self._state, no_dist=True, **options))

    def load(self, *, cold: bool) -> float:
        """Seconds of a load of ours into memory that is there."""
        return self._load("holdfast", holdfast.load, cold=cold)

    def save_with_torch(self) -> float:
        """Seconds of torch's save, with its own flush to disk."""
        stock = _stock()
        return _seconds(lambda: stock.save(self._state, checkpoint_id=f"{self._root}/torch", no_dist=True))

    def load_with_torch(self, *, cold: bool) -> float:
        """Seconds of torch's load."""
        return self._load("torch", _stock().load, cold=cold)

    def _load(self, side: str, load: Callable[..., Any], *, cold: bool) -> float:
        place = f"{self._root}/{side}"
        if cold:
            _forget(place)
        else:
            _read_once(place)
        target = {key: torch.zeros_like(value) for key, value in self._state.items()}
        return _seconds(lambda: load(target, checkpoint_id=place, no_dist=True))

    def raw_write(self) -> float:
        """Bytes a second of one plain file, written from front to back and flushed to disk."""
        content, path = memoryview(os.urandom(_RAW_STEP)), f"{self._root}/plain-file"
        os.makedirs(self._root, exist_ok=True)

        def write() -> None:
            with open(path, "wb", buffering=0) as file:
                file.writelines(content for _ in range(_RAW_NBYTES // _RAW_STEP))
                os.fsync(file.fileno())

        seconds = _seconds(write)
        os.unlink(path)
        return _RAW_NBYTES / seconds


def _seconds(work: Callable[[], object]) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of one process, and of what it replaces
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


def _stock() -> Any:
    import torch.distributed.checkpoint as stock  # noqa: PLC0415 - takes time, and is not needed for URLs

    return stock


def _files(folder: str) -> Iterator[int]:
    """Each file of a folder, opened for reading."""
    if os.path.isdir(folder):
        for entry in os.scandir(folder):
            descriptor = os.open(entry.path, os.O_RDONLY)
            try:
                yield descriptor
            finally:
                os.close(descriptor)


def _forget(folder: str) -> None:
    """Take the files of a folder out of the page cache."""
    for descriptor in _files(folder):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _read_once(folder: str) -> None:
    for descriptor in _files(folder):
        while os.read(descriptor, _RAW_STEP):
            pass
