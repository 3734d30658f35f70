"""The shipped transforms keep the contract, and the contract catches transforms that do not."""

import io
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, ClassVar, cast

import pytest

from holdfast._io import zstd_backends
from holdfast.extension import StreamTransformExtension, ZStandard
from holdfast.testing.rot13 import Rot13Example
from holdfast.testing.transform_contract import TransformContract

STANDARD_LIBRARY = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


class ZStandardContract(TransformContract):
    backend: ClassVar[str]
    level: ClassVar[int] = 3
    chunk_size = 128 << 10

    @pytest.fixture(autouse=True)
    def _choose_backend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zstd_backends, "PREFERENCE", (self.backend,))

    def make_transform(self) -> StreamTransformExtension:
        return ZStandard(self.level)

    def companions(self) -> Sequence[StreamTransformExtension]:
        return [Rot13Example(chunk_size=11), ZStandard(-5)]


class TestZStandardOfThePackage(ZStandardContract):
    backend = "zstandard"


class TestFastZStandardOfThePackage(ZStandardContract):
    backend = "zstandard"
    level = -7


class TestZStandardOfTheStandardLibrary(ZStandardContract):
    backend = STANDARD_LIBRARY


class TestFastZStandardOfTheStandardLibrary(ZStandardContract):
    backend = STANDARD_LIBRARY
    level = -7


class TestRot13Example(TransformContract):
    detects_damage = False
    chunk_size = 4000

    def make_transform(self) -> StreamTransformExtension:
        return Rot13Example(chunk_size=4000)

    def companions(self) -> Sequence[StreamTransformExtension]:
        return [ZStandard(1)]


