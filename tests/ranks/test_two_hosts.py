"""Ranks on two hosts that have nothing but a cable in common: network namespaces, each with its address."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.tools import need_command, need_root

pytestmark = pytest.mark.slow

_JOB = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import holdfast

rank, address, cable, folder = int(sys.argv[1]), *sys.argv[2:]
os.environ["GLOO_SOCKET_IFNAME"] = cable
dist.init_process_group("gloo", init_method=f"tcp://{address}:29511", rank=rank, world_size=2)
mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(12.0).view(4, 3)
holdfast.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=folder)
state = {"w": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)])}
holdfast.load(state, checkpoint_id=folder)
print("same" if torch.equal(state["w"].full_tensor(), whole) else "other", flush=True)
sys.stdin.readline()
try:
    holdfast.save(state, checkpoint_id=folder, peer_timeout=3)
except holdfast.CheckpointException as error:
    print(f"raised, naming {sorted(error.failures)}", flush=True)
os._exit(0)  # the group cannot say goodbye any more
"""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """Two namespaces, joined by a cable."""

    def __init__(self, addresses: tuple[str, str]) -> None:
        self.names = [f"hf{os.getpid()}{end}" for end in "ab"]
        for name in self.names:
            _ip("netns", "add", name)
        first, second = self.names
        _ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(self.names, addresses, strict=True):
            is_old = "." in address
            _ip("-n", name, "addr", "add", address, "dev", "cable", *([] if is_old else ["nodad"]))
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "cable", "up")

    def start(self, rank: int, address: str, folder: Path) -> "subprocess.Popen[str]":
        """A rank of the job on the host of its number."""
        return subprocess.Popen(
            [
                *("ip", "netns", "exec", self.names[rank], sys.executable, "-c", _JOB),
                *(str(rank), address, "cable", str(folder)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def cut(self) -> None:
        """Nothing goes through any more, and nobody is told."""
        for name in self.names:
            _ip("-n", name, "link", "set", "cable", "down")

    def remove(self) -> None:
        """Both are gone."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=60)


@pytest.fixture(params=[("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")], ids=["IPv4", "only IPv6"])
def hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Hosts, str]]:
    need_root("to make network namespaces")
    need_command("ip")
    first, second = request.param
    bits = 24 if "." in first else 64
    try:
        made = Hosts((f"{first}/{bits}", f"{second}/{bits}"))
    except OSError as error:
        pytest.fail(
            f"this machine does not let root make network namespaces: {error}. In a container, start it with "
            "--privileged.",
            pytrace=False,
        )
    yield made, first if "." in first else f"[{first}]"
    made.remove()


def test_ranks_on_two_hosts_save_and_load_and_name_each_other_when_the_cable_is_cut(
    hosts: tuple[Hosts, str], tmp_path: Path
) -> None:
    network, address = hosts
    ranks = [network.start(rank, address, tmp_path / "c") for rank in range(2)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "same\n"
        before = {file.name: file.read_bytes() for file in (tmp_path / "c").iterdir()}
        network.cut()
        said = [rank.communicate("go on\n", timeout=60)[0] for rank in ranks]
        assert said == ["raised, naming [1]\n", "raised, naming [0]\n"]
        assert {file.name: file.read_bytes() for file in (tmp_path / "c").iterdir()} == before
    finally:
        for rank in ranks:
            rank.kill()
