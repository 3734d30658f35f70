"""Safetensors files in a storage that takes files from front to back only."""

from typing import Any

import pytest
import torch
from tests.contract.stream_file_systems import MemoryFileSystem
from tests.hf.model_files import room_for, same, some_state

import holdfast as dcp
from holdfast._format.safetensors import header_nbytes, parse_header
from holdfast.errors import CheckpointException


def in_memory(storage: Any, folder: str) -> Any:
    """A writer or reader at a place of the file system in memory."""
    storage.fs = MemoryFileSystem()
    storage.path = f"mem://{folder}"
    return storage


def files_in(folder: str) -> dict[str, bytes]:
    files, prefix = MemoryFileSystem.files, f"mem://{folder}/"
    return {path.removeprefix(prefix): data for path, data in files.items() if path.startswith(prefix)}


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "2MB"}, {"max_shard_size": "1GB"}])
def test_one_process_streams_its_files(options: dict[str, Any]) -> None:
    folder = f"streamed {len(options)} {options.get('max_shard_size')}"
    for seed in range(3):
        state = some_state(seed)
        dcp.save(state, storage_writer=in_memory(dcp.HuggingFaceStorageWriter("x", **options), folder))
        found = room_for(state)
        dcp.load(found, storage_reader=in_memory(dcp.HuggingFaceStorageReader("x"), folder))
        assert same(found, state)
    models = {name: data for name, data in files_in(folder).items() if name.endswith(".safetensors")}
    keys = [key for data in models.values() for key in _keys(data)]
    assert sorted(keys) == sorted(state), "a file of an older model is left"


def _keys(data: bytes) -> list[str]:
    length = header_nbytes(data[:8], len(data), path="")
    return [tensor.key for tensor in parse_header(data[:length], len(data), path="").tensors]


def test_a_failed_save_leaves_no_file() -> None:
    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise OSError(5, "no data")

    writer = in_memory(dcp.HuggingFaceStorageWriter("x"), "failed")
    with pytest.raises(CheckpointException, match="no data"):
        dcp.save({"a": torch.zeros(3)}, storage_writer=writer, planner=Failing())
    assert files_in("failed") == {}
