"""What the writer process does: it receives requests, writes them in threads, and answers each."""

import contextlib
import gc
import logging
import mmap
import os
import pickle
import queue
import socket
import threading
import time
import traceback

from holdfast._io.progress import ProgressTracker
from holdfast._version import __version__
from holdfast._writer_process import process_messages as messages
from holdfast._writer_process.process_messages import ProcessMessage
from holdfast._writer_process.returned_state import ReturnedState, WriteAnswer
from holdfast._writer_process.save_request import RequestHeader, current_folder, unpack, unpack_header
from holdfast._writer_process.shared_progress import ProgressSlot, SharedProgress
from holdfast.errors import RemoteError, StorageError, portable_failure

_THREADS = 4
"""How many requests are written at the same time, each within the memory budget of its storage writer."""


class WriteCancelledError(Exception):
    """The trainer has cancelled the request."""


def serve(link: socket.socket, progress: SharedProgress) -> None:
    """Carry out requests until the other end of the link is gone; then end the process at once."""
    server = _Server(link, progress)
    for number in range(_THREADS):
        threading.Thread(target=server.run, name=f"holdfast-writer-{number}", daemon=True).start()
    server.answer(messages.READY, 0, pickle.dumps((messages.PROTOCOL, __version__)))
    while (message := messages.receive(link)) is not None:
        server.accept(message)
    # Files that are half written belong to no checkpoint, and nobody waits for them.
    os._exit(0)


class _Server:
    def __init__(self, link: socket.socket, progress: SharedProgress) -> None:
        self._requests: queue.Queue[tuple[ProcessMessage, RequestHeader, memoryview]] = queue.Queue()
        self._link = link
        self._progress = progress
        self._sending = threading.Lock()

    def answer(self, kind: int, number: int, body: bytes) -> None:
        """Send a message to the trainer; ends the process if the trainer is gone."""
        with self._sending:
            try:
                messages.send(self._link, kind, number, [body])
            except OSError:
                os._exit(0)

    def accept(self, message: ProcessMessage) -> None:
        """Queue a request, in the working folder of the trainer: relative paths must mean the same here."""
        header, rest = unpack_header(message.body)
        if header.folder is not None and header.folder != current_folder():
            self._requests.join()  # earlier requests need the folder that this process is in
            with contextlib.suppress(OSError):  # then the request itself fails
                os.chdir(header.folder)
        self._requests.put((message, header, rest))

    def run(self) -> None:
        """Carry out requests, one after the other, for ever."""
        while True:
            self.answer(*self._answer_to(*self._requests.get()))
            self._requests.task_done()
            # Reference cycles that a failed write has left may hold the mapping of the staged memory.
            gc.collect()

    def _answer_to(
        self, message: ProcessMessage, header: RequestHeader, rest: memoryview
    ) -> tuple[int, int, bytes]:
        try:
            slot = self._progress.slot(message.number)
            return messages.DONE, message.number, _write(header, rest, message.fds[0], slot)
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            return messages.FAILED, message.number, _described_somehow(error)
        finally:
            for fd in message.fds:
                os.close(fd)


def _write(header: RequestHeader, rest: memoryview, fd: int, slot: ProgressSlot) -> bytes:
    logging.getLogger("holdfast").setLevel(header.log_level)
    if header.folder not in (None, current_folder()):
        raise StorageError(f"the writer process cannot enter the folder of the trainer, {header.folder}")

    def check_cancelled() -> None:
        if slot.is_cancelled:
            raise WriteCancelledError("the write was cancelled")

    def report(nbytes_done: int) -> None:
        check_cancelled()
        slot.nbytes_done = nbytes_done

    def staged_memory(nbytes: int) -> mmap.mmap:
        # Mapped for this request only, so that the trainer can give the memory back to the system. Mapping
        # it takes 0.07 s of 0.4 s for each GiB. It is copy-on-write: nobody else sees changes made here.
        return mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)

    check_cancelled()
    tracker = ProgressTracker(report)
    request = unpack(header, rest, staged_memory, tracker)
    request.planner.check_cancelled = check_cancelled
    returned = ReturnedState(request.writer)
    began = time.perf_counter()
    results = request.writer.write_data(request.plan, request.planner).wait()
    seconds = time.perf_counter() - began
    check_cancelled()
    return returned.pickled(WriteAnswer(results, seconds, tracker.events))


def _described_somehow(error: BaseException) -> bytes:
    try:
        return _described(error)
    except Exception as second:  # noqa: BLE001 - whatever the error does when it is looked at, the trainer waits
        name = type(error).__name__
        return _described(StorageError(f"a {name}, which cannot be described: {type(second).__name__}"))


def _described(error: BaseException) -> bytes:
    """Pickle an error, and a description of it in case the trainer does not have its class."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    portable, _ = portable_failure((error, traceback.extract_tb(error.__traceback__)))
    return pickle.dumps((pickle.dumps(portable), RemoteError.from_exception(error), trace))
