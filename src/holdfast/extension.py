"""What a checkpoint's bytes may be wrapped in: stream transforms, their descriptors, and their registry."""

import abc
import difflib
import re
from collections.abc import Sequence
from typing import IO, Any, cast

from holdfast._io.zstd import ZstdReader, ZstdWriter
from holdfast._io.zstd_backends import Backend, select_backend
from holdfast.errors import ExtensionError, ExtensionUnavailableError, UnknownExtensionError, UsageError

__all__ = [
    "Extension",
    "ExtensionRegistry",
    "StreamTransformExtension",
    "ZStandard",
]

_WORD = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_WORD}(?:@{_WORD})?", re.ASCII)
_VERSION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*", re.ASCII)


class Extension(abc.ABC):
    """Something that changes the form in which a checkpoint's items are written.

    A writer is given instances. It asks each for its descriptor and records that with every item, so
    that a reader can make an equal instance again: it looks the descriptor's name up in an
    ``ExtensionRegistry`` and calls ``from_descriptor`` of the class found there.

    **Descriptors** have the form ``name[@domain][/version]``, such as ``stream.zstd/1`` or
    ``stream.cipher@example.org/2.1``. Name and domain are made of ASCII letters, digits, ``.``, ``_`` and
    ``-``, a version may have ``+`` too, and none of them begins with a mark other than ``_``. The domain
    keeps names of different organisations apart; take a domain name that is yours. The version is that of
    the *format*: data under an equal major version (what stands before the first dot) must stay readable
    by this class for ever, and a change that older code would misread needs a new major version.

    An instance holds settings, no stream. It must be picklable, since saves may run in another process,
    and its methods are called from several threads at once.
    """

    @staticmethod
    @abc.abstractmethod
    def registry_name() -> str:
        """The part of the descriptor before the slash: ``name`` or ``name@domain``. It never changes."""

    @staticmethod
    @abc.abstractmethod
    def from_descriptor(version: str) -> "Extension":
        """Make an instance that can read what was written under ``version``.

        Called when loading, on every rank that meets the descriptor. ``version`` is the part after the
        slash, or ``""`` where the descriptor has none. What the version does not tell, such as a key, must
        come from elsewhere. Everything raised here reaches the caller of the load as it is.

        Raises:
            ValueError: This class cannot read that major version. ``holdfast.errors`` has
                ``UnknownExtensionError`` for it, and ``ExtensionUnavailableError`` for a missing package.
        """

    @abc.abstractmethod
    def get_descriptor(self) -> str:
        """The descriptor to be recorded: ``registry_name()``, a slash, and the version written.

        Called when saving, once for every item. ``from_descriptor`` must understand what it returns.
        """


