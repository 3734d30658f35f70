"""``holdfast verify`` finds every kind of damage in our checkpoints, and names it."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.support.checkpoints import data_file, flip_bit, read_manifest, write_manifest

import holdfast as hf
from holdfast._contents.findings import Findings
from holdfast._format import metadata_file
from holdfast._format.description import column, ints
from holdfast._format.manifest import Manifest

Command = Callable[..., Any]
Copy = Callable[[str], Path]


def place_of(holdfast: Command, folder: Path, key: str) -> dict[str, Any]:
    """Where the item of a key lies."""
    document = holdfast("ls", folder, "--json").document
    for entry in document["tensors"] + document["objects"]:
        if entry["key"] == key:
            place: dict[str, Any] = entry["chunks"][0] if "chunks" in entry else entry
            return place
    raise KeyError(key)


def damage(found: Any) -> list[tuple[Any, ...]]:
    return [(one["kind"], one["file"], one["keys"]) for one in found.document["damage"]]


def edit_manifest(folder: Path, edit: Callable[[Manifest], None]) -> None:
    manifest = read_manifest(folder)
    edit(manifest)
    write_manifest(folder, manifest)


@pytest.mark.parametrize("name", ["ours", "tiny", "zstd", "native"])
def test_a_sound_checkpoint_is_sound(holdfast: Command, originals: Path, name: str) -> None:
    found = holdfast("verify", originals / name)
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith(f"{originals / name}: sound: ")
    assert len(found.out.splitlines()) == 1
    assert holdfast("verify", "-q", originals / name).out == ""


def test_every_byte_of_the_data_is_read(holdfast: Command, originals: Path) -> None:
    for name in ("ours", "zstd", "native"):
        document = holdfast("verify", "--json", originals / name).document
        stored = sum(path.stat().st_size for path in (originals / name).glob("*.distcp"))
        assert document["checked_nbytes"] == stored


def test_the_json_has_these_fields(holdfast: Command, copy: Copy) -> None:
    folder = copy("ours")
    flip_bit(data_file(folder), 2_000_000)
    document = holdfast("verify", "--json", folder).document
    assert set(document) == {
        *("schema", "path", "ok", "written_by", "files", "items", "checked_nbytes", "damage", "notes"),
        "limits",
    }
    assert document["schema"] == "holdfast.verify/1"
    assert (document["ok"], document["files"], document["items"]) == (False, 1, 9)
    assert set(document["damage"][0]) == {"kind", "message", "file", "keys", "offset", "nbytes", "rank"}


def test_a_flipped_bit_is_named_with_file_key_and_block(holdfast: Command, copy: Copy) -> None:
    folder = copy("ours")
    file = data_file(folder)
    flip_bit(file, 2_000_000)
    found = holdfast("verify", folder)
    assert found.code == 1
    first, last = found.out.splitlines()
    assert first.startswith(f"damaged  {file.name}, bytes ")
    assert first.endswith("key model.large: the bytes are not the ones that were written")
    assert ": DAMAGED: " in last
    (one,) = holdfast("verify", "--json", folder).document["damage"]
    assert one["offset"] <= 2_000_000 < one["offset"] + one["nbytes"]
    assert one["nbytes"] == 1 << 20


@pytest.mark.parametrize("name", ["tiny", "tiny-zstd"])
def test_any_flipped_bit_is_found(holdfast: Command, copy: Copy, name: str) -> None:
    folder = copy(name)
    for path in folder.iterdir():
        for offset in range(0, path.stat().st_size, 29):
            flip_bit(path, offset)
            found = holdfast("verify", "-q", folder)
            assert found.code == 1, (path.name, offset, found)
            assert path.name in found.out
            flip_bit(path, offset)
    assert holdfast("verify", folder).code == 0


def test_all_damage_is_named_not_only_the_first(holdfast: Command, copy: Copy) -> None:
    folder = copy("ours")
    file = data_file(folder)
    blob, epoch = (place_of(holdfast, folder, key) for key in ("blob", "epoch"))
    for offset in (100, 500_000, 2_700_000, blob["offset"] + 1000, epoch["offset"]):
        flip_bit(file, offset)
    found = holdfast("verify", "--json", folder)
    assert [(kind, keys) for kind, _, keys in damage(found)] == [
        ("container", ["model.weight"]),
        ("checksum", ["model.large"]),
        ("checksum", ["model.large"]),
        ("checksum", ["blob"]),
        ("container", ["epoch"]),
    ]


def test_neighbouring_bad_blocks_are_one_finding(holdfast: Command, copy: Copy) -> None:
    folder = copy("ours")
    file = data_file(folder)
    flip_bit(file, 500_000)
    flip_bit(file, 1_500_000)
    (one,) = holdfast("verify", "--json", folder).document["damage"]
    assert one["nbytes"] == 2 << 20


def test_a_file_that_is_too_short(holdfast: Command, copy: Copy) -> None:
    folder = copy("ours")
    file = data_file(folder)
    place = place_of(holdfast, folder, "epoch")
    os.truncate(file, place["offset"] + 10)
    found = holdfast("verify", "--json", folder)
    assert found.code == 1
    assert damage(found) == [("file too short", file.name, ["epoch", "mix.0", "mix.1"])]
    # What is left of it is checked all the same.
    flip_bit(file, 500_000)
    assert [kind for kind, _, _ in damage(holdfast("verify", "--json", folder))] == [
        "file too short",
        "checksum",
    ]


def test_a_file_that_is_too_long(holdfast: Command, copy: Copy) -> None:
    folder = copy("ours")
    file = data_file(folder)
    with file.open("ab") as stream:
        stream.write(b"\0")
    found = holdfast("verify", "--json", folder)
    assert found.code == 1
    assert damage(found) == [("file too long", file.name, [])]


def test_a_missing_file_names_its_keys(holdfast: Command, copy: Copy) -> None:
    folder = copy("native")
    place = place_of(holdfast, folder, "model.bias")
    (folder / place["file"]).unlink()
    found = holdfast("verify", "--json", folder)
    assert found.code == 1
    assert damage(found) == [("missing file", place["file"], ["model.bias"])]


def test_a_link_in_place_of_a_file_is_not_followed(holdfast: Command, copy: Copy, tmp_path: Path) -> None:
    folder = copy("tiny")
    file = data_file(folder)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    found = holdfast("verify", "--json", folder)
    assert damage(found) == [("missing file", file.name, ["a", "b.c"])]


def test_a_file_of_another_checkpoint_is_noticed(holdfast: Command, copy: Copy, tmp_path: Path) -> None:
    folder = copy("tiny")
    hf.save({"a": torch.arange(5) + 1, "b": {"c": "text"}}, checkpoint_id=tmp_path / "other")
    shutil.copy(data_file(tmp_path / "other"), data_file(folder))
    assert [(kind, keys) for kind, _, keys in damage(holdfast("verify", "--json", folder))] == [
        # The container has the checksum of the payload too.
        ("container", ["a"]),
        ("checksum", ["a"]),
    ]


def test_files_of_no_save_are_a_note_and_no_damage(holdfast: Command, copy: Copy) -> None:
    folder = copy("tiny")
    for name in ("__0_0-0123456789ab.distcp", ".metadata.0123.tmp", "__0.metadata", "readme.txt"):
        (folder / name).write_bytes(b"old")
    found = holdfast("verify", folder)
    assert found.code == 0
    notes = [line for line in found.out.splitlines() if line.startswith("note")]
    assert [line.split()[1] for line in notes] == [
        ".metadata.0123.tmp",
        "__0.metadata",
        "__0_0-0123456789ab.distcp",
    ]


def test_what_is_between_items_must_be_zeros(holdfast: Command, copy: Copy) -> None:
    folder = copy("tiny")
    file = data_file(folder)
    content = file.read_bytes()
    start = place_of(holdfast, folder, "b.c")["offset"]
    file.write_bytes(content[:start] + bytes(100) + content[start:] + bytes(50))

    def make_room(manifest: Manifest) -> None:
        offsets = ints(manifest.item_offsets, "q").tolist()
        manifest.item_offsets = column([n + 100 if n >= start else n for n in offsets], "q")
        manifest.file_nbytes = column([len(content) + 150], "q")

    edit_manifest(folder, make_room)
    assert holdfast("verify", folder).code == 0
    flip_bit(file, start + 5)
    flip_bit(file, len(content) + 149)
    found = holdfast("verify", "--json", folder)
    assert [(one["kind"], one["offset"], one["nbytes"]) for one in found.document["damage"]] == [
        ("gap", start, 100),
        ("gap", len(content) + 100, 50),
    ]


def test_a_tensor_that_its_chunks_do_not_cover(holdfast: Command, copy: Copy) -> None:
    folder = copy("tiny")

    def grow(manifest: Manifest) -> None:
        manifest.tensor_shapes = column([6], "q")

    edit_manifest(folder, grow)
    found = holdfast("verify", "--json", folder)
    assert damage(found) == [("not covered", None, ["a"])]


@pytest.mark.parametrize("cut", [1, 48, 200, 100_000], ids=["a byte", "the footer", "more", "all"])
def test_metadata_that_is_cut_off(holdfast: Command, copy: Copy, cut: int) -> None:
    folder = copy("tiny")
    path = folder / ".metadata"
    os.truncate(path, max(0, path.stat().st_size - cut))
    found = holdfast("verify", "--json", folder)
    assert (found.code, damage(found)) == (1, [("metadata", ".metadata", [])])
    for command in ("ls", "show"):
        found = holdfast(command, folder)
        assert (found.code, found.out) == (1, "")
        assert found.err.count("\n") == 1


def test_a_newer_format_is_unreadable_and_not_damaged(holdfast: Command, copy: Copy) -> None:
    folder = copy("tiny")

    def age(manifest: Manifest) -> None:
        manifest.version = (2, 0)

    edit_manifest(folder, age)
    for command in ("verify", "ls", "show"):
        found = holdfast(command, folder)
        assert (found.code, found.out) == (3, "")
        assert "is of format 2.0; this version of holdfast reads up to 1.x" in found.err


def test_a_newer_minor_version_with_unknown_fields_is_read(holdfast: Command, copy: Copy) -> None:
    folder = copy("tiny")
    path = folder / ".metadata"
    sections = metadata_file.split(path.read_bytes(), path=str(path))
    assert sections.manifest is not None
    fields = msgspec.msgpack.decode(sections.manifest)
    fields |= {"version": [1, 7], "mood": "sunny"}
    path.write_bytes(b"".join(metadata_file.join(bytes(sections.pickle), msgspec.msgpack.encode(fields))))
    assert holdfast("verify", folder).code == 0
    assert "holdfast 1.7" in holdfast("show", folder).out


def test_one_thread_finds_what_many_find(holdfast: Command, copy: Copy) -> None:
    folder = copy("ours")
    flip_bit(data_file(folder), 2_000_000)
    flip_bit(data_file(folder), 10)
    assert holdfast("verify", folder, "--threads", "1") == holdfast("verify", folder, "--threads", "7")


def test_more_files_than_a_process_may_open(holdfast: Command, tmp_path: Path) -> None:
    writer = hf.FileSystemWriter(tmp_path / "c", single_file_per_rank=False, sync_files=False)
    hf.save({str(n): torch.ones(1) for n in range(150)}, storage_writer=writer)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        assert holdfast("verify", tmp_path / "c").code == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_findings_are_in_the_order_of_the_files() -> None:
    report = Findings()
    for file, offset in (("b", 0), ("a", 9), ("a", 1)):
        report.damage("container", "", file=file, offset=offset, nbytes=1)
    assert [(one.file, one.offset) for one in report.sorted_damages()] == [("a", 1), ("a", 9), ("b", 0)]
