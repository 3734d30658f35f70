"""Owns one object of an object store: uploaded in parts while it is written, read in ranges."""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import PreconditionError
from typing_extensions import Buffer

from holdfast._format.item_table import Payload
from holdfast._io.blocks import BlockSums
from holdfast._io.bucket_errors import persist, translated
from holdfast._io.file_access import FileReader, FileWriter, check_payloads
from holdfast._io.local_buffers import BUFFER_NBYTES
from holdfast._io.progress import STRIDE
from holdfast._io.ring import BufferRing, FullBuffer
from holdfast._io.streams import byte_view
from holdfast._transfer_record import RETRY
from holdfast.errors import ChecksumError, StorageError

if TYPE_CHECKING:
    from obstore import GetOptions  # there are no types at run time

logger = logging.getLogger(__name__)

PARTS_IN_FLIGHT = 10
"""How many parts of an object are sent at the same time."""
SPARE_BUFFERS = 2
"""Buffers of an upload besides those being sent: one is filled while another waits to be sent."""
READ_NBYTES = 16 << 20
"""About how many bytes one request asks for: reads of one and a half times as many are several."""

_PIECE_NBYTES = 1 << 20  # of an answer on its way to its place
_SMALL, _WINDOW = 64 << 10, 256 << 10  # an object of a state is read in three small pieces
_MOST_WINDOWS = 16
_MOST_PARTS = 9_000  # S3 and GCS allow 10,000; a hint may be a little too small


