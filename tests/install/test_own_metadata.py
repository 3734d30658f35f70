"""Readers of torch's with a ``read_metadata`` of their own read as ours do, by what it returns."""

import copy
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

import holdfast

dcp: Any = importlib.import_module("torch.distributed.checkpoint")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    holdfast.install()
    yield
    assert holdfast.installed().strangers == {}
    holdfast.uninstall()


@pytest.fixture(params=["ours", "torch's"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "torch's":
        holdfast.uninstall()
    state = {"one": torch.arange(4096.0), "two": -torch.arange(4096.0), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path)
    holdfast.install()
    return tmp_path


class CountingReader(FileSystemReader):
    """As Megatron-Core has one: it changes only how metadata is found."""

    count = 0

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        type(self).count += 1
        return super().read_metadata(*args, **kwargs)


class RenamingReader(FileSystemReader):
    """Gives keys other names."""

    def __init__(self, path: Path, names: dict[str, str]) -> None:
        super().__init__(path)
        self.names = names

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        made = copy.deepcopy(super().read_metadata(*args, **kwargs))
        names = {key: self.names.get(key, key) for key in made.state_dict_metadata}
        made.state_dict_metadata = {names[key]: entry for key, entry in made.state_dict_metadata.items()}
        made.storage_data = {
            dataclasses.replace(index, fqn=names[index.fqn]): place
            for index, place in made.storage_data.items()
        }
        return made


class HidingReader(FileSystemReader):
    """Does not tell of some keys."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        made = super().read_metadata(*args, **kwargs)
        del made.state_dict_metadata["two"]
        return made


def load(reader: Any, *keys: str) -> dict[str, Any]:
    state = {key: torch.zeros(4096) for key in keys}
    dcp.load(state, storage_reader=reader)
    return state


def test_the_same_metadata(checkpoint: Path) -> None:
    assert load(CountingReader(checkpoint), "one")["one"][7] == 7
    assert CountingReader.count > 0


@pytest.mark.parametrize("names", [{"one": "model.one"}, {"one": "two", "two": "one"}])
def test_other_names(checkpoint: Path, names: dict[str, str]) -> None:
    reader = RenamingReader(checkpoint, names)
    assert load(reader, names["one"])[names["one"]][7] == 7


def test_fewer_keys(checkpoint: Path) -> None:
    assert load(HidingReader(checkpoint), "one")["one"][7] == 7
    with pytest.raises(dcp.CheckpointException, match="two"):
        load(HidingReader(checkpoint), "two")


def test_a_flipped_byte_is_noticed_under_another_name(tmp_path: Path) -> None:
    dcp.save({"one": torch.ones(4096)}, checkpoint_id=tmp_path)
    file = next(tmp_path.glob("__*.distcp"))
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    reader = RenamingReader(tmp_path, {"one": "model.one"})
    with pytest.raises(dcp.CheckpointException) as caught:
        load(reader, "model.one")
    assert isinstance(caught.value, holdfast.errors.ChecksumError)
