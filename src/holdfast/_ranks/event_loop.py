"""The one thread of a channel: it moves messages, answers for this rank, and notices silent peers."""

import contextlib
import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from holdfast._ranks.messages import Message, MessageKind
from holdfast._ranks.peer import LifeCheck, Peer
from holdfast._ranks.sockets import closed_in_children, open_pair

_LONGEST_NAP = 86400.0  # seconds; the system takes no number above some limit, and a timeout may be infinite

_WARN_AFTER = 60.0  # seconds of waiting for others until it is worth a line in the log


class ChannelEnd(Protocol):
    """What an event loop works for. The loop calls it in its own thread, with ``changed`` held."""

    def on_message(self, peer: Peer, message: Message) -> None:
        """A message has come in."""

    def on_lost(self, peer: Peer, reason: str) -> None:
        """The connection is closed or broken, and the peer is no longer served."""

    def on_silent(self, peer: Peer) -> None:
        """A watched peer gave no sign of life for its timeout. It is still served."""

    def on_broken(self, error: BaseException) -> None:
        """The loop has failed, which is a defect, and ends."""

    def watched(self) -> dict[Peer, float]:
        """Return the peers that somebody waits for, and how long each may be silent."""

    def shortest_timeout(self) -> float | None:
        """Return the shortest of those timeouts, None if nobody waits; it is called at every turn."""


