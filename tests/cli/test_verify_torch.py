"""``holdfast verify`` on what torch wrote: all that its checksums can tell, and what they cannot."""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import flip_bit
from tests.support.stock_torch import stock_save
from tests.support.torch_pickles import write_torch_metadata

from holdfast._format.torch_pickle_records import TorchProperties, TorchTensor

Command = Callable[..., Any]
Copy = Callable[[str], Path]

GOLDEN = Path(__file__).parents[1] / "golden"


def kinds_and_keys(found: Any) -> list[tuple[str, list[str]]]:
    return [(one["kind"], one["keys"]) for one in found.document["damage"]]


def write_metadata(folder: Path, tensors: dict[str, TorchTensor | None], places: dict[str, Any]) -> None:
    content = write_torch_metadata(
        entries=list(tensors.items()),
        storage=[
            (key, None if tensors[key] is None else (0,), None, *place, None) for key, place in places.items()
        ],
    )
    (folder / ".metadata").write_bytes(content)


@pytest.mark.parametrize(
    "folder",
    sorted(path.parent for path in GOLDEN.glob("torch-*/*/*metadata")),
    ids=lambda path: "/".join(path.parts[-2:]),
)
def test_checkpoints_of_every_torch_are_sound(holdfast: Command, folder: Path) -> None:
    found = holdfast("verify", folder)
    assert (found.code, found.err) == (0, "")
    limit, last = found.out.splitlines()
    assert limit.startswith("limit    torch keeps one CRC-32 for each record")
    assert ": sound: " in last


def test_a_flipped_bit_of_a_tensor_is_found(holdfast: Command, copy: Copy) -> None:
    folder = copy("torch")
    flip_bit(folder / "__0_0.distcp", 2_000_000)
    found = holdfast("verify", "--json", folder)
    assert found.code == 1
    assert kinds_and_keys(found) == [("checksum", ["model.large"])]


