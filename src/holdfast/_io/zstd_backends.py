"""Which zstd library does the work: the zstandard package, or the standard library's from 3.14 on."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Protocol

from typing_extensions import Buffer

PREFERENCE: tuple[str, ...] = ("zstandard", "compression.zstd", "backports.zstd")
"""Modules in the order in which they are tried; tests shorten it to choose one, or to have none."""

MAX_WINDOW_LOG = 27


@dataclass(frozen=True)
class Compressor:
    """Makes one frame, with a checksum at its end. What it is given it has copied when it returns."""

    compress: Callable[[Buffer], bytes]
    """Takes bytes in; returns what is ready, often nothing."""
    flush_block: Callable[[], bytes]
    """Returns the rest of what was taken in, so that a reader can have all of it."""
    finish: Callable[[], bytes]
    """Returns the rest and the end of the frame. Nothing may follow."""


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


def _zstandard_backend(module: ModuleType) -> Backend:
    def new_compressor(level: int) -> Compressor:
        made = module.ZstdCompressor(level=level, write_checksum=True).compressobj()
        end_block = partial(made.flush, module.COMPRESSOBJ_FLUSH_BLOCK)
        return Compressor(made.compress, end_block, partial(made.flush, module.COMPRESSOBJ_FLUSH_FINISH))

    def new_decompressor() -> Decompressor:
        made: Decompressor = module.ZstdDecompressor(max_window_size=1 << MAX_WINDOW_LOG).decompressobj()
        return made

    return Backend("zstandard", module.ZstdError, new_compressor, new_decompressor)


def _standard_backend(name: str, module: ModuleType) -> Backend:
    def new_compressor(level: int) -> Compressor:
        parameter: Any = module.CompressionParameter
        made = module.ZstdCompressor(options={parameter.compression_level: level, parameter.checksum_flag: 1})
        return Compressor(
            made.compress, partial(made.flush, made.FLUSH_BLOCK), partial(made.flush, made.FLUSH_FRAME)
        )

    def new_decompressor() -> Decompressor:
        options = {module.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}
        made: Decompressor = module.ZstdDecompressor(options=options)
        return made

    return Backend(name, module.ZstdError, new_compressor, new_decompressor)
