"""Checkpoints of every version of our format, kept as files, load with the values they were made from."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden import make_holdfast_checkpoints as recipes
from tests.golden.make_torch_checkpoints import compressible_state, plain_state, ramp, sharded_full_tensors
from tests.support.checkpoints import data_files, flip_bit
from tests.support.states import assert_same, blank
from tests.support.stock_torch import HAS_EXTENSIONS, stock_load
from torch.distributed.tensor import Shard

import holdfast as hf
from holdfast.cli import main
from holdfast.errors import IntegrityError
from holdfast.state_dict_loader import _load_state_dict_from_keys
from holdfast.testing import FakeRank, FakeRanks

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(folder for folder in GOLDEN.glob("holdfast-*/*") if folder.is_dir())
STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": plain_state,
    "threads": plain_state,
    "native": plain_state,
    "file_per_item": lambda: recipes.rank_local_state(0),
    "zstd": compressible_state,
    "zstd_blocks": recipes.blocks_state,
    "blocks": lambda: {"rows": recipes.blocks_state()["rows"]},
    "objects": recipes.objects_state,
    "empty": dict,
    "sharded": recipes.sharded_whole,
    "split_zstd": lambda: {"large": recipes.replicated_tensor()},
}
"""What one process loads of each; the others need several ranks, or leave."""


def forms(*names: str) -> pytest.MarkDecorator:
    found = [folder for folder in FOLDERS if folder.name in names]
    assert found
    return pytest.mark.parametrize("folder", found, ids=[f"{f.parent.name}-{f.name}" for f in found])


every_form = forms(*(folder.name for folder in FOLDERS))


def test_every_form_is_kept_of_every_version() -> None:
    versions = {folder.parent for folder in FOLDERS}
    assert "holdfast-1.0" in {version.name for version in versions}
    for version in versions:
        assert {folder.name for folder in version.iterdir()} >= {*STATES, "code", "per_rank", "rank_local"}


@every_form
def test_it_is_sound_and_of_the_version_that_its_folder_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(folder)]) == 0
    capsys.readouterr()
    assert main(["show", "--json", str(folder)]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert {part["format"].replace(" ", "-") for part in parts} == {folder.parent.name}
    assert {part["torch_readable"] for part in parts} == {folder.name != "native"}


@forms(*STATES)
def test_it_loads_exactly(folder: Path) -> None:
    expected = STATES[folder.name]()
    state = blank(expected)
    hf.load(state, checkpoint_id=folder, strict=True)
    assert_same(state, expected)


@forms("plain", "native", "objects", "sharded")
def test_it_is_built_without_a_template(folder: Path) -> None:
    expected = STATES[folder.name]()
    if folder.name == "objects":
        # Without a template a subclass of dict that is not an OrderedDict becomes a dict.
        expected["containers"]["counter"] = dict(expected["containers"]["counter"])
    assert_same(_load_state_dict_from_keys(checkpoint_id=folder), expected)


@forms(*(STATES.keys() - {"native"}))
def test_torch_reads_it(folder: Path) -> None:
    if "zstd" in folder.name and not HAS_EXTENSIONS:
        pytest.skip("this torch has no transforms")
    expected = STATES[folder.name]()
    state = blank(expected)
    stock_load(state, checkpoint_id=folder)
    if folder.name == "objects":
        # torch knows keys of text only, and puts what it loads under these.
        found, wanted = state.pop("keys"), expected.pop("keys")
        assert {str(key): found[str(key)] for key in wanted} == {str(key): wanted[key] for key in wanted}
    assert_same(state, expected)


@forms("native")
def test_torch_cannot_read_what_was_saved_without_its_part(folder: Path) -> None:
    with pytest.raises(BaseException, match=r"invalid load key|metadata is not None"):
        stock_load(blank(plain_state()), checkpoint_id=folder)


@forms("code")
def test_objects_need_the_same_permission_as_ever(folder: Path) -> None:
    expected = recipes.code_state()
    state = blank(expected)
    with pytest.raises(hf.CheckpointException, match="safe_globals"):
        hf.load(state, checkpoint_id=folder)
    hf.load(state, checkpoint_id=folder, safe_globals=[recipes.HasCode, torch.dtype])
    assert_same(state, expected)
    state = blank(expected)
    hf.load(state, checkpoint_id=folder, allow_pickle=True)
    assert_same(state, expected)


@forms("sharded")
@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_load_into_other_shards(folder: Path, world_size: int) -> None:
    full = sharded_full_tensors()

    def load(rank: FakeRank) -> None:
        def columns(whole: torch.Tensor) -> Any:
            return rank.distribute(whole, rank.mesh(), [Shard(whole.ndim - 1)])

        state = {"model": {name: columns(torch.zeros_like(whole)) for name, whole in full.items()}}
        rank.load(state, checkpoint_id=folder)
        for name, whole in full.items():
            assert torch.equal(state["model"][name].to_local(), columns(whole).to_local()), name

    FakeRanks(world_size).run(load)


@forms("per_rank")
def test_each_rank_gets_its_own_values(folder: Path) -> None:
    def load(rank: FakeRank) -> None:
        state = recipes.per_rank_state(rank.rank + 10)
        expected = recipes.per_rank_state(rank.rank)
        rank.load(state, checkpoint_id=folder)
        assert_same(state["shared"], expected["shared"])
        assert_same(state["rng"].value, expected["rng"].value)
        assert_same(state["data"]["position"].value, expected["data"]["position"].value)

    FakeRanks(2).run(load)


@forms("rank_local")
def test_each_rank_finds_the_part_that_it_wrote_by_itself(folder: Path) -> None:
    def load(rank: FakeRank) -> None:
        expected = recipes.rank_local_state(rank.rank)
        state = blank(expected)
        rank.load(state, checkpoint_id=folder)
        assert_same(state, expected)

    FakeRanks(2).run(load)


@forms(*(STATES.keys() - {"empty"}))
def test_a_flipped_bit_is_found_by_its_checksums(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    largest = max(data_files(copy), key=lambda name: (copy / name).stat().st_size)
    # The data of a tensor is in the middle of its file, whatever stands around it.
    flip_bit(copy / largest, (copy / largest).stat().st_size // 2)
    assert main(["verify", str(copy)]) == 1
    if folder.name in ("blocks", "split_zstd"):
        with pytest.raises(IntegrityError):
            hf.load(blank(STATES[folder.name]()), checkpoint_id=copy)


@every_form
def test_a_new_save_replaces_it(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    before = set(data_files(copy))
    hf.save({"new": ramp(3)}, checkpoint_id=copy)
    assert not before & set(data_files(copy))
    state = {"new": torch.zeros(3)}
    hf.load(state, checkpoint_id=copy, strict=True)
    assert_same(state, {"new": ramp(3)})