def test_a_flipped_bit_of_a_small_tensor_and_of_an_object_are_found(holdfast: Command, copy: Copy) -> None:
    folder = copy("torch")
    document = holdfast("ls", folder, "--json").document
    weight, blob = document["tensors"][0], document["objects"][1]
    assert (weight["key"], blob["key"]) == ("model.weight", "blob")
    for place in (weight["chunks"][0], blob):
        flip_bit(folder / "__0_0.distcp", place["offset"] + place["stored_nbytes"] // 2)
    assert sorted(kinds_and_keys(holdfast("verify", "--json", folder))) == [
        ("checksum", ["blob"]),
        ("checksum", ["model.weight"]),
    ]


def test_a_flipped_bit_behind_zstd_is_found(holdfast: Command, copy: Copy) -> None:
    folder = copy("torch-zstd")
    document = holdfast("ls", folder, "--json").document
    for value in [tensor["chunks"][0] for tensor in document["tensors"]] + document["objects"]:
        at = value["offset"] + value["stored_nbytes"] // 2
        flip_bit(folder / "__0_0.distcp", at)
        found = holdfast("verify", "--json", folder)
        assert found.code == 1
        assert len(found.document["damage"]) == 1
        flip_bit(folder / "__0_0.distcp", at)
    assert holdfast("verify", folder).code == 0


def test_a_short_and_a_missing_file(holdfast: Command, copy: Copy) -> None:
    folder = copy("torch-sharded")
    os.truncate(folder / "__0_0.distcp", 1500)
    (folder / "__1_0.distcp").unlink()
    found = holdfast("verify", "--json", folder)
    assert found.code == 1
    assert [kind for kind, _ in kinds_and_keys(found)] == ["file too short", "missing file"]


def test_longer_files_are_a_note_because_torch_records_no_sizes(holdfast: Command, copy: Copy) -> None:
    folder = copy("torch-sharded")
    with (folder / "__0_0.distcp").open("ab") as stream:
        stream.write(b"left over")
    found = holdfast("verify", folder)
    assert found.code == 0
    assert "note     __0_0.distcp is longer than its items need" in found.out


def test_a_tensor_of_another_shape_in_its_place_is_found(holdfast: Command, tmp_path: Path) -> None:
    for name, shape in (("left", (2, 3)), ("right", (3, 2))):
        stock_save({"t": torch.ones(shape)}, checkpoint_id=tmp_path / name)
    assert holdfast("verify", tmp_path / "left").code == 0
    shutil.copy(tmp_path / "right" / "__0_0.distcp", tmp_path / "left" / "__0_0.distcp")
    (one,) = holdfast("verify", "--json", tmp_path / "left").document["damage"]
    assert (one["kind"], one["keys"]) == ("archive", ["t"])
    assert "float32 tensor of shape [3, 2], but the metadata says float32 [2, 3]" in one["message"]


def test_a_key_that_was_never_stored(holdfast: Command, tmp_path: Path) -> None:
    tensor = TorchTensor(TorchProperties("float32"), (4,), [((0,), (4,))])
    write_metadata(tmp_path, {"lost": tensor, "gone": None}, {})
    assert kinds_and_keys(holdfast("verify", "--json", tmp_path)) == [
        ("not stored", ["gone"]),
        ("not stored", ["lost"]),
    ]


def test_an_object_of_many_tensors_is_checked(holdfast: Command, tmp_path: Path) -> None:
    torch.save([torch.full((100,), n) for n in range(80)], tmp_path / "data")
    nbytes = (tmp_path / "data").stat().st_size
    write_metadata(tmp_path, {"many": None}, {"many": ("data", 0, nbytes)})
    assert holdfast("verify", tmp_path).code == 0
    at = (tmp_path / "data").read_bytes().index(struct.pack("<100q", *[40] * 100))
    flip_bit(tmp_path / "data", at)
    assert kinds_and_keys(holdfast("verify", "--json", tmp_path)) == [("checksum", ["many"])]


def test_an_object_that_is_no_archive_is_left_and_said_so(holdfast: Command, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"whatever a planner of somebody's wrote")
    write_metadata(tmp_path, {"own": None}, {"own": ("data", 0, 38)})
    found = holdfast("verify", tmp_path)
    assert found.code == 0
    assert "limit    1 item not checked: an object in a form of its planner's" in found.out


def test_items_without_checksums_are_said_so(holdfast: Command, tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.ones(4), tmp_path / "data")
    finally:
        torch.serialization.set_crc32_options(before)
    tensor = TorchTensor(TorchProperties("float32"), (4,), [((0,), (4,))])
    write_metadata(tmp_path, {"t": tensor}, {"t": ("data", 0, (tmp_path / "data").stat().st_size)})
    found = holdfast("verify", tmp_path)
    assert found.code == 0
    assert "limit    1 item not checked: saved without checksums" in found.out


def test_a_transform_that_is_not_known_here_is_said_so(holdfast: Command, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"secret")
    content = write_torch_metadata(
        entries=[("o", None)],
        storage=[("o", None, None, "data", 0, 6, ("stream.cipher@example.org/1",))],
    )
    (tmp_path / ".metadata").write_bytes(content)
    found = holdfast("verify", tmp_path)
    assert found.code == 0
    assert "1 item not checked: behind stream.cipher@example.org/1" in found.out


def test_damage_in_one_rank_of_a_rank_local_checkpoint_names_the_rank(holdfast: Command, copy: Copy) -> None:
    folder = copy("torch-rank_local")
    payload = (folder / "__1_0.distcp").read_bytes().index(struct.pack("<4f", 1, 2, 3, 4))
    flip_bit(folder / "__1_0.distcp", payload)
    os.truncate(folder / "__0.metadata", 0)
    found = holdfast("verify", "--json", folder)
    assert [(one["rank"], one["kind"]) for one in found.document["damage"]] == [
        (0, "metadata"),
        (1, "checksum"),
    ]
    assert holdfast("verify", folder / "__1.metadata").code == 1
    flip_bit(folder / "__1_0.distcp", payload)
    assert holdfast("verify", folder / "__1.metadata").code == 0


def test_hostile_metadata_is_refused_in_one_line(holdfast: Command, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    for command in ("ls", "show", "verify"):
        found = holdfast(command, tmp_path)
        assert (found.code, found.out) == (3, "")
        assert found.err.count("\n") == 1
