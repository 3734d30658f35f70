"""The order in which a save reaches the disk: a power cut at any step loses no checkpoint (B4, X6, M1)."""

import os
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import contents, load, put_back
from tests.support.states import same, small_state
from tests.support.tools import as_nobody, traced_calls

import holdfast as hf
from holdfast.extension import ZStandard
from holdfast.filesystem import FileSystemWriter

pytestmark = pytest.mark.one_core

SAVE = """
    import os, sys
    import torch
    import holdfast as hf
    from holdfast.extension import ZStandard
    for name, options in eval(sys.argv[2]).items():
        hf.save({"a": torch.ones(300), "b": torch.ones(3 << 20), "c": "text"},
                storage_writer=hf.FileSystemWriter(os.path.join(sys.argv[1], name), **eval(options)))
"""
OPTIONS = {
    "one thread": "{}",
    "three threads": "{'thread_count': 3}",
    "a file per item": "{'single_file_per_rank': False}",
    "zstd": "{'_extensions': [ZStandard()]}",
}
CALLS = ["write", "pwrite64", "pwritev", "pwritev2", "fsync", "fdatasync", "sync", "syncfs"]
CALLS += ["rename", "renameat", "renameat2", "unlink", "unlinkat"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The steps of a save with each of the options, and of one that overwrites, by one traced process."""
    root = tmp_path_factory.mktemp("traced")
    hf.save(small_state(1), checkpoint_id=root / "overwrite")
    options = {**OPTIONS, "overwrite": "{}"}
    for name in OPTIONS:
        (root / name).mkdir()
    program = textwrap.dedent(SAVE)
    lines = traced_calls(program, str(root), repr(options), calls=CALLS, log=root / "trace")
    return {name: _steps(lines, str(root / name)) for name in options}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_data_is_flushed_before_the_metadata_and_the_metadata_before_its_name(
    trace: dict[str, list[str]], options: str
) -> None:
    steps = list(trace[options])
    # The lease is there as long as any file of the save is not part of a checkpoint. It need not be durable.
    assert [steps.pop(0), steps.pop(0)] == ["write lease", "rename lease"]
    assert steps.pop() == "unlink lease"
    rename = steps.index("rename metadata")
    data, commit = steps[: steps.index("write metadata")], steps[steps.index("write metadata") :]
    files = {step.removeprefix("write ") for step in data if step.startswith("write ")}
    assert files
    assert all(file.endswith(".distcp") for file in files)
    for file in files:
        last_write = max(n for n, step in enumerate(data) if step == f"write {file}")
        assert f"fsync {file}" in data[last_write:], f"{file} is not flushed before the metadata"
    last_flush = max(n for n, step in enumerate(data) if step.startswith("fsync __"))
    assert "fsync folder" in data[last_flush:], "the names of the data files are not flushed"
    assert commit == ["write metadata", "fsync metadata", "rename metadata", "fsync folder"]
    assert steps[rename + 1 :] == ["fsync folder"]


@pytest.mark.slow
def test_a_save_never_flushes_the_whole_machine(trace: dict[str, list[str]]) -> None:
    assert not [step for steps in trace.values() for step in steps if step.startswith("sync")]


@pytest.mark.slow
def test_an_overwrite_removes_old_files_only_after_the_commit_is_durable(trace: dict[str, list[str]]) -> None:
    steps = list(trace["overwrite"])
    first_removal = min(n for n, step in enumerate(steps) if step.startswith("unlink"))
    assert steps[:first_removal][-2:] == ["rename metadata", "fsync folder"]
    assert not [step for step in steps[first_removal:] if step.startswith(("write", "rename"))]


def _steps(lines: list[str], folder: str) -> list[str]:
    """The calls that change the folder, in order; equal ones in a row once."""
    steps: list[str] = []
    for line in lines:
        step = _step(line, folder)
        if step and steps[-1:] != [step]:
            steps.append(step)
    return steps


def _step(line: str, folder: str) -> str | None:
    call = re.match(r"\d+ +(\w+)\((.*)", line)
    if call is None:
        return None
    name = re.sub(r"^p?write(v2|v|64)?$", "write", re.sub(r"(at2?)$", "", call[1]))
    if name in ("sync", "syncfs"):
        return name
    if folder not in call[2]:
        return None
    name = "fsync" if name == "fdatasync" else name
    if name == "rename" and ".lease" not in call[2]:
        return "rename metadata" if '".metadata"' in call[2] or "/.metadata" in call[2] else "rename"
    if ".metadata" in call[2]:
        return f"{name} metadata"
    if ".lease" in call[2]:
        return f"{name} lease"
    file = re.search(r"(__\d+_\d+[^/\">]*)", call[2])
    return f"{name} {file[1] if file else 'folder'}"


class _Journal:
    """Notes what a save does to a folder, and plays a power cut after any step of it.

    The disk of the worst case: bytes that were not flushed are zeros. Of what happened to names since the
    folder was last flushed a disk may keep any part: here all, nothing, or the renames alone.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = str(folder)
        self.before = contents(folder)
        self.steps: list[tuple[str, str, Any]] = []
        self.paths: dict[int, str] = {}
        for name in ("open", "close", "pwritev", "fsync", "rename", "unlink"):
            patch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))

    def _open(self, call: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            fd = call(path, flags, mode, dir_fd=dir_fd)
            self.paths[fd] = os.path.basename(path)
            if flags & os.O_CREAT:
                self.steps.append(("create", os.path.basename(path), None))
            return fd

        return opened

    def _close(self, call: Callable[..., None]) -> Callable[..., None]:
        def closed(fd: int) -> None:
            self.paths.pop(fd, None)
            call(fd)

        return closed

    def _pwritev(self, call: Callable[..., int]) -> Callable[..., int]:
        def written(fd: int, pieces: Any, offset: int, *flags: int) -> int:
            count = call(fd, pieces, offset, *flags)
            self.steps.append(("write", self.paths[fd], (offset, b"".join(map(bytes, pieces))[:count])))
            return count

        return written

    def _fsync(self, call: Callable[..., None]) -> Callable[..., None]:
        def flushed(fd: int) -> None:
            call(fd)
            self.steps.append(("fsync", self.paths[fd], None))

        return flushed

    def _rename(self, call: Callable[..., None]) -> Callable[..., None]:
        def renamed(old: Any, new: Any, **folders: Any) -> None:
            call(old, new, **folders)
            self.steps.append(("rename", os.path.basename(old), os.path.basename(new)))

        return renamed

    def _unlink(self, call: Callable[..., None]) -> Callable[..., None]:
        def removed(path: Any, **folders: Any) -> None:
            call(path, **folders)
            self.steps.append(("unlink", os.path.basename(path), None))

        return removed

    def after_power_cut(self, count: int, *, kept: str) -> dict[str, bytes]:
        """What is on the disk if the power is cut after so many steps."""
        durable: dict[str, int] = {name: -1 - n for n, name in enumerate(self.before)}
        files: dict[int, tuple[bytearray, bytes]] = {
            number: (bytearray(self.before[name]), self.before[name]) for name, number in durable.items()
        }
        names, renamed = dict(durable), dict[str, int]()
        for number, (kind, name, detail) in enumerate(self.steps[:count]):
            if kind == "create":
                names[name] = number
                files[number] = (bytearray(), b"")
            elif kind == "write":
                offset, data = detail
                content = files[names[name]][0]
                content.extend(bytes(max(0, offset + len(data) - len(content))))
                content[offset : offset + len(data)] = data
            elif kind == "fsync" and name in names:
                content = files[names[name]][0]
                files[names[name]] = (content, bytes(content))
            elif kind == "fsync":
                durable, renamed = dict(names), {}
            elif kind == "rename":
                names[detail] = renamed[detail] = names.pop(name)
            else:
                names.pop(name, None)
        shown = {"all names": names, "no names": durable, "renames": {**durable, **renamed}}[kept]
        return {
            name: flushed.ljust(len(content), b"\0")
            for name, number in shown.items()
            for content, flushed in [files[number]]
        }


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["all names", "no names", "renames"])
@pytest.mark.parametrize(
    "options",
    [{}, {"thread_count": 3}, {"single_file_per_rank": False}, {"_extensions": [ZStandard()]}],
    ids=OPTIONS,
)
def test_a_power_cut_after_any_step_leaves_the_old_checkpoint_or_the_new(
    tmp_path: Path, options: dict[str, Any], kept: str
) -> None:
    folder, disk = tmp_path / "checkpoint", tmp_path / "disk"
    hf.save(small_state(1), storage_writer=FileSystemWriter(folder, **options))
    with pytest.MonkeyPatch.context() as patch:
        journal = _Journal(patch, folder)
        hf.save(small_state(2), storage_writer=FileSystemWriter(folder, **options))
    assert {kind for kind, _, _ in journal.steps} == {"create", "write", "fsync", "rename", "unlink"}
    found = []
    for count in range(len(journal.steps) + 1):
        put_back(disk, journal.after_power_cut(count, kept=kept))
        state = load(disk, small_state(99))
        found.append(
            "old" if same(state, small_state(1)) else "new" if same(state, small_state(2)) else "a mix"
        )
    commit = found.index("new")
    assert found == ["old"] * commit + ["new"] * (len(found) - commit)
    kind = journal.steps[commit - 1][0]
    assert kind == ("fsync" if kept == "no names" else "rename")


