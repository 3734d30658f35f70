"""The listening socket of a rank, and the connection to that of another: both ends must prove themselves.

A new connection has a few seconds to prove that it knows the secret, and only a bounded number of connections
may be waiting for that. So strangers cannot use up the files that this process may open.
"""

import contextlib
import math
import secrets
import selectors
import socket
import time
from collections.abc import Callable

from holdfast._ranks import authentication
from holdfast._ranks.addresses import Address, hosts_to_try
from holdfast._ranks.authentication import ANSWER_SIZE, CHALLENGE_SIZE, REPLY_SIZE, ConnectionRequest
from holdfast._ranks.broadcast import session_of_key
from holdfast._ranks.event_loop import EventLoop
from holdfast._ranks.heartbeat import heartbeat_port
from holdfast._ranks.sockets import closed_in_children, listen, open_connection
from holdfast.errors import CheckpointError

MOST_UNPROVED = 32
"""How many connections may be open that have not proved themselves, besides those of ranks that must come."""

_PROOF_TIMEOUT = 5.0  # seconds that a new connection has to prove itself
_REST = 1.0  # seconds without accepting when the process has no file left for a connection
_CONNECT_TIMEOUT = 5.0  # for each host; one that does not answer must not use up the timeout of the group
_REPLY_TIMEOUT = 60.0  # a thousand ranks connect at once, and the coordinator may be busy
_ATTEMPTS = 5  # a listener that is overrun by strangers may close the connection of a rank
_CHECK_INTERVAL = 0.1


class Listener:
    """A listening socket that the thread of an event loop serves.

    Args:
        loop: The event loop.
        secret: The secret of the group.
        admit: Called in the loop's thread with each connection for messages that has proved itself.
        expected: How many ranks have not connected yet.

    Attributes:
        port: Where it listens.
    """

    def __init__(
        self,
        loop: EventLoop,
        secret: bytes,
        admit: Callable[[socket.socket, ConnectionRequest], None],
        *,
        expected: Callable[[], int] = lambda: 0,
    ) -> None:
        self._loop = loop
        self._secret = secret
        self._admit = admit
        self._expected = expected
        self._heartbeat_port = heartbeat_port()
        self._unproved: dict[socket.socket, None] = {}  # the oldest first
        self._for_broadcasts: dict[bytes, socket.socket] = {}
        self._sessions: set[int] = set()
        self._latest = -1
        self._socket = listen()
        self.port: int = self._socket.getsockname()[1]
        loop.own(self._socket)
        loop.listen_to(self._socket, selectors.EVENT_READ, self._accept)

    def begin_session(self, number: int) -> None:
        """Keep connections for the broadcasts of a session. Only for the loop's thread."""
        self._latest = max(number, self._latest)
        self._sessions.add(number)

    def end_session(self, number: int) -> None:
        """Close those that nobody took, and those that come later. Only for the loop's thread."""
        self._sessions.discard(number)
        for key in [key for key in self._for_broadcasts if session_of_key(key) == number]:
            self._close_broadcast(key)

    def has_begun(self, number: int) -> bool:
        """Return whether this rank has begun a session. Only for the loop's thread."""
        return number <= self._latest

    def is_over(self, number: int) -> bool:
        """Return whether this rank has left a session. Only for the loop's thread."""
        return number <= self._latest and number not in self._sessions

    def _close_broadcast(self, key: bytes) -> None:
        if key in self._for_broadcasts:
            self._close(self._for_broadcasts.pop(key))

    def _close(self, connection: socket.socket) -> None:
        self._loop.disown(connection)
        self._loop.forget(connection)
        connection.close()

    def wait_for_broadcast(self, key: bytes, check: Callable[[], None]) -> socket.socket:
        """Return the connection for a broadcast. ``check`` is called while it has not come, and may raise."""
        while True:
            with self._loop.changed:
                self._loop.changed.wait_for(lambda: key in self._for_broadcasts, _CHECK_INTERVAL)
                connection = self._for_broadcasts.pop(key, None)
                if connection is not None:
                    self._loop.disown(connection)
                    return connection
            check()

    def _accept(self, now: float) -> None:
        try:
            connection = closed_in_children(lambda: self._socket.accept()[0])
        except (BlockingIOError, ConnectionError):
            return  # the other end has gone again
        except OSError:  # this process may open no more files
            if self._unproved:
                self._close_oldest()
            else:
                self._loop.forget(self._socket)
                self._loop.call_at(now + _REST, self._accept_again)
            return
        if len(self._unproved) >= MOST_UNPROVED + self._expected():
            self._close_oldest()
        connection.settimeout(0)
        self._loop.own(connection)
        self._unproved[connection] = None
        challenge, received = secrets.token_bytes(CHALLENGE_SIZE), bytearray()
        with contextlib.suppress(OSError):
            connection.send(challenge)  # a few bytes into an empty buffer
        self._loop.listen_to(
            connection, selectors.EVENT_READ, lambda _now: self._receive(connection, challenge, received)
        )
        self._loop.call_at(now + _PROOF_TIMEOUT, lambda _now: self._close_unproved(connection))

    def _accept_again(self, _now: float) -> None:
        self._loop.listen_to(self._socket, selectors.EVENT_READ, self._accept)

    def _close_oldest(self) -> None:
        self._close_unproved(next(iter(self._unproved)))

    def _close_unproved(self, connection: socket.socket) -> None:
        if connection in self._unproved:
            del self._unproved[connection]
            self._close(connection)

    def _receive(self, connection: socket.socket, challenge: bytes, received: bytearray) -> None:
        try:
            more = connection.recv(ANSWER_SIZE - len(received))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        received += more
        if more and len(received) < ANSWER_SIZE:
            return
        answered = bytes(received)
        request = authentication.check_answer(self._secret, challenge, answered) if more else None
        if request is None:
            self._close_unproved(connection)
            return
        del self._unproved[connection]
        self._loop.forget(connection)
        with contextlib.suppress(OSError):
            connection.send(authentication.reply(self._secret, challenge, answered, self._heartbeat_port))
        if request.broadcast == ConnectionRequest(0).broadcast:
            self._loop.disown(connection)
            self._admit(connection, request)
        else:
            self._close_broadcast(request.broadcast)
            self._for_broadcasts[request.broadcast] = connection
            if self.is_over(session_of_key(request.broadcast)):
                self._close_broadcast(request.broadcast)


