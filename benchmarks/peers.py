"""Everybody else who saves tensors to files, each called as its users call it, as far as it is installed.

They all fill tensors that exist already, as a load of holdfast or of stock torch does: what they return is
copied into those. After a save of theirs, all of its files and folders are synced.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import holdfast
from benchmarks.case import SIDES
from benchmarks.sides import Side, both_sides

__all__ = ["PEERS", "UNCHECKED", "side_called", "why_absent"]

UNCHECKED = "holdfast, not checking"
"""Holdfast with loads that do not compare checksums."""

State = dict[str, Any]
_PIECE = 4 << 20  # what one system call reads


def side_called(name: str) -> Side:
    """The side of a name, whether it is one of ``SIDES``, of ``PEERS``, or ``UNCHECKED``."""
    ours, torch_side = both_sides()
    if name == SIDES[0]:
        return ours
    if name == UNCHECKED:
        return replace(ours, load=_load_unchecked)
    if name == SIDES[1]:
        return replace(torch_side, save=_then_sync(torch_side.save))
    _, make = PEERS[name]
    save, load = make()
    return Side(name, _then_sync(save), load, only_tensors=True)


def why_absent(name: str, folder: Path) -> str | None:
    """Why a peer cannot be measured: it is not installed, or cannot save and load next to nothing here."""
    package, _ = PEERS[name]
    if find_spec(package) is None:
        return "not installed"
    # In a process of its own: some leave threads behind.
    code = "import sys, pathlib, benchmarks.peers as peers\n"
    code += "peers.side_called(sys.argv[1]).warm_up(pathlib.Path(sys.argv[2]))"
    tried = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, name, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode == 0:
        return None
    return "does not work here: " + (tried.stderr.strip().splitlines() or ["no message"])[-1][:200]


def _load_unchecked(state: State, folder: Path) -> None:
    holdfast.load(state, storage_reader=holdfast.FileSystemReader(folder, verify=False), no_dist=True)


def _then_sync(save: Callable[[State, Path], object]) -> Callable[[State, Path], None]:
    def save_and_sync(state: State, folder: Path) -> None:
        save(state, folder)
        for place, _, names in os.walk(folder):
            for path in [*(os.path.join(place, name) for name in names), place]:
                _sync(path)
        _sync(str(folder.parent))

    return save_and_sync


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy(loaded: State, state: State) -> None:
    for key, tensor in state.items():
        tensor.copy_(loaded[key])


_SaveAndLoad = tuple[Callable[[State, Path], object], Callable[[State, Path], None]]


def _plain_files() -> _SaveAndLoad:
    """The least that a program can do with system calls: bytes to a file and back, by four threads."""

    def save(state: State, folder: Path) -> None:
        folder.mkdir()
        with open(folder / "state", "wb", buffering=0) as file:
            for tensor in state.values():
                left = tensor.numpy().data.cast("B")
                while left:
                    left = left[file.write(left) :]

    def load(state: State, folder: Path) -> None:
        with open(folder / "state", "rb", buffering=0) as file, ThreadPoolExecutor(4) as threads:
            ends = itertools.accumulate(tensor.nbytes for tensor in state.values())
            list(threads.map(partial(_read, file.fileno()), state.values(), ends))

    return save, load


def _read(descriptor: int, tensor: torch.Tensor, end: int) -> None:
    left = tensor.numpy().data.cast("B")
    while left:
        left = left[os.preadv(descriptor, [left[:_PIECE]], end - len(left)) :]


def _torch_save() -> _SaveAndLoad:
    def save(state: State, folder: Path) -> None:
        folder.mkdir()
        torch.save(state, folder / "state.pt")

    def load(state: State, folder: Path) -> None:
        _copy(torch.load(folder / "state.pt", mmap=True), state)

    return save, load


def _safetensors() -> _SaveAndLoad:
    safetensors = import_module("safetensors.torch")

    def save(state: State, folder: Path) -> None:
        folder.mkdir()
        safetensors.save_file(state, folder / "state.safetensors")

    def load(state: State, folder: Path) -> None:
        _copy(safetensors.load_file(folder / "state.safetensors"), state)

    return save, load


def _safe_open() -> _SaveAndLoad:
    safe_open = import_module("safetensors").safe_open

    def load(state: State, folder: Path) -> None:
        with safe_open(folder / "state.safetensors", framework="pt") as file:
            for key, tensor in state.items():
                tensor.copy_(file.get_tensor(key))

    return _safetensors()[0], load


def _torch_checkpointing() -> _SaveAndLoad:
    package, files = (
        import_module("torch_checkpointing"),
        import_module("torch_checkpointing.storage.filesystem"),
    )
    # Its writes past the page cache are not aligned, which ext4 refuses.
    storage = files.LocalFileSystemStorageConfig(use_direct_io=False)
    config = package.CheckpointManager.Config(
        save=package.SyncCheckpointSaverConfig(), storage_config=storage
    )
    manager = config.build()

    def save(state: State, folder: Path) -> None:
        manager.save(str(folder), {"state": state})

    def load(state: State, folder: Path) -> None:
        _copy(manager.load(str(folder), into={"state": state})["state"], state)

    return save, load


def _torchsnapshot() -> _SaveAndLoad:
    package = import_module("torchsnapshot")

    def save(state: State, folder: Path) -> None:
        package.Snapshot.take(str(folder), {"state": package.StateDict(**state)})

    def load(state: State, folder: Path) -> None:
        # Tensors are filled in place.
        package.Snapshot(str(folder)).restore({"state": package.StateDict(**state)})

    return save, load


def _orbax() -> _SaveAndLoad:
    array_type, checkpoint = import_module("numpy").ndarray, import_module("orbax.checkpoint")
    checkpointer = checkpoint.PyTreeCheckpointer()

    def save(state: State, folder: Path) -> None:
        # The arrays share the memory of the tensors: nothing is converted.
        checkpointer.save(folder, {key: tensor.numpy() for key, tensor in state.items()})

    def load(state: State, folder: Path) -> None:
        how = {key: checkpoint.RestoreArgs(restore_type=array_type) for key in state}
        loaded = checkpointer.restore(folder, restore_args=how)
        _copy({key: torch.from_numpy(array) for key, array in loaded.items()}, state)

    return save, load


PEERS: dict[str, tuple[str, Callable[[], _SaveAndLoad]]] = {
    "plain files": ("torch", _plain_files),
    "torch.save": ("torch", _torch_save),
    "safetensors": ("safetensors", _safetensors),
    "safetensors, safe_open": ("safetensors", _safe_open),
    "torch_checkpointing": ("torch_checkpointing", _torch_checkpointing),
    "torchsnapshot": ("torchsnapshot", _torchsnapshot),
    "orbax": ("orbax", _orbax),
}
"""By the name in the table: the package that must be installed, and what makes its save and its load."""