class StreamTransformExtension(Extension):
    """An extension that maps a stream of bytes to another one and back: compression, encryption, checks.

    **Who calls what.** For each item that it saves, the writer calls ``transform_to`` on the stream of its
    storage, writes the item, and closes the result. With several transforms the first of the list is
    applied last: its output is what the storage sees. A reader calls ``transform_from`` in the order in
    which the descriptors are recorded, storage first, and reads. Items are handled on several threads at
    once: each call must give a stream that shares no changing state with any other. One stream is used by
    one thread at a time, though not always by the thread that made it.

    **The returned streams** are ``io`` objects, best subclasses of ``io.RawIOBase``: ``readable()``,
    ``writable()`` and ``seekable()`` tell the truth, so that ``io.BufferedReader`` and the like can wrap
    them; after ``close()`` reading and writing raise ``ValueError``; closing twice is fine. A reading
    stream need not be seekable.

    **Writing** comes in pieces of any size, empty ones included, and in any C-contiguous buffer, whose
    items may be larger than a byte. ``write`` takes all of it and returns its length in *bytes*. The
    buffer is the caller's: it must not be changed, nor used after ``write`` has returned, because the next
    piece may come in the same memory. The output may be a raw stream that takes only part of what it is
    given; write until all is taken.

    **flush()** hands on what can be handed on without ending the stream, and flushes the output. It may
    come at any time, more than once, and writing goes on after it.

    **close()** of a writing stream ends the transformed stream (last chunk, checksum, tag) and closes the
    output; of a reading one it closes the input. What is wrapped is closed also when ending fails, and the
    error is still raised. Only after a ``close()`` that raised nothing is the item written.

    **Reading** is asked for in any amount. The input may return fewer bytes than asked for, may lack
    ``readinto``, and returns None where it is non-blocking and empty; pass None on. Nothing (``b""``, or 0
    from ``readinto``) means the end and nothing else.

    **Damage.** Input that is damaged, cut short or too long must raise
    ``holdfast.errors.IntegrityError`` or one of its subclasses (``TruncatedFileError`` for what is cut
    short) where the transform can tell, also when the input is empty but an empty payload would not be.
    No input may make it loop for ever. Errors of the wrapped stream pass through unchanged.

    **Memory.** Work in chunks, from some 64 KiB to a few MiB, whatever the size of one write and however
    much a chunk of input may yield: items can be larger than memory.

    A complete example is ``holdfast.testing.Rot13Example``. ``holdfast.testing.TransformContract`` is all of
    the above as a pytest suite: subclass it, and run it on your own transform::

        class TestMyTransform(TransformContract):
            def make_transform(self):
                return MyTransform()
    """

    @abc.abstractmethod
    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a new writable stream; what is written to it reaches ``output`` transformed.

        The returned stream owns ``output`` from now on: its ``close()`` closes it.
        """

    @abc.abstractmethod
    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        """Return a new readable stream that undoes ``transform_to`` on what it reads from ``input``.

        The returned stream owns ``input`` from now on: its ``close()`` closes it. ``input`` is read from
        where it stands, up to its end.
        """


class ZStandard(StreamTransformExtension):
    """Zstandard compression: one frame an item, with a checksum over the uncompressed bytes.

    Works with the ``zstandard`` package (``pip install holdfast[zstd]``), with the standard library from
    Python 3.14 on, and with its backport. Reads several frames one after the other, skippable frames, and
    frames without a checksum too, so everything that torch's transform of this name wrote.

    A read fails, instead of returning wrong bytes or taking memory without bound, when the input is
    damaged, ends early, asks for a window over 128 MiB, or yields more than ``max_size``. The extra memory
    of a stream is a few MiB beside the window (2 MiB at the default level, 128 MiB at level 22).

    Args:
        level: From -131072 (fastest) to 22 (smallest); 0 means zstd's default, which is 3.

    Raises:
        UsageError: ``level`` is not an integer in that range.
        ExtensionUnavailableError: No zstd library is installed.
    """

    MIN_LEVEL = -131072
    MAX_LEVEL = 22

    def __init__(self, level: int = 3) -> None:
        super().__init__()
        if isinstance(level, bool) or not isinstance(level, int):
            raise UsageError(f"ZStandard: level must be an int, got {level!r}", found=level)
        if not self.MIN_LEVEL <= level <= self.MAX_LEVEL:
            raise UsageError(
                f"ZStandard: level {level} is out of range, expected {self.MIN_LEVEL} to {self.MAX_LEVEL}",
                expected=(self.MIN_LEVEL, self.MAX_LEVEL),
                found=level,
            )
        _require_backend()
        self.level = level

    @staticmethod
    def is_available() -> bool:
        """Whether a zstd library is installed."""
        return select_backend() is not None

    @staticmethod
    def from_descriptor(version: str) -> "ZStandard":
        """Make an instance that reads version 1.

        Raises:
            UnknownExtensionError: ``version`` has another major version, or is empty.
            ExtensionUnavailableError: No zstd library is installed.
        """
        require_major_version(ZStandard.registry_name(), version, "1")
        return ZStandard()

    @staticmethod
    def registry_name() -> str:
        """``stream.zstd``, as in torch."""
        return "stream.zstd"

    def get_descriptor(self) -> str:
        """``stream.zstd/1``. The level is not part of it: a reader does not need it."""
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Compress into ``output``; see ``StreamTransformExtension``.

        Dropping the stream without closing it, or leaving its ``with`` block by an exception, does not end
        the frame: what was given up is read as truncated, never as a shorter payload.
        """
        return cast("IO[bytes]", ZstdWriter(output, _require_backend(), self.level))

    def transform_from(self, input: IO[bytes], *, max_size: int | None = None) -> IO[bytes]:
        """Inflate ``input``; see ``StreamTransformExtension``.

        Args:
            input: Where the compressed bytes are.
            max_size: The most bytes that the caller expects. A frame that declares more, or a stream that
                yields more, raises IntegrityError before it is inflated any further. None: no limit.
        """
        if max_size is not None and max_size < 0:
            raise UsageError(f"max_size must not be negative, got {max_size}", found=max_size)
        return cast("IO[bytes]", ZstdReader(input, _require_backend(), max_size=max_size))

    def __repr__(self) -> str:
        return f"ZStandard(level={self.level})"


