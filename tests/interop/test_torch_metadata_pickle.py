"""torch's classes write metadata that we read, and what we write becomes torch's own objects again."""

import io
import pathlib
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.golden.make_torch_checkpoints import plain_state
from tests.support.stock_torch import stock_record
from tests.support.torch_pickles import write_torch_metadata
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast._format import torch_pickle_rows
from holdfast._format.dtypes import DTYPES
from holdfast._format.torch_pickle import read_torch_metadata
from holdfast._format.torch_pickle_records import (
    TorchMetadata,
    TorchObject,
    TorchProperties,
    TorchStorage,
    TorchStorageMeta,
    TorchTensor,
)
from holdfast.errors import IntegrityError, UnsafeMetadataError

# Those of the newest torch, as far as this one has them.
KNOWN_DTYPES = sorted(name for name in DTYPES if hasattr(torch, name))
GOLDEN = Path(__file__).parents[1] / "golden"
VERSIONS = ("torch-2.0", "torch-2.3", "torch-2.4", "torch-2.6", "torch-2.13")
# torch 2.6 does not store the version of its format.
VERSION = "1.0.0" if hasattr(Metadata, "version") else None
MEMORY_FORMATS = ("contiguous_format", "channels_last", "preserve_format")


def named(kind: type) -> dict[str, Any]:
    """torch's constants of a kind by their own name; aliases such as torch.half fall away."""
    found = [value for value in vars(torch).values() if isinstance(value, kind)]
    return {str(value).removeprefix("torch."): value for value in found}


def torch_properties(value: TorchProperties) -> TensorProperties:
    return TensorProperties(
        getattr(torch, value.dtype),
        getattr(torch, value.layout),
        value.requires_grad,
        getattr(torch, value.memory_format),
        value.pin_memory,
    )


def as_torch(records: TorchMetadata) -> Metadata:
    """The object that torch would have for these records."""
    meta = records.storage_meta
    made = Metadata(
        {
            key: BytesStorageMetadata()
            if isinstance(entry, TorchObject)
            else TensorStorageMetadata(
                torch_properties(entry.properties),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in entry.chunks],
            )
            for key, entry in records.entries.items()
        },
        records.planner_data,
        {
            MetadataIndex(key, offsets, number): stock_record(
                filesystem._StorageInfo,
                relative_path=row.path,
                offset=row.offset,
                length=row.nbytes,
                transform_descriptors=list(row.descriptors) or None,
            )
            for number, ((key, offsets), row) in enumerate(records.storage.items())
        },
        None
        if meta is None
        else stock_record(StorageMeta, **{**meta._asdict(), "modules": list(meta.modules)}),
    )
    if VERSION is not None:
        made.version = records.version
    return made


def write(records: TorchMetadata) -> bytes:
    meta = records.storage_meta or TorchStorageMeta()
    return write_torch_metadata(
        entries=records.entries.items(),
        storage=[
            (key, offsets, number, *row)
            for number, ((key, offsets), row) in enumerate(records.storage.items())
        ],
        planner_data=records.planner_data,
        checkpoint_id=meta.checkpoint_id,
        save_id=meta.save_id,
        load_id=meta.load_id,
        modules=meta.modules,
        version=records.version,
    )


def many(count: int, *, dims: int = 2, chunks: int = 1, seed: int = 0) -> TorchMetadata:
    """Records large enough to be read row by row, with numbers of every width."""
    rng = random.Random(seed)
    widths = (200, 60_000, 2**31 - 1, 2**40, 2**61)
    entries: dict[str, TorchTensor | TorchObject] = {}
    storage: dict[Any, TorchStorage] = {}
    for number in range(count):
        key = f"model.layers.{number}.weight"
        step = tuple(rng.randrange(1, 9) for _ in range(dims))
        shape = tuple(dim * chunks for dim in step)
        properties = TorchProperties(
            rng.choice(("float32", "bfloat16", "int64")), requires_grad=number % 5 == 0
        )
        boxes = [(tuple(dim * part for dim in step), step) for part in range(chunks)]
        entries[key] = TorchTensor(properties, shape, boxes)
        for offsets, _ in boxes:
            place = rng.randrange(rng.choice(widths))
            storage[key, offsets] = TorchStorage(
                f"__{number % 3}_0.distcp", place, rng.randrange(rng.choice(widths))
            )
    planner = {key: tuple(key.split(".")) for key in entries}
    return TorchMetadata(entries, storage, planner, TorchStorageMeta("here", "s"), VERSION)


# The tables.


def test_every_dtype_of_torch_is_in_the_table_with_its_itemsize() -> None:
    assert {name: dtype.itemsize for name, dtype in named(torch.dtype).items()} == {
        name: dtype.itemsize for name, dtype in DTYPES.items() if name in KNOWN_DTYPES
    }


