"""Which zstd library does the work: the zstandard package, or the standard library's from 3.14 on."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from typing_extensions import Buffer

PREFERENCE: tuple[str, ...] = ("zstandard", "compression.zstd", "backports.zstd")
"""Modules in the order in which they are tried; tests shorten it to choose one, or to have none."""

MAX_WINDOW_LOG = 27


class Compressor(Protocol):
    """Makes one frame, with a checksum at its end. What it is given it has copied when it returns."""

    def compress(self, data: Buffer, /) -> bytes:
        """Take ``data`` in; return what is ready, often nothing."""

    def flush_block(self) -> bytes:
        """Return the rest of what was taken in, so that a reader can have all of it."""

    def finish(self) -> bytes:
        """Return the rest and the end of the frame. Nothing may follow."""


class Decompressor(Protocol):
    """Inflates one frame, given in pieces."""

    @property
    def eof(self) -> bool:
        """Whether the end of the frame was seen, its checksum included."""

    def decompress(self, data: Buffer, /) -> bytes:
        """Return everything that the frame yields up to the end of ``data``."""


@dataclass(frozen=True)
class Backend:
    """One zstd library, seen through what we need of it."""

    module: str
    error: type[Exception]
    """What the library raises for input that is not zstd."""
    new_compressor: Callable[[int], Compressor]
    new_decompressor: Callable[[], Decompressor]


def select_backend() -> Backend | None:
    """The first library of ``PREFERENCE`` that can be imported, or None.

    Imported on call: neither is loaded by programs that meet no compressed checkpoint.
    """
    for name in PREFERENCE:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return _zstandard_backend(module) if name == "zstandard" else _standard_backend(name, module)
    return None


class _ZstandardCompressor:
    def __init__(self, module: ModuleType, level: int) -> None:
        self._module = module
        self._object = module.ZstdCompressor(level=level, write_checksum=True).compressobj()
        self.compress: Callable[[Buffer], bytes] = self._object.compress

    def flush_block(self) -> bytes:
        flushed: bytes = self._object.flush(self._module.COMPRESSOBJ_FLUSH_BLOCK)
        return flushed

    def finish(self) -> bytes:
        ending: bytes = self._object.flush(self._module.COMPRESSOBJ_FLUSH_FINISH)
        return ending


def _zstandard_backend(module: ModuleType) -> Backend:
    def new_decompressor() -> Decompressor:
        decompressor: Decompressor = module.ZstdDecompressor(
            max_window_size=1 << MAX_WINDOW_LOG
        ).decompressobj()
        return decompressor

    return Backend(
        module="zstandard",
        error=module.ZstdError,
        new_compressor=lambda level: _ZstandardCompressor(module, level),
        new_decompressor=new_decompressor,
    )


class _StandardCompressor:
    def __init__(self, module: ModuleType, level: int) -> None:
        parameter: Any = module.CompressionParameter
        options = {parameter.compression_level: level, parameter.checksum_flag: 1}
        self._object = module.ZstdCompressor(options=options)
        self.compress: Callable[[Buffer], bytes] = self._object.compress

    def flush_block(self) -> bytes:
        flushed: bytes = self._object.flush(self._object.FLUSH_BLOCK)
        return flushed

    def finish(self) -> bytes:
        ending: bytes = self._object.flush(self._object.FLUSH_FRAME)
        return ending


def _standard_backend(name: str, module: ModuleType) -> Backend:
    def new_decompressor() -> Decompressor:
        options = {module.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}
        decompressor: Decompressor = module.ZstdDecompressor(options=options)
        return decompressor

    return Backend(
        module=name,
        error=module.ZstdError,
        new_compressor=lambda level: _StandardCompressor(module, level),
        new_decompressor=new_decompressor,
    )
