"""Tests of a transform whose output fails, or whose input is not what was written."""

import random

import pytest

from holdfast.errors import IntegrityError
from holdfast.extension import StreamTransformExtension
from holdfast.testing.fake_streams import FakeInput, FakeOutput
from holdfast.testing.transform_contract_base import (
    MIB,
    TransformContractBase,
    attempt,
    drain,
    encode,
    new_reader,
    new_writer,
    payload,
)


class TransformDamageTests(TransformContractBase):
    """Full disks, changed bytes, missing bytes, foreign bytes."""

    # Outputs that fail

    def test_an_error_of_the_output_surfaces_unchanged(self) -> None:
        """Wherever the disk is full, write or close raises that very error, and the output is closed."""
        transform = self.make_transform()
        content = payload(2000)
        length = len(encode(transform, [content]))
        for room in {*range(min(length, 40)), *range(0, length, 97), length - 1}:
            sink = FakeOutput(room=room)
            stream = new_writer(transform, sink)
            errors = [e for e in (attempt(stream.write, content), attempt(stream.close)) if e is not None]
            assert errors, f"room for {room} of {length} bytes, and neither write nor close raised"
            assert errors[0] is sink.error
            assert (sink.closed, stream.closed) == (True, True)
            assert attempt(stream.close) is None

    # Damage

    @pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
    def test_a_changed_byte_never_gives_wrong_bytes(self, mask: int) -> None:
        """With any one byte changed, reading raises IntegrityError or still gives the payload; it ends."""
        transform = self.make_transform()
        content = payload(200)
        encoded = encode(transform, [content])
        for position in range(len(encoded)):
            self._check_damaged(
                transform, _changed(encoded, position, mask), content, f"byte {position} changed"
            )

    def test_a_changed_byte_in_a_large_stream_never_gives_wrong_bytes(self) -> None:
        """The same over many chunks, at places throughout."""
        transform = self.make_transform()
        content = payload(3 << 17)
        encoded = encode(transform, [content])
        for position in range(0, len(encoded), len(encoded) // 50):
            self._check_damaged(
                transform, _changed(encoded, position, 0x10), content, f"byte {position} changed"
            )

    def test_a_truncated_input_never_looks_whole(self) -> None:
        """Cut at every length, from nothing to one byte less: IntegrityError, not a shorter payload."""
        transform = self.make_transform()
        content = payload(200)
        encoded = encode(transform, [content])
        for length in range(len(encoded)):
            self._check_damaged(transform, encoded[:length], content, f"cut to {length} bytes")
        large = payload(3 << 17)
        encoded = encode(transform, [large])
        for length in range(0, len(encoded), len(encoded) // 30):
            self._check_damaged(transform, encoded[:length], large, f"cut to {length} bytes")

    def test_bytes_after_the_end_are_not_payload(self) -> None:
        """Foreign bytes behind the transformed stream raise, or are left alone; they are never returned."""
        transform = self.make_transform()
        content = payload(200)
        for tail in (b"\0", b"tail", bytes(5000)):
            self._check_damaged(
                transform, encode(transform, [content]) + tail, content, f"{tail[:4]!r} behind"
            )

    def test_foreign_bytes_end_in_an_error_or_in_data(self) -> None:
        """Random bytes, which this transform never wrote, terminate."""
        transform = self.make_transform()
        rng = random.Random(5)  # noqa: S311
        for size in (1, 3, 4, 17, 1000, 70_000):
            self._check_damaged(transform, rng.randbytes(size), None, f"{size} random bytes")

    def _check_damaged(
        self, transform: StreamTransformExtension, data: bytes, content: bytes | None, what: str
    ) -> None:
        source = FakeInput(data)
        stream = new_reader(transform, source)
        most = 64 * len(data) + 4 * MIB
        try:
            found = drain(stream, most)
        except Exception as error:
            if self.detects_damage and not isinstance(error, IntegrityError):
                raise AssertionError(f"{what}: expected IntegrityError, got {error!r}") from error
        else:
            assert not self.detects_damage or found == content, f"{what}: wrong bytes, and no error"
        stream.close()
        assert source.closed


def _changed(data: bytes, position: int, mask: int) -> bytes:
    return data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]
