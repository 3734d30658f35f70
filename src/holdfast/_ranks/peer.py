"""One rank's connection to another for messages, and how long the other has been silent."""

import contextlib
import enum
import math
import socket

from holdfast._ranks.heartbeat import HeartbeatProbe
from holdfast._ranks.messages import MessageReader, MessageSender


class LifeCheck(enum.Enum):
    """What must be done to find out whether a silent peer is alive."""

    NOTHING = enum.auto()
    PING = enum.auto()  # ask it
    PROBE = enum.auto()  # look at its heartbeat
    GIVE_UP = enum.auto()  # it has been silent for too long


class Peer:
    """The rank at the other end of a connection; used by the thread of the event loop only.

    A peer is watched while somebody waits for it. It is asked for a sign of life every quarter of the
    timeout; while nobody waits, nothing is sent.

    Attributes:
        rank: The peer's rank.
        connection: The socket; it does not block.
        sender: The messages that wait to be sent.
        reader: The message that is coming in.
        probe: The look at the peer's heartbeat that is under way, or that could not reach it.
    """

    def __init__(self, rank: int, connection: socket.socket, heartbeat_port: int) -> None:
        connection.settimeout(0)
        with contextlib.suppress(OSError):
            # Small messages go out at once; a host that vanished is noticed also while nobody waits.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.rank = rank
        self.connection = connection
        self.sender = MessageSender()
        self.reader = MessageReader()
        self.probe: HeartbeatProbe | None = None
        self._heartbeat_port = heartbeat_port
        self._heard = -math.inf
        self._asked = -math.inf
        self._watched_since: float | None = None

    def heard(self, now: float) -> None:
        """Note a sign of life."""
        self._heard = now

    def unwatch(self) -> None:
        """Stop watching; when it is watched again, its silence counts from then."""
        self._watched_since = None

    def watch(self, timeout: float, now: float) -> LifeCheck:
        """Return what must be done about the silence of a peer that may be silent for ``timeout`` seconds."""
        if self._watched_since is None:
            self._watched_since = now
        silence = now - max(self._heard, self._watched_since)
        if silence >= timeout:
            return LifeCheck.GIVE_UP
        if silence >= timeout / 2 and self._heartbeat_port and self.probe is None:
            return LifeCheck.PROBE
        if silence >= timeout / 4 and now - self._asked >= timeout / 4:
            self._asked = now
            return LifeCheck.PING
        return LifeCheck.NOTHING

    def open_probe(self) -> HeartbeatProbe:
        """Begin to look at the peer's heartbeat. Raises OSError if it cannot be reached."""
        self.probe = HeartbeatProbe(self.connection.getpeername()[0], self._heartbeat_port)
        return self.probe
