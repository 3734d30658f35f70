"""What several ranks need is read from storage once, and arrives bit for bit on all of them.

Ranks of one machine find it in the page cache. If they may not use that, they pass it on to each other, as
ranks of different machines do.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.cached import forget, read_from_disk
from tests.support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast as hf
from holdfast._io import cold_reads, local
from holdfast.extension import ZStandard

KIB = 1 << 10
RANKS = 8


def read_by_this_process() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def many() -> dict[str, Any]:
    torch.manual_seed(5)
    state: dict[str, Any] = {f"small.{n}": torch.randn(n, 7) for n in range(50)}
    state["large"] = torch.randn(1200, 1024)
    state["half"] = torch.randn(2600, 1024).bfloat16()  # longer than a strip, which a rank that casts reads
    state["seen sideways"] = torch.randn(300, 200)
    state["text"] = "x" * 100_000
    state["empty"] = torch.zeros(0, 3)
    return state


def blank(rank: int) -> dict[str, Any]:
    state = {key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for key, v in many().items()}
    # Each rank may want its values in a form of its own.
    if rank == 1:
        state["seen sideways"] = torch.zeros(200, 300).t()
    if rank == 2:
        state["half"] = torch.zeros(2600, 1024)
    return state


def is_same(state: dict[str, Any]) -> bool:
    return all(
        torch.equal(state[key].to(value.dtype), value)
        if isinstance(value, torch.Tensor)
        else state[key] == value
        for key, value in many().items()
    )


def load_past_the_page_cache(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    # Whatever is imported on the first use counts as read, too.
    hf.load(blank(rank), checkpoint_id=f"{folder}/zstd", cast=True, page_cache="bypass")
    hf.load(blank(rank), checkpoint_id=f"{folder}/torch", cast=True, page_cache="bypass")
    for name in ("plain", "zstd", "torch"):
        # How torch's items are read depends on where they go: only ranks that are alike read them together.
        state = blank(0 if name == "torch" else rank)
        before = read_by_this_process()
        hf.load(state, checkpoint_id=f"{folder}/{name}", cast=True, page_cache="bypass")
        found[name] = (read_by_this_process() - before, is_same(state))
    state = blank(rank)
    before = read_by_this_process()
    reader = hf.FileSystemReader(f"{folder}/plain", share_reads=rank != 3, page_cache="bypass")
    hf.load(state, storage_reader=reader, cast=True)
    found["one for itself"] = (read_by_this_process() - before, is_same(state))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    whole = many()["large"]
    weight = distribute_tensor(torch.zeros_like(whole), mesh, [Replicate(), Shard(0)])
    before = read_by_this_process()
    hf.load({"large": weight}, checkpoint_id=f"{folder}/plain", strict=False, page_cache="bypass")
    rows = whole.chunk(2)[mesh.get_coordinate()[1]]  # type: ignore[index]
    found["halves"] = (read_by_this_process() - before, torch.equal(weight.to_local(), rows))
    damaged = f"{folder}/damaged"
    try:
        hf.load(blank(rank), checkpoint_id=damaged, cast=True, page_cache="bypass")
    except hf.errors.ChecksumError as error:
        found["damaged"] = str(error)
    return found


@pytest.mark.slow
def test_each_byte_that_ranks_need_is_read_by_one_and_passed_on_to_all(tmp_path: Path) -> None:
    from tests.support.stock_torch import stock_save  # noqa: PLC0415 - ranks need it not

    state = many()
    hf.save(state, checkpoint_id=tmp_path / "plain")
    hf.save(state, checkpoint_id=tmp_path / "damaged")
    hf.save(state, storage_writer=hf.FileSystemWriter(tmp_path / "zstd", _extensions=[ZStandard()]))
    stock_save(state, checkpoint_id=tmp_path / "torch")
    file = next((tmp_path / "damaged").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 4] ^= 1
    file.write_bytes(content)
    outcome = run_ranks(load_past_the_page_cache, RANKS, str(tmp_path))
    assert [kind for kind, _ in outcome] == ["returned"] * RANKS, "\n".join(
        str(found) for _, found in outcome
    )
    results = [found for _, found in outcome]
    for name in ("plain", "zstd", "torch", "one for itself", "halves"):
        assert all(found[name][1] for found in results), name
    unique = {
        name: sum(os.path.getsize(file) for file in (tmp_path / name).iterdir())
        for name in ("plain", "zstd", "torch")
    }
    for name, nbytes in unique.items():
        assert sum(found[name][0] for found in results) < 1.1 * nbytes + 64 * KIB, name
    assert sum(found["one for itself"][0] for found in results) < 2.1 * unique["plain"] + 64 * KIB
    # A block that both halves have a part of is read for each of them, to be checked.
    assert sum(found["halves"][0] for found in results) < 1200 * 1024 * 4 + 2 * 1024 * KIB
    assert all("large" in found["damaged"] for found in results)


def bulk() -> torch.Tensor:
    return torch.arange(6 << 20).view(3072, 2048)


def load_through_the_page_cache(folder: str) -> dict[str, tuple[int, int, bool]]:
    """What each load has read from the disk and in all, and whether it is right."""
    rank, found = dist.get_rank(), {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # A device that is faster than copying is read past the page cache, but not what other ranks need, too.
    cold_reads._devices[os.stat(folder).st_dev] = cold_reads._Device(1 << 30, worked=1.0, passed=1.0)
    for name in ("whole", "columns", "hot without room", "cold without room"):
        placement = Shard(1) if name == "columns" else Replicate()
        target = distribute_tensor(torch.zeros_like(bulk()), mesh, [placement])
        if rank == 0 and "hot" not in name:
            forget(Path(folder))
        if "without room" in name:
            vars(local)["room"] = lambda: 0
        dist.barrier()
        on_disk, in_all = read_from_disk(), read_by_this_process()
        hf.load({"bulk": target}, checkpoint_id=folder)
        share = bulk().chunk(dist.get_world_size(), 1)[rank] if name == "columns" else bulk()
        is_right = torch.equal(target.to_local(), share)
        found[name] = (read_from_disk() - on_disk, read_by_this_process() - in_all, is_right)
        dist.barrier()
    return found


@pytest.mark.slow
def test_ranks_of_one_machine_read_each_byte_from_the_disk_once_and_send_none(tmp_path: Path) -> None:
    hf.save({"bulk": bulk()}, checkpoint_id=tmp_path)
    outcome = run_ranks(load_through_the_page_cache, 2, str(tmp_path))
    assert [kind for kind, _ in outcome] == ["returned"] * 2, outcome
    nbytes = bulk().nbytes
    for name in outcome[0][1]:
        on_disk, in_all, is_right = zip(*(found[name] for _, found in outcome), strict=True)
        assert all(is_right), name
        assert sum(on_disk) <= 1.1 * nbytes, name
        if name == "cold without room":
            assert sum(in_all) <= 1.1 * nbytes, name  # what one has read is sent to the other
        else:
            assert min(in_all) >= nbytes, name


def table() -> torch.Tensor:
    """Rows that are longer than a page and no part of a block; a block has parts of several."""
    return torch.arange(3 * 1201 * 3001).view(3, 1201, 3001)


def load_columns_past_the_page_cache(folder: str) -> dict[str, tuple[int, bool]]:
    """How many bytes each load has read, and whether it is right."""
    rank, world_size, found = dist.get_rank(), dist.get_world_size(), {}
    mesh = init_device_mesh("cpu", (world_size,))
    saved = distribute_tensor(table(), mesh, [Shard(1)])
    hf.save({"table": saved}, checkpoint_id=folder)
    for name, dimension, dtype in (
        ("columns", 2, torch.int64),
        ("cast", 2, torch.int32),
        ("planes", 0, None),
    ):
        target = distribute_tensor(torch.zeros_like(table(), dtype=dtype), mesh, [Shard(dimension)])
        before = read_by_this_process()
        hf.load({"table": target}, checkpoint_id=folder, page_cache="bypass", cast=True)
        expected = table().to(target.dtype).chunk(world_size, dimension)[rank]
        found[name] = (read_by_this_process() - before, torch.equal(target.to_local(), expected))
    return found


@pytest.mark.slow
def test_rows_of_which_each_rank_needs_other_columns_are_read_once(tmp_path: Path) -> None:
    outcome = run_ranks(load_columns_past_the_page_cache, 3, str(tmp_path))
    assert [kind for kind, _ in outcome] == ["returned"] * 3, outcome
    for name in outcome[0][1]:
        read, is_right = zip(*(found[name] for _, found in outcome), strict=True)
        assert all(is_right), name
        assert sum(read) <= 1.1 * table().nbytes, name
