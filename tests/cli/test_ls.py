"""``holdfast ls`` shows what is there, and only what was asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.torch_pickles import write_torch_metadata

import holdfast as hf
from holdfast._contents.inventory import ObjectEntry
from holdfast._format.paths import TypedKey
from holdfast._format.torch_pickle_records import TorchProperties, TorchTensor
from holdfast.cli.tree import branches, make_tree
from holdfast.testing import FakeRanks

pytestmark = pytest.mark.one_core

Command = Callable[..., Any]

TREE = """\
├─ model                               2.7 MiB
│  ├─ weight       float32   [20, 30]  2.3 KiB
│  ├─ large        int32     [700000]  2.7 MiB
│  └─ bias         bfloat16  [3]           6 B
├─ optimizer                             278 B
│  └─ state                              278 B
│     ├─ 0                                 4 B
│     │  └─ step   float32   []            4 B
│     └─ (1, 'a')  object                274 B  3
├─ blob            object              3.2 KiB  b'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...
├─ epoch           object                268 B  3
└─ mix                                   292 B
   ├─ [0]          float32   [2]           8 B
   └─ [1]          object                284 B  'text'
5 tensors, 2.7 MiB; 4 objects, 4.0 KiB
"""


def keys(document: Any) -> list[str]:
    return [entry["key"] for entry in document["tensors"] + document["objects"]]


def test_the_tree_shows_dtype_shape_size_and_containers(holdfast: Command, originals: Path) -> None:
    found = holdfast("ls", originals / "ours")
    assert (found.code, found.out, found.err) == (0, TREE, "")


def test_the_metadata_file_may_be_named_in_place_of_the_folder(holdfast: Command, originals: Path) -> None:
    by_folder = holdfast("ls", originals / "ours")
    assert holdfast("ls", originals / "ours" / ".metadata") == by_folder


def test_globs_pick_keys_and_may_stand_behind_options(holdfast: Command, originals: Path) -> None:
    found = holdfast("ls", originals / "ours", "--flat", "model.*", "*.step")
    assert [line.split()[0] for line in found.out.splitlines()[:-1]] == [
        "model.weight",
        "model.large",
        "model.bias",
        "optimizer.state.0.step",
    ]
    assert found.out.splitlines()[-1].endswith("; of 9 keys")


def test_globs_tell_upper_from_lower_case(holdfast: Command, originals: Path) -> None:
    found = holdfast("ls", originals / "ours", "MODEL.*", "--json")
    assert keys(found.document) == []
    assert found.code == 2
    assert "no key matches MODEL.*; there are 9 keys" in found.err


def test_largest_first(holdfast: Command, originals: Path) -> None:
    found = holdfast("ls", originals / "ours", "model.*", "--flat", "--sort", "size")
    assert [line.split()[0] for line in found.out.splitlines()[:-1]] == [
        "model.large",
        "model.weight",
        "model.bias",
    ]
    branches = holdfast("ls", originals / "ours", "--sort", "size").out.splitlines()
    assert [line.split()[1] for line in branches[:3]] == ["model", "├─", "├─"]


def test_by_name(holdfast: Command, originals: Path) -> None:
    found = holdfast("ls", originals / "ours", "--json", "--sort", "name")
    names = [tensor["key"] for tensor in found.document["tensors"]]
    assert names == sorted(names)


def test_depth_cuts_the_tree_and_sums_what_is_below(holdfast: Command, originals: Path) -> None:
    lines = holdfast("ls", originals / "ours", "--depth", "1").out.splitlines()
    assert lines[0].split() == ["├─", "model", "...", "3", "keys", "2.7", "MiB"]
    assert len(lines) == 6


def test_chunks_of_a_sharded_tensor_are_counted(holdfast: Command, originals: Path) -> None:
    lines = holdfast("ls", originals / "torch-sharded").out.splitlines()
    assert lines[1].split() == ["│", "├─", "rows", "float32", "[5,", "4]", "80", "B", "2", "chunks"]


def test_each_rank_of_a_rank_local_checkpoint_is_shown_by_itself(holdfast: Command, originals: Path) -> None:
    lines = holdfast("ls", originals / "torch-rank_local").out.splitlines()
    assert [line for line in lines if line.startswith("rank")] == ["rank 0", "rank 1"]
    found = holdfast("ls", originals / "torch-rank_local", "--json").document
    assert [(tensor["rank"], tensor["key"]) for tensor in found["tensors"]] == [(0, "mine"), (1, "mine")]
    alone = holdfast("ls", originals / "torch-rank_local" / "__1.metadata", "--json").document
    assert [(tensor["rank"], tensor["file"]) for tensor in alone["objects"]] == [(1, "__1_0.distcp")]


def test_the_json_of_a_tensor_and_of_an_object(holdfast: Command, originals: Path) -> None:
    document = holdfast("ls", originals / "tiny", "--json").document
    (name,) = [path.name for path in (originals / "tiny").glob("*.distcp")]
    (tensor,), (value,) = document["tensors"], document["objects"]
    assert document["schema"] == "holdfast.ls/1"
    assert document["path"] == str(originals / "tiny")
    assert tensor == {
        "rank": None,
        "key": "a",
        "dtype": "int64",
        "shape": [5],
        "nbytes": 40,
        "chunks": [
            {
                "offsets": [0],
                "lengths": [5],
                "file": name,
                "offset": 0,
                "stored_nbytes": tensor["chunks"][0]["stored_nbytes"],
                "transforms": [],
            }
        ],
    }
    assert set(value) == {"rank", "key", "file", "offset", "stored_nbytes", "transforms", "value"}
    assert value["value"] == "text"
    assert document["totals"] == {
        "tensors": 1,
        "tensor_nbytes": 40,
        "objects": 1,
        "object_nbytes": value["stored_nbytes"],
    }


def test_json_names_transforms(holdfast: Command, originals: Path) -> None:
    for name in ("zstd", "torch-zstd"):
        document = holdfast("ls", originals / name, "--json").document
        assert all(value["transforms"] == ["stream.zstd/1"] for value in document["objects"])


@pytest.mark.filterwarnings("ignore:ranks save different values")
def test_values_that_were_kept_for_single_ranks_are_one_line(holdfast: Command, tmp_path: Path) -> None:
    FakeRanks(3).run(
        lambda rank: rank.save({"w": torch.full((2,), rank.rank), "n": rank.rank}, checkpoint_id=tmp_path)
    )
    *tree, line, _ = holdfast("ls", tmp_path).out.splitlines()
    assert [row.split()[1] for row in tree] == ["w", "n"]
    assert line.startswith("2 keys with other values on 2 ranks")
    shown = holdfast("ls", tmp_path, "--flat", "@kept-for-rank-*").out.splitlines()[:-1]
    names = [f"@kept-for-rank-{rank}-of-3.{key}" for rank in (1, 2) for key in ("w", "n")]
    assert [row.split()[0] for row in shown] == names
    assert holdfast("ls", tmp_path, "@kept-for-rank-1*").out.startswith("└─ @kept-for-rank-1-of-3")
    assert holdfast("verify", tmp_path).code == 0


def test_names_cannot_speak_to_the_terminal(holdfast: Command, tmp_path: Path) -> None:
    hf.save({"\x1b[31mred\n": torch.ones(1)}, checkpoint_id=tmp_path / "c")
    for mode in ("--flat", "--depth=3"):
        found = holdfast("ls", tmp_path / "c", mode)
        assert "\x1b" not in found.out
        assert "\\x1b[31mred\\n" in found.out
    assert holdfast("ls", tmp_path / "c", "--json").document["tensors"][0]["key"] == "\x1b[31mred\n"


def test_a_key_that_was_never_stored_is_marked(holdfast: Command, tmp_path: Path) -> None:
    tensor = TorchTensor(TorchProperties("float32"), (4,), [((0,), (2,)), ((2,), (2,))])
    content = write_torch_metadata(
        entries=[("halved", tensor), ("lost", None)],
        storage=[("halved", (0,), 0, "__0_0.distcp", 0, 8, None)],
    )
    (tmp_path / ".metadata").write_bytes(content)
    out = holdfast("ls", tmp_path, "--flat").out
    assert "2 chunks, not all stored" in out
    assert out.splitlines()[1].split() == ["lost", "object", "0", "B", "not", "stored"]


def test_a_number_and_its_spelling_are_two_branches() -> None:
    entries = [ObjectEntry(key, None) for key in ("x", "y", "z")]
    paths = {"x": (TypedKey(1), "leaf"), "y": ("1", "leaf"), "z": (1, "leaf")}
    drawn = [
        branch for branch, _, _ in branches(make_tree(entries, paths, None), depth=None, with_lines=True)
    ]
    assert drawn == ["├─ 1", "│  └─ leaf", "├─ 1", "│  └─ leaf", "└─ [1]", "   └─ leaf"]


@pytest.mark.slow
def test_a_hundred_thousand_tensors_are_listed(holdfast: Command, tmp_path: Path) -> None:
    hf.save({f"layers.{n}": torch.ones(1) for n in range(100_000)}, checkpoint_id=tmp_path / "c")
    lines = holdfast("ls", tmp_path / "c").out.splitlines()
    assert len(lines) == 100_001
    assert lines[-1] == "100,000 tensors, 390.6 KiB; 0 objects, 0 B"
