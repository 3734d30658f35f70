"""Values that are not tensors: what is read without leave, what needs it, and what is never run."""

import argparse
import collections
import dataclasses
import decimal
import fractions
import io
import os
import pickle
import random
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast._objects.decode import decode_object
from holdfast._objects.encode import encode_object
from holdfast.errors import IntegrityError, PlanError, UnsafeMetadataError


def round_trip(value: Any, **options: Any) -> Any:
    return decode_object("k", io.BytesIO(encode_object("k", value).getvalue()), **options)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
    st.binary().map(bytearray),
    st.dates(),
    st.datetimes(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
)
hashable = st.one_of(st.none(), st.integers(), st.text(), st.binary(), st.floats(allow_nan=False))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(collections.deque),
        st.dictionaries(hashable, inner, max_size=3),
        st.dictionaries(hashable, inner, max_size=3).map(collections.OrderedDict),
        st.sets(hashable, max_size=3),
        st.frozensets(hashable, max_size=3),
        st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=2).map(
            lambda fields: argparse.Namespace(**fields)
        ),
    ),
    max_leaves=8,
)


def shown(value: Any) -> list[str]:
    """A value as text, which tells 1 from True and -0.0 from 0.0; sets come in any order."""
    return sorted(repr(value))


@settings(max_examples=100, deadline=None)
@given(values)
def test_plain_data_of_any_nesting_comes_back_without_leave(value: Any) -> None:
    arrived = round_trip(value)
    assert arrived == value
    assert shown(arrived) == shown(value)


@settings(max_examples=100, deadline=None)
@given(values)
def test_torch_reads_the_containers_of_objects(value: Any) -> None:
    arrived = torch.load(io.BytesIO(encode_object("k", value).getvalue()), weights_only=False)
    assert arrived == value
    assert shown(arrived) == shown(value)


@settings(max_examples=100, deadline=None)
@given(values)
def test_what_torch_saved_of_plain_data_is_read(value: Any) -> None:
    # Protocol 2 makes calls of empty bytes; that has a test of its own.
    if any(empty in repr(value) for empty in ("b''", "bytearray(b'')")):
        return
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    arrived = decode_object("k", stream)
    assert arrived == value


