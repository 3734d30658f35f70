"""Fingerprints: equal for equal values on whatever process, different for different ones, never an alarm."""

import collections
import copy
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import json
import math
import os
import pathlib
import random
import struct
import subprocess
import sys
import types
import uuid
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._objects.object_fingerprint import fingerprint
from holdfast._tensors.tensor_fingerprint import SMALL, fingerprint_tensor


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    names: list[str] = dataclasses.field(default_factory=lambda: ["a", "b"])


@dataclasses.dataclass(frozen=True)
class Slots:
    __slots__ = ("left", "right")
    left: int
    right: Any


class Point(collections.namedtuple("Point", "x y")):  # noqa: PYI024 - no types are needed here
    __slots__ = ()


class CountsLooks:
    looks = 0

    def __reduce__(self) -> tuple[Any, ...]:
        self.looks += 1
        return CountsLooks, (), {"looks": self.looks}


def an_optimizer() -> tuple[torch.optim.Optimizer, Any]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(3, 2, generator=generator))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def many_values() -> dict[str, Any]:
    """Values of every kind, made anew by each call; no two are equal."""
    optimizer, scheduler = an_optimizer()
    source = random.Random(5)
    ring: list[Any] = [1]
    ring.append({"back": ring})
    array = np.arange(6, dtype="f4").reshape(2, 3)
    return {
        "int": 1,
        "negative": -1,
        "byte": 255,
        "large int": 10**5000,
        "bool": True,
        "float": 1.0,
        "zero": 0.0,
        "minus zero": -0.0,
        "nan": math.nan,
        "other nan": struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0],
        "complex": 1 + 2j,
        "none": None,
        "ellipsis": ...,
        "str": "a",
        "half a character": "\ud800",
        "bytes": b"a",
        "bytearray": bytearray(b"a"),
        "large bytes": bytes(range(256)) * 1024,
        "longer bytes": bytes(range(256)) * 1024 + b"\0",
        "large text": "x" * 100_000,
        "tuple": (1, 2),
        "list": [1, 2],
        "nested": [[1], 2],
        "otherwise nested": [1, [2]],
        "no items": (),
        "no elements": [],
        "dict": {"a": 1, "b": (2, None)},
        "dict of other keys": {1: "a", (2, 3): "b", None: "c"},
        "set": {"a", "b", "c"},
        "frozenset": frozenset({"a", "b", "c"}),
        "ordered": collections.OrderedDict([("a", 1), ("b", 2)]),
        "otherwise ordered": collections.OrderedDict([("b", 2), ("a", 1)]),
        "defaultdict": collections.defaultdict(list, a=[1]),
        "counter": collections.Counter("abca"),
        "deque": collections.deque([1, 2], maxlen=3),
        "namedtuple": Point(1, 2),
        "enum": Color.RED,
        "other member": Color.BLUE,
        "int enum": Level.LOW,
        "dataclass": Settings(),
        "other dataclass": Settings(rate=0.2),
        "slots": Slots(1, [2]),
        "namespace": types.SimpleNamespace(a=1),
        "datetime": dt.datetime(2024, 5, 6, 7, tzinfo=dt.timezone.utc),
        "date": dt.date(2024, 5, 6),
        "timedelta": dt.timedelta(days=1),
        "partial": functools.partial(int, base=2),
        "other partial": functools.partial(int, base=3),
        "function": an_optimizer,
        "builtin": len,
        "class": Settings,
        "method": Color.RED.name.upper,
        "path": pathlib.PurePosixPath("/a/b"),
        "uuid": uuid.UUID(int=5),
        "decimal": decimal.Decimal("1.10"),
        "range": range(3),
        "slice": slice(1, 2),
        "python's state": source.getstate(),
        "python's generator": source,
        "torch's state": torch.Generator().manual_seed(7).get_state(),
        "numpy's state": np.random.RandomState(5).get_state(),
        "numpy's generator": np.random.default_rng(5),
        "param_groups": optimizer.state_dict()["param_groups"],
        "scheduler": scheduler.state_dict(),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "shape": torch.Size([1, 2]),
        "ring": ring,
        "tensor": (torch.arange(4.0),),
        "tensor of another shape": (torch.arange(4.0).view(2, 2),),
        "tensor of another dtype": (torch.arange(4.0).double(),),
        "tensor of other elements": (torch.arange(4.0) + 1,),
        "empty tensor": (torch.empty(0, 3),),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "quantized by another scale": torch.quantize_per_tensor(torch.ones(3) * 2, 0.2, 0, torch.qint8),
        "quantized by channel": torch.quantize_per_channel(
            torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8
        ),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "csc": torch.eye(3).to_sparse_csc(),
        "nested tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "storage": torch.arange(3.0).untyped_storage(),
        "array": array,
        "array of another shape": array.reshape(3, 2),
        "array of another order of bytes": array.astype(">f4"),
        "array of objects": np.array([1, "a", None], dtype=object),
        "array of records": np.array([(1, 2.0)], dtype=[("a", "i1"), ("b", "f8")]),
        "array of dates": np.array(["2024-01-01"], dtype="M8[D]"),
        "masked array": np.ma.masked_array([1, 2], [True, False]),
        "other mask": np.ma.masked_array([1, 2], [False, True]),
        "scalar": np.float32(1),
        "scalar that is a float": np.float64(1),
        "scalar that is a bool": np.bool_(True),
        "empty array": np.empty((0, 2)),
    }


