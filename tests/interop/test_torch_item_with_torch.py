import io
import os
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import pytest
import torch
from torch.distributed.checkpoint.utils import _create_file_view

from holdfast._format import dtypes
from holdfast._format.torch_item import bytes_item, tensor_item
from holdfast._format.torch_item_reader import TensorLayout, read_item_layout
from holdfast._geometry import row_major_strides
from holdfast._io.blocks import crc32_combine
from holdfast.errors import IntegrityError

# Younger torches have more dtypes than the oldest that we support.
DTYPES = [name for name, dtype in dtypes.DTYPES.items() if dtype.storage and hasattr(torch, name)]
SHAPES = [(), (1,), (0,), (7,), (2, 3), (300, 2), (2, 0, 3), (1, 2, 3, 4), (2, 1, 1, 1, 70_000), (0, 2**33)]


@pytest.fixture(autouse=True)
def _complex_half_is_experimental() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor")
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        yield


def tensor_of(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    raw = torch.empty(shape, dtype=getattr(torch, dtype))
    count = raw.untyped_storage().nbytes()
    values = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8, generator=generator)
    raw.untyped_storage().copy_(values.untyped_storage())
    return raw


def storage_bytes(tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def layout_of(data: bytes) -> TensorLayout | None:
    return read_item_layout(
        lambda offset, nbytes: data[offset : offset + nbytes], len(data), path="f", key="k"
    )


def rebuild(data: bytes, layout: TensorLayout) -> torch.Tensor:
    """The tensor that a layout and its payload describe, made without torch.load."""
    payload = bytearray(data[layout.payload_offset : layout.payload_offset + layout.payload_nbytes])
    tensor = torch.empty(0, dtype=getattr(torch, layout.dtype))
    storage = (
        torch.frombuffer(payload, dtype=torch.uint8).untyped_storage()
        if payload
        else tensor.untyped_storage()
    )
    tensor.set_(storage, layout.storage_offset, layout.shape, layout.strides)
    return torch._neg_view(tensor) if layout.neg else tensor.conj() if layout.conj else tensor


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert (found.is_conj(), found.is_neg()) == (expected.is_conj(), expected.is_neg())
    assert storage_bytes(found) == storage_bytes(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_loads_our_items_bit_for_bit_out_of_the_middle_of_a_file(dtype: str) -> None:
    for position, shape in enumerate(SHAPES):
        tensor = tensor_of(dtype, shape)
        payload = storage_bytes(tensor)
        item = tensor_item(dtype, shape)
        whole = item.head(position) + payload + item.tail(position, zlib.crc32(payload))
        file = io.BytesIO(b"x" * position + whole + b"y" * 99)
        view = cast("IO[bytes]", _create_file_view(file, position, len(whole)))
        loaded = torch.load(view, map_location="cpu", weights_only=True)
        assert_same(loaded, tensor)
        assert not loaded.requires_grad
        assert loaded.is_contiguous()
        assert tensor.stride() == row_major_strides(shape)
        with zipfile.ZipFile(io.BytesIO(whole)) as archive:
            assert archive.testzip() is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layout_of_what_torch_saved_leads_to_its_bytes(dtype: str) -> None:
    for shape in SHAPES:
        tensor = tensor_of(dtype, shape)
        data = saved(tensor)
        layout = layout_of(data)
        assert layout is not None
        assert_same(rebuild(data, layout), tensor)
        payload = data[layout.payload_offset :][: layout.payload_nbytes]
        assert zlib.crc32(payload) == layout.crc32
        assert layout.byteorder == "little"


def test_every_dtype_that_torch_can_save_and_read_back_has_an_item() -> None:
    savable = set()
    for name, dtype in vars(torch).items():
        if isinstance(dtype, torch.dtype) and name == str(dtype).removeprefix("torch."):
            try:
                saved(torch.empty(2, dtype=dtype))
            except (KeyError, RuntimeError):
                continue
            savable.add(name)
    assert savable == set(DTYPES)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(100.0)[10:40:3],
        torch.arange(3.0).expand(2, 3),
        torch.arange(12.0).view(torch.complex64).reshape(2, 3).conj(),
        torch.arange(12.0).view(torch.complex64).conj().imag,
    ],
    ids=["channels-last", "transposed", "view", "expanded", "conj", "neg"],
)
def test_memory_formats_views_and_lazy_bits_are_reported(tensor: torch.Tensor) -> None:
    data = saved(tensor)
    layout = layout_of(data)
    assert layout is not None
    assert (layout.conj, layout.neg) == (tensor.is_conj(), tensor.is_neg())
    found = rebuild(data, layout)
    assert found.stride() == tensor.stride()
    assert torch.equal(found, tensor)


def test_gradient_flags_and_parameters_are_plain_tensors() -> None:
    for tensor in (torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3))):
        layout = layout_of(saved(tensor))
        assert layout is not None
        assert layout.shape == (3,)
    frozen = layout_of(saved(torch.nn.Parameter(torch.ones(3), requires_grad=False)))
    assert frozen is not None


class Subclass(torch.Tensor):
    pass


def with_attribute() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.note = "mine"  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: torch.ones(2).as_subclass(Subclass),
        with_attribute,
        lambda: torch.empty(2, device="meta"),
        lambda: {"weight": torch.ones(2)},
        lambda: [torch.ones(2)] * 2,
        lambda: 5,
        lambda: [torch.ones(1) for _ in range(100)],
    ],
    ids=["sparse", "csr", "quantized", "subclass", "attribute", "meta", "dict", "list", "int", "many"],
)
def test_what_is_more_than_a_plain_tensor_is_left_to_torch(make: object) -> None:
    assert callable(make)
    assert layout_of(saved(make())) is None


def test_items_saved_without_checksums_have_a_layout_without_one() -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(torch.arange(5.0))
    finally:
        torch.serialization.set_crc32_options(before)
    layout = layout_of(data)
    assert layout is not None
    assert layout.crc32 is None
    assert torch.equal(rebuild(data, layout), torch.arange(5.0))


def test_every_single_wrong_byte_of_an_item_of_torch_is_found_or_harmless() -> None:
    data = saved(torch.arange(3.0))
    whole = layout_of(data)
    assert whole is not None
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        try:
            found = layout_of(bytes(damaged))
        except IntegrityError:
            continue
        assert found in (whole, None), place


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_torch_loads_bytes_as_bytes(kind: type[bytes]) -> None:
    content = kind(range(256)) * 20
    item = bytes_item(len(content), combine=crc32_combine, kind=kind)
    whole = item.head(77) + content + item.tail(77, zlib.crc32(content))
    loaded = torch.load(io.BytesIO(whole), weights_only=False)
    assert type(loaded) is kind
    assert loaded == content
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert archive.testzip() is None


def test_torch_loads_an_item_beyond_4_gib(tmp_path: Path) -> None:
    nbytes = 2**32 + 5000
    item = tensor_item("uint8", (nbytes,))
    path = tmp_path / "item"
    with open(path, "wb") as file:
        file.write(item.head(0) + b"first")
        file.seek(nbytes - 9, os.SEEK_CUR)  # a hole: no disk, and by the map no memory
        file.write(b"last" + item.tail(0, 0))
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded.shape == (nbytes,)
    assert bytes(loaded[:6].tolist()) == b"first\0"
    assert bytes(loaded[-5:].tolist()) == b"\0last"
