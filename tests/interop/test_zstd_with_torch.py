"""Compressed streams between torch's ZStandard, with both of its libraries, and ours."""

import io
import random
import sys
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch
from tests.support.stock_torch import stock_load, stock_save
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from holdfast._io import zstd_backends
from holdfast.errors import IntegrityError
from holdfast.extension import ExtensionRegistry, ZStandard
from holdfast.testing.fake_streams import FakeOutput

KIB_128 = 128 << 10
STANDARD_LIBRARY = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
torch_extension: Any = pytest.importorskip(
    "torch.distributed.checkpoint._extension", reason="this torch has no transforms"
)

SIZES = [0, 1, KIB_128 - 1, KIB_128, KIB_128 + 1, 5 << 20]


@pytest.fixture(autouse=True, params=["zstandard", STANDARD_LIBRARY])
def our_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstd_backends, "PREFERENCE", (request.param,))


@pytest.fixture(params=["zstandard", "pyzstd"])
def torchs_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pyzstd":
        monkeypatch.setattr(torch_extension, "zstandard", None)
    return str(request.param)


def content_of(size: int) -> bytes:
    rng = random.Random(size)
    return b"".join(rng.choice((rng.randbytes(1000), bytes(1000))) for _ in range(size // 1000 + 1))[:size]


def write_through(transform: Any, content: bytes, *, step: int, flush: bool) -> bytes:
    sink = FakeOutput()
    stream = transform.transform_to(cast("IO[bytes]", sink))
    for start in range(0, len(content), step):
        stream.write(content[start : start + step])
        if flush:
            stream.flush()
    stream.close()
    return bytes(sink.content)


@pytest.mark.usefixtures("torchs_library")
@pytest.mark.parametrize("size", SIZES)
def test_we_read_what_torch_wrote(size: int) -> None:
    content = content_of(size)
    data = write_through(torch_extension.ZStandard(), content, step=1 << 20, flush=False)
    assert ZStandard().transform_from(io.BytesIO(data)).read() == content


def test_we_read_every_frame_where_torch_wrote_several(torchs_library: str) -> None:
    # With pyzstd each flush ends a frame; torch.save flushes, so real checkpoints have several.
    content = content_of(3 * KIB_128)
    data = write_through(torch_extension.ZStandard(), content, step=50_000, flush=True)
    assert data.count(b"\x28\xb5\x2f\xfd") == (1 if torchs_library == "zstandard" else 9)
    assert ZStandard().transform_from(io.BytesIO(data)).read() == content


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_torch_reads_what_we_wrote(size: int, flush: bool) -> None:
    content = content_of(size)
    data = write_through(ZStandard(), content, step=100_000, flush=flush)
    assert torch_extension.ZStandard().transform_from(io.BytesIO(data)).read(-1) == content


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "weight": torch.randn(300, 400),
        "step": 7,
        "empty": torch.zeros(0),
        "half": torch.ones(9).bfloat16(),
    }


def assert_loads(path: Path, registry: Any) -> None:
    loaded: dict[str, Any] = {
        key: torch.zeros_like(v) if torch.is_tensor(v) else None for key, v in state().items()
    }
    stock_load(loaded, storage_reader=FileSystemReader(path, _extension_registry=registry))
    for key, value in state().items():
        assert torch.equal(loaded[key], value) if torch.is_tensor(value) else loaded[key] == value


@pytest.mark.usefixtures("torchs_library")
def test_the_items_of_a_compressed_torch_checkpoint_are_read_by_their_descriptors(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path, _extensions=[torch_extension.ZStandard()])
    stock_save(state(), storage_writer=writer)
    items = FileSystemReader(tmp_path).read_metadata().storage_data
    assert len(items) == len(state())
    for index, item in items.items():
        (transform,) = ExtensionRegistry().from_descriptor_list(item.transform_descriptors)
        assert isinstance(transform, ZStandard)
        data = (tmp_path / item.relative_path).read_bytes()[item.offset : item.offset + item.length]
        found = torch.load(io.BytesIO(transform.transform_from(io.BytesIO(data)).read()))
        value = state()[index.fqn]
        assert torch.equal(found, value) if torch.is_tensor(value) else found == value


def test_our_transform_serves_torchs_writer_and_torchs_registry_reads_it(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path, _extensions=cast("Any", [ZStandard(1)]))
    stock_save(state(), storage_writer=writer)
    assert_loads(tmp_path, torch_extension.ExtensionRegistry())


def test_a_flipped_bit_in_our_stream_is_noticed_by_us() -> None:
    content = content_of(KIB_128)
    data = bytearray(write_through(ZStandard(), content, step=1 << 20, flush=False))
    data[len(data) // 2] ^= 1
    with pytest.raises(IntegrityError):
        ZStandard().transform_from(io.BytesIO(bytes(data))).read()