def hexes() -> dict[str, str | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of kinds of tensors that are not finished or go away
        values = many_values()
    return {
        name: None if (made := fingerprint(value)) is None else made.hex() for name, value in values.items()
    }


def test_values_made_anew_have_the_same_fingerprint() -> None:
    first = hexes()
    assert [name for name, made in first.items() if made is None or len(made) != 32] == []
    assert hexes() == first


def test_no_two_different_values_have_the_same_fingerprint() -> None:
    seen = collections.defaultdict(list)
    for name, made in hexes().items():
        seen[made].append(name)
    assert [names for names in seen.values() if len(names) > 1] == []


@pytest.mark.slow
def test_another_process_with_another_hash_seed_agrees() -> None:
    code = (
        "import sys, json, importlib.util as u\n"
        "spec = u.spec_from_file_location(sys.argv[2], sys.argv[1])\n"
        "module = sys.modules[spec.name] = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(json.dumps(module.hexes()))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, __file__, __name__],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout) == hexes()


def test_the_order_of_keys_and_elements_does_not_count() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    grown, shrunk = {8, 0}, set(range(1000))
    shrunk -= set(range(1000)) - {0, 8}
    assert fingerprint(grown) == fingerprint(shrunk) == fingerprint({0, 8})
    assert fingerprint(collections.defaultdict(int, a=1, b=2)) == fingerprint(
        collections.defaultdict(int, b=2, a=1)
    )


def test_what_is_shared_and_what_is_interned_does_not_count() -> None:
    once, interned = ["x" * 50], "ab" * 20
    parts = "".join(["ab"] * 20)
    assert interned is not parts
    assert fingerprint([once, once, interned, interned]) == fingerprint(
        [["x" * 50], copy.deepcopy(once), interned, parts]
    )


def test_where_elements_lie_does_not_count() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    columns = matrix.t().contiguous().t()
    assert columns.stride() != matrix.stride()
    assert fingerprint((matrix,)) == fingerprint((columns,)) == fingerprint((torch.nn.Parameter(matrix),))
    array = np.arange(12.0).reshape(3, 4)
    assert fingerprint(array) == fingerprint(np.asfortranarray(array)) == fingerprint(array[::-1][::-1])


def test_the_gaps_between_the_fields_of_records_do_not_count() -> None:
    dtype = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    one, other = np.zeros(3, np.uint8).repeat(16), np.full(48, 255, np.uint8)
    made = []
    for memory in (one, other):
        records = memory.view(dtype)
        records["a"], records["b"] = 1, 2.0
        made.append(fingerprint(records))
    assert one.tobytes() != other.tobytes()
    assert made[0] == made[1]
    assert made[0] is not None


def test_values_that_cannot_be_told_have_none() -> None:
    class Local:
        pass

    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    generator = (number for number in range(3))
    unknown = [generator, lambda: 0, Local, Local(), CountsLooks(), sys, deep, memoryview(b"a")]
    assert [fingerprint(value) for value in unknown] == [None] * len(unknown)
    assert fingerprint([1, {"a": generator}]) is None
    assert list(generator) == [0, 1, 2]


def test_values_that_refer_to_themselves_end() -> None:
    def ring(length: int) -> list[Any]:
        first: list[Any] = []
        last = first
        for _ in range(length - 1):
            last.append([])
            last = last[0]
        last.append(first)
        return first

    assert fingerprint(ring(2)) == fingerprint(ring(2))
    assert fingerprint(ring(2)) != fingerprint(ring(3))
    ladder: list[Any] = [1]
    for _ in range(150):
        ladder = [ladder, ladder]
    assert fingerprint(ladder) is not None
    everyone: list[Any] = [[] for _ in range(12)]
    for one in everyone:
        one.extend(everyone)
    assert fingerprint(everyone) is None


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


def exact(value: Any) -> Any:
    """A form of a plain value that is equal only for the same types and bits."""
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if isinstance(value, list | tuple):
        return (type(value), tuple(exact(part) for part in value))
    if isinstance(value, dict):
        return frozenset((exact(key), exact(part)) for key, part in value.items())
    return (type(value), value)


@settings(max_examples=300, deadline=None)
@given(PLAIN, PLAIN)
def test_plain_values_have_equal_fingerprints_exactly_if_they_are_equal(one: Any, other: Any) -> None:
    assert (fingerprint(one) == fingerprint(other)) == (exact(one) == exact(other))
    assert fingerprint(copy.deepcopy(one)) == fingerprint(one)


@pytest.mark.parametrize("at", [0, 70_000, (1 << 21) - 1])
def test_a_flipped_bit_of_large_bytes_is_seen(at: int) -> None:
    content = bytearray(1 << 21)
    before = fingerprint(bytes(content))
    content[at] ^= 1
    assert fingerprint(bytes(content)) != before


# Tensors


def views(whole: torch.Tensor) -> list[torch.Tensor]:
    """The same elements, lying in memory in other ways."""
    spread = torch.zeros(*whole.shape[:-1], whole.shape[-1] * 2, dtype=whole.dtype)[..., ::2]
    spread.copy_(whole)
    offset = torch.zeros(whole.numel() + 3, dtype=whole.dtype)[3:].view(whole.shape)
    offset.copy_(whole)
    return [whole.clone(), whole.t().contiguous().t(), spread, offset, torch.nn.Parameter(whole, False)]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (300, 301)], ids=["small", "large"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex128]
)
def test_strides_and_offsets_do_not_count(shape: tuple[int, int], dtype: torch.dtype, full: bool) -> None:
    whole = torch.randint(0, 2, shape).to(dtype)
    assert (whole.nbytes > SMALL) == (shape == (300, 301))
    made = {fingerprint_tensor(view, full=full) for view in views(whole)}
    assert len(made) == 1
    assert len(made.pop()) == 16


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("count", [10, 20_000])
def test_lazy_conjugation_and_negation_count_as_done(count: int, full: bool) -> None:
    lazy = torch.randn(count, dtype=torch.complex64).conj()
    assert lazy.is_conj()
    assert lazy.imag.is_neg()
    for value in (lazy, lazy.imag):
        done = value.resolve_conj().resolve_neg().clone()
        assert fingerprint_tensor(value, full=full) == fingerprint_tensor(done, full=full)
        assert fingerprint_tensor(value, full=full) != fingerprint_tensor(done + 1, full=full)


