"""Checkpoints that past versions of torch wrote, kept as files, load with the values they were made from."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden import make_torch_checkpoints as recipes
from tests.support.states import assert_same, blank

import holdfast as hf
from holdfast.errors import PlanError
from holdfast.state_dict_loader import _load_state_dict_from_keys

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(folder for folder in GOLDEN.glob("torch-*/*") if folder.is_dir())


def named(name: str) -> list[Any]:
    return [pytest.param(f, id=f.parent.name) for f in FOLDERS if f.name == name]


def plain_state(folder: Path) -> dict[str, Any]:
    """What the maker saved; an old torch could not save every dtype."""
    state: dict[str, Any] = recipes.plain_state()
    stored = hf.FileSystemReader(folder).read_metadata().state_dict_metadata
    state["dtypes"] = {name: t for name, t in state["dtypes"].items() if f"dtypes.{name}" in stored}
    assert len(state["dtypes"]) >= 12
    return state


def test_every_folder_of_the_golden_files_is_known_here() -> None:
    known = {"plain", "file_per_item", "sharded", "sharded_tensor", "zstd", "rank_local"}
    assert {folder.name for folder in FOLDERS} <= known
    assert {folder.parent.name for folder in FOLDERS} >= {
        "torch-2.0",
        "torch-2.3",
        "torch-2.4",
        "torch-2.6",
        "torch-2.13",
    }


@pytest.mark.parametrize("folder", named("plain"))
def test_a_nested_state_loads_in_place(folder: Path) -> None:
    expected = plain_state(folder)
    state = blank(expected)
    hf.load(state, checkpoint_id=folder)
    assert_same(state, expected)


@pytest.mark.parametrize("folder", named("plain"))
def test_a_nested_state_loads_strictly(folder: Path) -> None:
    state = blank(plain_state(folder))
    hf.load(state, checkpoint_id=folder, strict=True)


@pytest.mark.parametrize("folder", named("plain"))
def test_a_nested_state_is_built_without_a_template(folder: Path) -> None:
    expected = plain_state(folder)
    loaded = _load_state_dict_from_keys(checkpoint_id=folder)
    # torch forgets what is empty, and the type of keys of dicts that it opens.
    before_2_4 = folder.parent.name in ("torch-2.0", "torch-2.3")
    if not before_2_4:
        del expected["empty_dict"]
    expected["optimizer"]["state"] = {
        str(key): value for key, value in expected["optimizer"]["state"].items()
    }
    assert_same(loaded, expected)


@pytest.mark.parametrize("folder", named("file_per_item"))
def test_a_file_per_item_loads(folder: Path) -> None:
    expected = {"a": recipes.ramp(3), "b": {"c": recipes.ramp(2, 2)}, "n": 5}
    state = blank(expected)
    hf.load(state, checkpoint_id=folder, strict=True)
    assert_same(state, expected)


@pytest.mark.parametrize("folder", named("sharded"))
def test_shards_load_into_whole_tensors(folder: Path) -> None:
    expected = {"model": recipes.sharded_full_tensors(), "step": 11}
    state = blank(expected)
    hf.load(state, checkpoint_id=folder, strict=True)
    assert_same(state, expected)
    assert_same(_load_state_dict_from_keys(checkpoint_id=folder), expected)


@pytest.mark.parametrize("folder", named("sharded_tensor"))
def test_uneven_shards_load_into_whole_tensors(folder: Path) -> None:
    state = {"table": torch.zeros(6, 2)}
    hf.load(state, checkpoint_id=folder, strict=True)
    assert torch.equal(state["table"], recipes.ramp(6, 2))


@pytest.mark.parametrize("folder", named("zstd"))
def test_a_compressed_checkpoint_loads(folder: Path) -> None:
    expected = recipes.compressible_state()
    state = blank(expected)
    hf.load(state, checkpoint_id=folder, strict=True)
    assert_same(state, expected)


@pytest.mark.parametrize("folder", named("rank_local"))
@pytest.mark.parametrize("rank", [0, 1])
def test_one_ranks_own_part_is_read_by_its_rank(folder: Path, rank: int) -> None:
    metadata = hf.FileSystemReader(folder).read_metadata(rank=rank)
    assert set(metadata.state_dict_metadata) == {"mine", "rank"}
    assert {info.relative_path for info in metadata.storage_data.values()} == {f"__{rank}_0.distcp"}


@pytest.mark.parametrize("folder", named("rank_local"))
def test_a_process_alone_is_refused_the_parts_that_two_ranks_wrote_each_for_itself(folder: Path) -> None:
    state = {"mine": torch.zeros(4), "rank": -1}
    with pytest.raises(PlanError, match="2 ranks wrote"):
        hf.load(state, checkpoint_id=folder)
    assert_same(state, {"mine": torch.zeros(4), "rank": -1})


@pytest.mark.parametrize("folder", named("rank_local"))
def test_the_part_of_one_rank_alone_loads_where_the_others_are_not_seen(folder: Path, tmp_path: Path) -> None:
    for name in folder.iterdir():
        if name.name.startswith("__0"):
            shutil.copy(name, tmp_path)
    state = {"mine": torch.zeros(4), "rank": -1}
    hf.load(state, checkpoint_id=tmp_path)
    assert_same(state, {"mine": recipes.ramp(4, start=0), "rank": 0})


@pytest.mark.parametrize("folder", named("plain"))
def test_tensors_can_be_loaded_in_another_dtype(folder: Path) -> None:
    state = {"dtypes": {"float32": torch.zeros(2, 3, dtype=torch.float64)}}
    hf.load(state, checkpoint_id=folder, cast=True, strict=False)
    assert torch.equal(state["dtypes"]["float32"], recipes.plain_state()["dtypes"]["float32"].double())


@pytest.mark.parametrize("folder", named("plain"))
def test_reading_changes_nothing_and_needs_no_permission_to_write(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    copy.chmod(0o555)
    try:
        hf.load(blank(plain_state(copy)), checkpoint_id=copy)
    finally:
        copy.chmod(0o755)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before


@pytest.mark.parametrize("folder", named("plain"))
def test_it_can_be_saved_over(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    hf.save({"new": torch.ones(2)}, checkpoint_id=copy)
    state = {"new": torch.zeros(2)}
    hf.load(state, checkpoint_id=copy, strict=True)
    assert state["new"].all()
    assert not (copy / "__0_0.distcp").exists()