@pytest.mark.parametrize(
    "value",
    [
        decimal.Decimal("1.10"),
        fractions.Fraction(1, 3),
        uuid.UUID(int=5),
        collections.Counter(a=2),
        collections.defaultdict(int, a=1),
        collections.defaultdict(None, a=1),
        *(
            collections.defaultdict(made)
            for made in (
                *(set, frozenset, bytearray, complex, dict, collections.deque, collections.OrderedDict),
                *(collections.Counter, collections.defaultdict, torch.Size),
            )
        ),
        random.getstate(),
        torch.Size([1, 2]),
        torch.float8_e5m2,
        torch.strided,
        torch.device("cpu"),
        np.dtype("float32"),
        np.dtype("<U5"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_well_known_types_need_no_leave(value: Any) -> None:
    arrived = round_trip(value)
    assert arrived == value
    assert type(arrived) is type(value)
    assert getattr(arrived, "default_factory", None) is getattr(value, "default_factory", None)


@pytest.mark.parametrize("beside", [(), (torch.ones(1),)], ids=["alone", "beside a tensor"])
@pytest.mark.parametrize(
    "named",
    [
        *(int, set, collections.OrderedDict, collections.deque, collections.defaultdict, fractions.Fraction),
        *(torch.Size, torch.device, torch.Tensor, torch.FloatStorage),
        *(np.dtype, np.ndarray, np.float32, np.dtypes.Float32DType),
    ],
    ids=lambda named: named.__qualname__,
)
def test_a_class_as_a_value_is_the_class_or_refused_with_a_warning(
    named: Any, beside: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    value = (named, *beside)
    with pytest.raises(UnsafeMetadataError, match=named.__qualname__):
        round_trip(value)
    assert named.__qualname__ in caplog.text
    # torch.load itself has something else for a storage class.
    if named is not torch.FloatStorage:
        assert round_trip(value, safe_globals=[named])[0] is named
        assert round_trip(value, allow_pickle=True)[0] is named


def test_a_class_that_is_a_value_beside_its_use_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    both: list[Any] = [(int, collections.defaultdict(int)), (collections.defaultdict(int), int)]
    for value in both:
        caplog.clear()
        with pytest.raises(UnsafeMetadataError, match=r"builtins\.int"):
            round_trip(value)
        assert "builtins.int" in caplog.text
    with pytest.raises(UnsafeMetadataError, match="OrderedDict"):
        round_trip((collections.OrderedDict(), collections.OrderedDict))


def test_data_that_names_no_class_as_a_value_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    plain: list[Any] = [
        [collections.OrderedDict(a=collections.deque([1])), torch.Size([1]), torch.device("cpu")],
        [np.ones(3), np.float32(1), np.dtype("f4"), bytearray(b"x"), fractions.Fraction(1, 2)],
        (collections.defaultdict(set), collections.Counter("ab"), torch.ones(1), np.ones(2)),
        (collections.defaultdict(int), collections.defaultdict(str), range(3), torch.ones(1)),
    ]
    for value in plain:
        round_trip(value)
    assert not caplog.text


def test_a_value_that_only_free_unpickling_reads_is_saved_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    named: Any = (collections.defaultdict(Settings), torch.ones(1))
    assert round_trip(named, allow_pickle=True)[0] == {}
    assert "Settings" in caplog.text
    unreadable = (Made(collections.deque, "text"), torch.ones(1))
    assert round_trip(unreadable, allow_pickle=True)[0] == collections.deque("text")
    assert "free unpickling" in caplog.text
    with pytest.raises(IntegrityError):
        round_trip(unreadable)


def test_a_stream_of_bytes_comes_back_where_it_stood() -> None:
    stream = io.BytesIO(b"some bytes")
    stream.seek(5)
    arrived = round_trip([stream])[0]
    assert type(arrived) is io.BytesIO
    assert (arrived.getvalue(), arrived.read()) == (b"some bytes", b"bytes")


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


class Made:
    """Is unpickled as what a function makes of arguments."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced[0], self.reduced[1:]


class Opens:
    """Would make a file if it were ever unpickled freely."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_a_class_of_the_callers_own_needs_leave_and_says_which(tmp_path: Path) -> None:
    hf.save({"settings": (Settings(0.5),)}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"settings": None}
    with pytest.raises(UnsafeMetadataError, match=r"settings: .*Settings.*safe_globals") as caught:
        hf.load(state, checkpoint_id=tmp_path)
    assert caught.value.key == "settings"
    assert state == {"settings": None}
    hf.load(state, checkpoint_id=tmp_path, safe_globals=[Settings])
    assert state == {"settings": (Settings(0.5),)}
    state["settings"] = None
    hf.load(state, checkpoint_id=tmp_path, allow_pickle=True)
    assert state == {"settings": (Settings(0.5),)}


def test_saving_a_class_that_loading_will_refuse_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf.save({"settings": Settings()}, checkpoint_id=tmp_path)
    assert "settings" in caplog.text
    assert "Settings" in caplog.text
    assert "safe_globals" in caplog.text


@pytest.mark.parametrize("protocol", range(6))
def test_code_in_a_stored_object_is_not_run(tmp_path: Path, protocol: int) -> None:
    planted = tmp_path / "planted"
    stream = io.BytesIO()
    torch.save(Opens(str(planted)), stream, pickle_protocol=protocol)
    stream.seek(0)
    with pytest.raises(UnsafeMetadataError, match="mkdir"):
        decode_object("k", stream)
    assert not planted.exists()


def test_code_beside_a_tensor_is_not_run(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    stream = io.BytesIO()
    torch.save((torch.ones(1), Opens(str(planted))), stream)
    stream.seek(0)
    with pytest.raises(UnsafeMetadataError):
        decode_object("k", stream)
    assert not planted.exists()


def test_a_refusal_beside_a_tensor_names_what_was_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save((torch.ones(1), Opens(str(tmp_path / "planted"))), stream)
    stream.seek(0)
    with pytest.raises(UnsafeMetadataError, match="mkdir"):
        decode_object("k", stream)


def test_code_in_an_object_where_a_tensor_is_wanted_is_never_reached(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    hf.save({"weight": (Opens(str(planted)),)}, checkpoint_id=tmp_path / "checkpoint")
    with pytest.raises(hf.CheckpointError, match="weight"):
        hf.load({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "checkpoint")
    assert not planted.exists()


@pytest.mark.parametrize("name", ["eval", "exec", "getattr", "__import__", "open", "compile", "breakpoint"])
def test_functions_of_python_itself_are_refused(name: str) -> None:
    pickled = b"\x80\x02cbuiltins\n" + name.encode() + b"\n."
    with pytest.raises(UnsafeMetadataError, match=name):
        from_pickle(pickled)


def from_pickle(pickled: bytes) -> Any:
    """Reads a pickle as if it stood in a container of ours."""
    return decode_object("k", io.BytesIO(contained(pickled)))


def contained(pickled: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/version", "3\n")
    return stream.getvalue()


def test_an_array_of_objects_is_refused() -> None:
    array = np.array([Settings(), 1], dtype=object)
    with pytest.raises(UnsafeMetadataError):
        from_pickle(pickle.dumps(array, 4))


@pytest.mark.parametrize("content", [b"", b"not a container", b"PK\x03\x04" + bytes(40)], ids=len)
def test_bytes_that_are_no_object_raise(content: bytes) -> None:
    with pytest.raises((IntegrityError, UnsafeMetadataError), match="k"):
        decode_object("k", io.BytesIO(content))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_any_pickle_is_either_read_or_refused(tail: bytes) -> None:
    try:
        from_pickle(b"\x80\x04" + tail)
    except (IntegrityError, UnsafeMetadataError):
        pass


def test_a_value_that_cannot_be_pickled_says_so_with_its_type() -> None:
    with pytest.raises(PlanError, match=r"k: .*function.* cannot be saved"):
        encode_object("k", lambda: None)


def test_bytes_are_stored_as_bytes(tmp_path: Path) -> None:
    hf.save({"raw": bytes(100_000)}, checkpoint_id=tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 110_000


def test_a_stream_of_an_object_reads_like_any_stream() -> None:
    stream = encode_object("k", b"abc")
    content = stream.getvalue()
    assert stream.tell() == 0
    assert stream.read(4) + stream.read() == content
    stream.seek(2)
    assert bytes(stream.getbuffer()[2:]) == stream.read()
    assert encode_object("k", b"abc").seek(0, io.SEEK_END) == len(content)


@pytest.mark.parametrize(
    "read",
    [b"".join, lambda stream: b"".join(stream.readlines())],
    ids=["iterate", "readlines"],
)
def test_a_stream_of_an_object_is_whole_also_line_by_line(read: Callable[[io.BytesIO], bytes]) -> None:
    assert read(encode_object("k", b"abc")) == encode_object("k", b"abc").getvalue()
