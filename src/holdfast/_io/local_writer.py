"""Owns the writing of one local file, on disk at the end."""

import os
from contextlib import suppress

from holdfast._io.blocks import STEP, BlockSums
from holdfast._io.file_access import FileWriter
from holdfast._io.local_calls import PAGE, flush_to_disk, naming, write_fully
from holdfast._io.progress import BUFFERED
from holdfast._io.ring import BufferRing, write_each
from holdfast._io.write_back import BufferOutput


class LocalWriter(FileWriter):
    """Writes one new file of a local file system.

    Args:
        path: The file, for messages and for removing it.
        fd: It, open for writing and empty. The writer owns the descriptor.
        durable: Whether ``finish`` waits for stable storage.
        output: Writes full buffers of it while others are filled. None: every piece is written through the
            page cache as it comes, which takes the same time for a file smaller than a buffer.
    """

    def __init__(self, path: str, fd: int, *, durable: bool, output: BufferOutput | None) -> None:
        super().__init__(path)
        self._fd = fd
        self._durable = durable
        self._output = output
        self._ring = None if output is None else BufferRing(write_each(output.write), unit=PAGE)

    def _append(self, view: memoryview, sums: BlockSums | None) -> None:
        with naming(self.path):
            if self._ring is not None:
                self._ring.append(view, sums)
                return
            for at in range(0, len(view), STEP):
                piece = view[at : at + STEP]
                if sums is not None:
                    sums.update(piece)
                write_fully(self._fd, [piece], self.position + at)

    def _complete(self) -> None:
        with naming(self.path):
            if self._ring is not None and self._output is not None:
                tail, offset = self._ring.finish()
                self._output.end_buffers()
                write_fully(self._fd, [tail], offset)
            if self._durable:
                flush_to_disk(self._fd)
            if self._output is not None:
                self._output.release_pages()
                if self._output.is_refused:
                    self.progress.note(BUFFERED)
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _discard(self) -> None:
        try:
            if self._ring is not None:
                self._ring.abort()
        finally:
            with suppress(OSError):  # a stray file is harmless: no metadata names it; the first error counts
                # Before the close, so that dirty pages are dropped instead of being written.
                os.unlink(self.path)
            fd, self._fd = self._fd, -1
            with suppress(
                OSError
            ):  # closed already; or the file is gone, and nobody misses what is not written
                os.close(fd)
