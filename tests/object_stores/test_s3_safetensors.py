"""Several ranks write a model as safetensors files into an object store: each file by one of them."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors
from tests.hf.model_files import room_for, same
from tests.hf.test_ranks_export import spread, whole_state
from tests.object_stores.states import store_of
from tests.support.ranks import run_ranks
from tests.support.s3_server import S3Server

import holdfast as dcp

pytestmark = pytest.mark.slow


def export_together(place: str, environment: dict[str, str], options: dict[str, Any], add: float) -> None:
    import os

    os.environ.update(environment)
    state = {key: value + add if value.dtype == torch.float32 else value for key, value in whole_state().items()}
    dcp.save(spread(state), storage_writer=dcp.HuggingFaceStorageWriter(place, **options))


def files_of(place: str, server: S3Server) -> dict[str, bytes]:
    store = store_of(place, server)
    return {name: bytes(store.read(name, max_bytes=1 << 30)) for name in store.names()}


@pytest.mark.parametrize(("world_size", "options"), [(2, {}), (3, {"max_shard_size": "3MB"})])
def test_ranks_stream_the_files_of_one_model(
    s3: S3Server, place: str, world_size: int, options: dict[str, Any]
) -> None:
    for add in (1.0, 0.0):
        ended = run_ranks(export_together, world_size, place, s3.environment, options, add)
        assert ended == [("returned", None)] * world_size
    files = files_of(place, s3)
    weight_map = json.loads(files.pop("model.safetensors.index.json"))["weight_map"]
    models = {name: load_safetensors(data) for name, data in files.items() if name.endswith(".safetensors")}
    assert set(models) == set(weight_map.values()), "files of the older model are left"
    expected = whole_state()
    assert same({key: models[name][key] for key, name in weight_map.items()}, expected)
    room = room_for(expected)
    dcp.load(room, storage_reader=dcp.HuggingFaceStorageReader(place))
    assert same(room, expected)
