"""``holdfast diff`` names every key in which two checkpoints differ, and by how much."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.stock_torch import IS_NEWEST, stock_save

import holdfast
from holdfast.cli import main


def state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(8.0).view(2, 4), "count": torch.tensor(3)},
        "step": 7,
        "nan": torch.tensor([float("nan"), 1.0]),
        "name": "a",
    }


@pytest.fixture
def first(tmp_path: Path) -> str:
    holdfast.save(state(), checkpoint_id=tmp_path / "a")
    return str(tmp_path / "a")


def diff(capsys: pytest.CaptureFixture[str], first: str, second: str) -> tuple[int, dict[str, Any]]:
    code = main(["diff", first, second, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_equal_checkpoints_are_equal_by_checksum(
    tmp_path: Path, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    holdfast.save(state(), checkpoint_id=tmp_path / "b")
    code, found = diff(capsys, first, str(tmp_path / "b"))
    assert code == 0
    assert found["equal_checkpoints"]
    assert found["equal"] == found["by_checksum"] == 5
    assert main(["diff", first, str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "equal: 5 keys equal (5 by checksum), 0 keys with other values\n"
    assert main(["diff", first, str(tmp_path / "b"), "-q"]) == 0
    assert capsys.readouterr().out == ""


def test_every_difference_is_named_with_its_size(
    tmp_path: Path, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = state()
    changed["model"]["weight"][1, 2] += 0.5
    changed["model"]["count"] = torch.tensor(3.0)
    changed["step"] = 8
    del changed["name"]
    changed["new"] = 1
    holdfast.save(changed, checkpoint_id=tmp_path / "b")
    code, found = diff(capsys, first, str(tmp_path / "b"))
    assert code == 1
    assert found["only_first"] == ["name"]
    assert found["only_second"] == ["new"]
    assert found["kinds"] == [{"key": "model.count", "first": "int64 []", "second": "float32 []"}]
    assert found["values"] == [
        {"key": "model.weight", "differing": 1, "elements": 8, "largest": 0.5, "mean": 0.0625},
        {"key": "step", "first": "7", "second": "8"},
    ]
    assert found["equal"] == 1
    assert main(["diff", first, str(tmp_path / "b")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"only in {first}: name"
    assert "values  model.weight: 1 of 8 elements differ, by 0.5 at most, 0.0625 on average" in lines


def test_a_checkpoint_of_torch_with_the_same_values_is_equal(
    tmp_path: Path, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stock_save(state(), checkpoint_id=tmp_path / "b")
    code, found = diff(capsys, first, str(tmp_path / "b"))
    assert (code, found["equal"], found["by_checksum"]) == (0, 5, 0)
    assert found["values"] == []


def test_objects_that_hold_tensors_and_arrays_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        random = ("MT19937", np.arange(3) + seed, [torch.ones(2) * seed], {"at": (seed,)})
        kept = ("MT19937", np.arange(3), [torch.ones(2)], {"at": ()})
        stock_save({"random": random, "kept": kept}, checkpoint_id=tmp_path / name)
    code, found = diff(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert (code, found["equal"], found["by_checksum"]) == (1, 1, 0)
    assert [value["key"] for value in found["values"]] == ["random"]


def test_something_missing_is_unreadable(first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", first, first + "-missing"]) == 3
    assert "no such folder" in capsys.readouterr().err


def test_a_copy_that_was_cut_off_is_not_equal(
    tmp_path: Path, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(first, copy)
    [file] = copy.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    code, found = diff(capsys, first, str(copy))
    assert code == 1
    assert not found["equal_checkpoints"]
    assert found["damaged"] == [{"path": str(copy), "file": file.name, "state": "too short"}]

    file.unlink()
    assert main(["diff", str(copy), first]) == 1
    assert f"damaged {copy}: {file.name}: missing\n" in capsys.readouterr().out


def test_integers_that_a_float_cannot_tell_apart_and_nans_are_compared_by_their_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = float("nan")
    for name, change in (("a", 0), ("b", 1)):
        state = {"ids": torch.tensor([2**53 + change, 5]), "losses": torch.tensor([nan, 1.0 + change])}
        holdfast.save(state, checkpoint_id=tmp_path / name)
    code, found = diff(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 1
    assert {value["key"]: value["differing"] for value in found["values"]} == {"ids": 1, "losses": 1}


@pytest.mark.skipif(not IS_NEWEST, reason="this torch cannot copy 4-bit numbers, or has none")
def test_a_dtype_without_numbers_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, change in (("a", 0), ("b", 1)):
        packed = torch.tensor([change, 2, 3], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        holdfast.save({"packed": packed}, checkpoint_id=tmp_path / name)
    code, found = diff(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert (code, found["values"]) == (
        1,
        [{"key": "packed", "differing": 1, "elements": 3, "largest": None, "mean": None}],
    )
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "values  packed: 1 of 3 elements differ\n" in capsys.readouterr().out


def test_the_memory_is_that_of_a_piece_however_small_the_elements_are(tmp_path: Path) -> None:
    for name, change in (("a", 0), ("b", 1)):
        large = torch.full((48 << 20,), change, dtype=torch.uint8)
        holdfast.save({"large": large}, checkpoint_id=tmp_path / name)
    program = (
        "import resource, sys, torch, holdfast.cli.value_difference\n"
        "from holdfast.cli import main\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert main(['diff', *sys.argv[1:]]) == 1\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "a"), str(tmp_path / "b")]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(ran.stdout.split()[-1]) < 400
