"""What the benchmark compares with and what it limits: peers, control groups, the page cache, ranks."""

import contextlib
import itertools
import os
import subprocess
from pathlib import Path

import pytest
import torch
from benchmarks import cgroups, neighbour, peers, restarts
from benchmarks.apart import run_apart
from benchmarks.case import SIDES, Job, SkippedError
from benchmarks.results import rows_of
from benchmarks.turns import read_through
from benchmarks.worker import run_case

MIB = 1 << 20


@pytest.mark.parametrize("name", [*SIDES, peers.UNCHECKED, "torch.save"])
@pytest.mark.filterwarnings("ignore")
def test_every_side_fills_the_tensors_that_are_there(name: str, tmp_path: Path) -> None:
    side = peers.side_called(name)
    target = {"x": torch.zeros(3)}
    kept = target["x"]
    side.save({"x": torch.arange(3.0)}, tmp_path / "saved")
    side.load(target, tmp_path / "saved")
    assert kept.tolist() == [0, 1, 2]


def test_what_others_write_is_synced_with_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    peers.side_called("torch.save").save({"x": torch.ones(3)}, tmp_path / "saved")
    assert synced == [str(tmp_path / "saved/state.pt"), str(tmp_path / "saved"), str(tmp_path)]


def test_a_peer_that_is_not_installed_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "nobody", ("no_such_package", peers.PEERS["orbax"][1]))
    assert peers.why_absent("nobody", tmp_path) == "not installed"


# Control groups, in a tree of plain files


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own").write_text("3:cpu,blkio:/job\n2:memory:/\n0::/job/rank\n")
    monkeypatch.setattr(cgroups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(cgroups, "_MOUNTS", tmp_path / "mounts")
    (tmp_path / "mounts").mkdir()
    return tmp_path / "mounts"


def test_a_slow_volume_of_the_older_version(mounts: Path, tmp_path: Path) -> None:
    (mounts / "blkio/job").mkdir(parents=True)
    device = f"{os.major(tmp_path.stat().st_dev)}:{os.minor(tmp_path.stat().st_dev)}"
    with cgroups.slow_volume(tmp_path, 5000) as volume:
        (group,) = (mounts / "blkio/job").glob("holdfast-bench-*")
        for way in ("read", "write"):
            assert (group / f"blkio.throttle.{way}_bps_device").read_text() == f"{device} 5000"
        assert (group / "cgroup.procs").read_text() == str(os.getpid())
        (group / "blkio.throttle.io_service_bytes").write_text(
            f"1:1 Read 7\n{device} Read 11\n{device} Write 22\n{device} Total 33\nTotal 40\n"
        )
        assert (volume.moved("read"), volume.moved("write")) == (11, 22)
    assert (mounts / "blkio/job/cgroup.procs").read_text() == str(os.getpid())


def test_a_slow_volume_of_the_newer_version(mounts: Path, tmp_path: Path) -> None:
    (mounts / "job/rank").mkdir(parents=True)
    device = f"{os.major(tmp_path.stat().st_dev)}:{os.minor(tmp_path.stat().st_dev)}"
    with cgroups.slow_volume(tmp_path, 5000) as volume:
        (group,) = (mounts / "job").glob("holdfast-bench-*")
        assert (mounts / "job/cgroup.subtree_control").read_text() == "+io"
        assert (group / "io.max").read_text() == f"{device} rbps=5000 wbps=5000"
        (group / "io.stat").write_text(f"1:1 rbytes=7\n{device} rbytes=11 wbytes=22 rios=1\n")
        assert (volume.moved("read"), volume.moved("write")) == (11, 22)


def test_without_permission_a_limit_is_a_case_skipped(mounts: Path) -> None:
    # There is no folder of this process's group to make another in.
    (mounts / "memory").write_text("")
    with pytest.raises(SkippedError, match="no control group"), cgroups.limited_memory(5):
        pass


def test_the_page_cache_tells_which_pages_it_has(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for number in range(2):
        (files / str(number)).write_bytes(bytes(MIB))
    assert neighbour.cached_share(files) == 1
    with (files / "0").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert neighbour.cached_share(files) == pytest.approx(0.5, abs=0.05)


# Everybody


def test_a_peer_that_fails_is_absent_and_takes_no_figures_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def run(side: str, operation: str, folder: Path, nbytes: int) -> float:
        calls.append(side)
        folder.mkdir(exist_ok=True)
        if side == "torch.save" and operation == "cold" and calls.count("torch.save") > 5:
            raise subprocess.CalledProcessError(3, ["python", side, operation, str(folder), str(nbytes)])
        return 0.5 if side == peers.UNCHECKED else 1.0

    monkeypatch.setattr(restarts, "run_apart", run)
    monkeypatch.setattr(restarts, "drop_caches", lambda: None)
    monkeypatch.setattr(restarts, "why_absent", lambda side, _: None if side == "torch.save" else "no")
    (case,) = [case for case in restarts.restart_cases(0.001) if case.name == "everybody"]
    job = Job(tmp_path, 3, lambda _line: None)
    samples = case.run(job)
    assert [row.quantity for row in rows_of(case.quantities, samples)] == list(samples)
    assert all(set(of_sides) == set(SIDES) for of_sides in samples.values())
    assert samples["hot load, holdfast not checking"] == {"holdfast": [0.5] * 3, "torch": [1.0] * 3}
    assert job.absent["torch.save"] == "a process of it ended with status 3"
    assert job.absent["orbax"] == "no"
    assert list(tmp_path.iterdir()) == []


def test_pages_that_somebody_else_pushed_out_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drops = itertools.count()
    monkeypatch.setattr(neighbour, "_cache_drops", lambda: next(drops))
    monkeypatch.setattr(neighbour, "limited_memory", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(neighbour, "run_apart", lambda _side, _save, folder, _nbytes: folder.mkdir())
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: read_through(tmp_path / "files"))
    (case,) = neighbour.neighbour_cases(0.001)
    with pytest.raises(SkippedError, match="somebody else"):
        case.run(Job(tmp_path, 1, lambda _line: None))


# Processes


@pytest.mark.slow
def test_a_save_and_a_load_in_processes_of_their_own(tmp_path: Path) -> None:
    for operation in ("save", "load"):
        assert run_apart("torch.save", operation, tmp_path / "saved", MIB) > 0


# Stock torch warns of its own deprecated calls.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["ranks-reshard", "neighbour"])
def test_a_case_of_several_processes_measures_both_sides(name: str, tmp_path: Path) -> None:
    found = run_case(name, 0.0005, 1, tmp_path)
    if name != "neighbour" or "skipped" not in found:  # not everybody may make control groups
        samples = found["samples"]
        assert isinstance(samples, dict)
        assert all(len(of_sides[side]) == 1 for of_sides in samples.values() for side in SIDES)


@pytest.mark.slow
def test_requests_to_an_object_store_are_counted_and_nothing_is_left(tmp_path: Path) -> None:
    found = run_case("object-store-slice", 0.01, 1, tmp_path)
    samples, absent = found["samples"], found["absent"]
    assert isinstance(samples, dict)
    assert isinstance(absent, dict)
    # Stock torch needs s3fs, which is not always there.
    assert all(("torch" in of_sides) != ("torch" in absent) for of_sides in samples.values())
    assert samples["requests"]["holdfast"][0] >= 2
    assert samples["bytes received per byte needed"]["holdfast"][0] >= 1
    assert list(tmp_path.iterdir()) == []
