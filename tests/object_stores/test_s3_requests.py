"""How many requests and bytes a save, a load and a look take on an object store."""

import json

import pytest
import torch
from tests.object_stores.states import save
from tests.support.s3_proxy import S3Proxy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
from holdfast.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.one_core]

MIB = 1 << 20


def _received(proxy: S3Proxy) -> int:
    return sum(request.nbytes_down for request in proxy.requests)


def test_an_eighth_of_a_tensor_takes_little_more_than_its_bytes(proxy: S3Proxy, place: str) -> None:
    whole = torch.randn(8 * 1000 + 8, 4 * 1024)  # 15.6 MiB a rank, no multiple of a block
    holdfast.save({"w": whole}, checkpoint_id=place)
    rows = whole.shape[0] // 8
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (8,))
        part = DTensor.from_local(torch.zeros(rows, whole.shape[1]), mesh, [Shard(0)])
        proxy.clear()
        holdfast.load({"w": part}, checkpoint_id=place, no_dist=True)
    finally:
        torch.distributed.destroy_process_group()
    local: torch.Tensor = part.to_local()
    assert torch.equal(local, whole[3 * rows : 4 * rows])
    assert _received(proxy) <= 1.1 * local.nbytes
    assert len(proxy.requests) <= 5


def test_columns_are_asked_for_by_large_requests(proxy: S3Proxy, place: str) -> None:
    whole = torch.randn(6 * 1024, 1024)  # 24 MiB: to check a column, all of it is read
    holdfast.save({"w": whole}, checkpoint_id=place)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        part = DTensor.from_local(torch.zeros(6 * 1024, 512), mesh, [Shard(1)])
        proxy.clear()
        holdfast.load({"w": part}, checkpoint_id=place, no_dist=True)
    finally:
        torch.distributed.destroy_process_group()
    local: torch.Tensor = part.to_local()
    assert torch.equal(local, whole[:, 512:])
    assert len(proxy.requests) <= whole.nbytes / (8 * MIB) + 2


def test_objects_of_a_state_are_asked_for_together(proxy: S3Proxy, place: str) -> None:
    options = {f"number {n}": n for n in range(100)}
    holdfast.save({"options": options, "w": torch.ones(1000)}, checkpoint_id=place)
    proxy.clear()
    loaded = {"options": dict.fromkeys(options, -1), "w": torch.zeros(1000)}
    holdfast.load(loaded, checkpoint_id=place)
    assert loaded["options"] == options
    assert len(proxy.requests) <= 6


def test_a_load_asks_for_neighbours_together(proxy: S3Proxy, place: str) -> None:
    state = {f"small {n}": torch.full((1000,), float(n)) for n in range(500)}
    state |= {f"large {n}": torch.full((MIB,), float(n)) for n in range(8)}
    holdfast.save(state, checkpoint_id=place)
    proxy.clear()
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    holdfast.load(loaded, checkpoint_id=place)
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    nbytes = sum(value.nbytes for value in state.values())
    assert _received(proxy) <= 1.2 * nbytes
    assert len(proxy.requests) <= nbytes / (8 * MIB) + len(state) / 50 + 3


@pytest.mark.parametrize("command", ["ls", "show"])
def test_looking_takes_at_most_four_requests(
    proxy: S3Proxy, place: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(place, 1.0)
    for url in (place, f"{place}/", f"{place}/.metadata"):
        proxy.clear()
        assert main([command, url, "--json"]) == 0
        assert "nested" in json.dumps(json.loads(capsys.readouterr().out)) or command == "show"
        assert len(proxy.requests) <= 4
        assert all(request.method in {"GET", "HEAD"} for request in proxy.requests)


def test_verify_reads_a_checkpoint_in_an_object_store(
    proxy: S3Proxy, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(place, 1.0, nbytes=20 * MIB)
    assert main(["verify", place]) == 0
    assert "sound" in capsys.readouterr().out
    assert _received(proxy) >= 20 * MIB


def test_a_missing_place_is_told_with_what_is_near(
    proxy: S3Proxy, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(place, 1.0)
    above = place.rpartition("/")[0]
    assert main(["ls", above]) == 0
    assert "step-1" in capsys.readouterr().out
    nowhere = f"{above}/nothing"
    assert main(["ls", nowhere]) != 0
    assert nowhere in capsys.readouterr().err
    with pytest.raises(holdfast.errors.WrongFolderError, match="step-1"):
        holdfast.load({"a": torch.zeros(1)}, checkpoint_id=above)


def test_a_save_takes_a_bounded_number_of_small_requests(proxy: S3Proxy, place: str) -> None:
    save(place, 1.0)
    proxy.clear()
    save(place, 2.0)
    assert len(proxy.requests) <= 20, [f"{each.method} {each.key} {each.query}" for each in proxy.requests]
