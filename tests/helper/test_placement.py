"""Where the helper runs: on the CPUs that a virtual disk interrupts, if those are few and known."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helper.support import PlacedWriter, save_remotely

from holdfast._helper import stop_helper
from holdfast._helper.placement import interrupted_cpus
from holdfast.extension import ZStandard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of interrupts")

INTERRUPTS = """\
           CPU0       CPU1       CPU2       CPU3
 35:          0          1          0          0 PCI-MSIX-0000:00:02.0   0-edge      virtio1-config
 36:          0    6424535          0          0 PCI-MSIX-0000:00:02.0   1-edge      virtio1-req.0
 37:          0          0        251          0 PCI-MSIX-0000:00:03.0   1-edge      virtio11-req.0
 38:          0          0        251          0 PCI-MSIX-0000:00:04.0   1-edge      virtio2-request
 39:          0          0        251          0 PCI-MSIX-0000:00:05.0   1-edge      nvme0q1
NMI:          0          0          0          0   Non-maskable interrupts
ERR:          0
"""
AFFINITY = {35: "0", 36: "1", 37: "2", 38: "0-1,3", 39: "2"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A system with the interrupts above; which disk the files of the test are on is up to the test."""
    root = tmp_path / "system"
    for number, cpus in AFFINITY.items():
        folder = root / "proc/irq" / str(number)
        folder.mkdir(parents=True)
        (folder / "effective_affinity_list").write_text(cpus + "\n")
    (root / "proc/interrupts").write_text(INTERRUPTS)
    (root / "sys/dev/block").mkdir(parents=True)
    return root


def _disk(root: Path, name: str, driver: str) -> Path:
    disk, device = root / "sys/block" / name, root / "sys/devices/pci0000:00/0000:00:02.0" / driver
    disk.mkdir(parents=True)
    device.mkdir(parents=True)
    (disk / "device").symlink_to(device)
    return disk


def _partition(disk: Path) -> Path:
    part = disk / f"{disk.name}1"
    part.mkdir()
    (part / "partition").write_text("1\n")
    return part


def _volume(root: Path, *parts: Path) -> Path:
    volume = root / "sys/block/dm-0"
    (volume / "slaves").mkdir(parents=True)
    for part in parts:
        (volume / "slaves" / part.name).symlink_to(part)
    return volume


def _holds_the_files(root: Path, block: Path) -> None:
    device = root.stat().st_dev
    (root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").symlink_to(block)


def test_a_virtual_disk_is_known_by_its_queues(root: Path) -> None:
    _holds_the_files(root, _disk(root, "vda", "virtio1"))
    assert interrupted_cpus(root, root=root) == {1}
    assert interrupted_cpus(root / "not" / "yet", root=root) == {1}


def test_partitions_controllers_and_volumes_lead_to_their_disks(root: Path) -> None:
    behind_a_controller = _disk(root, "sda", "virtio2/host0/target0:0:0/0:0:0:0")
    _holds_the_files(root, _volume(root, _partition(_disk(root, "vda", "virtio1")), behind_a_controller))
    assert interrupted_cpus(root, root=root) == {0, 1, 3}


def test_other_disks_and_places_without_one_have_none(root: Path) -> None:
    assert interrupted_cpus(root, root=root) == set()
    _holds_the_files(root, _disk(root, "nvme0n1", "nvme0"))
    assert interrupted_cpus(root, root=root) == set()
    assert interrupted_cpus("/proc") == set()


@pytest.fixture
def _helper_is_stopped() -> Iterator[None]:
    yield
    stop_helper()


@pytest.mark.slow
@pytest.mark.usefixtures("_helper_is_stopped")
def test_a_write_keeps_to_these_cpus_and_the_helper_does_not(tmp_path: Path) -> None:
    everywhere = os.sched_getaffinity(0)
    near = interrupted_cpus(tmp_path) & everywhere or everywhere

    def placed(**options: Any) -> list[set[int]]:
        writer = PlacedWriter(tmp_path / "c", **options)
        save_remotely({"w": torch.ones(10)}, writer)
        return writer.cpus

    for _ in range(2):
        assert placed() == [everywhere, near]
    assert placed(_extensions=[ZStandard()]) == [everywhere, everywhere]
    assert placed(thread_count=len(everywhere) + 1) == [everywhere, everywhere]