def connect(
    address: Address,
    secret: bytes,
    request: ConnectionRequest,
    check: Callable[[], None] = lambda: None,
    until: float = math.inf,
) -> tuple[socket.socket, int]:
    """Connect to another rank's listener; return the connection and the port of that rank's heartbeat.

    The listener has proved that it knows the secret when this returns. ``check`` is called while nothing
    happens, and may raise. It is given up when the monotonic clock shows ``until``.

    Raises:
        ConnectionError: The rank cannot be reached under any of its addresses; the message gives the reasons.
    """
    hosts = hosts_to_try(address)
    reasons: dict[str, object] = {}
    for attempt in range(_ATTEMPTS):
        if attempt:
            check()
            time.sleep(_CHECK_INTERVAL * 2**attempt)
        for host in hosts:
            try:
                return _connect_to(host, address.port, secret, request, check, until)
            except OSError as error:  # noqa: PERF203 - each host may fail in its own way
                if isinstance(error, CheckpointError):  # of check
                    raise
                reasons[host] = error
        hosts = [host for host in hosts if isinstance(reasons[host], ConnectionResetError | BrokenPipeError)]
        if not hosts:
            break
    told = "; ".join(f"{host}: {reason}" for host, reason in reasons.items())
    raise ConnectionError(f"port {address.port} cannot be reached: {told}")


def _connect_to(
    host: str, port: int, secret: bytes, request: ConnectionRequest, check: Callable[[], None], until: float
) -> tuple[socket.socket, int]:
    remaining = until - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("there was no time left to try it")
    connection = open_connection(host, port, min(_CONNECT_TIMEOUT, remaining))
    try:
        until = min(until, time.monotonic() + _REPLY_TIMEOUT)
        challenge = _receive_exactly(connection, CHALLENGE_SIZE, until, check)
        answered = authentication.answer(secret, challenge, request)
        connection.sendall(answered)
        replied = _receive_exactly(connection, REPLY_SIZE, until, check)
    except BaseException:
        connection.close()
        raise
    heartbeat = authentication.check_reply(secret, challenge, answered, replied)
    if heartbeat is None:
        connection.close()
        raise ConnectionRefusedError("something else listens there")
    return connection, heartbeat


def _receive_exactly(connection: socket.socket, size: int, until: float, check: Callable[[], None]) -> bytes:
    received = b""
    connection.settimeout(_CHECK_INTERVAL)
    while len(received) < size:
        try:
            more = connection.recv(size - len(received))
        except TimeoutError:
            check()
            if time.monotonic() > until:
                raise
            continue
        if not more:
            raise ConnectionResetError("it closed the connection before it had proved who it is")
        received += more
    return received
