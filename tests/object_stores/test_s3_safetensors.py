"""Several ranks write a model as safetensors files into an object store: each file by one of them."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hf.model_files import load, model_files, same, with_safetensors
from tests.hf.test_ranks_export import spread, whole_state
from tests.object_stores.states import store_of
from tests.support.ranks import rank_processes, run_ranks
from tests.support.s3_server import S3Server

import holdfast as dcp
from holdfast.errors import CheckpointException
from holdfast.state_dict_saver import AsyncCheckpointerType

pytestmark = pytest.mark.slow


class _Planner(dcp.DefaultSavePlanner):
    """Fails on one rank, or kills it, when the last of its tensors is wanted."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.end = end

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "replicated" and dist.get_rank() == dist.get_world_size() - 1:
            if self.end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(5, "no data")
        return super().resolve_data(write_item)


def export_together(place: str, environment: dict[str, str], options: dict[str, Any], add: float) -> None:
    os.environ.update(environment)
    whole = whole_state()
    state = {key: value + add if value.dtype == torch.float32 else value for key, value in whole.items()}
    mode = options.pop("async", None)
    writer = dcp.HuggingFaceStorageWriter(place, **options)
    if mode is None:
        dcp.save(spread(state), storage_writer=writer)
        return
    kind = getattr(AsyncCheckpointerType, mode)
    saving: Any = dcp.async_save(spread(state), storage_writer=writer, async_checkpointer_type=kind)
    saving.result()


def fail_together(place: str, environment: dict[str, str], end: str) -> str:
    os.environ.update(environment)
    writer = dcp.HuggingFaceStorageWriter(place, max_shard_size="3MB")
    try:
        dcp.save(spread(whole_state()), storage_writer=writer, planner=_Planner(end), peer_timeout=5)
    except CheckpointException as error:
        return str(error)
    return "saved"


def fetch(place: str, server: S3Server, folder: Path) -> None:
    """Copy all files of a place into a folder."""
    store = store_of(place, server)
    for name in store.names():
        (folder / name).write_bytes(store.read(name, max_bytes=1 << 30))


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {}), (3, {"max_shard_size": "3MB"}), (2, {"async": "THREAD"}), (2, {"async": "PROCESS"})],
)
def test_ranks_stream_the_files_of_one_model(
    s3: S3Server, place: str, tmp_path: Path, world_size: int, options: dict[str, Any]
) -> None:
    for add in (1.0, 0.0) if world_size == 3 else (0.0,):
        ended = run_ranks(export_together, world_size, place, s3.environment, options, add)
        assert ended == [("returned", None)] * world_size
    fetch(place, s3, tmp_path)
    expected = whole_state()
    assert same(with_safetensors(tmp_path), expected)
    assert same(load(place, expected), expected)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert model_files(tmp_path) == sorted({*weight_map.values(), "model.safetensors.index.json"})


def test_a_rank_that_fails_makes_all_raise_and_leaves_no_file(s3: S3Server, place: str) -> None:
    for kind, message in run_ranks(fail_together, 3, place, s3.environment, "raise"):
        assert kind == "returned"
        assert "no data" in message
    assert not [name for name in store_of(place, s3).names() if "safetensors" in name]


def test_a_killed_rank_makes_the_others_raise_and_the_old_model_stays(s3: S3Server, place: str) -> None:
    def exported(add: float) -> dict[str, torch.Tensor]:
        ended = run_ranks(export_together, 3, place, s3.environment, {"max_shard_size": "3MB"}, add)
        assert ended == [("returned", None)] * 3
        whole = whole_state()
        return {key: value + add if value.dtype == torch.float32 else value for key, value in whole.items()}

    old = exported(1.0)
    ended = rank_processes().run(fail_together, 3, place, s3.environment, "kill")
    assert [one.kind for one in ended] == ["returned", "returned", "ended"]
    assert all("rank 2" in one.value for one in ended[:2])
    assert same(load(place, old), old)
    new = exported(0.0)
    assert same(load(place, new), new)
