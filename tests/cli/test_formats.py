"""The command line on every format, on several paths, and on the folder of a run."""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.tools import as_nobody

import holdfast as hf

pytestmark = pytest.mark.one_core

Command = Callable[..., Any]


def state() -> dict[str, Any]:
    return {"model": {"weight": torch.arange(600.0).reshape(20, 30), "bias": torch.ones(3)}, "epoch": 3}


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("formats")
    flat = {"model.weight": state()["model"]["weight"], "model.bias": state()["model"]["bias"]}
    torch.save(state(), root / "saved.pt")
    hf.save(flat, storage_writer=hf.HuggingFaceStorageWriter(root / "model"))
    save_file(flat, root / "lone.safetensors")
    hf.save(state(), checkpoint_id=root / "ours")
    names = {"torch.save": "saved.pt", "safetensors": "model", "file": "lone.safetensors", "ours": "ours"}
    return {kind: root / name for kind, name in names.items()}


@pytest.mark.parametrize("kind", ["torch.save", "safetensors", "file", "ours"])
def test_ls_show_and_verify_every_format(holdfast: Command, formats: dict[str, Path], kind: str) -> None:
    path = formats[kind]
    listed = holdfast("ls", path)
    assert listed.code == 0
    assert "float32  [20, 30]  2.3 KiB" in listed.out
    document = holdfast("ls", path, "--json").document
    assert {tensor["key"] for tensor in document["tensors"]} == {"model.weight", "model.bias"}
    assert [value["value"] for value in document["objects"]] == (
        [3] if kind in ("torch.save", "ours") else []
    )
    (part,) = holdfast("show", path, "--json").document["parts"]
    assert part["written_by"] == {"ours": "holdfast", "file": "safetensors"}.get(kind, kind)
    assert all(file["state"] == "present" for file in part["files"])
    assert holdfast("show", path).code == 0
    verified = holdfast("verify", path)
    assert verified.code == 0, verified.out
    assert ("limit" in verified.out) == (kind == "file"), "files of others have no checksums"


