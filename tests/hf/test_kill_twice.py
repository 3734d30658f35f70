"""Saves of safetensors files that are killed, and whose successors are: no file of them stays for ever."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf.model_files import export, load, model_files, same

import holdfast
from holdfast._io.local_ranges import LocalRanges
from holdfast._storage import safetensors_writer, store_writer
from holdfast.cli import main

OLD, NEW = ({"a": torch.full((8,), float(n)), "b": torch.arange(4) + n} for n in range(2))


def _dies(*_: Any, **__: Any) -> None:
    os._exit(9)


def _takes_no_ranges(*_: Any) -> bool:
    return False


def _save(folder: Path, dies_in: str, is_streamed: bool, options: dict[str, Any]) -> None:
    for module in (safetensors_writer, store_writer):
        if hasattr(module, dies_in):
            setattr(module, dies_in, _dies)
    if is_streamed:
        LocalRanges.takes_ranges = _takes_no_ranges  # type: ignore[assignment, method-assign]
    export(NEW, folder, **options)


def killed(dies_in: str) -> Callable[..., None]:
    """A save that dies when it calls the function of that name."""

    def run(folder: Path, *, is_streamed: bool = False, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=_save, args=(folder, dies_in, is_streamed, options))
        child.start()
        child.join()
        assert child.exitcode == 9

    return run


def test_files_of_a_killed_save_go_though_the_next_one_was_killed_before_it_removed_them(
    tmp_path: Path,
) -> None:
    export(OLD, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    killed("write_chunks")(tmp_path, max_shard_size=40)
    assert list(tmp_path.glob(".*.tmp"))
    killed("remove_dead")(tmp_path)
    export(NEW, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert same(load(tmp_path, NEW), NEW)


def _save_of_another_kind(folder: Path) -> None:
    holdfast.save(NEW, checkpoint_id=folder)


def _clean(folder: Path) -> None:
    assert main(["clean", str(folder)]) == 0


@pytest.mark.parametrize("remove", [_save_of_another_kind, _clean])
def test_files_of_a_killed_save_go_without_another_one_of_safetensors(
    tmp_path: Path, remove: Callable[[Path], None]
) -> None:
    export(OLD, tmp_path)
    killed("write_chunks")(tmp_path, max_shard_size=40)
    assert list(tmp_path.glob(".*.tmp"))
    remove(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))
    assert same(load(tmp_path, OLD), OLD)


@pytest.mark.parametrize("old", [{}, {"max_shard_size": "1GB"}])
def test_streamed_files_of_a_killed_save_go_under_whatever_names(tmp_path: Path, old: dict[str, Any]) -> None:
    export(OLD, tmp_path, **old)
    killed("_join_checksums")(tmp_path, is_streamed=True, max_shard_size=40)
    assert same(load(tmp_path, OLD), OLD)
    assert "model-00002-of-00002.safetensors" in model_files(tmp_path)
    export(NEW, tmp_path, fqn_to_index_mapping={"a": 1, "b": 3})
    assert model_files(tmp_path) == [
        "model-00001-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert same(load(tmp_path, NEW), NEW)