class BucketWriter(FileWriter):
    """Uploads one object. It appears when it is complete; until then there is nothing of it.

    An object smaller than a buffer is one request. A larger one is uploaded in parts, from the memory of a
    ring of buffers. Progress is told of bytes that the store has confirmed.

    Args:
        path: Its URL.
        client: obstore's store.
        name: The object.
        nbytes_hint: About how large it will be.
        discard: Removes what is left of an upload that failed.
    """

    def __init__(
        self, path: str, client: Any, name: str, nbytes_hint: int, discard: Callable[[], None]
    ) -> None:
        super().__init__(path)
        self._client = client
        self._name = name
        self._remove = discard
        # A part of a very large object is several buffers, since the number of parts is limited.
        self._buffers_of_part = 1 + nbytes_hint // (_MOST_PARTS * BUFFER_NBYTES)
        self._parts = max(2, PARTS_IN_FLIGHT // self._buffers_of_part)
        count = self._parts * self._buffers_of_part + SPARE_BUFFERS
        self._ring = BufferRing(self._upload, unit=1, count=count)
        self._confirmed: SimpleQueue[int] = SimpleQueue()
        self._reported = 0
        self._is_begun = False

    def _append(self, view: memoryview, sums: BlockSums | None) -> None:
        self._ring.append(view, sums)

    def _upload(self, buffers: Iterator[FullBuffer]) -> None:
        """Send full buffers as the parts of one object."""
        self._is_begun = True
        with translated(self.path):
            obstore.put(
                self._client,
                self._name,
                (self._watched(buffer) for buffer in buffers),
                use_multipart=True,
                chunk_size=self._buffers_of_part * BUFFER_NBYTES,
                max_concurrency=self._parts,
            )

    def _watched(self, buffer: FullBuffer) -> memoryview:
        """The bytes, to be sent from where they are. The buffer is free when obstore lets go of the view."""

        def confirm(release: Callable[[], None] = buffer.release, nbytes: int = len(buffer.view)) -> None:
            self._confirmed.put(nbytes)
            release()

        weakref.finalize(buffer.view, confirm).atexit = False
        return buffer.view

    def _report(self, nbytes: int) -> None:  # noqa: ARG002 - what was taken is not confirmed yet
        confirmed = 0
        try:
            while True:
                confirmed += self._confirmed.get_nowait()
        except Empty:
            self._tell(min(confirmed, self.position - self._reported))

    def _tell(self, nbytes: int) -> None:
        self._reported += nbytes
        # Also of nothing: the tracker may want to stop the transfer.
        for at in range(0, max(nbytes, 1), STRIDE):
            self.progress.advance(min(STRIDE, nbytes - at))

    def _complete(self) -> None:
        rest, offset = self._ring.finish()
        if offset == 0:
            self._is_begun = True
            with translated(self.path):
                obstore.put(self._client, self._name, bytes(rest), use_multipart=False)
        self._tell(self.position - self._reported)

    def _discard(self) -> None:
        self._ring.abort()
        if self._is_begun:
            self._remove()


class _Window:
    """Neighbouring bytes of an object, read by the first thread that wants some of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.content: memoryview | None = None


class BucketReader(FileReader):
    """Reads ranges of one object. If the object is replaced meanwhile, reading it raises StorageError.

    What lies near a small range is read with it, and kept for the next small ranges.

    Args:
        path: Its URL.
        client: obstore's store.
        name: The object.
        nbytes: Its size.
        e_tag: What changes with its content; None if the store does not tell.
    """

    def __init__(self, path: str, client: Any, name: str, nbytes: int, e_tag: str | None) -> None:
        self.path = path
        self.nbytes = nbytes
        self._client = client
        self._name = name
        self._e_tag = e_tag
        self._lock = threading.Lock()
        self._windows: dict[int, _Window] = {}

    def read_into(self, offset: int, buffer: Buffer) -> None:
        """Fill ``buffer``; see FileReader. Asks for about ``READ_NBYTES`` at once."""
        view = byte_view(buffer)
        self._check_range(offset, len(view))
        self._get_into(offset, view)

    def _read_blocks(self, view: memoryview, payload: Payload, start: int) -> None:
        """See FileReader.

        Blocks at both ends that are wanted in part are read in the same requests. Bytes that were changed on
        their way are read a second time.
        """
        offset, nbytes, crcs, block_size = payload
        stop = start + len(view)
        step = max(block_size, READ_NBYTES - READ_NBYTES % block_size)
        at = start - start % block_size
        while at < stop:
            end = min(at + step, nbytes, stop + -stop % block_size)
            recorded = crcs[at // block_size : -(-end // block_size)]
            blocks = [Payload(offset + at, end - at, recorded, block_size)]
            first, last = max(at, start), min(end, stop)
            part = view[first - start : last - start]
            if len(part) == end - at:
                self.read_together(offset + at, part, blocks)
            else:
                content = memoryview(bytearray(end - at))
                self.read_together(offset + at, content, blocks)
                part[:] = content[first - at : last - at]
            at = end

    def read_whole_blocks(self, offset: int, view: memoryview, crcs: Sequence[int], block_size: int) -> None:
        """Fill ``view`` with whole blocks, as ``read_blocks_into`` reads them; see FileReader."""
        self.read_blocks_into(view, Payload(offset, len(view), crcs, block_size))

    def read_together(self, offset: int, view: memoryview, payloads: Sequence[Payload]) -> None:
        """Fill ``view`` by one request, unless it is very large, and check the payloads; see FileReader."""
        self._check_range(offset, len(view))
        for is_last in (False, True):
            (self._request_into if is_last else self._get_into)(offset, view)
            try:
                check_payloads(payloads, offset, view, path=self.path)
            except ChecksumError as error:
                if is_last:
                    raise
                logger.warning("%s Reading them again.", error)
                self._note(RETRY)
            else:
                break

    def _get_into(self, offset: int, target: memoryview) -> None:
        number, at = divmod(offset, _WINDOW)
        if len(target) > _SMALL or at + len(target) > _WINDOW:
            # Neighbours that are read together have gaps between them, for which no second request is made.
            count = max(1, round(len(target) / READ_NBYTES))
            step = -(-len(target) // count)
            for begin in range(0, len(target), max(step, 1)):
                self._request_into(offset + begin, target[begin : begin + step])
            return
        with self._lock:
            window = self._windows.setdefault(number, _Window())
            if len(self._windows) > _MOST_WINDOWS:
                del self._windows[next(iter(self._windows))]
        with window.lock:
            if window.content is None:
                content = memoryview(bytearray(min(_WINDOW, self.nbytes - offset + at)))
                self._request_into(offset - at, content)
                window.content = content
        target[:] = window.content[at : at + len(target)]

    def _request_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` as the bytes come: a whole answer is never in memory."""
        if not target:
            return
        try:
            found = persist(self.path, lambda: self._receive(offset, target), lambda: self._note(RETRY))
        except StorageError as error:
            if not isinstance(error.__cause__, PreconditionError):
                raise
            raise StorageError(
                f"{self.path}: was replaced by another object while it was read. Load again.", path=self.path
            ) from error
        if found != len(target):
            raise StorageError(
                f"{self.path}: the store sent {found} bytes instead of the {len(target)} at {offset}.",
                path=self.path,
                expected=len(target),
                found=found,
            )

    def _receive(self, offset: int, target: memoryview) -> int:
        """Ask for the bytes once, and return how many came."""
        options: GetOptions = {"range": (offset, offset + len(target))}
        if self._e_tag is not None:
            options["if_match"] = self._e_tag
        found = 0
        answer = obstore.get(self._client, self._name, options=options)
        for piece in answer.stream(min_chunk_size=_PIECE_NBYTES):
            end = found + len(piece)
            if end <= len(target):
                target[found:end] = memoryview(piece)
            found = end
        return found
