"""Models as huggingface_hub keeps them: folders of symbolic links into a folder of blobs."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.hf.model_files import room_for, same_bits
from tests.support.stock_torch import stock_hf_storage, stock_load

import holdfast as dcp
from holdfast.errors import CheckpointError, StorageError
from holdfast.format_utils import torch_save_to_dcp

STATE = {"a": torch.arange(600_000.0).view(2, -1), "b": torch.tensor(3), "c": torch.ones(0, 4)}
FILES = {
    "model-00001-of-00002.safetensors": ["a"],
    "model-00002-of-00002.safetensors": ["b", "c"],
}


def link(snapshot: Path, name: str) -> Path:
    """Where the content of a file of the snapshot goes, which is a link to it."""
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir(exist_ok=True)
    blob = blobs / f"{len(list(blobs.iterdir())):064x}"
    (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return blob


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    folder = tmp_path / "models--me--mine/snapshots/0123abcd"
    folder.mkdir(parents=True)
    return folder


def model_in(snapshot: Path, *, with_index: bool = True) -> None:
    for name, keys in FILES.items():
        save_file({key: STATE[key] for key in keys}, link(snapshot, name))
    if with_index:
        names = ", ".join(f'"{key}": "{name}"' for name, keys in FILES.items() for key in keys)
        index = f'{{"metadata": {{}}, "weight_map": {{{names}}}}}'
        link(snapshot, "model.safetensors.index.json").write_text(index)


def is_state(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == STATE.keys() and all(same_bits(found[key], STATE[key]) for key in STATE)


@pytest.mark.parametrize("with_index", [True, False])
def test_a_linked_model_is_read_by_everything_that_reads_models(
    snapshot: Path, tmp_path: Path, with_index: bool
) -> None:
    model_in(snapshot, with_index=with_index)
    for load, reader in (
        (dcp.load, dcp.HuggingFaceStorageReader(snapshot)),
        (stock_load, stock_hf_storage().HuggingFaceStorageReader(str(snapshot))),
    ):
        into = room_for(STATE)
        load(into, storage_reader=reader)
        assert is_state(into)
    assert is_state({key: value[...] for key, value in dcp.open(snapshot).items()})
    dcp.convert(snapshot, tmp_path / "model.pt")
    assert is_state(torch.load(tmp_path / "model.pt"))
    (first, *_) = FILES
    assert torch.equal(dcp.open(snapshot / first)["a"][1, 3:5], STATE["a"][1, 3:5])


def test_an_export_over_links_replaces_them_and_not_what_they_lead_to(snapshot: Path) -> None:
    model_in(snapshot)
    blobs = {path: path.read_bytes() for path in (snapshot.parent.parent / "blobs").iterdir()}
    for options in ({"fqn_to_index_mapping": {"a": 1, "b": 2}}, {"max_shard_size": "1GB"}):
        new = {"a": torch.zeros(3), "b": torch.ones(2)}
        dcp.save(new, storage_writer=dcp.HuggingFaceStorageWriter(snapshot, **options))
        into = room_for(new)
        dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(snapshot))
        assert all(same_bits(into[key], new[key]) for key in new)
    assert not any(path.is_symlink() for path in snapshot.iterdir())
    assert {path: path.read_bytes() for path in blobs} == blobs


def test_a_linked_file_of_torch_save(snapshot: Path, tmp_path: Path) -> None:
    torch.save(STATE, link(snapshot, "pytorch_model.bin"))
    file = snapshot / "pytorch_model.bin"
    into = room_for(STATE)
    dcp.load(into, storage_reader=dcp.TorchSaveReader(file))
    assert is_state(into)
    assert is_state({key: value[...] for key, value in dcp.open(file).items()})
    dcp.convert(file, tmp_path / "model", to="safetensors")
    torch_save_to_dcp(file, tmp_path / "checkpoint")
    for path in (tmp_path / "model", tmp_path / "checkpoint"):
        assert is_state({key: value[...] for key, value in dcp.open(path).items()})


def test_links_that_lead_nowhere_or_to_a_pipe_are_refused_without_waiting(snapshot: Path) -> None:
    model_in(snapshot)
    (snapshot / "model-00002-of-00002.safetensors").resolve().unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        dcp.load(room_for(STATE), storage_reader=dcp.HuggingFaceStorageReader(snapshot))
    os.mkfifo((snapshot / "model-00002-of-00002.safetensors").resolve())
    with pytest.raises((StorageError, CheckpointError), match="regular"):
        dcp.load(room_for(STATE), storage_reader=dcp.HuggingFaceStorageReader(snapshot))


def test_an_index_whose_files_are_elsewhere_is_explained_by_open(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "below/1.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"a: .* says that it is in 'below/1\.safetensors'"):
        list(dcp.open(tmp_path))
