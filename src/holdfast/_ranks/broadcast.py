"""Bulk bytes from one rank to several: each rank receives and sends every byte at most once.

The ranks of a broadcast form a ring, and each has one connection to the next. A buffer goes from its source
around the ring in pieces; each rank passes on what it has while the rest is still coming. So the time does
not grow with the number of ranks. The coordinator takes no part unless it is one of them; it only watches
them, and tells all if one is lost.

Measured between processes of one host with 2 cores, in runs beside gloo's own broadcast: 1.6 to 3.1 GB/s
into each of 2 ranks where gloo has 2.0 to 2.3, 0.4 to 1.1 into each of 4 where it has 0.6 to 0.9. But
gloo's timeout cannot tell a source that reads from slow storage from one that is dead.
"""

import hashlib
import select
import socket
import time
from collections.abc import Callable, Sequence

from typing_extensions import Self

from holdfast.errors import StorageError

_PIECE = 1 << 20
_CHECK_INTERVAL = 0.1  # seconds without progress after which a rank checks whether another one is lost
_BROKEN_CHECKS = 100


def broadcast_key(session: int, members: Sequence[int], count: int, to: int) -> bytes:
    """Return the key of the connection of one broadcast into one rank; no other connection has it."""
    return (
        session.to_bytes(8, "big") + hashlib.sha256(repr((tuple(members), count, to)).encode()).digest()[:8]
    )


def session_of_key(key: bytes) -> int:
    """Return the session of a broadcast."""
    return int.from_bytes(key[:8], "big")


class Broadcast:
    """This rank's place in the ring.

    Attributes:
        members: The ranks of the broadcast, in the order of the ring.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        incoming: socket.socket,
        outgoing: socket.socket,
        check: Callable[[], None],
    ) -> None:
        self.members = tuple(members)
        self._place = self.members.index(rank)
        self._incoming = incoming
        self._outgoing = outgoing
        self._check = check
        incoming.settimeout(0)
        outgoing.settimeout(0)

    def send_to_all(self, buffer: memoryview, source: int) -> None:
        """Fill ``buffer`` on every rank of the broadcast with what it holds on rank ``source``.

        Every one of them must call it, in the same order, with buffers of the same size; contiguous, and
        writable except at the source. It takes no memory besides, and waits for a source that is slow.

        Raises:
            CheckpointException: A rank is lost, or the exchange has failed for another reason.
            StorageError: The connection to a neighbour broke, though no rank is known to be lost.
        """
        view = memoryview(buffer).cast("B")
        distance = (self._place - self.members.index(source)) % len(self.members)
        received = len(view) if distance == 0 else 0
        sent = 0 if distance < len(self.members) - 1 else len(view)
        while received < len(view) or sent < len(view):
            moved_in = self._receive(view[received : received + _PIECE])
            received += moved_in
            moved_out = self._send(view[sent : min(received, sent + _PIECE)])
            sent += moved_out
            if not moved_in and not moved_out:
                self._wait(may_send=sent < received, may_receive=received < len(view))

    def _receive(self, room: memoryview) -> int:
        if not room:
            return 0
        try:
            taken = self._incoming.recv_into(room)
        except BlockingIOError:
            return 0
        except OSError:
            taken = 0
        if not taken:
            self._broken(-1)
        return taken

    def _send(self, piece: memoryview) -> int:
        if not piece:
            return 0
        try:
            return self._outgoing.send(piece)
        except BlockingIOError:
            return 0
        except OSError:
            self._broken(1)
            return 0

    def _wait(self, *, may_send: bool, may_receive: bool) -> None:
        waiting = select.poll()  # select() knows no file numbers above 1024
        if may_receive:
            waiting.register(self._incoming, select.POLLIN)
        if may_send:
            waiting.register(self._outgoing, select.POLLOUT)
        if not waiting.poll(_CHECK_INTERVAL * 1000):
            self._check()

    def _broken(self, step: int) -> None:
        """Raise for the loss of a neighbour; the coordinator knows the reason, or will in a moment."""
        for _ in range(_BROKEN_CHECKS):
            self._check()
            time.sleep(_CHECK_INTERVAL)
        neighbour = self.members[(self._place + step) % len(self.members)]
        raise StorageError(f"the connection to rank {neighbour} broke during a broadcast", rank=neighbour)

    def close(self) -> None:
        """Close both connections."""
        self._incoming.close()
        self._outgoing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
