"""Runs of bytes: views of memory, copies of it, and streams of which nothing is known."""

import ctypes
import errno
from typing import IO, Any

from typing_extensions import Buffer

# Finding out where the memory is takes a microsecond, in which 16 KiB are copied.
_WORTHWHILE = 64 << 10


def byte_view(buffer: Buffer) -> memoryview:
    """The memory of ``buffer`` as a flat run of bytes, whatever its items are; nothing is copied.

    Release the view (``with byte_view(b) as view``) so that the owner can resize its memory again.

    Raises:
        BufferError: The memory is not C-contiguous.
    """
    view = memoryview(buffer)
    if view.nbytes == 0:
        # An array with a zero in its shape cannot be cast, and has no memory to show.
        return memoryview(bytearray())
    if not view.c_contiguous:
        raise BufferError(
            "a C-contiguous buffer is needed, this one has gaps or another order; copy it first"
        )
    return view.cast("B")


def memory_at(address: int, nbytes: int, owner: object) -> memoryview:
    """The bytes at an address, writable. The view keeps ``owner``, whose memory it is, alive."""
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as ``target`` takes, all that ``source`` has, without the interpreter's lock.

    ``target[:] = source`` holds it: beside a thread that copied so, a training loop of small matrix products
    took 2 to 3.6 times as long. Read-only memory is still copied with the lock, because
    Python does not tell its address.
    """
    assert len(target) == len(source)
    if len(target) < _WORTHWHILE or source.readonly:
        target[:] = source
        return
    # memmove is called without the lock. These two keep the memory where it is until it returns.
    to, come_from = ctypes.c_char.from_buffer(target), ctypes.c_char.from_buffer(source)
    ctypes.memmove(ctypes.addressof(to), ctypes.addressof(come_from), len(target))


def write_all(output: IO[bytes], data: bytes | memoryview) -> int:
    """Write every byte of ``data``, also to a raw stream that takes only a part at a time; returns how many.

    Raises:
        BlockingIOError: ``output`` is non-blocking and full; ``characters_written`` tells how far it got.
        OSError: ``output`` takes no more bytes, or claims to have taken more than it was given.
    """
    written = 0
    with memoryview(data) as view:
        while written < len(view):
            with view[written:] as rest:
                done: Any = output.write(rest)
            left = len(view) - written
            if done is None:
                # Taking None for success would lose bytes silently where it means "nothing was written".
                words = "the output took no bytes now (write returned None); use a blocking one"
                raise BlockingIOError(errno.EAGAIN, words, written)
            if not 0 < done <= left:
                words = f"the output reports {done} of {left} bytes written; it must make progress"
                raise OSError(errno.EIO, words)
            written += done
    return written


def stream_name(stream: IO[bytes]) -> str | None:
    """The path under which ``stream`` was opened, where it tells."""
    name = getattr(stream, "name", None)
    return name if isinstance(name, str) else None
