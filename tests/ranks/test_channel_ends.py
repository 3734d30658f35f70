"""The two ends of a channel, both in this process: what one does when the other, or its own thread, fails."""

import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast._ranks.addresses import Address, address_of_port
from holdfast._ranks.authentication import ConnectionRequest
from holdfast._ranks.broadcast import broadcast_key
from holdfast._ranks.coordinator import CoordinatorEnd
from holdfast._ranks.failures import SessionFailedError
from holdfast._ranks.ledger import Label
from holdfast._ranks.listener import connect
from holdfast._ranks.worker import WorkerEnd

LABEL = Label("save", "plan", 5.0)


@pytest.fixture
def coordinator() -> Iterator[CoordinatorEnd]:
    made = CoordinatorEnd(0, 2)
    yield made
    made.close()


@pytest.fixture
def worker(coordinator: CoordinatorEnd) -> Iterator[WorkerEnd]:
    address = address_of_port(coordinator.listener.port, is_master=True)
    made = WorkerEnd(1, 0, address, coordinator.secret)
    yield made
    made.close()


def test_failures_travel_while_the_program_is_being_imported() -> None:
    program = "import tests.ranks.importing_program"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.count("ProgramError: on purpose") == 3


def test_a_worker_whose_thread_has_ended_does_not_let_the_others_wait(
    coordinator: CoordinatorEnd, worker: WorkerEnd
) -> None:
    def fail() -> None:
        raise MemoryError("on purpose")

    worker._loop.call(fail)
    worker._loop.close(5)
    worker.begin(0)
    with pytest.raises(SessionFailedError, match="its channel broke: MemoryError"):
        worker.check(0, "plan")
    with pytest.raises(SessionFailedError):
        coordinator.gather(0, 0, LABEL, None)


def test_nobody_waits_for_a_thread_that_is_about_to_end(worker: WorkerEnd) -> None:
    loop = worker._loop
    release = threading.Event()

    class Closing:
        """Keeps the thread from its end once it has done its last turn."""

        def close(self) -> None:
            release.wait(60)

    loop._owned.add(Closing())  # type: ignore[arg-type]
    loop.call(lambda: loop._begin_to_close(0.0))
    with loop.changed:
        assert loop.changed.wait_for(lambda: loop.has_ended, 60)
    settling = threading.Thread(target=loop.settle, daemon=True)
    settling.start()
    settling.join(20)
    assert not settling.is_alive()
    release.set()


@pytest.mark.parametrize("timeout", [math.inf, 1e9])
def test_a_rank_may_be_silent_for_ever(
    coordinator: CoordinatorEnd, worker: WorkerEnd, timeout: float
) -> None:
    label = Label("save", "plan", timeout)
    coordinator.expect(0, 0, label)
    coordinator._loop.settle()
    worker.deliver(0, 0, label, [b"x"], None)
    assert coordinator.gather(0, 0, label, None) == {1: [b"x"]}
    worker.end(0, timeout)


def test_connections_for_broadcasts_that_nobody_takes_are_closed(
    coordinator: CoordinatorEnd, worker: WorkerEnd
) -> None:
    address = address_of_port(coordinator.listener.port, is_master=True)

    def broadcast(session: int) -> socket.socket:
        request = ConnectionRequest(1, broadcast=broadcast_key(session, (0, 1), 1, 0))
        connection = connect(address, coordinator.secret, request)[0]
        connection.settimeout(20)
        return connection

    coordinator.begin(3)
    replaced, kept, early = broadcast(3), broadcast(3), broadcast(4)
    assert replaced.recv(1) == b""
    coordinator.end(3, 1.0)
    assert kept.recv(1) == b""
    late = broadcast(3)
    assert late.recv(1) == b""
    coordinator.begin(4)
    taken = coordinator.listener.wait_for_broadcast(broadcast_key(4, (0, 1), 1, 0), lambda: None)
    taken.sendall(b"x")
    assert early.recv(1) == b"x"
    for connection in (replaced, kept, late, early, taken):
        connection.close()


def test_a_coordinator_that_does_not_answer_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("elsewhere", ("localhost", "127.0.0.2"), silent.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="cannot be reached"):
            connect(address, b"secret", ConnectionRequest(1), until=began + 0.5)
        assert time.monotonic() - began < 5
