"""``holdfast convert`` converts, says what it did, and has the exit codes of the other commands."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.cli import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    state = {"model": {"w": torch.arange(6.0), "b": torch.ones(2)}, "step": 3}
    holdfast.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    return str(tmp_path / "a")


def test_into_a_file_and_back(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", checkpoint, str(tmp_path / "x.pt")]) == 0
    assert "holdfast to torch_save: 2 tensors, 1 object, 32 B, all checked" in capsys.readouterr().out
    assert torch.load(tmp_path / "x.pt")["step"] == 3
    assert main(["convert", str(tmp_path / "x.pt"), str(tmp_path / "b"), "--to", "holdfast", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["tensors"], found["source_format"]) == (
        "holdfast.convert/1",
        2,
        "torch_save",
    )
    assert main(["diff", checkpoint, str(tmp_path / "b")]) == 0


def test_the_weights_alone(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--to", "safetensors", "--keys", "model", "--rename", "model=", "--rename", "model.b=bias"]
    assert main(["convert", checkpoint, str(tmp_path / "c"), *options, "--dtype", "bfloat16", "-q"]) == 0
    assert capsys.readouterr().out == ""
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert {key: value.dtype for key, value in found.items()} == {
        "w": torch.bfloat16,
        "bias": torch.bfloat16,
    }


def test_exit_codes(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "x.pt")
    assert main(["convert", checkpoint, target, "--rename", "model"]) == 2
    assert main(["convert", checkpoint, str(tmp_path / "c")]) == 2
    assert "which format? Pass to=, or --to, with one of holdfast, torch" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "absent"), target]) == 3
    assert main(["convert", checkpoint, str(tmp_path / "c"), "--to", "safetensors"]) == 2
    assert "step" in capsys.readouterr().err
    assert main(["convert", checkpoint, target, "--keys", "modle"]) == 2
    assert "no key matches 'modle'" in capsys.readouterr().err
    assert main(["convert", checkpoint, target]) == 0
    assert main(["convert", checkpoint, target]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["convert", checkpoint, target, "--overwrite"]) == 0
    data = bytearray(Path(target).read_bytes())
    data[data.index(torch.arange(6.0).numpy().tobytes()) + 5] ^= 1
    Path(target).write_bytes(data)
    assert main(["convert", target, str(tmp_path / "d"), "--to", "holdfast"]) == 1


@pytest.mark.parametrize("target", ["new/er/c", "new/er/x.pt"])
def test_a_conversion_that_is_refused_leaves_no_folder(checkpoint: str, tmp_path: Path, target: str) -> None:
    data = next(Path(checkpoint).glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[content.index(torch.arange(6.0).numpy().tobytes()) + 5] ^= 1
    data.write_bytes(content)
    with pytest.raises(holdfast.errors.CheckpointError, match=r"model\.w"):
        holdfast.convert(checkpoint, tmp_path / target, to=None if target.endswith(".pt") else "torch")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


class Color:
    """A value that needs code to be loaded."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_what_a_value_needs_is_named_and_can_be_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = str(tmp_path / "x.pt"), str(tmp_path / "b")
    torch.save({"w": torch.ones(2), "color": Color(3)}, source)
    assert main(["convert", source, target, "--to", "holdfast"]) == 3
    name = f"{__name__}.Color"
    assert f"color: this value needs {name}" in (said := capsys.readouterr().err)
    assert f"pass --safe-global {name}" in said
    assert not (tmp_path / "b").exists()
    assert main(["convert", source, target, "--to", "holdfast", "--safe-global", "absent.Name"]) == 2
    assert main(["convert", source, target, "--to", "holdfast", "--safe-global", name]) == 0
    state = {"w": torch.zeros(2), "color": None}
    holdfast.load(state, checkpoint_id=target, safe_globals=[Color], no_dist=True)
    assert state["color"].number == 3  # type: ignore[union-attr]
