"""Safetensors files of anybody are read by the index, by name, or all of them; what is missing is named."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.hf.model_files import export, load, room_for, same, some_state

import holdfast as dcp
from holdfast._format.safetensors import header_nbytes, parse_header
from holdfast.errors import (
    CheckpointNotFoundError,
    ChecksumError,
    IncompleteCheckpointError,
    IntegrityError,
    MetadataFormatError,
    TruncatedFileError,
)

INDEX = "model.safetensors.index.json"
CHECKSUMS = ".holdfast.safetensors.checksums"
STATE = {"a": torch.arange(600_000.0), "b": torch.arange(12).view(3, 4)}


def two_files(folder: Path) -> tuple[Path, Path]:
    """A model of two files with an index, as others write it."""
    names = {key: f"model-0000{number}-of-00002.safetensors" for number, key in enumerate(STATE, 1)}
    for key, name in names.items():
        save_file({key: STATE[key]}, folder / name)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    return folder / names["a"], folder / names["b"]


def test_files_of_the_safetensors_package(tmp_path: Path) -> None:
    state = {key: value.contiguous() for key, value in some_state().items() if key != "tied"}
    save_file(state, tmp_path / "model.safetensors")
    assert same(load(tmp_path, state), state)


def test_the_index_decides_and_not_the_listing(tmp_path: Path) -> None:
    two_files(tmp_path)
    save_file({"a": torch.zeros(5), "old": torch.zeros(1)}, tmp_path / "model-00003-of-00003.safetensors")
    assert same(load(tmp_path, STATE), STATE)


def test_an_index_of_diffusers(tmp_path: Path) -> None:
    two_files(tmp_path)
    (tmp_path / INDEX).rename(tmp_path / "diffusion_pytorch_model.safetensors.index.json")
    assert same(load(tmp_path, STATE), STATE)


def test_without_an_index_all_files_are_the_model(tmp_path: Path) -> None:
    two_files(tmp_path)
    (tmp_path / INDEX).unlink()
    assert same(load(tmp_path, STATE), STATE)


def test_without_an_index_the_lone_file_is_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert same(load(tmp_path, STATE), STATE)
    assert "adapter_model.safetensors" in caplog.text


def test_a_key_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(MetadataFormatError, match=r"a is in one\.safetensors and in two\.safetensors"):
        load(tmp_path, {"a": torch.zeros(2)})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    _, second = two_files(tmp_path)
    second.unlink()
    with pytest.raises(IncompleteCheckpointError, match=second.name):
        load(tmp_path, STATE)
    (tmp_path / INDEX).unlink()
    with pytest.raises(IncompleteCheckpointError, match=second.name):
        load(tmp_path, STATE)


@pytest.mark.parametrize("name", ["z/q.safetensors", "../q.safetensors", "/q.safetensors", ".."])
def test_an_index_that_names_a_file_elsewhere_is_refused_with_the_key(tmp_path: Path, name: str) -> None:
    two_files(tmp_path)
    (tmp_path / "z").mkdir()
    save_file(STATE, tmp_path / "z" / "q.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name, "b": name}}))
    with pytest.raises(MetadataFormatError, match=r"^.*a: .* must lie beside the index") as caught:
        load(tmp_path, STATE)
    assert repr(name) in str(caught.value)


def test_a_missing_file_is_named_by_loads_that_need_nothing_of_it(tmp_path: Path) -> None:
    """Metadata is of the whole model: whoever makes a state from it must not get a part without a word."""
    _, second = two_files(tmp_path)
    second.unlink()
    with pytest.raises(IncompleteCheckpointError, match=rf"{second.name} is missing"):
        load(tmp_path, {"a": STATE["a"]})


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    first, _ = two_files(tmp_path)
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(TruncatedFileError, match=first.name):
        load(tmp_path, STATE)


def test_a_stale_file_is_named(tmp_path: Path) -> None:
    first, second = two_files(tmp_path)
    shutil.copy(first, second)
    with pytest.raises(IncompleteCheckpointError, match=rf"^.*b: .*{second.name} has it"):
        load(tmp_path, STATE)


def test_a_folder_without_safetensors_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no safetensors files"):
        load(tmp_path, STATE)
    dcp.save({"a": torch.zeros(1)}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="FileSystemReader"):
        load(tmp_path, STATE)


def payload_of(path: Path) -> int:
    """Where the elements begin."""
    data = path.read_bytes()
    return parse_header(data[: header_nbytes(data[:8], len(data), path="")], len(data), path="").nbytes


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_of_ours_is_found(tmp_path: Path) -> None:
    export(STATE, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    begin, nbytes = payload_of(file), file.stat().st_size
    for at in (begin, begin + 1_500_000, nbytes - 1):
        flip(file, at)
        with pytest.raises(ChecksumError):
            load(tmp_path, STATE)
        assert not same(load(tmp_path, STATE, verify=False), STATE)
        flip(file, at)
    assert same(load(tmp_path, STATE), STATE)


@pytest.mark.slow
def test_a_flipped_byte_of_a_header_gives_no_wrong_tensor(tmp_path: Path) -> None:
    """It raises; or the file is taken for one of others and loaded unchecked; or the byte means nothing."""
    state = {"a": torch.arange(6.0), "b": torch.arange(4)}
    export(state, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    for at in [*range(260), 3000]:
        flip(file, at)
        found = room_for(state)
        try:
            dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(tmp_path))
        except (IntegrityError, ValueError):
            pass
        else:
            assert same(found, state), at
        flip(file, at)


def test_checksums_of_another_file_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    export(STATE, tmp_path, max_shard_size="1GB")
    changed = {key: value + 1 for key, value in STATE.items()}
    save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        assert same(load(tmp_path, changed), changed)
    assert "unchecked" in caplog.text


@pytest.mark.parametrize("damage", [b"", b"garbage", bytes(1000)])
def test_damaged_checksums_are_ignored(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    export(STATE, tmp_path)
    (tmp_path / CHECKSUMS).write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert same(load(tmp_path, STATE), STATE)
    assert "unchecked" in caplog.text


def test_a_copy_under_other_names_is_still_checked(tmp_path: Path) -> None:
    export(STATE, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.rename(tmp_path / "model.safetensors")
    (tmp_path / INDEX).unlink()
    assert same(load(tmp_path, STATE), STATE)
    flip(tmp_path / "model.safetensors", payload_of(tmp_path / "model.safetensors") + 7)
    with pytest.raises(ChecksumError):
        load(tmp_path, STATE)


@pytest.mark.parametrize("offsets", ["[0]", "[-1, 0]", '"x"', "[0, 0, 0]"])
def test_parts_that_cannot_be_are_refused(tmp_path: Path, offsets: str) -> None:
    info = f'{{"b": {{"saved_offsets": {offsets}}}}}'
    save_file({"b": STATE["b"]}, tmp_path / "x.safetensors", {"DCP_SHARDING_INFO": info})
    with pytest.raises(MetadataFormatError):
        load(tmp_path, {"b": STATE["b"]})


def test_only_the_bytes_that_are_needed_are_read(tmp_path: Path) -> None:
    """Of one tensor in a large file: its bytes, and the headers."""
    state = {f"t{number}": torch.full((100_000,), float(number)) for number in range(20)}
    save_file(state, tmp_path / "model.safetensors")
    seen: list[int] = []
    found = {"t7": torch.zeros(100_000)}
    dcp.load(
        found,
        storage_reader=dcp.HuggingFaceStorageReader(tmp_path),
        progress=lambda progress: seen.append(progress.nbytes_done),
    )
    assert torch.equal(found["t7"], state["t7"])
    assert max(seen) <= 400_000 * 1.05