@pytest.mark.parametrize("name", [name for name in KNOWN_DTYPES if DTYPES[name].storage])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_the_bytes_of_an_element_are_torchs(name: str) -> None:
    storage = torch.empty(8, dtype=getattr(torch, name)).untyped_storage()
    assert storage.nbytes() == 8 * DTYPES[name].itemsize


# Both ways.


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("count", [1, 300])
def test_what_torchs_classes_pickle_is_read(protocol: int, count: int) -> None:
    records = many(count)
    assert read_torch_metadata(pickle.dumps(as_torch(records), protocol)) == records


@pytest.mark.parametrize("dims", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("chunks", [1, 3])
def test_rows_of_any_number_of_dimensions_are_read(dims: int, chunks: int) -> None:
    records = many(200, dims=dims, chunks=chunks if dims else 1)
    assert read_torch_metadata(pickle.dumps(as_torch(records))) == records


@pytest.mark.parametrize(
    "records", [many(3), many(1500), many(20, dims=4, chunks=60)], ids=["few", "many", "chunks"]
)
def test_what_we_write_becomes_torchs_own_objects(records: TorchMetadata) -> None:
    loaded = pickle.loads(write(records))
    expected = as_torch(records)
    assert loaded == expected
    assert list(loaded.state_dict_metadata) == list(expected.state_dict_metadata)
    for index, twin in zip(loaded.storage_data, expected.storage_data, strict=True):
        assert (hash(index), vars(index)) == (hash(twin), vars(twin))
        assert type(index.offset) is torch.Size
    for entry in loaded.state_dict_metadata.values():
        assert type(entry.size) is torch.Size
        assert all(type(chunk.offsets) is type(chunk.sizes) is torch.Size for chunk in entry.chunks)


def test_a_pickle_of_what_we_wrote_and_torch_loaded_is_torchs_own() -> None:
    records = many(40)._replace(
        entries={"o": TorchObject()}, storage={("o", None): TorchStorage("f", 1, 2, ("stream.zstd/1", "b"))}
    )
    loaded = pickle.loads(write(records))
    assert loaded == as_torch(records)
    assert vars(next(iter(loaded.storage_data))) == vars(MetadataIndex("o", None, 0))
    assert read_torch_metadata(pickle.dumps(loaded)) == records


@pytest.mark.parametrize("name", KNOWN_DTYPES)
@pytest.mark.parametrize("memory_format", MEMORY_FORMATS)
def test_properties_of_every_dtype_and_format_go_both_ways(name: str, memory_format: str) -> None:
    properties = TorchProperties(name, "strided", True, memory_format, True)
    records = TorchMetadata(
        {"w": TorchTensor(properties, (2,), [((0,), (2,))])}, {}, None, TorchStorageMeta()
    )
    assert pickle.loads(write(records)) == as_torch(records)
    assert read_torch_metadata(pickle.dumps(as_torch(records))) == records


@pytest.mark.parametrize("layout", sorted(set(named(torch.layout))))
def test_every_layout_of_torch_goes_both_ways(layout: str) -> None:
    records = TorchMetadata(
        {"w": TorchTensor(TorchProperties("int8", layout), (), [])}, {}, 5, TorchStorageMeta()
    )
    assert pickle.loads(write(records)) == as_torch(records)
    assert read_torch_metadata(pickle.dumps(as_torch(records))) == records


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=12,
)
dims = st.lists(st.integers(0, 1000), max_size=5).map(tuple)


@settings(deadline=None, max_examples=60)
@given(
    entries=st.dictionaries(
        st.text(),
        st.just(TorchObject())
        | st.tuples(st.sampled_from(KNOWN_DTYPES), dims).map(
            lambda drawn: TorchTensor(
                TorchProperties(drawn[0]), drawn[1], [(tuple(0 for _ in drawn[1]), drawn[1])]
            )
        ),
        max_size=5,
    ),
    storage=st.dictionaries(
        st.tuples(st.text(), st.none() | dims),
        st.builds(TorchStorage, st.text("abc", min_size=1), st.integers(0, 2**62), st.integers(0, 2**61)),
        max_size=5,
    ),
    planner_data=plain,
    version=st.none() | st.text(),
)
def test_any_metadata_goes_both_ways(
    entries: Any, storage: Any, planner_data: Any, version: str | None
) -> None:
    records = TorchMetadata(entries, storage, planner_data, TorchStorageMeta("x", "y", "z", ("m",)), version)
    assert pickle.loads(write(records)) == as_torch(records)


# What other Pythons and platforms pickle.


def test_an_enum_pickled_by_name_is_read_as_python_3_11_0_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = torch_metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(
        encoding, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)), raising=False
    )
    records = many(2)
    for protocol in (2, 4):
        data = pickle.dumps(as_torch(records), protocol)
        assert b"getattr" in data
        assert read_torch_metadata(data) == records


