"""A store is entered once, and then serves saves, loads and commands that name a URL of its scheme."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.memory_store import MemoryStore

import holdfast as hf
from holdfast._io import places
from holdfast.cli import main
from holdfast.errors import CheckpointNotFoundError, UsageError

URL = "memory://bucket/step-1"


@pytest.fixture(autouse=True)
def memory_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(places.STORES, "memory", MemoryStore)
    monkeypatch.setattr("tests.contract.memory_store._PLACES", {})


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300, 200), value), "small": {"b": torch.full((3,), value)}, "step": int(value)}


@pytest.mark.parametrize("named", ["place", "storage"])
def test_a_url_of_an_entered_scheme_is_saved_to_and_loaded_from(named: str) -> None:
    # A path object has one slash after the colon.
    writer: Any = {"place": {"checkpoint_id": URL}, "storage": {"storage_writer": hf.FileSystemWriter(URL)}}
    reader: Any = {"place": {"checkpoint_id": URL}, "storage": {"storage_reader": hf.FileSystemReader(URL)}}
    for value in (1.0, 2.0):
        hf.save(state(value), **writer[named])
        found = state(-1.0)
        hf.load(found, **reader[named])
        assert torch.equal(found["w"], state(value)["w"])
        assert (found["small"]["b"].tolist(), found["step"]) == ([value] * 3, int(value))
    hf.async_save(state(3.0), **writer[named]).result()  # type: ignore[union-attr]
    metadata = hf.FileSystemReader(URL).read_metadata()
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == URL
    assert len(MemoryStore(URL).names()) == 2
    assert hf.FileSystemWriter.validate_checkpoint_id(URL)


@pytest.mark.parametrize("end", ["", "/", "/.metadata"])
def test_the_commands_take_a_url_of_an_entered_scheme(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    hf.save(state(1.0), checkpoint_id=URL)
    for command in ("ls", "show", "verify"):
        assert main([command, URL + end, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["path"] == URL + end
    name = next(name for name in MemoryStore(URL).names() if name.endswith(".distcp"))
    data = MemoryStore(URL).read(name, max_bytes=1 << 30)
    data[len(data) // 2] ^= 1
    MemoryStore(URL).replace(name, data)
    assert main(["verify", URL + end]) == 1
    assert "w" in capsys.readouterr().out


def test_where_there_is_no_checkpoint_the_url_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "memory://empty"]) == 3
    assert "memory://empty" in capsys.readouterr().err
    with pytest.raises(CheckpointNotFoundError, match="memory://empty"):
        hf.load(state(0.0), checkpoint_id="memory://empty")


def test_a_scheme_that_nobody_entered_is_refused_and_the_known_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"nowhere://a.*memory:// URLs.*storage_writer=") as caught:
        hf.save(state(1.0), checkpoint_id="nowhere://a")
    assert (caught.value.path, main(["ls", "nowhere://a"])) == ("nowhere://a", 2)
    assert "Cannot detect which storage" in capsys.readouterr().err
    assert not hf.FileSystemReader.validate_checkpoint_id("nowhere://a")
    assert hf.FileSystemReader.validate_checkpoint_id(tmp_path)


@pytest.mark.parametrize("url", ["file://", "file://localhost"])
def test_a_url_of_no_folder_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="names no folder"):
        hf.save(state(1.0), checkpoint_id=url)
    assert list(tmp_path.iterdir()) == []
