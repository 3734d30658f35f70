"""One rank's connection to another, and how long the other has been silent."""

import contextlib
import enum
import math
import socket

from holdfast._ranks.frames import FrameReader, FrameSender
from holdfast._ranks.pulse import Probe

__all__ = ["Link", "Silence"]


class Silence(enum.Enum):
    """What the silence of a watched peer calls for."""

    NOTHING = enum.auto()
    ASK = enum.auto()  # for a sign of life
    PROBE = enum.auto()  # look at its pulse
    GIVE_UP = enum.auto()


class Link:
    """A connection to a peer; used by the thread of the loop alone.

    A peer is watched while somebody waits for it. It is asked for a sign of life every quarter of its
    timeout, so that silence means something; while nobody waits, nothing is sent.

    Attributes:
        connection: The socket; does not block.
        rank: The peer's rank.
        sender: What waits to be sent.
        reader: What is coming in.
        probe: The look at the peer's pulse that is under way, or that found nobody.
    """

    def __init__(self, connection: socket.socket, rank: int, pulse: int) -> None:
        connection.settimeout(0)
        with contextlib.suppress(OSError):
            # Small messages go out at once; a host that vanished is noticed also while nobody waits.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.connection = connection
        self.rank = rank
        self.sender = FrameSender()
        self.reader = FrameReader()
        self.probe: Probe | None = None
        self._pulse = pulse
        self._heard = -math.inf
        self._asked = -math.inf
        self._watched_since: float | None = None

    def heard(self, now: float) -> None:
        """Note a sign of life."""
        self._heard = now

    def unwatch(self) -> None:
        """Nobody waits for this peer any more; or: its silence until now does not count."""
        self._watched_since = None

    def watch(self, timeout: float, now: float) -> Silence:
        """Somebody waits for this peer: what is to be done about its silence."""
        if self._watched_since is None:
            self._watched_since = now
        silence = now - max(self._heard, self._watched_since)
        if silence >= timeout:
            return Silence.GIVE_UP
        if silence >= timeout / 2 and self._pulse and self.probe is None:
            return Silence.PROBE
        if silence >= timeout / 4 and now - self._asked >= timeout / 4:
            self._asked = now
            return Silence.ASK
        return Silence.NOTHING

    def open_probe(self) -> Probe:
        """Begin to look at the peer's pulse. Raises OSError if there is none to be felt."""
        self.probe = Probe(self.connection.getpeername()[0], self._pulse)
        return self.probe