@pytest.mark.parametrize(
    ("checkpoint_id", "text"),
    [
        (pathlib.PurePosixPath("/a/b c/d"), "/a/b c/d"),
        (pathlib.PurePosixPath("a/b"), "a/b"),
        (pathlib.PureWindowsPath("C:\\a\\b"), "C:\\a\\b"),
        (pathlib.Path("x") / "y", str(pathlib.Path("x") / "y")),
        (None, None),
    ],
)
def test_a_checkpoint_id_that_is_a_path_is_read_as_text(checkpoint_id: Any, text: str | None) -> None:
    data = pickle.dumps(Metadata({}, None, {}, StorageMeta(checkpoint_id, "s")))
    for variant in (data, data.replace(b"\x8c\x07pathlib", b"\x8c\x0epathlib._local")):
        unframed = variant[:2] + variant[11:]
        assert read_torch_metadata(unframed).storage_meta == TorchStorageMeta(text, "s")


def test_a_module_in_the_planner_data_is_refused_and_named() -> None:
    with pytest.raises(UnsafeMetadataError, match=r"torch\.device|torch\._"):
        read_torch_metadata(pickle.dumps(Metadata({}, {"a": torch.device("cpu")}, {})))
    with pytest.raises(UnsafeMetadataError, match="Nothing was run"):
        read_torch_metadata(pickle.dumps(Metadata({}, {"a": torch.float32}, {})))


# Rows read at once.


def test_large_files_are_read_row_by_row_and_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    records = many(700, chunks=3)
    # Texts of their own for each row, as they come from other ranks; and two unlike rows in between.
    twin = as_torch(records)
    own: dict[Any, Any] = {}
    for number, (index, info) in enumerate(twin.storage_data.items()):
        fqn = "".join(list(index.fqn))
        own[MetadataIndex(fqn, index.offset, number)] = info
        if number in (100, 1200):
            own[MetadataIndex(f"object {number}")] = stock_record(
                filesystem._StorageInfo,
                relative_path="ü" * 100,
                offset=1,
                length=2,
                transform_descriptors=["t"],
            )
    twin.storage_data = own
    data = pickle.dumps(twin)
    fast = read_torch_metadata(data)
    offered = 0

    def interpret(*_: object) -> int:
        nonlocal offered
        offered += 1
        return 0

    monkeypatch.setattr(torch_pickle_rows.Rows, "read", interpret)
    assert fast == read_torch_metadata(data)
    assert offered > 4000
    assert len(fast.storage) == 700 * 3 + 2


def test_rows_with_their_fields_in_another_order_are_read() -> None:
    records = many(100, chunks=2)
    twin = as_torch(records)
    for entry in twin.state_dict_metadata.values():
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            offsets, sizes = vars(chunk).pop("offsets"), vars(chunk).pop("sizes")
            vars(chunk).update(sizes=sizes, offsets=offsets)
    for info in twin.storage_data.values():
        vars(info).update(length=vars(info).pop("length"), offset=vars(info).pop("offset"))
    assert read_torch_metadata(pickle.dumps(twin)) == records


def test_a_row_whose_text_claims_another_length_is_not_read_as_if_it_were_right() -> None:
    twin = as_torch(many(100))
    twin.storage_data = {
        MetadataIndex("".join(list(index.fqn)), index.offset, 0): info
        for index, info in twin.storage_data.items()
    }
    data = pickle.dumps(twin)
    text = data.rindex(b"model.layers.99.weight")
    assert data[text - 2 : text] == b"\x8c\x16"
    for length in (0x15, 0x17):
        with pytest.raises(IntegrityError):
            read_torch_metadata(data[: text - 1] + bytes([length]) + data[text:])


