"""Every kind of value in every kind of container: a load gives it back, or the save has warned or refused."""

import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import logging
import operator
import pathlib
import re
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast._objects.decode import decode_object
from holdfast._objects.encode import encode_object
from holdfast.errors import PlanError, UnsafeMetadataError

# torch warns of kinds of tensors that are deprecated, or not yet stable, when one is made.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    held: Any


@dataclasses.dataclass
class Holder:
    held: Any


def _complex() -> torch.Tensor:
    return torch.tensor([1 + 2j, 3 - 4j])


def _with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.mark = 1  # type: ignore[attr-defined]
    return tensor


def _quantized_by_channel() -> torch.Tensor:
    scales, zeros = torch.tensor([0.5, 0.25]), torch.tensor([0, 1])
    return torch.quantize_per_channel(torch.ones(2, 2), scales, zeros, 0, torch.qint8)


# Values that are made when a test runs, by their names.
TENSORS: dict[str, Callable[[], Any]] = {
    "conjugated view": lambda: _complex().conj(),
    "negated view": lambda: _complex().conj().imag,
    "Parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "Parameter without gradient": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "Parameter of a conjugated view": lambda: torch.nn.Parameter(_complex().conj()),
    "Buffer": lambda: torch.nn.Buffer(torch.ones(2)),
    "sparse COO": lambda: torch.eye(3).to_sparse(),
    "sparse COO with an index twice": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), [1.0, 2.0], (2,)
    ),
    "sparse CSR": lambda: torch.eye(3).to_sparse_csr(),
    "sparse CSC": lambda: torch.eye(3).to_sparse_csc(),
    "sparse BSR": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.5, 1, torch.quint8),
    "quantized by channel": _quantized_by_channel,
    "requires a gradient": lambda: torch.ones(2, requires_grad=True),
    "every second element": lambda: torch.arange(10)[::2],
    "expanded": lambda: torch.ones(1).expand(4),
    "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "uint16": lambda: torch.ones(2, dtype=torch.uint16),
    "no elements": lambda: torch.empty(0, 3),
    "meta": lambda: torch.empty(2, device="meta"),
}
DATA: dict[str, Callable[[], Any]] = {
    "array": lambda: np.arange(3),
    "array in column order": lambda: np.asfortranarray(np.ones((2, 3))),
    "array of text": lambda: np.array(["a", "b"]),
    "float32": lambda: np.float32(1.5),
    "complex64": lambda: np.complex64(1j),
    "datetime64": lambda: np.datetime64("2020-01-01"),
    "timedelta64": lambda: np.timedelta64(1, "s"),
    "numpy's dtype": lambda: np.dtype("f4"),
    "datetime": lambda: dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc),
    "timedelta": lambda: dt.timedelta(1),
    "Decimal": lambda: decimal.Decimal("1.10"),
    "Fraction": lambda: fractions.Fraction(1, 3),
    "Path": lambda: pathlib.Path("/a"),
    "UUID": lambda: uuid.UUID(int=1),
    "torch.Size": lambda: torch.Size([1]),
    "torch.dtype": lambda: torch.float16,
    "torch.layout": lambda: torch.strided,
    "torch.qscheme": lambda: torch.per_tensor_affine,
    "torch.device": lambda: torch.device("cuda", 0),
    "Ellipsis": lambda: ...,
    "Counter": lambda: collections.Counter("aab"),
    "SimpleNamespace": lambda: types.SimpleNamespace(a=1),
}
NEED_LEAVE: dict[str, Callable[[], Any]] = {
    "array of objects": lambda: np.array([1, "a"], dtype=object),
    "array of records": lambda: np.zeros(2, dtype=[("a", "i4")]),
    "a record": lambda: np.zeros(2, dtype=[("a", "i4")])[0],
    "dtype of arrays": lambda: np.dtype(("f4", (2,))),
    "masked array": lambda: np.ma.array([1, 2], mask=[False, True]),
    "numpy's Generator": lambda: np.random.default_rng(0),
    "torch.Generator": torch.Generator,
    "Enum": lambda: Colour.RED,
    "named tuple": lambda: Pair(1),
    "dataclass": lambda: Holder(1),
    "array.array": lambda: array.array("i", [1]),
    "pattern": lambda: re.compile("a"),
    "a builtin type": lambda: int,
    "a function": lambda: operator.add,
}
IMPOSSIBLE: dict[str, Callable[[], Any]] = {
    "lambda": lambda: lambda: 0,
    "torch.memory_format": lambda: torch.channels_last,
    "Module": lambda: torch.nn.Linear(1, 1),
    "memoryview": lambda: memoryview(b"a"),
}
# What only torch can read, and not in every container.
UNUSUAL: dict[str, Callable[[], Any]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a storage": lambda: torch.ones(2).storage(),  # type: ignore[no-untyped-call]
    "Tensor with an attribute": lambda: _with_attribute(torch.ones(2)),
    "Parameter with an attribute": lambda: _with_attribute(torch.nn.Parameter(torch.ones(2))),
}

CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda value: (value,),
    "list": lambda value: [value],
    "deque": lambda value: collections.deque([value], maxlen=4),
    "set": lambda value: {value},
    "frozenset": lambda value: frozenset([value]),
    "dict": lambda value: {"x": value},
    "OrderedDict": lambda value: collections.OrderedDict(x=value),
    "defaultdict": lambda value: collections.defaultdict(list, x=value),
    "SimpleNamespace": lambda value: types.SimpleNamespace(x=value),
    "list in a tuple": lambda value: ([value], 1),
}
CONTAINERS_THAT_NEED_LEAVE: dict[str, Callable[[Any], Any]] = {"named tuple": Pair, "dataclass": Holder}


