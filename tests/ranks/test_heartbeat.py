"""The heartbeat of this process, over real sockets: probes see it, and strangers cannot use it."""

import os
import select
import socket
import sys

import pytest

from holdfast._ranks.heartbeat import HeartbeatProbe, heartbeat_port


def _is_alive() -> bool:
    probe = HeartbeatProbe("127.0.0.1", heartbeat_port())
    try:
        select.select([], [probe.connection], [], 20)
        probe.connected()
        select.select([probe.connection], [], [], 20)
        return probe.is_alive()
    finally:
        probe.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot drop what is sent")
def test_what_strangers_send_to_a_heartbeat_neither_arrives_nor_uses_files() -> None:
    assert _is_alive()
    before = len(os.listdir("/proc/self/fd"))
    strangers = [socket.create_connection(("127.0.0.1", heartbeat_port()), 20) for _ in range(20)]
    for stranger in strangers:
        stranger.sendall(b"\0" * 10)
    assert _is_alive()
    # The end of a connection comes after its data: the store would have taken those of the strangers by now.
    assert len(os.listdir("/proc/self/fd")) == before + len(strangers)
    for stranger in strangers:
        stranger.close()