@pytest.mark.parametrize("kind", ["torch.save", "safetensors"])
def test_verify_names_the_key_of_damage(
    holdfast: Command, formats: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    source = formats[kind]
    file = source if source.is_file() else next(source.glob("*.safetensors"))
    for other in [file, *source.glob(".*")]:
        (tmp_path / other.name).write_bytes(other.read_bytes())
    data = bytearray(file.read_bytes())
    at = data.find(torch.arange(100.0, 200.0).numpy().tobytes())
    data[at] ^= 1
    (tmp_path / file.name).write_bytes(data)
    found = holdfast("verify", tmp_path / file.name if kind == "torch.save" else tmp_path, "--json")
    assert found.code == 1
    (damage,) = found.document["damage"]
    assert (damage["keys"], damage["kind"]) == (["model.weight"], "checksum")


def test_verify_tells_that_a_file_of_a_model_is_missing(holdfast: Command, tmp_path: Path) -> None:
    flat = {f"w{number}": torch.ones(1000) for number in range(4)}
    hf.save(flat, storage_writer=hf.HuggingFaceStorageWriter(tmp_path, max_shard_size=8000))
    next(tmp_path.glob("*.safetensors")).unlink()
    found = holdfast("verify", tmp_path)
    assert found.code == 1
    assert "is missing: the index names it" in found.out


def test_several_paths_are_each_checked_whatever_the_others_are(
    holdfast: Command, formats: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    found = holdfast("verify", formats["ours"], tmp_path / "notes", formats["safetensors"])
    assert found.code == 3
    assert [line.split(":")[1].strip() for line in found.out.splitlines()] == ["sound", "sound"]
    assert "the folder is empty" in found.err
    both = holdfast("verify", formats["ours"], formats["safetensors"], "--json")
    assert [json.loads(line)["ok"] for line in both.out.splitlines()] == [True, True]
    shown = holdfast("show", formats["ours"], formats["safetensors"])
    assert (shown.code, shown.out.count("made by")) == (0, 2)
    listed = holdfast("ls", formats["ours"], formats["safetensors"], "*.bias")
    assert listed.code == 0
    assert listed.out.count("bias") == 2
    assert f"{formats['safetensors']}:" in listed.out


def test_ls_of_a_run_is_a_table_of_its_steps(holdfast: Command, tmp_path: Path) -> None:
    for step in (9, 10, 100):
        hf.save(state(), checkpoint_id=tmp_path / f"step-{step}")
    (tmp_path / "step-200").mkdir()
    (tmp_path / "step-200" / "__0_0-0123456789ab.distcp").write_bytes(b"x")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events").write_text("x")
    found = holdfast("ls", tmp_path)
    assert found.code == 0
    lines = found.out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["step-9", "step-10", "step-100", "step-200"]
    assert all("UTC" in line and line.endswith("complete") for line in lines[:3])
    assert lines[3].endswith("incomplete")
    assert lines[-1].startswith("4 checkpoints, 3 complete")
    document = holdfast("ls", tmp_path, "--json").document
    assert [row["step"] for row in document["checkpoints"]] == [9, 10, 100, 200]
    size = sum(file.stat().st_size for file in (tmp_path / "step-9").iterdir())
    assert document["checkpoints"][0]["nbytes"] == size


def test_diff_compares_formats(holdfast: Command, formats: dict[str, Path], tmp_path: Path) -> None:
    assert holdfast("diff", formats["ours"], formats["torch.save"]).code == 0
    found = holdfast("diff", formats["safetensors"], formats["file"], "--json")
    assert (found.code, found.document["equal"]) == (0, 2)
    changed = state()
    changed["model"]["weight"][3, 4] += 0.5
    torch.save(changed, tmp_path / "changed.pt")
    found = holdfast("diff", formats["ours"], tmp_path / "changed.pt", "--json")
    assert found.code == 1
    (value,) = found.document["values"]
    assert (value["key"], value["differing"], value["largest"]) == ("model.weight", 1, 0.5)


def test_a_damaged_object_hides_only_its_own_value(holdfast: Command, tmp_path: Path) -> None:
    hf.save({"a": 1, "b": "two", "c": [3]}, checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.find(b"two")] ^= 1
    file.write_bytes(data)
    document = holdfast("ls", tmp_path, "--json").document
    assert {value["key"]: value.get("value") for value in document["objects"]} == {
        "a": 1,
        "b": None,
        "c": [3],
    }


@pytest.mark.parametrize("kind", ["ours", "safetensors", "file"])
def test_looking_imports_neither_torch_nor_numpy(formats: dict[str, Path], kind: str) -> None:
    code = (
        "import sys; from holdfast.cli import main;"
        f"[main([command, {str(formats[kind])!r}]) for command in ('ls', 'show', 'verify')];"
        "sys.exit(bool({'torch', 'numpy', 'rich', 'fsspec'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("command", ["cp", "trace"])
def test_commands_for_checkpoints_say_that_a_model_is_none(
    holdfast: Command, formats: dict[str, Path], tmp_path: Path, command: str
) -> None:
    for kind in ("safetensors", "file", "torch.save"):
        found = holdfast(command, formats[kind], *([tmp_path / "copy"] if command == "cp" else []))
        assert found.code == (2 if command == "cp" else 3)
        assert "holdfast convert" in found.err if command == "cp" else "no record" in found.err
    assert not (tmp_path / "copy").exists()


def test_show_gives_the_time_of_the_file(holdfast: Command, formats: dict[str, Path]) -> None:
    for kind in ("torch.save", "safetensors", "file"):
        assert "UTC (by the file's time)" in holdfast("show", formats[kind]).out


def test_the_index_of_a_model_stands_for_the_model(holdfast: Command, formats: dict[str, Path]) -> None:
    index = formats["safetensors"] / "model.safetensors.index.json"
    assert holdfast("ls", index).out == holdfast("ls", formats["safetensors"]).out
    assert holdfast("verify", index).code == 0
    assert holdfast("ls", index.with_name("other.safetensors.index.json")).code == 3


@pytest.mark.parametrize("command", ["ls", "show", "verify", "report"])
def test_a_data_file_is_not_taken_for_damage(
    holdfast: Command, formats: dict[str, Path], tmp_path: Path, command: str
) -> None:
    [file] = formats["ours"].glob("*.distcp")
    for path in (str(file), file.as_uri()):
        words = ["-o", str(tmp_path / "page.html")] if command == "report" else []
        outcome = holdfast(command, path, *words)
        assert outcome.code == 3
        assert "is a data file" in outcome.err
        assert f"Name the folder that it is in: {file.parent}\n" in outcome.err


@pytest.mark.parametrize("kind", ["list", "before torch 1.6", "another archive"])
def test_a_file_of_a_kind_that_is_not_read_is_not_called_damaged(
    holdfast: Command, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "x.pt"
    if kind == "another archive":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x/notes.txt", "text")
    else:
        value: Any = [torch.ones(2)] if kind == "list" else {"x": torch.ones(2)}
        torch.save(value, file, _use_new_zipfile_serialization=kind == "list")
    for words in (["ls"], ["verify"], ["convert", str(tmp_path / "target"), "--to", "holdfast"]):
        found = holdfast(words[0], file, *words[1:])
        assert found.code == 3
        assert "DAMAGED" not in found.out
        assert str(file) in found.err


def test_damage_of_one_of_several_checkpoints_begins_with_its_path(holdfast: Command, tmp_path: Path) -> None:
    for name in ("a", "b"):
        hf.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / name)
    next((tmp_path / "b").glob("*.distcp")).unlink()
    found = holdfast("verify", "-q", tmp_path / "a", tmp_path / "b")
    (line,) = found.out.splitlines()
    assert line.startswith(f"damaged  {tmp_path / 'b'}: __0_0-")


def test_ls_of_a_run_with_a_key_is_refused(holdfast: Command, tmp_path: Path) -> None:
    hf.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "step-1")
    found = holdfast("ls", tmp_path, "model.*")
    assert (found.code, found.out) == (2, "")
    what = (
        f"{tmp_path} is the folder of a run: model.* selects keys of a checkpoint, such as {tmp_path}/step-1"
    )
    assert found.err == f"holdfast: {what}\n"


def test_a_step_that_may_not_be_looked_into_is_told_from_an_incomplete_one(holdfast: Command) -> None:
    root = Path(tempfile.mkdtemp())
    try:
        root.chmod(0o755)
        for step in (1, 2):
            hf.save({"a": torch.ones(1)}, checkpoint_id=root / f"step-{step}")
        (root / "lost+found").mkdir(mode=0o700)
        commands = [["ls"], ["steps"], ["clean", "--dry-run"]]
        for words in commands:
            holdfast(*words, root)  # what is imported late is imported as root
        (root / "step-2").chmod(0)
        with as_nobody():
            listed, steps, cleaned = [holdfast(*words, root) for words in commands]
        for found in (listed, steps):
            assert found.code == 0
            assert "complete" in found.out.splitlines()[-3 if found is listed else -2]
            assert "unreadable" in found.out.splitlines()[-2 if found is listed else -1]
        assert (cleaned.code, cleaned.out) == (3, "")
        assert "step-2: Permission denied" in cleaned.err
    finally:
        shutil.rmtree(root)
