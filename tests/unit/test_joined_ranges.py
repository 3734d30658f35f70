"""Where a request costs much, neighbours are read by one, and arrive as if each were read alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._io.file_access import FileReader
from holdfast._io.local import LocalStore
from holdfast._storage.store_reader import StoreReader
from holdfast.errors import ChecksumError

MIB = 1 << 20
COUNT = 10
ROWS, COLUMNS = 600, 512  # 1.2 MiB


class Counting(FileReader):
    """A file, and the reads of it."""

    def __init__(self, inner: FileReader, reads: list[tuple[int, int]]) -> None:
        self.path, self.nbytes = inner.path, inner.nbytes
        self._inner, self._reads = inner, reads

    def read_into(self, offset: int, buffer: Any) -> None:
        self._reads.append((offset, len(buffer)))
        self._inner.read_into(offset, buffer)

    def close(self) -> None:
        self._inner.close()


class FarStore(LocalStore):
    """A folder that wants to be asked for 4 MiB at once, and says what it was asked for."""

    traits = replace(LocalStore.traits, request_nbytes=4 * MIB)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads: list[tuple[int, int]] = []

    def open(self, name: str) -> Any:
        return Counting(super().open(name), self.reads)


def _state() -> dict[str, torch.Tensor]:
    return {
        f"w{number}": torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + number
        for number in range(COUNT)
    }


@pytest.fixture
def store(tmp_path: Path) -> FarStore:
    """With tensors of 1.2 MiB."""
    holdfast.save(_state(), checkpoint_id=tmp_path)
    return FarStore(tmp_path)


def _data_reads(store: FarStore) -> list[tuple[int, int]]:
    return [(offset, nbytes) for offset, nbytes in store.reads if nbytes >= MIB]


@pytest.mark.parametrize("verify", [True, False])
def test_neighbours_are_read_together_into_whatever_is_to_be_filled(store: FarStore, verify: bool) -> None:
    blank: dict[str, torch.Tensor] = {key: torch.zeros(ROWS, COLUMNS) for key in _state()}
    blank["w1"] = torch.zeros(COLUMNS, ROWS).t()
    blank["w2"] = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    holdfast.load(blank, storage_reader=StoreReader(store, verify=verify), cast=True)
    assert all(torch.equal(blank[key].float(), value) for key, value in _state().items())
    reads = _data_reads(store)
    assert len(reads) == -(-COUNT // 3)
    assert sum(nbytes for _, nbytes in reads) <= 1.07 * COUNT * ROWS * COLUMNS * 4


def test_what_lies_apart_is_read_apart(store: FarStore) -> None:
    blank = {key: torch.zeros(ROWS, COLUMNS) for key in ("w0", "w1", "w5")}
    holdfast.load(blank, storage_reader=StoreReader(store), strict=False)
    assert all(torch.equal(value, _state()[key]) for key, value in blank.items())
    assert sorted(nbytes // MIB for _, nbytes in _data_reads(store)) == [1, 2]


def test_of_tensors_that_are_read_together_the_damaged_one_is_named(store: FarStore, tmp_path: Path) -> None:
    file = next(tmp_path.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) * 3 // 20] ^= 1  # in the middle of the second one
    file.write_bytes(content)
    blank = {key: torch.zeros(ROWS, COLUMNS) for key in _state()}
    with pytest.raises(ChecksumError, match=r"w1: .*distcp"):
        holdfast.load(blank, storage_reader=StoreReader(store))
    assert not blank["w0"].any()  # they are checked before one of them is given out
