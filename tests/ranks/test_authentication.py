"""Who may connect to a rank, over real sockets: only those who prove that they know the secret."""

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast._ranks.addresses import Address, address_of_port, hosts_to_try
from holdfast._ranks.authentication import (
    ANSWER_SIZE,
    CHALLENGE_SIZE,
    REPLY_SIZE,
    ConnectionRequest,
    answer,
    new_secret,
)
from holdfast._ranks.event_loop import EventLoop
from holdfast._ranks.listener import MOST_UNPROVED, Listener, connect
from holdfast._ranks.messages import Message, MessageKind

SECRET = new_secret()
REQUEST = ConnectionRequest(3, 4567)


class Rank:
    """A rank that only listens, and keeps the connections that were admitted."""

    def __init__(self) -> None:
        self.admitted: list[tuple[socket.socket, ConnectionRequest]] = []
        self.loop = EventLoop(self, "test")
        self.listener = Listener(
            self.loop, SECRET, lambda connection, request: self.admitted.append((connection, request))
        )
        self.address = address_of_port(self.listener.port, is_master=False)
        self.loop.start()

    def visit(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.listener.port), timeout=20)

    def on_message(self, *_: Any) -> None: ...
    def on_lost(self, *_: Any) -> None: ...
    def on_silent(self, *_: Any) -> None: ...
    def on_broken(self, error: BaseException) -> None: ...
    def watched(self) -> dict[Any, float]:
        return {}

    def shortest_timeout(self) -> None:
        return None


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.loop.close(1.0)
    for connection, _ in made.admitted:
        connection.close()


class Trap:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def read(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes, or fewer if the other end closes the connection before."""
    got = b""
    while len(got) < size:
        try:
            more = connection.recv(size - len(got))
        except ConnectionResetError:
            more = b""
        if not more:
            break
        got += more
    return got


def is_refused(connection: socket.socket) -> bool:
    """Wait for the end of the connection; nothing must come before it."""
    return read(connection, 1) == b""


def serve_once(serve: Callable[[socket.socket], None]) -> tuple[Address, threading.Thread]:
    """Have one connection to a listener of this test served in a thread, and closed."""
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listening, listening.accept()[0] as connection:
            serve(connection)

    thread = threading.Thread(target=run)
    thread.start()
    return address_of_port(listening.getsockname()[1], is_master=False)._replace(hosts=()), thread


def test_ranks_that_know_the_secret_are_connected(rank: Rank) -> None:
    connection, _ = connect(rank.address, SECRET, REQUEST)
    with connection:
        rank.loop.settle()
        ((theirs, request),) = rank.admitted
        assert request == REQUEST
        theirs.send(b"hello")
        assert read(connection, 5) == b"hello"


def test_a_client_that_does_not_know_the_secret_is_refused(rank: Rank) -> None:
    with rank.visit() as impostor:
        challenge = read(impostor, CHALLENGE_SIZE)
        impostor.sendall(answer(new_secret(), challenge, REQUEST))
        assert is_refused(impostor)
    assert rank.admitted == []


def test_a_recorded_answer_is_refused_on_another_connection(rank: Rank) -> None:
    recorded = []

    def relay(connection: socket.socket) -> None:
        with rank.visit() as onward:
            connection.sendall(read(onward, CHALLENGE_SIZE))
            recorded.append(read(connection, ANSWER_SIZE))
            onward.sendall(recorded[0])
            connection.sendall(read(onward, REPLY_SIZE))

    address, thread = serve_once(relay)
    connect(address, SECRET, REQUEST)[0].close()
    thread.join()
    rank.loop.settle()
    assert len(rank.admitted) == 1
    with rank.visit() as impostor:
        read(impostor, CHALLENGE_SIZE)
        impostor.sendall(recorded[0])
        assert is_refused(impostor)
    assert len(rank.admitted) == 1


@pytest.mark.parametrize("kind", ["random", "reflected", "pickle"])
def test_a_listener_that_does_not_know_the_secret_learns_nothing_and_is_left(
    kind: str, tmp_path: Path
) -> None:
    heard = []
    trap = pickle.dumps(Trap(tmp_path / "trapped"))

    def pretend(connection: socket.socket) -> None:
        connection.sendall(os.urandom(CHALLENGE_SIZE))
        heard.append(read(connection, ANSWER_SIZE))
        replies = {"random": os.urandom(REPLY_SIZE), "reflected": bytes(2) + heard[0][-32:], "pickle": trap}
        connection.sendall(replies[kind].ljust(REPLY_SIZE, b"."))
        heard.append(read(connection, 1))

    address, thread = serve_once(pretend)
    with pytest.raises(ConnectionError, match="something else listens there"):
        connect(address, SECRET, REQUEST)
    thread.join()
    assert len(heard[0]) == ANSWER_SIZE
    assert heard[1] == b""
    assert not any(SECRET[at : at + 4] in heard[0] for at in range(len(SECRET) - 3))
    assert not (tmp_path / "trapped").exists()


def test_what_comes_before_the_proof_is_not_unpickled(rank: Rank, tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "trapped"))
    message = b"".join(Message(MessageKind.PART, 0, 0, [trap, trap]).pieces())
    for garbage in (b"GET / HTTP/1.1\r\n" * 20, bytes(500), os.urandom(500), trap.ljust(500), message * 5):
        with rank.visit() as stranger:
            read(stranger, CHALLENGE_SIZE)
            stranger.sendall(garbage)
            assert is_refused(stranger)
    rank.loop.settle()
    assert rank.admitted == []
    assert not (tmp_path / "trapped").exists()


def test_idle_connections_are_bounded_and_never_shut_a_rank_out(rank: Rank) -> None:
    before = len(os.listdir("/proc/self/fd"))
    idle = [rank.visit() for _ in range(3 * MOST_UNPROVED)]
    for stranger in idle:
        assert len(read(stranger, CHALLENGE_SIZE)) == CHALLENGE_SIZE
    rank.loop.settle()
    open_here = len(os.listdir("/proc/self/fd")) - before - len(idle)
    assert open_here <= MOST_UNPROVED
    connection, _ = connect(rank.address, SECRET, REQUEST)
    rank.loop.settle()
    assert len(rank.admitted) == 1
    assert is_refused(idle[0])
    for made in (connection, *idle):
        made.close()


@pytest.mark.slow
def test_a_connection_that_says_nothing_is_closed_after_seconds(rank: Rank) -> None:
    began = time.monotonic()
    with rank.visit() as idle, rank.visit() as slow:
        slow.sendall(b"x")
        for stranger in (idle, slow):
            read(stranger, CHALLENGE_SIZE)
            assert is_refused(stranger)
    assert time.monotonic() - began < 20


def test_a_rank_without_a_file_left_goes_on_when_there_is_one_again(rank: Rank) -> None:
    """It neither ends its thread nor keeps it busy."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with rank.visit() as waiting, socket.socket() as late:
        read(waiting, CHALLENGE_SIZE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, hard))
        try:
            late.connect(("127.0.0.1", rank.listener.port))
            assert is_refused(waiting)  # it made room for the next one
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        late.settimeout(20)
        assert len(read(late, CHALLENGE_SIZE)) == CHALLENGE_SIZE


def test_addresses_of_this_host_are_not_tried_for_another_machine() -> None:
    here = address_of_port(1, is_master=False)
    assert hosts_to_try(here)[0] == "127.0.0.1"
    elsewhere = Address("another machine", ("127.0.0.1", *here.hosts, "192.0.2.7"), 1)
    tried = hosts_to_try(elsewhere)
    assert "127.0.0.1" not in tried
    assert tried[-1] == "192.0.2.7"