class EventLoop:
    """The thread, and the calls that other threads make on it.

    Only this thread changes the state that messages change: other threads ask for it with :meth:`call` and
    wait on ``changed``. So an interrupt in their midst never leaves a half-made change behind.

    The thread sleeps until something comes in, is asked for, or is due. It is a daemon: a process may end
    without it.

    Attributes:
        changed: Notified after every change; its lock protects what other threads read.
        has_ended: Whether nothing is done any more; set with ``changed`` held.
    """

    def __init__(self, end: ChannelEnd, name: str) -> None:
        self.changed = threading.Condition()
        self.has_ended = False
        self._end = end
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._timer_numbers = itertools.count()
        self._selector = closed_in_children(selectors.DefaultSelector)
        self._wake_in, self._wake_out = open_pair()
        self._wake_in.settimeout(0)
        self._wake_out.settimeout(0)
        self.listen_to(self._wake_in, selectors.EVENT_READ, self._woken)
        self._owned: set[socket.socket] = {self._wake_in, self._wake_out}
        self._peers: set[Peer] = set()
        self._sending: set[Peer] = set()
        self._watching: set[Peer] = set()
        self._watched_at = 0.0
        self._now = time.monotonic()
        self._turns = 0
        self._closing_until: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # For any thread.

    def call(self, work: Callable[[], None]) -> None:
        """Have ``work`` done in the loop's thread, in the order of the calls. Never blocks, never raises."""
        self._calls.append(work)
        with contextlib.suppress(OSError):  # full: it is awake anyway; closed: nobody is left to do it
            self._wake_out.send(b"\0")

    def wait_until(self, is_over: Callable[[], bool], warn: Callable[[], None]) -> None:
        """Wait with ``changed`` held until ``is_over``; call ``warn`` once if that takes long."""
        if not self.changed.wait_for(is_over, _WARN_AFTER):
            warn()
            self.changed.wait_for(is_over)

    def settle(self) -> None:
        """Wait until the loop has handled everything that had come in before this call."""
        with self.changed:
            target = self._turns + 2
            self.call(lambda: self.call(lambda: None))
            self.changed.wait_for(lambda: self._turns >= target or self.is_gone())

    def flush(self, timeout: float) -> None:
        """Wait until the kernel has all that was posted, at most ``timeout`` seconds."""
        self.settle()
        with self.changed:
            self.changed.wait_for(lambda: not self._sending or self.is_gone(), min(timeout, _LONGEST_NAP))

    def is_gone(self) -> bool:
        """Return whether nothing is done any more in this process."""
        # In a forked child the thread is not alive, and never said that it ended.
        return self.has_ended or not self._thread.is_alive()

    def close(self, timeout: float) -> None:
        """Tell the peers, send what waits to be sent, and close everything within about ``timeout`` seconds.

        In a forked child, which does not have the thread, this does nothing.
        """
        if self._thread.is_alive():
            self.call(lambda: self._begin_to_close(timeout))
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout + 1)

    def own(self, connection: socket.socket) -> None:
        """Close a socket when the loop ends."""
        self._owned.add(connection)

    def disown(self, connection: socket.socket) -> None:
        """Leave the closing of a socket to somebody else."""
        self._owned.discard(connection)

    # Only for the loop's thread, or before it starts.

    def call_at(self, when: float, work: Callable[[float], None]) -> None:
        """Call ``work`` with the time as soon as the monotonic clock shows ``when``."""
        heapq.heappush(self._timers, (when, next(self._timer_numbers), work))

    def listen_to(self, connection: socket.socket, events: int, work: Callable[[float], None]) -> None:
        """Call ``work`` with the time whenever the socket is ready."""
        if connection in self._selector.get_map():
            self._selector.modify(connection, events, work)
        else:
            self._selector.register(connection, events, work)

    def forget(self, connection: socket.socket) -> None:
        """Listen to a socket no more."""
        if connection.fileno() >= 0 and connection in self._selector.get_map():
            self._selector.unregister(connection)

    def add(self, peer: Peer) -> None:
        """Serve a peer from now on."""
        self._peers.add(peer)
        peer.heard(time.monotonic())
        self.listen_to(peer.connection, selectors.EVENT_READ, lambda now: self._read(peer, now))

    def post(self, peer: Peer, message: Message) -> None:
        """Send a message."""
        if peer in self._peers:
            peer.sender.add(message)
            self._sending.add(peer)

    def drop(self, peer: Peer, reason: str) -> None:
        """Close the connection to a peer, and tell the channel's end why."""
        if peer in self._peers:
            self._peers.discard(peer)
            self._sending.discard(peer)
            self._watching.discard(peer)
            self._unwatch(peer)
            self.forget(peer.connection)
            peer.connection.close()
            self._end.on_lost(peer, reason)

    # The thread itself.

    def _begin_to_close(self, timeout: float) -> None:
        if self._closing_until is None:
            self._closing_until = time.monotonic() + timeout
            self.call_at(self._closing_until, lambda _now: None)
            for peer in self._peers:
                self.post(peer, Message(MessageKind.LEAVING))

    def _is_done(self) -> bool:
        until = self._closing_until
        return until is not None and (not self._sending or time.monotonic() > until)

    def _run(self) -> None:
        try:
            while not self._is_done():
                self._turn()
        except BaseException as error:  # noqa: BLE001 - whoever waits for this thread must not wait for ever
            with self.changed:
                self.has_ended = True
                self._end.on_broken(error)
        finally:
            with self.changed:
                self.has_ended = True
                self.changed.notify_all()
            for peer in self._peers:
                self._unwatch(peer)
                peer.connection.close()
            for owned in list(self._owned):
                owned.close()
            self._selector.close()

    def _turn(self) -> None:
        """Sleep until there is something to do, and do it."""
        nap = self._nap()
        events = self._selector.select(nap)
        before, now = self._now, time.monotonic()
        self._now = now
        with self.changed:
            if now - before > (nap or 0) + min(1.0, (self._end.shortest_timeout() or 0) / 4):
                # It was this process that was stopped or had no CPU. What the others sent meanwhile is
                # still to be read; their silence until now proves nothing.
                for peer in self._watching:
                    self._unwatch(peer)
                self._watching.clear()
            for key, _ in events:
                if key.fileobj.fileno() >= 0:  # type: ignore[union-attr]  # not closed by an earlier one
                    key.data(now)
            while self._calls:
                self._calls.popleft()()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2](now)
            self._watch(now)
            for peer in list(self._sending):
                self._send(peer)
            self._turns += 1
            self.changed.notify_all()

    def _nap(self) -> float | None:
        with self.changed:
            timeout = self._end.shortest_timeout()
        if self._calls:
            return 0
        until = [when for when, _, _ in self._timers[:1]]
        if timeout is not None:
            until.append(self._watch_at(timeout))
        return min(max(0.0, min(until) - time.monotonic()), _LONGEST_NAP) if until else None

    def _woken(self, _now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    def _read(self, peer: Peer, now: float) -> None:
        try:
            messages = peer.reader.receive(peer.connection)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self.drop(peer, "it died: its connection closed")
            return
        except (OSError, ValueError, MemoryError) as error:
            self.drop(peer, f"its connection broke: {error!r}")
            return
        peer.heard(now)
        for message in messages:
            if message.kind is MessageKind.PING:
                self.post(peer, Message(MessageKind.PONG))
            elif message.kind is MessageKind.LEAVING:
                self.drop(peer, "its process ended")
            elif message.kind is not MessageKind.PONG:
                try:
                    self._end.on_message(peer, message)
                except Exception as error:  # noqa: BLE001 - one rank's nonsense must not end the loop for all
                    self.drop(peer, f"what it sent cannot be understood: {error!r}")

    def _send(self, peer: Peer) -> None:
        try:
            peer.sender.send(peer.connection)
        except OSError:
            # What the peer sent before it closed is still to be read; reading meets the end by itself.
            self._sending.discard(peer)
            return
        if peer.sender:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
        else:
            events = selectors.EVENT_READ
            self._sending.discard(peer)
        key = self._selector.get_key(peer.connection)
        if key.events != events:
            self._selector.modify(peer.connection, events, key.data)

    # Which peers are alive.

    def _watch_at(self, timeout: float) -> float:
        return self._watched_at + timeout / 8

    def _watch(self, now: float) -> None:
        """Check the peers that somebody waits for; not at every turn, as there may be thousands."""
        timeout = self._end.shortest_timeout()
        if timeout is not None and now < self._watch_at(timeout):
            return
        self._watched_at = now
        watched = {peer: timeout for peer, timeout in self._end.watched().items() if peer in self._peers}
        for peer in self._watching - watched.keys():
            self._unwatch(peer)
        self._watching = set(watched)
        for peer, timeout in watched.items():
            check = peer.watch(timeout, now)
            if check is LifeCheck.PING:
                self.post(peer, Message(MessageKind.PING))
            elif check is LifeCheck.PROBE:
                self._probe(peer)
            elif check is LifeCheck.GIVE_UP:
                self._unwatch(peer)
                self._end.on_silent(peer)

    def _unwatch(self, peer: Peer) -> None:
        peer.unwatch()
        if peer.probe is not None:
            self.forget(peer.probe.connection)
            peer.probe.close()
            peer.probe = None

    def _probe(self, peer: Peer) -> None:
        def connected(_now: float) -> None:
            try:
                probe.connected()
            except OSError:
                self.forget(probe.connection)  # nobody is there; the peer keeps the probe: no second look
            else:
                self.listen_to(probe.connection, selectors.EVENT_READ, ended)

        def ended(now: float) -> None:
            if probe.is_alive():
                peer.heard(now)
            self.forget(probe.connection)
            probe.close()
            peer.probe = None

        try:
            probe = peer.open_probe()
        except OSError:
            return
        self.listen_to(probe.connection, selectors.EVENT_WRITE, connected)
