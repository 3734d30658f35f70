"""The one thread of a channel: it moves frames, answers for this rank, and notices peers that fell silent."""

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from holdfast._ranks.frames import Frame, Kind
from holdfast._ranks.link import Link, Silence

__all__ = ["Loop", "Owner"]


class Owner(Protocol):
    """Whom a loop works for. All of it is called in the loop's thread, with ``changed`` held."""

    def received(self, link: Link, frame: Frame) -> None:
        """A frame has come in."""

    def lost(self, link: Link, reason: str) -> None:
        """The connection is closed or broken; the link is gone."""

    def silent(self, link: Link) -> None:
        """A watched peer gave no sign of life for its timeout. The link stays."""

    def watched(self) -> dict[Link, float]:
        """The peers that somebody waits for, and how long each may be silent."""

    def patience(self) -> float | None:
        """The shortest of those timeouts; None if nobody waits. Asked much more often."""

    def alarm(self) -> float | None:
        """When the owner wants to be called next, on the monotonic clock."""

    def rang(self, now: float) -> None:
        """The time of the alarm has come."""

    def broken(self, error: BaseException) -> None:
        """The loop has failed and ends. Never expected."""


class Loop:
    """The thread, and the calls that other threads make on it.

    State that frames change is changed in this thread only: other threads ask for it with :meth:`call`
    and wait on ``changed``. So an interrupt in their midst never leaves a half-made change behind.

    The thread sleeps until something comes in, is asked for, or is due. It is a daemon: a process may end
    without it.

    Attributes:
        changed: Notified after every change; its lock protects what other threads read.
    """

    def __init__(self, owner: Owner, name: str) -> None:
        self.changed = threading.Condition()
        self._owner = owner
        self._process = os.getpid()
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.settimeout(0)
        self._wake_out.settimeout(0)
        self.listen_to(self._wake_in, selectors.EVENT_READ, self._woken)
        self._owned: set[socket.socket] = set()
        self._links: set[Link] = set()
        self._sending: set[Link] = set()
        self._watching: set[Link] = set()
        self._watched_at = 0.0
        self._now = time.monotonic()
        self._passes = 0
        self._closing: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def call(self, work: Callable[[], None]) -> None:
        """Have ``work`` done in the loop's thread, in the order of calls. Never blocks, never raises."""
        self._calls.append(work)
        with contextlib.suppress(OSError):  # full: it is awake anyway; closed: nobody is left to do it
            self._wake_out.send(b"\0")

    def settle(self) -> None:
        """Wait until everything that had come in before this call has been looked at."""
        with self.changed:
            target = self._passes + 2
            self.call(lambda: self.call(lambda: None))
            self.changed.wait_for(lambda: self._passes >= target or not self._thread.is_alive())

    def flush(self, patience: float) -> None:
        """Wait until all that was posted is with the kernel; ``patience`` is for a peer that has stopped."""
        self.settle()
        with self.changed:
            self.changed.wait_for(lambda: not self._sending or not self._thread.is_alive(), patience)

    def add(self, link: Link) -> None:
        """Serve a link from now on. Only in the loop's thread, or before it starts."""
        self._links.add(link)
        link.heard(time.monotonic())
        self.listen_to(link.connection, selectors.EVENT_READ, lambda now: self._read(link, now))

    def listen_to(self, connection: socket.socket, events: int, do: Callable[[float], None]) -> None:
        """Call ``do`` with the time when the socket is ready. In the loop's thread, or before it starts."""
        if connection in self._selector.get_map():
            self._selector.modify(connection, events, do)
        else:
            self._selector.register(connection, events, do)

    def own(self, connection: socket.socket) -> None:
        """Close a socket when the loop ends."""
        self._owned.add(connection)

    def disown(self, connection: socket.socket) -> None:
        """Leave a socket to somebody else."""
        self._owned.discard(connection)

    def forget(self, connection: socket.socket) -> None:
        """Listen to a socket no more. Only in the loop's thread."""
        if connection.fileno() >= 0 and connection in self._selector.get_map():
            self._selector.unregister(connection)

    def post(self, link: Link, frame: Frame) -> None:
        """Send a frame. Only in the loop's thread."""
        if link in self._links:
            link.sender.add(frame)
            self._sending.add(link)

    def close(self, patience: float) -> None:
        """Tell the peers, send what waits to be sent, close everything; wait for it at most ``patience``.

        In a forked child, which has no such thread, it does nothing: the connections are its parent's.
        """
        if os.getpid() != self._process or not self._thread.is_alive():
            return
        self.call(lambda: self._begin_to_close(patience))
        if threading.current_thread() is not self._thread:
            self._thread.join(patience + 1)

    def _begin_to_close(self, patience: float) -> None:
        if self._closing is None:
            self._closing = time.monotonic() + patience
            for link in self._links:
                self.post(link, Frame(Kind.LEAVING))

    def _run(self) -> None:
        try:
            while not self._is_done():
                self._turn()
        except BaseException as error:  # noqa: BLE001 - whoever waits for this thread must not wait for ever
            with self.changed:
                self._owner.broken(error)
                self.changed.notify_all()
        finally:
            for link in list(self._links):
                self._unwatch(link)
                link.connection.close()
            for owned in self._owned:
                owned.close()
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()
            with self.changed:
                self._passes += 3
                self.changed.notify_all()

    def _is_done(self) -> bool:
        if self._closing is None:
            return False
        return time.monotonic() > self._closing or not self._sending

    def _turn(self) -> None:
        """Sleep until there is something to do, and do it."""
        nap = self._nap()
        events = self._selector.select(nap)
        before, now = self._now, time.monotonic()
        self._now = now
        with self.changed:
            if now - before > (nap or 0) + min(1.0, (self._owner.patience() or 0) / 4):
                # It was this process that was stopped or starved. What the others said meanwhile is
                # still to be read; their silence until now proves nothing.
                for link in self._watching:
                    self._unwatch(link)
                self._watching.clear()
            for key, _ in events:
                if key.fileobj.fileno() >= 0:  # type: ignore[union-attr]  # not closed by an earlier one
                    key.data(now)
            while self._calls:
                self._calls.popleft()()
            alarm = self._owner.alarm()
            if alarm is not None and now >= alarm:
                self._owner.rang(now)
            self._watch(now)
            for link in list(self._sending):
                self._send(link)
            self._passes += 1
            self.changed.notify_all()

    def _nap(self) -> float | None:
        with self.changed:
            patience, alarm = self._owner.patience(), self._owner.alarm()
        if self._calls:
            return 0
        until = [] if patience is None else [self._watch_at(patience) - time.monotonic()]
        if alarm is not None:
            until.append(alarm - time.monotonic())
        if self._closing is not None:
            until.append(self._closing - time.monotonic())
        return max(0.0, min(until)) if until else None

    def _woken(self, _now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    def _read(self, link: Link, now: float) -> None:
        try:
            frames = link.reader.receive(link.connection)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self.drop(link, "it died: its connection closed")
            return
        except OSError as error:
            self.drop(link, f"its connection broke: {error.strerror}")
            return
        link.heard(now)
        for frame in frames:
            if frame.kind is Kind.PING:
                self.post(link, Frame(Kind.PONG))
            elif frame.kind is Kind.LEAVING:
                self.drop(link, "its process ended")
            elif frame.kind is not Kind.PONG:
                self._take(link, frame)

    def _take(self, link: Link, frame: Frame) -> None:
        try:
            self._owner.received(link, frame)
        except Exception as error:  # noqa: BLE001 - one rank's nonsense must not end the loop for all
            self.drop(link, f"what it sent cannot be understood: {error!r}")

    def _send(self, link: Link) -> None:
        try:
            link.sender.send(link.connection)
        except OSError:
            # What the peer said before it closed is still to be read; reading meets the end by itself.
            self._sending.discard(link)
            return
        if link.sender:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
        else:
            events = selectors.EVENT_READ
            self._sending.discard(link)
        key = self._selector.get_key(link.connection)
        if key.events != events:
            self._selector.modify(link.connection, events, key.data)

    def drop(self, link: Link, reason: str) -> None:
        """Close a link and tell the owner why. Only in the loop's thread."""
        if link in self._links:
            self._links.discard(link)
            self._sending.discard(link)
            self._watching.discard(link)
            self._unwatch(link)
            self.forget(link.connection)
            link.connection.close()
            self._owner.lost(link, reason)

    def _watch_at(self, patience: float) -> float:
        return self._watched_at + patience / 8

    def _watch(self, now: float) -> None:
        """Look at those whom somebody waits for; not at every turn, as there may be thousands."""
        patience = self._owner.patience()
        if patience is not None and now < self._watch_at(patience):
            return
        self._watched_at = now
        watched = {link: timeout for link, timeout in self._owner.watched().items() if link in self._links}
        for link in self._watching - watched.keys():
            self._unwatch(link)
        self._watching = set(watched)
        for link, timeout in watched.items():
            todo = link.watch(timeout, now)
            if todo is Silence.ASK:
                self.post(link, Frame(Kind.PING))
            elif todo is Silence.PROBE:
                self._look_at_pulse(link)
            elif todo is Silence.GIVE_UP:
                self._unwatch(link)
                self._owner.silent(link)

    def _unwatch(self, link: Link) -> None:
        link.unwatch()
        if link.probe is not None:
            self.forget(link.probe.connection)
            link.probe.close()
            link.probe = None

    def _look_at_pulse(self, link: Link) -> None:
        def connected(_now: float) -> None:
            try:
                probe.connected()
            except OSError:
                self.forget(probe.connection)  # nobody is there; the link keeps the probe: no second look
            else:
                self.listen_to(probe.connection, selectors.EVENT_READ, ended)

        def ended(now: float) -> None:
            if probe.beats():
                link.heard(now)
            self.forget(probe.connection)
            probe.close()
            link.probe = None

        try:
            probe = link.open_probe()
        except OSError:
            return
        self.listen_to(probe.connection, selectors.EVENT_WRITE, connected)