class ExtensionRegistry:
    """Which class a descriptor's name stands for. A new registry knows the classes of this module.

    Attributes:
        extensions: The classes by registry name.
    """

    def __init__(self) -> None:
        self.extensions: dict[str, type[Extension]] = {ZStandard.registry_name(): ZStandard}

    def register(self, cls: type[Extension]) -> None:
        """Make ``cls`` known under its ``registry_name()``.

        A class that was known under that name is replaced, so that a program can put its own in the place
        of a shipped one. Classes that derive from torch's ``Extension`` are as welcome as ours.

        Raises:
            UsageError: ``cls`` is not a class with the three methods of ``Extension``.
            ExtensionError: Its name could not stand in a descriptor.
        """
        methods = ("registry_name", "from_descriptor", "get_descriptor")
        if not isinstance(cls, type):
            raise UsageError(
                f"register takes an Extension class, got {cls!r}; pass the class, not an instance"
            )
        missing = [method for method in methods if not any(method in vars(base) for base in cls.__mro__)]
        if missing:
            raise UsageError(f"{cls.__qualname__} is not an Extension class: it has no {', '.join(missing)}")
        name: Any = cls.registry_name()
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ExtensionError(
                f"{cls.__qualname__}.registry_name() returned {name!r}, expected name or name@domain made of "
                "ASCII letters, digits, '.', '_' and '-'",
                found=name,
            )
        self.extensions[name] = cls

    def from_descriptor_list(self, descriptors: Sequence[str]) -> Sequence[Extension]:
        """Make the extensions that ``descriptors`` stand for, in the same order.

        Raises:
            ExtensionError: A descriptor is malformed.
            UnknownExtensionError: No class is registered under a descriptor's name, or the class does not
                know the version.
            ExtensionUnavailableError: A package that the extension needs is not installed.
            Exception: Whatever a registered class raises in ``from_descriptor`` passes through.
        """
        if isinstance(descriptors, str):
            raise ExtensionError(
                f"a sequence of descriptors is needed, got the single string {descriptors!r}; "
                f"write [{descriptors!r}]",
                found=descriptors,
            )
        # Everything is looked up before anything is made: making may open keys or start libraries.
        found = [(self._find(descriptor), split_descriptor(descriptor)[1]) for descriptor in descriptors]
        return [cls.from_descriptor(version) for cls, version in found]

    def _find(self, descriptor: str) -> type[Extension]:
        name, _ = split_descriptor(descriptor)
        cls = self.extensions.get(name)
        if cls is None:
            known = ", ".join(sorted(self.extensions)) or "none"
            nearest = difflib.get_close_matches(name, self.extensions, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise UnknownExtensionError(
                f"no extension is registered for descriptor {descriptor!r}: {hint}registered are: {known}. "
                "Register the class that wrote it with ExtensionRegistry.register and give the registry to "
                "the reader",
                expected=sorted(self.extensions),
                found=descriptor,
            )
        return cls


def split_descriptor(descriptor: str) -> tuple[str, str]:
    """The registry name and the version of ``descriptor``; the version is ``""`` where it has none.

    Raises:
        ExtensionError: ``descriptor`` is not of the form ``name[@domain][/version]``.
    """

    def malformed(why: str) -> ExtensionError:
        return ExtensionError(
            f"malformed extension descriptor {descriptor!r}: {why}; expected name[@domain][/version], "
            "such as 'stream.zstd/1'",
            found=descriptor,
        )

    text: Any = descriptor
    if not isinstance(text, str):
        raise malformed(f"it is a {type(text).__name__}, not a str")
    if not text:
        raise malformed("it is empty")
    name, slash, version = text.partition("/")
    if "/" in version:
        raise malformed("it has more than one slash")
    if not _NAME.fullmatch(name):
        raise malformed(
            f"{name!r} is not a name of ASCII letters, digits, '.', '_' and '-' with at most one '@'"
        )
    if slash and not version:
        raise malformed("nothing stands behind the slash")
    if version and not _VERSION.fullmatch(version):
        raise malformed(f"{version!r} is not a version of ASCII letters, digits, '.', '_', '+' and '-'")
    return name, version


def require_major_version(name: str, version: str, known: str) -> None:
    """Refuse every version of extension ``name`` but those whose major version is ``known``.

    Raises:
        UnknownExtensionError: ``version`` is empty, or another one.
    """
    if not version:
        raise UnknownExtensionError(
            f"extension descriptor {name!r} has no version, so its data cannot be read safely; "
            f"expected '{name}/{known}'",
            expected=f"{name}/{known}",
            found=name,
        )
    if version.partition(".")[0] != known:
        raise UnknownExtensionError(
            f"extension descriptor '{name}/{version}' has a major version that is not known here, expected "
            f"{known}: the checkpoint was written by newer code; update the package that provides {name!r}",
            expected=known,
            found=version,
        )


def _require_backend() -> Backend:
    backend = select_backend()
    if backend is None:
        raise ExtensionUnavailableError(
            "'stream.zstd/1' (ZStandard) needs a zstd library and none is installed: "
            "run `pip install holdfast[zstd]`, or use Python 3.14 or newer, which brings one",
            expected="zstandard",
        )
    return backend
