"""Owns a torch.save file as something to look into, to read from and to check."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from holdfast._contents.findings import Findings
from holdfast._contents.inventory import Inventory, inventory_of
from holdfast._contents.opening import Checkpoint
from holdfast._io.blocks import STEP, crc32
from holdfast._io.store import FileSource
from holdfast._plan.flatten import containers_of
from holdfast._storage.torch_save_contents import StoredRun
from holdfast._storage.torch_save_reading import torch_save_manifest
from holdfast._storage.torch_save_source import TorchSaveSource
from holdfast.errors import ChecksumError


@dataclass(frozen=True)
class TorchSaveCheckpoint(Checkpoint):
    """A file that ``torch.save`` wrote."""

    @property
    def url(self) -> str:
        return self.source.path

    @property
    def source(self) -> TorchSaveSource:
        """The file."""
        assert isinstance(self.store, TorchSaveSource)
        return self.store

    def read(self, rank: int | None, name: str) -> Inventory:  # noqa: ARG002 - there is one part
        source = self.source
        structure = source.contents.structure
        found = inventory_of(
            torch_save_manifest(source),
            source="torch.save",
            path=source.path,
            nbytes=0,
            torch_readable=True,
            steps=structure,
            containers=containers_of(structure),
        )
        # The second file is not one that a user could find.
        return replace(found, files={source.name: source.contents.nbytes})

    def check_jobs(self, part: Inventory, report: Findings) -> Iterator[Callable[[], None]]:
        name = self.source.name
        keys = [(item.offset, key) for key, _, item in part.items() if item and item.relative_path == name]
        for run in self.source.contents.storages:
            if run.crc32 is None:
                report.leave_unchecked("saved without checksums")
            else:
                inside = [key for at, key in keys if run.start <= at < run.start + max(1, run.nbytes)]
                yield partial(self._check, run, inside, report)

    def _check(self, run: StoredRun, keys: list[str], report: Findings) -> None:
        found, buffer = 0, memoryview(bytearray(min(STEP, run.nbytes)))
        # A reader that checks by itself raises with the last piece.
        with self.source.open(self.source.name) as file, contextlib.suppress(ChecksumError):
            for at in range(0, run.nbytes, STEP):
                piece = buffer[: min(STEP, run.nbytes - at)]
                file.read_into(run.start + at, piece)
                found = crc32(piece, found)
        report.advance(run.nbytes)
        if found != run.crc32:
            message = "the bytes are not the ones that were written"
            place = {"file": self.source.name, "offset": run.start, "nbytes": run.nbytes}
            report.damage("checksum", message, keys=keys, **place)


def open_torch_save(
    store: FileSource,
    name: str,
    *,
    verify: bool = True,
    allow_pickle: bool = False,
    safe_globals: Iterable[Callable[..., Any] | type] = (),
) -> TorchSaveCheckpoint:
    """A torch.save file in a place; see ``TorchSaveSource`` for what may be wrong with it."""
    allowed: Sequence[Callable[..., Any] | type] = tuple(safe_globals)
    source = TorchSaveSource(store, name, safe_globals=allowed, allow_pickle=allow_pickle, verify=verify)
    return TorchSaveCheckpoint(source, [(None, name)])