def content(container: Any) -> Any:
    if isinstance(container, types.SimpleNamespace):
        return container.x
    first = next(iter(container.values() if isinstance(container, dict) else container))
    return first[0] if isinstance(first, list) else first


def same(found: Any, expected: Any) -> bool:
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        facts = operator.attrgetter("dtype", "layout", "shape", "requires_grad", "device")
        if facts(found) != facts(expected) or hasattr(found, "_is_buffer") != hasattr(expected, "_is_buffer"):
            return False
        if expected.is_meta:
            return True
        if expected.is_quantized:
            return same(found.int_repr(), expected.int_repr()) and same(
                found.dequantize(), expected.dequantize()
            )
        if expected.layout is torch.sparse_coo and found.is_coalesced() != expected.is_coalesced():
            return False
        found, expected = (t if t.is_complex() else t.to_dense().float() for t in (found, expected))
        return torch.equal(found, expected)
    if isinstance(expected, np.ndarray):
        return bool(found.dtype == expected.dtype and (found == expected).all())
    return bool(found == expected)


def outcome(container: Any, caplog: pytest.LogCaptureFixture) -> Any:
    """What a default load gives: the value, or why not. A save must have warned if and only if it refuses."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        stream = io.BytesIO(encode_object("the key", container).getvalue())
    messages = [record.getMessage() for record in caplog.records]
    try:
        loaded = decode_object("the key", stream)
    except UnsafeMetadataError as refused:
        assert len(messages) == 1
        assert messages[0].startswith("the key: ")
        assert "safe_globals" in messages[0]
        return refused
    assert messages == [], "the save warned of a value that is loaded"
    return loaded


def held_by(make: Callable[[], Any], containers: dict[str, Callable[[Any], Any]]) -> list[Any]:
    held = []
    for put in containers.values():
        value = make()
        try:
            held.append(put(value))
        except TypeError:
            pass  # a value that cannot be hashed is in no set
    return held


@pytest.mark.parametrize("make", [*TENSORS.values(), *DATA.values()], ids=[*TENSORS, *DATA])
def test_data_comes_back_from_every_container(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    for container in held_by(make, CONTAINERS):
        loaded = outcome(container, caplog)
        assert type(loaded) is type(container)
        assert same(content(loaded), content(container))


@pytest.mark.parametrize("make", [*TENSORS.values(), *DATA.values()], ids=[*TENSORS, *DATA])
def test_data_in_a_class_of_the_callers_own_is_warned_of(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    for container in held_by(make, CONTAINERS_THAT_NEED_LEAVE):
        assert isinstance(outcome(container, caplog), UnsafeMetadataError)


@pytest.mark.parametrize("make", NEED_LEAVE.values(), ids=NEED_LEAVE)
def test_what_needs_leave_to_be_loaded_is_warned_of_in_every_container(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    for container in [make(), *held_by(make, {**CONTAINERS, **CONTAINERS_THAT_NEED_LEAVE})]:
        assert isinstance(outcome(container, caplog), UnsafeMetadataError)
        assert isinstance(outcome((container, torch.ones(1)), caplog), UnsafeMetadataError)


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_tensors_are_loaded_or_warned_of(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    for container in held_by(make, CONTAINERS):
        loaded = outcome(container, caplog)
        if not isinstance(loaded, UnsafeMetadataError):
            assert type(content(loaded)) is type(make())


@pytest.mark.parametrize("make", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_be_pickled_is_refused_with_its_key_by_every_container(make: Callable[[], Any]) -> None:
    for container in [make(), *held_by(make, {**CONTAINERS, **CONTAINERS_THAT_NEED_LEAVE})]:
        for value in (container, (container, torch.ones(1))):
            with pytest.raises(PlanError, match=r"the key: .*Leave it out"):
                encode_object("the key", value)


@pytest.mark.parametrize("put", CONTAINERS.values(), ids=CONTAINERS)
def test_tensors_in_containers_come_back_from_a_checkpoint(
    put: Callable[[Any], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, make in TENSORS.items():
        if name in ("meta", "expanded"):
            continue  # as an entry of a list or dict of the state: neither can be filled
        folder = tmp_path / name
        state = {"deep": {"leaf": put(make())}}
        hf.save(state, checkpoint_id=folder)
        loaded = {"deep": {"leaf": put(make())}}
        hf.load(loaded, checkpoint_id=folder)
        assert same(content(loaded["deep"]["leaf"]), content(state["deep"]["leaf"]))
    assert [record for record in caplog.records if "safe_globals" in record.getMessage()] == []


@pytest.mark.parametrize(
    "numbers", [(2, 0, (2,), (1,)), (0, 3, (2,), (1,)), (0, 0, (-1,), (1,)), (0, 0, (2, 2), (1,))]
)
def test_a_quantized_tensor_must_lie_in_its_storage(numbers: Any) -> None:
    """The arguments of a pickle that somebody else made."""
    from holdfast._objects.rebuild_tensors import REBUILT, NamedStorage  # noqa: PLC0415

    extra, offset, size, stride = numbers
    storage = NamedStorage(torch.ones(2 - extra, dtype=torch.uint8).untyped_storage(), torch.qint8)
    rebuild = REBUILT["torch._utils", "_rebuild_qtensor"]
    with pytest.raises(TypeError):
        rebuild(storage, offset, size, stride, (torch.per_tensor_affine, 0.5, 0), False, {})


def test_the_indices_of_a_sparse_tensor_must_lie_in_its_shape() -> None:
    stream = io.BytesIO()
    outside = torch.sparse_coo_tensor(torch.tensor([[7]]), [1.0], (2,), check_invariants=False)
    torch.save(collections.deque([outside]), stream)
    with pytest.raises(hf.errors.IntegrityError):
        decode_object("k", stream)