def test_damaged_rows_give_records_or_an_integrity_error() -> None:
    data = pickle.dumps(as_torch(many(120)))
    rng = random.Random(1)
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 3))):
            damaged[rng.randrange(len(data) // 2, len(data))] = rng.randrange(256)
        try:
            read_torch_metadata(bytes(damaged))
        except IntegrityError:
            pass


def test_a_row_with_a_negative_number_is_refused() -> None:
    records = many(100)
    key = list(records.storage)[-1]
    records.storage[key] = records.storage[key]._replace(offset=-5)
    with pytest.raises(IntegrityError, match="which no file has"):
        read_torch_metadata(pickle.dumps(as_torch(records)))


def test_a_row_with_a_path_outside_the_folder_is_refused() -> None:
    records = many(100)
    key = list(records.storage)[-1]
    records.storage[key] = records.storage[key]._replace(path="../x")
    with pytest.raises(UnsafeMetadataError, match="not a plain path"):
        read_torch_metadata(pickle.dumps(as_torch(records)))


def golden(version: str, name: str) -> TorchMetadata:
    file = GOLDEN / version / name / ".metadata"
    return read_torch_metadata(file.read_bytes(), path=str(file))


def flat(state: Any, *path: Any) -> dict[tuple[Any, ...], Any]:
    if isinstance(state, dict):
        return {key: leaf for name in state for key, leaf in flat(state[name], *path, str(name)).items()}
    return {path: state}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_plain_checkpoint_of_every_torch_is_read(version: str) -> None:
    read = golden(version, "plain")
    state = flat(plain_state())
    for key, entry in read.entries.items():
        value = state.get(read.planner_data[key])
        if not isinstance(value, torch.Tensor):
            continue
        assert isinstance(entry, TorchTensor)
        assert entry.shape == tuple(value.shape)
        assert entry.properties.dtype == str(value.dtype).removeprefix("torch.")
        assert entry.properties.requires_grad == value.requires_grad
        ((offsets, lengths),) = entry.chunks
        assert (offsets, lengths) == ((0,) * value.ndim, entry.shape)
        row = read.storage[key, offsets]
        with (GOLDEN / version / "plain" / row.path).open("rb") as file:
            file.seek(row.offset)
            item = io.BytesIO(file.read(row.nbytes))
        assert torch.load(item, weights_only=True).equal(value.detach())
    tensors = [entry for entry in read.entries.values() if isinstance(entry, TorchTensor)]
    assert len(tensors) > 20
    assert isinstance(read.entries["epoch"], TorchObject)
    assert set(read.planner_data) == set(read.entries) == {key for key, _ in read.storage}
    assert read.entries["list.1.deep"] == TorchTensor(TorchProperties("float32"), (1,), [((0,), (1,))])
    assert read.planner_data["list.1.deep"] == ("list", 1, "deep")


@pytest.mark.parametrize("version", VERSIONS)
def test_fields_that_an_old_torch_did_not_have_are_none(version: str) -> None:
    read = golden(version, "file_per_item")
    assert sorted(row.path for row in read.storage.values()) == [f"__0_{n}.distcp" for n in range(3)]
    assert (read.storage_meta is None) == (version in ("torch-2.0", "torch-2.3"))
    assert read.version == ("1.0.0" if version == "torch-2.13" else None)


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_the_chunks_of_a_sharded_checkpoint_are_read(version: str) -> None:
    read = golden(version, "sharded")
    chunks = {
        key: sorted(entry.chunks) for key, entry in read.entries.items() if isinstance(entry, TorchTensor)
    }
    assert chunks == {
        "model.rows": [((0, 0), (3, 4)), ((3, 0), (2, 4))],
        "model.columns": [((0, 0), (4, 3)), ((0, 3), (4, 3))],
        "model.replicated": [((0,), (3,))],
    }
    assert {row.path for row in read.storage.values()} == {"__0_0.distcp", "__1_0.distcp"}


@pytest.mark.parametrize(
    "version", [version for version in VERSIONS if (GOLDEN / version / "sharded_tensor").exists()]
)
def test_the_chunks_of_a_sharded_tensor_are_read(version: str) -> None:
    read = golden(version, "sharded_tensor")
    (entry,) = read.entries.values()
    assert isinstance(entry, TorchTensor)
    assert sorted(entry.chunks) == [((0, 0), (4, 2)), ((4, 0), (2, 2))]
    assert set(read.storage) == {("table", (0, 0)), ("table", (4, 0))}


def test_descriptors_of_stream_transforms_are_read() -> None:
    assert {row.descriptors for row in golden("torch-2.13", "zstd").storage.values()} == {("stream.zstd/1",)}


def test_a_rank_local_checkpoint_has_metadata_for_each_rank() -> None:
    for rank in range(2):
        file = GOLDEN / "torch-2.13" / "rank_local" / f"__{rank}.metadata"
        read = read_torch_metadata(file.read_bytes())
        assert {row.path for row in read.storage.values()} == {f"__{rank}_0.distcp"}


@pytest.mark.parametrize(
    "file", sorted(GOLDEN.glob("torch-2.1[0-9]/*/.metadata")), ids=lambda file: file.parent.name
)
def test_our_pickle_of_a_golden_file_loads_as_the_file_does(file: Path) -> None:
    data = file.read_bytes()
    theirs = pickle.loads(data)
    records = read_torch_metadata(data)
    ours = pickle.loads(write(records))
    # torch keeps the checkpoint's place as a path; we write it as text.
    theirs.storage_meta.checkpoint_id = str(theirs.storage_meta.checkpoint_id)
    for infos in (theirs.storage_data, ours.storage_data):
        for info in infos.values():
            info.transform_descriptors = list(getattr(info, "transform_descriptors", None) or ())
    assert ours == theirs


def test_the_golden_files_are_small() -> None:
    assert sum(file.stat().st_size for file in GOLDEN.rglob("*") if file.is_file()) < 3_000_000
