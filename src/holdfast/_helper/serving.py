"""Owns the helper's work: requests come in, threads carry them out, answers go back as they are ready."""

import contextlib
import gc
import logging
import mmap
import os
import pickle
import queue
import socket
import threading
import traceback
from collections.abc import Iterator
from typing import Any

from holdfast._helper.frames import DONE, FAILED, PROTOCOL, READY, Frame, receive, send
from holdfast._helper.parcel import unpack
from holdfast._helper.slate import Slate, Slot
from holdfast._helper.watch import tracker_of
from holdfast._version import __version__
from holdfast.errors import RemoteError, portable_failure

__all__ = ["serve"]

_AT_ONCE = 4
"""Requests that are carried out at the same time, each within the memory budget of its writer."""


def serve(link: socket.socket, slate: Slate) -> None:
    """Carry out requests until the other end of the link is gone; then end the process, whatever it does."""
    work = _Work(link, slate)
    for number in range(_AT_ONCE):
        threading.Thread(target=work.run, name=f"holdfast-writer-{number}", daemon=True).start()
    work.answer(READY, 0, pickle.dumps({"protocol": PROTOCOL, "version": __version__, "pid": os.getpid()}))
    while (frame := receive(link)) is not None:
        work.requests.put(frame)
    # Files that are half written belong to no checkpoint, and nobody waits for them any more.
    os._exit(0)


class _Work:
    def __init__(self, link: socket.socket, slate: Slate) -> None:
        self.requests: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._link = link
        self._slate = slate
        self._sending = threading.Lock()
        self._folder = _WorkingFolder()

    def answer(self, kind: int, number: int, body: bytes) -> None:
        with self._sending:
            try:
                send(self._link, kind, number, [body])
            except OSError:
                os._exit(0)

    def run(self) -> None:
        while True:
            self.answer(*self._carry_out(self.requests.get()))
            # What a failed write left in cycles may hold the mapping of the staged memory.
            gc.collect()

    def _carry_out(self, frame: Frame) -> tuple[int, int, bytes]:
        try:
            with self._folder.of(frame):
                return DONE, frame.number, _write(frame, self._slate.slot(frame.number))
        except BaseException as error:  # noqa: BLE001 - the trainer decides what to do about it
            return FAILED, frame.number, _described(error)
        finally:
            for fd in frame.fds:
                os.close(fd)


def _write(frame: Frame, slot: Slot) -> bytes:
    nbytes = int.from_bytes(frame.body[:8], "little")
    facts: dict[str, Any] = pickle.loads(frame.body[8 : 8 + nbytes])
    logging.getLogger("holdfast").setLevel(facts["log_level"])
    tracker = tracker_of(slot)
    tracker.advance(0)

    def staged_memory(size: int) -> mmap.mmap:
        # Mapped for this write only: a trainer that lets go of the memory gets it back. Mapping it again
        # takes 0.07 s of 0.4 s a GiB. What is written into a copy-on-write mapping is seen nowhere else.
        return mmap.mmap(frame.fds[0], size, access=mmap.ACCESS_COPY)

    plan, writer, handed = unpack(memoryview(frame.body)[8 + nbytes :], staged_memory)
    before = _attributes(writer)
    results = writer.write_data(plan, handed).wait()
    tracker.advance(0)
    after = _attributes(writer)
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    return pickle.dumps((results, changed), pickle.HIGHEST_PROTOCOL)


def _attributes(writer: Any) -> dict[str, bytes]:
    """What a writer has noted, as pickles: a write may note what the commit needs."""
    noted = {}
    for name, value in getattr(writer, "__dict__", {}).items():
        with contextlib.suppress(Exception):  # what cannot be pickled is this process's alone
            noted[name] = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return noted


def _described(error: BaseException) -> bytes:
    """An error for the trainer, which may not have its class."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    portable, _ = portable_failure((error, traceback.extract_tb(error.__traceback__)))
    return pickle.dumps((pickle.dumps(portable), RemoteError.from_exception(error), trace))


class _WorkingFolder:
    """Relative paths mean what they mean to the trainer, which may have changed its folder since."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0

    @contextlib.contextmanager
    def of(self, frame: Frame) -> Iterator[None]:
        """Be in the folder that the request came from; others that are elsewhere wait, or are waited for."""
        nbytes = int.from_bytes(frame.body[:8], "little")
        wanted = pickle.loads(frame.body[8 : 8 + nbytes])["folder"]
        with self._changed:
            while self._users and wanted != _current_folder():
                self._changed.wait()
            if wanted is not None and wanted != _current_folder():
                os.chdir(wanted)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