def the_page_for_plugin_authors() -> ModuleType:
    page = ModuleType("extensions_page")
    # A module of its own, so that what it defines can be pickled.
    sys.modules[page.__name__] = page
    text = (Path(__file__).parents[2] / "docs" / "extensions.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(block, page.__dict__)
    return page


PAGE = the_page_for_plugin_authors()


class TestTheExampleOfThePage(PAGE.TestCheckedBlocks):  # type: ignore[name-defined,misc]
    """What the page teaches keeps the contract."""


# The contract is worth what it catches: each of these breaks one rule.


class WriterThat(io.RawIOBase):
    """A rot13 writer with a hole in it."""

    def __init__(self, output: IO[bytes], fault: str) -> None:
        self.output = output
        self.fault = fault
        self.held: Any = b""

    def __del__(self) -> None:
        # io would close it once more, and from Python 3.13 on report what that raises.
        pass

    def writable(self) -> bool:
        return self.fault != "denies that it is writable"

    def write(self, b: Any, /) -> int:
        if self.closed:
            if self.fault == "ignores writes after close":
                return len(b)
            raise ValueError("closed")
        data = memoryview(b).cast("B")
        if self.fault == "changes the caller's buffer" and not data.readonly:
            data[:] = bytes(data).swapcase()
        elif self.fault == "drops the last chunk":
            self.output.write(bytes(self.held))
            self.held = bytes(data)
            return len(data)
        elif self.fault == "keeps the caller's buffer":
            self.output.write(bytes(self.held))
            self.held = data
            return len(data)
        elif self.fault == "swallows errors":
            try:
                self.output.write(bytes(data))
            except OSError:
                pass
            return len(data)
        if self.fault == "ignores short writes":
            self.output.write(bytes(data))
        else:
            rest = bytes(data)
            while rest:
                rest = rest[self.output.write(rest) :]
        return len(b) if self.fault == "counts items" else len(data)

    def flush(self) -> None:
        if self.fault == "ends the stream on flush":
            self.output.close()
        elif self.fault != "does not pass flush on":
            self.output.flush()

    def close(self) -> None:
        if self.closed:
            return
        if self.fault == "keeps the caller's buffer":
            self.output.write(bytes(self.held))
        super().close()
        if self.fault != "does not close the output":
            self.output.close()


class ReaderThat(io.RawIOBase):
    def __init__(self, input: IO[bytes], fault: str) -> None:
        self.input = input
        self.fault = fault

    def readable(self) -> bool:
        return True

    def readinto(self, b: Any, /) -> int | None:
        view = memoryview(b).cast("B")
        if self.fault == "needs readinto":
            return cast("io.RawIOBase", self.input).readinto(view)
        data = self.input.read(len(view)) or b""
        if self.fault == "takes a short read for the end" and len(data) < len(view):
            self.fault = "is at its end"
        elif self.fault == "is at its end":
            return 0
        view[: len(data)] = data
        return len(data)

    def seekable(self) -> bool:
        return self.fault in {"claims to be seekable", "turns round at the end"}

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == io.SEEK_END and self.fault == "turns round at the end":
            offset = -offset
        return self.input.seek(offset, whence) if self.seekable() else super().seek(offset, whence)

    def tell(self) -> int:
        return self.input.tell()

    def close(self) -> None:
        if self.fault != "does not close the input":
            self.input.close()
        super().close()


class TransformThat(StreamTransformExtension):
    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.shared = WriterThat(io.BytesIO(), fault)

    @staticmethod
    def registry_name() -> str:
        return "stream.faulty"

    @staticmethod
    def from_descriptor(version: str) -> "TransformThat":
        return TransformThat("reads every version")

    def get_descriptor(self) -> str:
        return "stream.faulty" if self.fault == "has no version" else "stream.faulty/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        if self.fault == "shares one stream":
            self.shared.output = output
            return cast("IO[bytes]", self.shared)
        return cast("IO[bytes]", WriterThat(output, self.fault))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return cast("IO[bytes]", ReaderThat(input, self.fault))

    def __reduce__(self) -> Any:
        if self.fault == "cannot be pickled":
            raise TypeError("cannot be pickled")
        return TransformThat, (self.fault,)


class DeflateWithoutEnd(StreamTransformExtension):
    """Reads all at once, leaves truncation unnoticed, and lets zlib's own error out."""

    @staticmethod
    def registry_name() -> str:
        return "stream.deflate"

    @staticmethod
    def from_descriptor(version: str) -> "DeflateWithoutEnd":
        return DeflateWithoutEnd()

    def get_descriptor(self) -> str:
        return "stream.deflate/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Writer(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    output.write(zlib.compress(self.getvalue()))
                    output.close()
                    super().close()

        return Writer()

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        with input:
            return io.BytesIO(zlib.decompressobj().decompress(input.read()))


def contract_on(make: Callable[[], StreamTransformExtension], *, detects: bool) -> TransformContract:
    class Subject(TransformContract):
        detects_damage = detects
        chunk_size = 1000

        def make_transform(self) -> StreamTransformExtension:
            return make()

    return Subject()


FAULTS = {
    "changes the caller's buffer": "test_the_callers_buffer_is_neither_changed_nor_kept",
    "keeps the caller's buffer": "test_the_callers_buffer_is_neither_changed_nor_kept",
    "drops the last chunk": "test_every_size_round_trips",
    "swallows errors": "test_an_error_of_the_output_surfaces_unchanged",
    "ignores short writes": "test_an_output_with_short_writes_gets_everything",
    "counts items": "test_write_takes_every_contiguous_buffer_and_counts_bytes",
    "denies that it is writable": "test_flags_tell_the_truth",
    "ignores writes after close": "test_a_closed_stream_refuses",
    "ends the stream on flush": "test_flush_does_not_end_the_stream",
    "does not pass flush on": "test_flush_does_not_end_the_stream",
    "does not close the output": "test_closing_closes_what_is_wrapped",
    "does not close the input": "test_closing_closes_what_is_wrapped",
    "needs readinto": "test_an_input_without_readinto_is_enough",
    "takes a short read for the end": "test_an_input_with_short_reads_is_read_to_its_end",
    "claims to be seekable": "test_flags_tell_the_truth",
    "turns round at the end": "test_a_seekable_stream_seeks_as_io_says",
    "shares one stream": "test_streams_of_one_transform_do_not_disturb_one_another",
    "has no version": "test_the_descriptor_is_well_formed_and_names_the_class",
    "reads every version": "test_a_minor_version_is_read_and_another_major_version_refused",
    "cannot be pickled": "test_a_transform_can_be_pickled",
    "detects nothing": "test_a_truncated_input_never_looks_whole",
}


def run_rule(contract: TransformContract, rule: str) -> None:
    method = getattr(contract, rule)
    cases = [mark for mark in getattr(method, "pytestmark", []) if mark.name == "parametrize"]
    for argument in cases[0].args[1] if cases else [None]:
        method() if argument is None else method(argument)


@pytest.mark.parametrize(("fault", "rule"), FAULTS.items())
def test_the_contract_catches_a_transform_that(fault: str, rule: str) -> None:
    contract = contract_on(lambda: TransformThat(fault), detects=fault == "detects nothing")
    # Any error will do: the next test shows that the rule passes without the fault.
    with pytest.raises((Exception, pytest.fail.Exception)):
        run_rule(contract, rule)


@pytest.mark.parametrize(
    "rule", sorted(set(FAULTS.values()) - {"test_a_minor_version_is_read_and_another_major_version_refused"})
)
def test_the_same_rules_pass_without_the_fault(rule: str) -> None:
    run_rule(contract_on(lambda: TransformThat("none"), detects=False), rule)


@pytest.mark.parametrize(
    "rule",
    [
        "test_a_truncated_input_never_looks_whole",
        "test_a_changed_byte_never_gives_wrong_bytes",
        "test_memory_does_not_grow_with_the_payload",
    ],
)
def test_the_contract_catches_a_careless_compressor(rule: str) -> None:
    with pytest.raises((AssertionError, zlib.error)):
        run_rule(contract_on(DeflateWithoutEnd, detects=True), rule)
