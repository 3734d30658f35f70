"""The command as a user starts it: its exit codes, its errors, its help, and what it costs."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.cli.text import printable, size_text

Command = Callable[..., Any]

HOLDFAST = [sys.executable, "-m", "holdfast.cli"]


def start(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*HOLDFAST, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_the_program_runs_and_returns_the_exit_code(originals: Path, tmp_path: Path) -> None:
    done = start("verify", originals / "tiny")
    assert (done.returncode, done.stderr) == (0, "")
    missing = start("verify", tmp_path / "nothing")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert missing.stderr == f"holdfast: no checkpoint at {tmp_path / 'nothing'}: there is no such folder\n"


@pytest.mark.parametrize("words", [("ls",), ("show",), ("verify", "--threads=2")], ids=" ".join)
@pytest.mark.parametrize("name", ["ours", "torch-zstd"])
def test_neither_torch_nor_numpy_is_imported(originals: Path, words: tuple[str, ...], name: str) -> None:
    command, *options = words
    code = (
        "import sys; from holdfast.cli import main\n"
        f"code = main({[command, str(originals / name), *options]!r})\n"
        "assert not {'torch', 'numpy', 'rich', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_goes_away_is_no_error(originals: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        done = subprocess.run(
            [*HOLDFAST, "ls", str(originals / "ours")], stdout=nobody, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_changes_no_exit_code(originals: Path, tmp_path: Path, closed: str) -> None:
    for path, code in ((originals / "ours", 0), (tmp_path / "nothing", 3)):
        command = f"{sys.executable} -m holdfast.cli verify '{path}' --json {closed}"
        assert subprocess.run(command, shell=True, check=False, capture_output=True).returncode == code


def test_lines_are_drawn_in_ascii_where_the_terminal_has_nothing_else(originals: Path) -> None:
    done = start("ls", originals / "ours", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout.splitlines()[1].startswith("|  |- weight")


def test_alone_it_prints_its_help(holdfast: Command) -> None:
    found = holdfast()
    assert found.code == 0
    for word in ("ls", "show", "verify", "exit codes", "cannot be read"):
        assert word in found.out


def test_the_version(holdfast: Command) -> None:
    assert holdfast("--version").out == f"holdfast {hf.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [("nonsense",), ("ls",), ("ls", "x", "--sort", "colour"), ("verify",), ("ls", "x", "--no")],
)
def test_wrong_usage_is_2_and_explained(holdfast: Command, words: tuple[str, ...]) -> None:
    found = holdfast(*words)
    assert (found.code, found.out) == (2, "")
    assert "usage: holdfast" in found.err
    assert "GLOB\n" not in found.err.splitlines(keepends=True)[-1]


@pytest.mark.parametrize(
    "words", [("ls", "x", "--depth", "two"), ("prune", "x", "--steps", "1,b"), ("bench", "x", "--rounds", "")]
)
def test_what_is_no_number_is_said_in_words_of_people(holdfast: Command, words: tuple[str, ...]) -> None:
    found = holdfast(*words)
    assert found.code == 2
    assert f"argument {words[2]}: must be a whole number, not " in found.err


@pytest.mark.parametrize("command", ["steps", "prune"])
def test_what_is_not_the_folder_of_a_run_is_named(
    holdfast: Command, originals: Path, tmp_path: Path, command: str
) -> None:
    words = [command] if command == "steps" else [command, "--last", "1"]
    found = holdfast(*words, originals / "tiny")
    assert (found.code, found.out) == (2, "")
    assert "is a checkpoint, and not the folder of a run: name the folder that it is in" in found.err
    (tmp_path / "empty").mkdir()
    assert holdfast(*words, tmp_path / "empty").code == 0
    shutil.copytree(originals / "tiny", tmp_path / "best")
    found = holdfast(*words, tmp_path)
    assert (found.code, found.out) == (3, "")
    assert "no folder here has the name of a step (it has best, empty)" in found.err
    assert "--name" in found.err
    assert (tmp_path / "best" / ".metadata").exists()


@pytest.mark.parametrize("command", ["ls", "show", "verify", "steps"])
def test_a_place_that_nothing_serves_is_wrong_usage(holdfast: Command, command: str) -> None:
    assert holdfast(command, "nonsense://x/y").code == 2


@pytest.mark.parametrize("threads", ["0", "-1", "many"])
def test_threads_are_a_positive_number(holdfast: Command, originals: Path, threads: str) -> None:
    assert holdfast("verify", originals / "tiny", f"--threads={threads}").code == 2


@pytest.mark.parametrize("command", ["show", "verify", "trace"])
def test_the_folder_of_a_run_names_its_checkpoints(
    holdfast: Command, originals: Path, tmp_path: Path, command: str
) -> None:
    shutil.copytree(originals / "tiny", tmp_path / "step-1")
    found = holdfast(command, tmp_path)
    assert (found.code, found.out) == (3, "")
    reason = "the checkpoints are in folders of it: step-1 (newest first). Name one of them, such as"
    assert found.err == f"holdfast: no checkpoint at {tmp_path}: {reason} {tmp_path}/step-1\n"


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_what_is_no_checkpoint_is_said_in_one_line(holdfast: Command, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "__0_0-0123456789ab.distcp").write_text("x")
    (tmp_path / "empty").mkdir()
    for path, reason in {
        "absent": "no checkpoint at {}: there is no such folder",
        "empty": "no checkpoint at {}: the folder is empty",
        "file": "{}: is not a folder, and no file of a checkpoint",
        "unfinished": "no complete checkpoint at {}: it has 1 data file of save 0123456789ab, but no "
        ".metadata. Either the save did not end, or .metadata was removed: then put it back before you save "
        "here again.",
        "empty/.metadata": "{}: there is no such file",
        ".": "no checkpoint at {}: it has no .metadata (it has file, empty/, unfinished/)",
    }.items():
        found = holdfast(command, tmp_path / path)
        assert (found.code, found.out) == (3, "")
        assert found.err == f"holdfast: {reason.format(tmp_path / path)}\n"


def test_a_folder_that_may_not_be_read(
    holdfast: Command, originals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, *rest: object, **more: object) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)
    found = holdfast("ls", originals / "tiny")
    assert found.code == 3
    assert "Permission denied" in found.err


def test_sizes_are_in_the_unit_that_keeps_them_short() -> None:
    sizes = (0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 20, 5 << 30, 1 << 60, None)
    assert [size_text(size) for size in sizes] == [
        *("0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "5.0 GiB", "1.0 EiB", "?")
    ]


def test_text_of_strangers_is_escaped() -> None:
    assert printable("plain ünïcode") == "plain ünïcode"
    assert printable("\x1b]0;title\x07\u202e\ud800") == "\\x1b]0;title\\x07\\u202e\\ud800"


def test_bench_of_a_file_and_a_bucket_without_a_name_are_explained(holdfast: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    found = holdfast("bench", tmp_path / "file")
    assert (found.code, found.out) == (2, "")
    assert "is a file, and not a folder on the storage to measure" in found.err
    found = holdfast("bench", tmp_path / "typo")
    assert (found.code, found.out) == (2, "")
    assert f"{tmp_path / 'typo'}: there is no such folder. Name a folder on the storage" in found.err
    assert not (tmp_path / "typo").exists()
    assert "no such folder" not in holdfast("ls", "s3://").err


@pytest.mark.parametrize("command", ["report", "trace"])
def test_an_output_that_cannot_be_made_is_said_before_anything_is_read(
    holdfast: Command, tmp_path: Path, command: str
) -> None:
    found = holdfast(command, "absent", "-o", tmp_path / "typo" / "page.html")
    assert (found.code, found.out) == (2, "")
    assert f"page.html: there is no folder {tmp_path / 'typo'} to write it to\n" in found.err
    assert (
        f"{tmp_path}: is a folder: name a file to write\n" in holdfast(command, "absent", "-o", tmp_path).err
    )


@pytest.mark.slow
def test_a_bench_that_is_terminated_removes_what_it_wrote(tmp_path: Path) -> None:
    bench = subprocess.Popen(
        [*HOLDFAST, "bench", "--size=64MiB", "--rounds=1000", tmp_path], stderr=subprocess.PIPE
    )
    while not list(tmp_path.rglob(".metadata")):
        assert bench.poll() is None
        time.sleep(0.01)
    bench.terminate()
    _, told = bench.communicate(timeout=60)
    assert (bench.returncode, told) == (143, b"holdfast: terminated\n")
    assert list(tmp_path.iterdir()) == []


def test_windows_is_refused_at_the_import() -> None:
    program = "import sys; sys.platform = 'win32'; import holdfast"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: holdfast does not run on Windows. Use it in WSL 2" in done.stderr