def test_dtype_shape_and_length_count() -> None:
    values = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(5),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.zeros(()),
        torch.zeros(100_000),
        torch.zeros(100_001),
        torch.zeros(100_000, dtype=torch.int32),
    ]
    for full in (False, True):
        assert len({fingerprint_tensor(value, full=full) for value in values}) == len(values)


@pytest.mark.parametrize("at", [0, 7, SMALL // 4 - 1])
def test_every_element_of_a_small_tensor_is_looked_at(at: int) -> None:
    tensor = torch.zeros(SMALL // 4)
    before = fingerprint_tensor(tensor, full=False)
    tensor[at] = -0.0
    assert fingerprint_tensor(tensor, full=False) != before


@pytest.mark.parametrize("strided", [False, True])
def test_a_full_look_at_a_large_tensor_sees_every_element_and_a_sample_its_ends(strided: bool) -> None:
    def made() -> torch.Tensor:
        return torch.zeros(1000, 1001).t() if strided else torch.zeros(1001, 1000)

    plain = made()
    for at in ((0, 0), (500, 501), (1000, 999)):
        changed = made()
        changed[at] = 1
        assert fingerprint_tensor(changed, full=True) != fingerprint_tensor(plain, full=True)
        is_end = at != (500, 501)
        sampled = fingerprint_tensor(changed, full=False) != fingerprint_tensor(plain, full=False)
        assert sampled or not is_end


def test_a_sample_sees_noise_of_another_seed_anywhere_in_a_large_tensor() -> None:
    base = torch.zeros(1 << 20)
    before = fingerprint_tensor(base, full=False)
    for part in range(0, 1 << 20, 1 << 16):
        changed = base.clone()
        changed[part : part + (1 << 16)] = 1
        assert fingerprint_tensor(changed, full=False) != before
