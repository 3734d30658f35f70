"""A save of safetensors files over older ones, killed at any call: the old model or the new one, whole."""

import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.hf.model_files import export, load, model_files, same
from tests.support.checkpoints import contents, put_back
from tests.support.kills import run_and_kill
from tests.support.sweeps import sweep
from typing_extensions import override

import holdfast as dcp
from holdfast._format.safetensors_index import LONE_SHARD, is_shard
from holdfast._storage.safetensors_layout import ExportOptions
from holdfast.filesystem import FileSystem

pytestmark = pytest.mark.one_core

INDEXED: dict[str, Any] = {}
SHARDS = {"max_shard_size": "1KB"}
LONE = {"max_shard_size": "1GB"}
ONE_SHARD = {"as_shard": True}
TORCH_SHARDS = {"of_torch": True}
OTHER_NAMES = {"fqn_to_index_mapping": {"a": 1, "b": 3, "c": 3}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the same shards": (SHARDS, SHARDS),
    "one file to one file": (LONE, LONE),
    "one file with an index to the same": (INDEXED, INDEXED),
    "one file to shards": (LONE, SHARDS),
    "shards to one file": (SHARDS, LONE),
    "shards to other shards": (SHARDS, OTHER_NAMES),
    "a shard to a shard": (ONE_SHARD, ONE_SHARD),
    "shards of torch to a shard": (TORCH_SHARDS, ONE_SHARD),
    "shards of torch to one file with an index": (TORCH_SHARDS, INDEXED),
    "one file with an index to a shard": (INDEXED, ONE_SHARD),
}


class Kill(NamedTuple):
    """One kill: at which call, what our reader and transformers find after it, what was left at last."""

    point: str
    ours: str
    theirs: str
    stale: list[str]


@pytest.mark.slow
@pytest.mark.one_core
def test_a_kill_at_some_calls_leaves_the_old_model_or_the_new(tmp_path: Path) -> None:
    kills = _run_kills(tmp_path, "the same shards", stride=40)
    assert {kill.ours for kill in kills} == {kill.theirs for kill in kills} == {"old", "new"}


@sweep(stride=11)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_kill_at_any_call_leaves_the_old_model_or_the_new(tmp_path: Path, case: str, stride: int) -> None:
    """For our reader and for one that finds models as transformers does. The next save cleans up."""
    kills = _run_kills(tmp_path, case, stride)
    for found in ([kill.ours for kill in kills], [kill.theirs for kill in kills]):
        # Once new, always new.
        assert found == sorted(found, reverse=True), kills
        assert set(found) == {"old", "new"} or stride > 1
    assert [kill for kill in kills if kill.stale] == [], "the save after a kill left stale files"
    points = {"before rename", "after rename", "before fsync", "after unlink"}
    assert stride > 1 or points <= {kill.point for kill in kills}


@sweep(stride=29)
@pytest.mark.slow
@pytest.mark.parametrize("case", ["the same shards", "one file to shards", "shards to one file"])
def test_a_kill_while_files_are_streamed(tmp_path: Path, case: str, stride: int) -> None:
    """Where files are written from front to back, and get no other name afterwards."""
    kills = _run_kills(tmp_path, case, stride, streamed=True)
    found = [kill.ours for kill in kills]
    assert found == sorted(found, reverse=True), kills
    assert set(found) == {"old", "new"} or stride > 1
    assert [kill for kill in kills if kill.stale] == [], "the save after a kill left stale files"


def _run_kills(folder: Path, case: str, stride: int = 1, *, streamed: bool = False) -> list[Kill]:
    """All kills of one case, by a process that forks a victim for each of them."""
    command = [
        sys.executable,
        "-m",
        "tests.hf.test_kill_during_export",
        str(folder / "model"),
        case,
        str(stride),
        str(int(streamed)),
    ]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    return [Kill(*kill) for kill in json.loads(done.stdout)]


# What follows runs in the process that is started for it.


def _state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(10, 20, generator=generator) for key in "abc"}


def _save(state: dict[str, torch.Tensor], folder: str, options: dict[str, Any]) -> None:
    if options is TORCH_SHARDS:
        _save_as_torch_does(state, folder)
    elif options is ONE_SHARD:
        writer = dcp.HuggingFaceStorageWriter(folder)
        writer.options = ExportOptions(lone_name=LONE_SHARD, as_shards=True)
        dcp.save(state, storage_writer=writer, no_dist=True)
    else:
        export(state, folder, **options)


def _save_as_torch_does(state: dict[str, torch.Tensor], folder: str) -> None:
    """Two shards, each with half of the rows, as two ranks write them."""
    os.makedirs(folder, exist_ok=True)
    for number, begin in ((1, 0), (2, 5)):
        rows = {key: value[begin : begin + 5].clone() for key, value in state.items()}
        offsets = {key: {"saved_offsets": [begin, 0]} for key in state}
        name = f"{folder}/shard-{number:05}-model-00001-of-00001.safetensors"
        save_file(rows, name, {"DCP_SHARDING_INFO": json.dumps(offsets)})


def _load_as_transformers_does(folder: str) -> dict[str, torch.Tensor]:
    if any(map(is_shard, os.listdir(folder))):
        return load(folder, _state(1))  # it calls torch, and that leads to ours
    if os.path.exists(f"{folder}/model.safetensors"):
        return load_file(f"{folder}/model.safetensors")
    weight_map = json.loads(Path(folder, "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(f"{folder}/{name}") for name in set(weight_map.values())}
    return {key: files[name][key] for key, name in weight_map.items()}


class StreamedFiles(FileSystem):
    """The local file system as one that takes files from front to back, by calls that a kill can meet."""

    @contextlib.contextmanager
    @override
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode == "rb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        opened = _OneWay(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        yield opened
        opened.close()


class _OneWay(io.RawIOBase):
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return os.write(self._descriptor, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def _streamed(state: dict[str, torch.Tensor], folder: str, options: dict[str, Any]) -> None:
    writer = dcp.HuggingFaceStorageWriter(folder, **options)
    writer.fs = StreamedFiles()
    dcp.save(state, storage_writer=writer)


def _main(folder: str, case: str, stride: int, streamed: bool) -> None:
    torch.set_num_threads(1)
    before, after = CASES[case]
    old, new, later = map(_state, (1, 2, 3))
    save = _streamed if streamed else _save

    def which(found: dict[str, torch.Tensor]) -> str:
        return "old" if same(found, old) else "new" if same(found, new) else "a mix"

    save(later, f"{folder}-clean", after)
    expected = model_files(f"{folder}-clean")
    save(old, folder, before)
    content = contents(folder)
    kills: list[Kill] = []
    for number in itertools.count(1, stride):
        put_back(folder, content)
        point = run_and_kill(lambda: save(new, folder, after), number)
        if point is None:
            break
        # Streamed files keep the names that carry their save, and a lone one then has an index.
        found = which(load(folder, old)), "" if streamed else which(_load_as_transformers_does(folder))
        save(later, folder, after)
        assert same(load(folder, later), later), f"the save after a kill {point} is not whole"
        left = model_files(folder)
        stale = [] if streamed and len(left) <= len(expected) + 1 else sorted(set(left) ^ set(expected))
        kills.append(Kill(point, *found, stale))
    sys.stdout.write(json.dumps(kills))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
