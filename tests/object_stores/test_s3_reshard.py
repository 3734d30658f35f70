"""What ranks that load another layout than was saved ask of an object store: few requests, no byte twice."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks
from tests.support.s3_faults import Fault, FlipAnswer, S3Request
from tests.support.s3_proxy import S3Proxy
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast

pytestmark = [pytest.mark.slow, pytest.mark.one_core]

MIB = 1 << 20
TENSORS = 8
ROWS, COLUMNS = 1024, 1024  # 4 MiB
NBYTES = TENSORS * ROWS * COLUMNS * 4
DATA = re.compile(r"\.distcp$")


def _whole(number: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + number


def _state(dimension: int, dtype: torch.dtype = torch.float32) -> dict[str, DTensor]:
    rank, count = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    return {
        f"w{number}": DTensor.from_local(
            _whole(number).to(dtype).chunk(count, dimension)[rank].contiguous(), mesh, [Shard(dimension)]
        )
        for number in range(TENSORS)
    }


def _options(endpoint: str) -> dict[str, Any]:
    return {"endpoint": endpoint, "access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}


def save_sharded(place: str, endpoint: str, dimension: int) -> None:
    """Save tensors that are sharded on a dimension."""
    writer = holdfast.ObjectStoreWriter(place, options=_options(endpoint))
    holdfast.save(_state(dimension), storage_writer=writer)


def load_sharded(place: str, endpoint: str, dimension: int, verify: bool) -> bool:
    """Load them sharded on a dimension; rank 1 wants other numbers than were saved."""
    dtype = torch.float64 if dist.get_rank() == 1 else torch.float32
    state = _state(dimension, dtype)
    expected = {key: value.to_local().clone() for key, value in state.items()}
    for value in state.values():
        value.to_local().zero_()
    reader = holdfast.ObjectStoreReader(place, options=_options(endpoint), verify=verify)
    holdfast.load(state, storage_reader=reader, cast=True)
    return all(torch.equal(state[key].to_local(), value) for key, value in expected.items())


@pytest.mark.parametrize(("saved", "loaded"), [(0, 1), (1, 0)])
def test_a_reshard_asks_for_every_byte_once_by_few_large_requests(
    proxy: S3Proxy, s3: S3Server, place: str, saved: int, loaded: int
) -> None:
    assert run_ranks(save_sharded, 2, place, s3.endpoint, saved) == [("returned", None)] * 2
    # What is not checked has no checksums that every rank compares: the reading rank sends one.
    outcome = run_ranks(load_sharded, 2, place, proxy.endpoint, loaded, saved == 0)
    assert outcome == [("returned", True)] * 2
    asked = [request for request in proxy.requests if DATA.search(request.key)]
    assert sum(request.nbytes_down for request in asked) <= 1.01 * NBYTES
    assert len(asked) == NBYTES // (16 * MIB), [request.headers["range"] for request in asked]
    assert len(proxy.requests) == len(asked) + 3  # the metadata once, and each rank lists


def test_bytes_that_change_on_their_way_to_one_rank_are_wrong_on_none(
    proxy: S3Proxy, s3: S3Server, place: str
) -> None:
    assert run_ranks(save_sharded, 2, place, s3.endpoint, 1) == [("returned", None)] * 2
    changed = list[str]()

    def once(request: S3Request) -> Fault | None:
        if DATA.search(request.key) is None or changed:
            return None
        changed.append(request.key)
        return FlipAnswer(5 * MIB)

    proxy.rules.append(once)
    assert run_ranks(load_sharded, 2, place, proxy.endpoint, 0, True) == [("returned", True)] * 2
    assert changed
    proxy.rules[:] = []
    proxy.on(FlipAnswer(5 * MIB), method="GET", key=DATA)
    for kind, said in run_ranks(load_sharded, 2, place, proxy.endpoint, 0, True):
        assert kind == "raised"
        assert re.search(r"ChecksumError: w\d: s3://.*distcp: the bytes", said), said
