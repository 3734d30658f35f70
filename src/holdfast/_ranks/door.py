"""A listener that lets in whoever knows the secret, and looks at nothing else that a stranger says."""

import contextlib
import hmac
import selectors
import socket
from collections.abc import Callable

from holdfast._ranks.addresses import listen
from holdfast._ranks.loop import Loop

__all__ = ["TOKEN_SIZE", "Door"]

TOKEN_SIZE = 32
"""A visitor says the first half, and is answered with the second."""


class Door:
    """A listening socket, served by the thread of a loop.

    Args:
        loop: What serves it.
        token: The secret, both halves.
        size: How many bytes a visitor says; they begin with the first half of the token.
        welcome: What it is answered.
        admit: Called with the connection and all that the visitor said, in the loop's thread.

    Attributes:
        port: Where it listens.
    """

    def __init__(
        self,
        loop: Loop,
        token: bytes,
        size: int,
        welcome: bytes,
        admit: Callable[[socket.socket, bytes], None],
        *,
        backlog: int,
    ) -> None:
        self._loop = loop
        self._secret = token[: TOKEN_SIZE // 2]
        self._size = size
        self._welcome = welcome
        self._admit = admit
        self._listener = listen(backlog)
        self.port: int = self._listener.getsockname()[1]
        loop.own(self._listener)
        loop.listen_to(self._listener, selectors.EVENT_READ, self._knocked)

    def _knocked(self, _now: float) -> None:
        with contextlib.suppress(OSError):
            visitor = self._listener.accept()[0]
            visitor.settimeout(0)
            said = bytearray()
            self._loop.listen_to(visitor, selectors.EVENT_READ, lambda _: self._hear(visitor, said))

    def _hear(self, visitor: socket.socket, said: bytearray) -> None:
        try:
            more = visitor.recv(self._size - len(said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said.extend(more)
        if more and len(said) < self._size:
            return
        self._loop.forget(visitor)
        if len(said) < self._size or not hmac.compare_digest(said[: len(self._secret)], self._secret):
            visitor.close()
            return
        with contextlib.suppress(OSError):
            visitor.send(self._welcome)  # a few bytes into an empty buffer
        self._admit(visitor, bytes(said))
