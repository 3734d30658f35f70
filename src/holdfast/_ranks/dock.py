"""Where the lanes into a rank arrive, and wait to be picked up."""

import socket
import struct
from collections.abc import Callable

from holdfast._ranks.addresses import connect
from holdfast._ranks.door import Door
from holdfast._ranks.loop import Loop

__all__ = ["Dock", "set_out"]

_HELLO = struct.Struct("!16s16s")  # the first half of the token, the lane's key
_LOOK_AROUND = 0.1


class Dock:
    """The connections that have arrived at this rank, by the keys of their lanes.

    Attributes:
        port: Where they arrive.
    """

    def __init__(self, loop: Loop, token: bytes) -> None:
        self._loop = loop
        self._arrived: dict[bytes, socket.socket] = {}
        self.port = Door(loop, token, _HELLO.size, token[16:], self._admit, backlog=16).port

    def _admit(self, connection: socket.socket, said: bytes) -> None:
        _, key = _HELLO.unpack(said)
        self._arrived[key] = connection
        self._loop.own(connection)

    def wait_for(self, key: bytes, check: Callable[[], None]) -> socket.socket:
        """The connection with that key. ``check`` is called while it does not come, and may raise."""
        while True:
            with self._loop.changed:
                self._loop.changed.wait_for(lambda: key in self._arrived, _LOOK_AROUND)
                connection = self._arrived.pop(key, None)
                if connection is not None:
                    self._loop.disown(connection)
                    return connection
            check()


def set_out(
    hosts: list[str], port: int, token: bytes, key: bytes, check: Callable[[], None]
) -> socket.socket:
    """A connection to another rank's dock. Raises ConnectionError, or what ``check`` raises."""
    return connect(hosts, port, _HELLO.pack(token[:16], key), token[16:], 16, check)[0]
