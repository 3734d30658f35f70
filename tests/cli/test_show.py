"""``holdfast show`` tells what a checkpoint is, and whether its files are there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.support.checkpoints import data_file

import holdfast as hf

Command = Callable[..., Any]
Copy = Callable[[str], Path]

PAGE = """\
PATH
  made by     holdfast VERSION, torch VERSION
  saved       WHEN UTC
  saved as    PATH
  save id     ID
  world size  1
  format      holdfast 1.3, a CRC-32 for every 1.0 MiB
  torch       can read it, from version 2.6 on
  transforms  none
  objects     1 object, 316 B
  tensors     1 tensor in 1 chunk, 40 B
              int64  1 tensor  40 B
  files       2 files, SIZE
              .metadata              SIZE
              __0_0-SAVE.distcp     936 B
"""


def test_the_page_of_a_checkpoint(holdfast: Command, originals: Path) -> None:
    found = holdfast("show", originals / "tiny")
    assert (found.code, found.err) == (0, "")
    text = found.out.replace(str(originals / "tiny"), "PATH")
    text = text.replace(hf.__version__, "VERSION").replace(torch.__version__, "VERSION")
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "WHEN", text)
    text = re.sub(r"[0-9a-f]{32}", "ID", text)
    text = re.sub(r"-[0-9a-f]{12}\.", "-SAVE.", text)
    # The length of the path is part of the metadata's size.
    text = re.sub(r"(files, |metadata +)[\d.]+ K?i?B", lambda found: f"{found[1]}SIZE", text)
    text = re.sub(r" {2,}(?=SIZE|\d+ B\n)", "  ", text)
    assert text == re.sub(r" {2,}(?=SIZE|\d+ B\n)", "  ", PAGE)


def test_what_torch_does_not_record_is_said_so(holdfast: Command, originals: Path) -> None:
    out = holdfast("show", originals / "torch-sharded").out
    assert "torch.distributed.checkpoint (it does not record its version)" in out
    assert "(by the file's time)" in out
    assert "not recorded; 2 ranks wrote data" in out
    assert "wrote it, and can read it" in out


def test_the_json_has_these_fields(holdfast: Command, originals: Path) -> None:
    document = holdfast("show", originals / "ours", "--json").document
    assert set(document) == {"schema", "path", "parts"}
    assert document["schema"] == "holdfast.show/1"
    (part,) = document["parts"]
    assert set(part) == {
        *("rank", "written_by", "format", "software", "created", "created_source", "world_size"),
        *("ranks_with_data", "save_id", "checkpoint_id", "torch_readable", "block_size", "transforms"),
        *("tensors", "tensor_nbytes", "chunks", "dtypes", "objects", "object_nbytes", "metadata", "files"),
        "user_metadata",
    }
    assert part["dtypes"] == [
        {"dtype": "int32", "tensors": 1, "nbytes": 2_800_000},
        {"dtype": "float32", "tensors": 3, "nbytes": 2412},
        {"dtype": "bfloat16", "tensors": 1, "nbytes": 6},
    ]
    file = data_file(originals / "ours")
    nbytes = file.stat().st_size
    assert part["files"] == [
        {"name": file.name, "nbytes": nbytes, "expected_nbytes": nbytes, "state": "present"}
    ]
    assert (part["written_by"], part["world_size"], part["block_size"]) == ("holdfast", 1, 1 << 20)


def test_transforms_are_listed(holdfast: Command, originals: Path) -> None:
    for name, items in {"zstd": 9, "torch-zstd": 3}.items():
        found = holdfast("show", originals / name, "--json").document["parts"][0]
        assert found["transforms"] == [{"descriptors": ["stream.zstd/1"], "items": items}]
        assert f"stream.zstd/1 ({items} items)" in holdfast("show", originals / name).out


def test_a_checkpoint_for_holdfast_alone_says_that_torch_cannot_read_it(
    holdfast: Command, originals: Path
) -> None:
    assert (
        "cannot read it: it was saved with torch_compatible=False"
        in holdfast("show", originals / "native").out
    )


def test_each_rank_of_a_rank_local_checkpoint_has_a_page(holdfast: Command, originals: Path) -> None:
    parts = holdfast("show", originals / "torch-rank_local", "--json").document["parts"]
    assert [(part["rank"], part["metadata"]["name"]) for part in parts] == [
        (0, "__0.metadata"),
        (1, "__1.metadata"),
    ]
    assert ", rank 1\n" in holdfast("show", originals / "torch-rank_local").out


def test_missing_and_wrong_files_are_shown_and_are_damage(holdfast: Command, copy: Copy) -> None:
    folder = copy("ours")
    file = data_file(folder)
    with file.open("r+b") as stream:
        stream.truncate(1000)
    found = holdfast("show", folder)
    assert found.code == 1
    assert re.search(r"too short: expected [\d,]+ bytes, has 1,000", found.out)
    file.unlink()
    found = holdfast("show", folder)
    assert found.code == 1
    assert re.search(rf"{file.name} +\?  missing\n", found.out)


def test_many_files_are_shortened_unless_all_are_wanted(holdfast: Command, tmp_path: Path) -> None:
    writer = hf.FileSystemWriter(tmp_path / "c", single_file_per_rank=False)
    hf.save({str(n): torch.ones(1) for n in range(25)}, storage_writer=writer)
    short = holdfast("show", tmp_path / "c").out
    assert short.count(".distcp") == 20
    assert "and 5 more (--all lists them)" in short
    names = re.findall(r"__0_(\d+)-", holdfast("show", tmp_path / "c", "--all").out)
    assert names == [str(n) for n in range(25)]