@pytest.mark.parametrize("compressed", [False, True])
def test_loading_needs_read_access_only(compressed: bool) -> None:
    """Nobody may write the folder or the one above it; the process that loads owns neither."""
    parent = tempfile.mkdtemp()
    folder = os.path.join(parent, "checkpoint")
    try:
        extensions = [ZStandard()] if compressed else None
        hf.save(small_state(1), storage_writer=FileSystemWriter(folder, _extensions=extensions))
        before = contents(folder)
        for name in before:
            os.chmod(os.path.join(folder, name), 0o444)
        os.chmod(folder, 0o555)
        os.chmod(parent, 0o555)
        # Whatever is imported late is imported as somebody who may.
        load(folder, small_state(99))
        with as_nobody():
            assert not os.access(folder, os.W_OK, effective_ids=True)
            assert same(load(folder, small_state(99)), small_state(1))
        assert contents(folder) == before
    finally:
        shutil.rmtree(parent)


def test_a_file_that_may_not_be_read_is_raised_with_its_name() -> None:
    parent = tempfile.mkdtemp()
    folder = os.path.join(parent, "checkpoint")
    try:
        os.chmod(parent, 0o755)
        hf.save(small_state(1), checkpoint_id=folder)
        (name,) = [name for name in os.listdir(folder) if name.endswith(".distcp")]
        os.chmod(os.path.join(folder, name), 0o000)
        with as_nobody(), pytest.raises(PermissionError, match=name) as caught:
            load(folder, small_state(99))
        assert caught.value.filename == os.path.join(folder, name)
    finally:
        shutil.rmtree(parent)
