"""The metadata reader takes any bytes and gives checked records or an IntegrityError; the writer feeds it."""

import math
import os
import pickle
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.torch_pickles import iter_torch_metadata, write_torch_metadata

from holdfast._format.dtypes import DTYPES
from holdfast._format.torch_pickle import read_plain_pickle, read_torch_metadata
from holdfast._format.torch_pickle_records import (
    TorchMetadata,
    TorchObject,
    TorchProperties,
    TorchStorage,
    TorchStorageMeta,
    TorchTensor,
)
from holdfast.errors import (
    IntegrityError,
    MetadataFormatError,
    TruncatedFileError,
    UnsafeMetadataError,
    UsageError,
)

GOLDEN = Path(__file__).parents[1] / "golden"
FLOAT = TorchProperties("float32")
MODULE = b"torch.distributed.checkpoint.metadata"


def written(**changes: Any) -> bytes:
    """A metadata pickle of one tensor in two chunks and one object, with changes."""
    arguments: dict[str, Any] = {
        "entries": [
            ("w", TorchTensor(FLOAT, (4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))])),
            ("o", TorchObject()),
        ],
        "storage": [
            ("w", (0, 0), 0, "__0_0.distcp", 0, 100, None),
            ("w", (2, 0), 1, "__1_0.distcp", 0, 100, ("stream.zstd/1",)),
            ("o", None, None, "__0_0.distcp", 100, 7, None),
        ],
        "planner_data": {"w": ("w",), "o": ("o",)},
        "checkpoint_id": "somewhere",
        "save_id": "s",
        "modules": ["m"],
        "version": "1.0.0",
    }
    return write_torch_metadata(**{**arguments, **changes})


def tensor(shape: Any, *chunks: Any, properties: TorchProperties = FLOAT) -> dict[str, Any]:
    return {"entries": [("w", TorchTensor(properties, shape, list(chunks)))], "storage": []}


def stored(path: str = "f", offset: int = 0, nbytes: int = 1) -> dict[str, Any]:
    return {"storage": [("w", (0, 0), 0, path, offset, nbytes, None)]}


def short(text: bytes) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text


# What is read.


def test_every_field_that_was_written_is_read() -> None:
    assert read_torch_metadata(written()) == TorchMetadata(
        entries={"w": TorchTensor(FLOAT, (4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))]), "o": TorchObject()},
        storage={
            ("w", (0, 0)): TorchStorage("__0_0.distcp", 0, 100),
            ("w", (2, 0)): TorchStorage("__1_0.distcp", 0, 100, ("stream.zstd/1",)),
            ("o", None): TorchStorage("__0_0.distcp", 100, 7),
        },
        planner_data={"w": ("w",), "o": ("o",)},
        storage_meta=TorchStorageMeta("somewhere", "s", None, ("m",)),
        version="1.0.0",
    )


def test_a_memoryview_and_bytes_after_the_pickle_are_fine() -> None:
    assert read_torch_metadata(memoryview(written() + b"manifest and footer")) == read_torch_metadata(
        written()
    )


def test_the_order_of_entries_is_kept() -> None:
    keys = ["z", "a", "m"]
    entries = [(key, None if key == "a" else TorchTensor(FLOAT, (), [((), ())])) for key in keys]
    assert list(read_torch_metadata(written(entries=entries, storage=[])).entries) == keys


def test_pieces_joined_are_the_whole() -> None:
    rows = [(f"k{number}", None) for number in range(2500)]
    pieces = list(iter_torch_metadata(entries=rows, storage=[]))
    assert len(pieces) > 3
    assert b"".join(pieces) == write_torch_metadata(entries=rows, storage=[])
    assert list(read_torch_metadata(b"".join(pieces)).entries) == [key for key, _ in rows]


def test_reading_and_writing_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; import holdfast._format.torch_pickle, holdfast._format.torch_pickle_writer;"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=300) | st.integers(-(2**60), 2**60), inner, max_size=5)
        | st.dictionaries(st.text(), inner, max_size=5).map(OrderedDict)
        | st.sets(st.text() | st.integers(-5, 5))
        | st.frozensets(st.text())
    ),
    max_leaves=20,
)


@st.composite
def tensors(draw: st.DrawFn) -> TorchTensor:
    shape = tuple(draw(st.lists(st.integers(0, 2**20), max_size=6)))
    if math.prod(shape) >= 2**58:
        shape = ()
    chunks = []
    for _ in range(draw(st.integers(0, 3))):
        offsets = tuple(draw(st.integers(0, dim)) for dim in shape)
        chunks.append((offsets, tuple(dim - offset for dim, offset in zip(shape, offsets, strict=True))))
    properties = TorchProperties(
        draw(st.sampled_from(sorted(DTYPES))),
        draw(st.sampled_from(["strided", "sparse_coo", "jagged"])),
        draw(st.booleans()),
        draw(st.sampled_from(["contiguous_format", "channels_last", "preserve_format"])),
        draw(st.booleans()),
    )
    return TorchTensor(properties, shape, chunks)


names = st.text(max_size=300)
file_names = st.from_regex(r"[a-z_0-9]{1,300}(/[a-z_0-9]{1,9})?\.distcp", fullmatch=True)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=50)
@given(
    entries=st.dictionaries(names, tensors() | st.just(TorchObject()), max_size=6),
    storage=st.dictionaries(
        st.tuples(names, st.none() | st.lists(st.integers(0, 2**62), max_size=5).map(tuple)),
        st.builds(
            TorchStorage,
            path=file_names,
            offset=st.integers(0, 2**61),
            nbytes=st.integers(0, 2**61),
            descriptors=st.lists(names, max_size=3).map(tuple),
        ),
        max_size=6,
    ),
    planner_data=plain,
    version=st.none() | names,
)
def test_what_is_written_is_what_is_read(
    entries: Any, storage: dict[Any, TorchStorage], planner_data: Any, version: str | None
) -> None:
    data = write_torch_metadata(
        entries=entries.items(),
        storage=[(key, offsets, None, *row) for (key, offsets), row in storage.items()],
        planner_data=planner_data,
        version=version,
    )
    read = read_torch_metadata(data)
    assert read == TorchMetadata(entries, storage, planner_data, TorchStorageMeta(), version)
    assert list(read.entries) == list(entries)
    assert same_types(read.planner_data, planner_data)


def same_types(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return all(same_types(a, b) for a, b in zip(left.items(), right.items(), strict=True))
    if isinstance(left, (list, tuple)):
        return all(same_types(a, b) for a, b in zip(left, right, strict=True))
    return True


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@settings(deadline=None, max_examples=50)
@given(data=plain)
def test_plain_pickles_of_every_protocol_are_read(protocol: int, data: Any) -> None:
    read = read_plain_pickle(pickle.dumps(data, protocol), path="p")
    assert read == data
    assert same_types(read, data)


def test_a_bytearray_survives_writing_and_every_protocol() -> None:
    data = bytearray(range(256))
    assert read_torch_metadata(written(planner_data=data)).planner_data == data
    for protocol in (2, 3, 4, 5):
        assert read_plain_pickle(pickle.dumps(data, protocol), path="p") == data


class Name(str):
    __slots__ = ()


class Table(dict[str, Any]):
    pass


def test_subclasses_in_planner_data_are_written_as_what_they_derive_from() -> None:
    read = read_torch_metadata(written(planner_data=Table({"a": (Name("b"), 1), Name("c"): [Name("d")]})))
    assert read.planner_data == {"a": ("b", 1), "c": ["d"]}
    assert same_types(read.planner_data, {"a": ("b", 1), "c": ["d"]})


def test_planner_data_that_is_not_plain_is_refused_by_the_writer() -> None:
    with pytest.raises(UsageError, match=r"builtins\.complex"):
        written(planner_data={"a": [1j]})


@pytest.mark.parametrize(
    "properties",
    [
        TorchProperties("float33"),
        TorchProperties("int8", "round"),
        TorchProperties("int8", memory_format="odd"),
    ],
)
def test_properties_that_torch_cannot_have_are_refused_by_the_writer(properties: TorchProperties) -> None:
    with pytest.raises(UsageError, match="expected a dtype"):
        written(**tensor((1,), ((0,), (1,)), properties=properties))


# What is refused because it reaches for code.


class Payload:
    """Pickles as a call of ``function`` with ``args``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def call(module: bytes, name: bytes, argument: bytes, *, stacked: bool) -> bytes:
    function = short(module) + short(name) + b"\x93" if stacked else b"c" + module + b"\n" + name + b"\n"
    return b"\x80\x04" + function + argument + b"\x85R."


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("os.system", "posix.system", "nt.system", "subprocess.Popen", "builtins.eval", "builtins.exec"),
        *("builtins.__import__", "__builtin__.eval", "builtins.open", "builtins.print", "builtins.type"),
        *("operator.attrgetter", "operator.methodcaller", "functools.partial", "types.FunctionType"),
        *("types.CodeType", "importlib.import_module", "runpy.run_path", "pickle.loads", "pty.spawn"),
        *(
            "torch.load",
            "torch.hub.load",
            "torch._utils._rebuild_tensor_v2",
            "torch.storage._load_from_bytes",
        ),
        *("numpy.load", "numpy.core.multiarray._reconstruct", "copyreg._reconstructor", "copyreg.__newobj__"),
        *("collections.defaultdict", "pathlib.Path.write_text", "torch.Size.__class__", "os.path.join"),
        *("holdfast._format.torch_pickle_names.Call", "torch.distributed.checkpoint.metadata.os.system"),
    ],
)
def test_a_name_outside_the_list_is_refused_and_named(name: str, stacked: bool) -> None:
    module, _, attribute = name.rpartition(".")
    data = call(module.encode(), attribute.encode(), short(b"echo bad"), stacked=stacked)
    with pytest.raises(UnsafeMetadataError, match=r"Nothing was run") as caught:
        read_torch_metadata(data, path="ck/.metadata")
    assert name in str(caught.value)
    assert caught.value.path == "ck/.metadata"


@pytest.mark.parametrize(
    ("module", "name"),
    [("torch", "Size.__class__"), ("pathlib", "PosixPath.unlink"), ("builtins", "getattr.x")],
)
def test_a_dotted_name_is_not_followed(module: str, name: str) -> None:
    with pytest.raises(UnsafeMetadataError, match="asks for"):
        read_torch_metadata(call(module.encode(), name.encode(), b")", stacked=True))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_payload_anywhere_in_the_planner_data_does_not_run(protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    payload = Payload(os.mkdir, str(marker))
    pickle.loads(pickle.dumps(payload, protocol))
    assert marker.exists(), "the payload itself must work, or this test shows nothing"
    marker.rmdir()
    with pytest.raises(UnsafeMetadataError, match="mkdir"):
        read_plain_pickle(pickle.dumps({"a": [1, (payload,)]}, protocol), path="p")
    assert not marker.exists()


SIZE = b"ctorch\nSize\n"
CHUNK = b"c" + MODULE + b"\nChunkStorageMetadata\n"
FORMAT = b"c" + MODULE + b"\n_MEM_FORMAT_ENCODING\n"
GETATTR = b"cbuiltins\ngetattr\n"


@pytest.mark.parametrize(
    "program",
    [
        # An allowed name, used as no checkpoint does.
        pytest.param(GETATTR + SIZE + short(b"__class__") + b"\x86R.", id="getattr of a stand-in"),
        pytest.param(
            GETATTR + SIZE + short(b"TORCH_CHANNELS_LAST") + b"\x86R.", id="getattr of another owner"
        ),
        pytest.param(GETATTR + FORMAT + short(b"make") + b"\x86R.", id="getattr of another attribute"),
        pytest.param(GETATTR + short(b"x") + short(b"__class__") + b"\x86R.", id="getattr of a str"),
        pytest.param(FORMAT + b"K\x07\x85R.", id="no such memory format"),
        pytest.param(FORMAT + b"\x88\x85R.", id="memory format True"),
        pytest.param(FORMAT + b"J\xff\xff\xff\xff\x85R.", id="memory format -1"),
        pytest.param(SIZE + b"]\x85R.", id="size of a list"),
        pytest.param(SIZE + b"G?\xf0\x00\x00\x00\x00\x00\x00\x85\x85R.", id="size of a float"),
        pytest.param(SIZE + b"J\xff\xff\xff\xff\x85\x85R.", id="size of -1"),
        pytest.param(SIZE + b"\x8a\x09" + b"\x00" * 8 + b"\x01\x85\x85R.", id="size of 2**64"),
        pytest.param(SIZE + b"(" + b"K\x01" * 65 + b"t\x85R.", id="size of 65 dimensions"),
        pytest.param(SIZE + b")\x81.", id="blank instance of a function"),
        pytest.param(CHUNK + b"K\x01\x85\x81.", id="instance with arguments"),
        pytest.param(CHUNK + b"K\x01\x85R.", id="constructor with too few arguments"),
        pytest.param(b"cpathlib\nPosixPath\nK\x01\x85R.", id="path of a number"),
        pytest.param(b"ctorch.serialization\n_get_layout\n" + short(b"torch.load") + b"\x85R.", id="layout"),
        pytest.param(b"c_codecs\nencode\n" + short(b"x") + short(b"rot13") + b"\x86R.", id="codec"),
        pytest.param(b"ccollections\nOrderedDict\n}\x85R.", id="OrderedDict of arguments"),
        # State given to what has none.
        pytest.param(CHUNK + b"}b.", id="state of a class"),
        pytest.param(CHUNK + b"N}" + short(b"name") + short(b"x") + b"s\x86b.", id="slots of a class"),
        pytest.param(SIZE + b"}b.", id="state of a function"),
        pytest.param(b"]}b.", id="state of a list"),
        pytest.param(b"}}b.", id="state of a dict"),
        # Opcodes that reach outside.
        pytest.param(b"\x82\x01.", id="EXT1"),
        pytest.param(b"\x83\x01\x00.", id="EXT2"),
        pytest.param(b"\x84\x01\x00\x00\x00.", id="EXT4"),
        pytest.param(b"Pid\n.", id="PERSID"),
        pytest.param(short(b"id") + b"Q.", id="BINPERSID"),
        pytest.param(b"(ios\nsystem\n.", id="INST"),
        pytest.param(b"(" + SIZE + b"o.", id="OBJ"),
        pytest.param(CHUNK + b")}\x92.", id="NEWOBJ_EX"),
        pytest.param(b"\x97.", id="NEXT_BUFFER"),
        pytest.param(b"N\x98.", id="READONLY_BUFFER"),
        pytest.param(short(b"os") + b"K\x01\x93.", id="a name that is a number"),
        # Calls of what is not callable.
        pytest.param(b"N)R.", id="call of None"),
        pytest.param(short(b"os.system") + b")R.", id="call of a str"),
        pytest.param(SIZE + b"NR.", id="arguments that are no tuple"),
    ],
)
def test_an_allowed_name_used_otherwise_is_refused(program: bytes) -> None:
    before = read_torch_metadata(written())
    with pytest.raises(UnsafeMetadataError):
        read_torch_metadata(b"\x80\x04" + program)
    assert read_torch_metadata(written()) == before


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(CHUNK + b")\x81N}\x86b.", id="state of a tuple"),
        pytest.param(CHUNK + b")\x81}b}b.", id="state twice"),
        pytest.param(b"N2.", id="DUP"),
        pytest.param(b"I1\n.", id="a text opcode"),
        pytest.param(b"K\x01p5\n.", id="a text memo index"),
        pytest.param(b"}K\x01K\x02sK\x01K\x03s.", id="the same key twice"),
        pytest.param(b"\x8f(K\x01K\x01\x90.", id="the same member twice"),
        pytest.param(b"}]Ns.", id="a list as a key"),
        pytest.param(b"}(K\x01u.", id="a key without a value"),
        pytest.param(b"]K\x01K\x01s.", id="items of a list"),
        pytest.param(b"}K\x01a.", id="append to a dict"),
        pytest.param(b".", id="nothing"),
        pytest.param(b"\x85.", id="a tuple of nothing"),
        pytest.param(b"\x80\x09N.", id="protocol 9"),
        pytest.param(b"h\x07.", id="a reference to nothing"),
        pytest.param(b"e.", id="no mark"),
        pytest.param(b"\x8c\x01\xff.", id="not UTF-8"),
        pytest.param(b"}.", id="a dict"),
        pytest.param(b"N.", id="None"),
        pytest.param(CHUNK + b")\x81.", id="another record"),
        pytest.param(b"c" + MODULE + b"\nMetadata\n)\x81.", id="blank metadata"),
    ],
)
def test_a_malformed_pickle_is_a_format_error(program: bytes) -> None:
    with pytest.raises(MetadataFormatError):
        read_torch_metadata(b"\x80\x04" + program)


# What is refused because it would take the process down.


def doubled(depth: int) -> bytes:
    """A value of 2**depth leaves."""
    return b")\x94" + b"".join(
        b"j" + struct.pack("<I", n) + b"j" + struct.pack("<I", n) + b"\x86\x94" for n in range(depth)
    )


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(b"})" + b"\x85" * 200_000 + b"Ns.", id="a key nested 200,000 deep"),
        pytest.param(b"\x8f()" + b"\x85" * 200_000 + b"\x90.", id="a member nested 200,000 deep"),
        pytest.param(b"}" + doubled(60) + b"Ns.", id="a key of 2**60 leaves"),
        pytest.param(doubled(60) + b".", id="a value of 2**60 leaves"),
        pytest.param(b"]" * 200_000 + b"a" * 199_999 + b".", id="lists nested 200,000 deep"),
        pytest.param(b"]\x94h\x00a.", id="a list in itself"),
        pytest.param(b"(" * 200_000 + b".", id="200,000 marks"),
        pytest.param(b"Nr\xff\xff\xff\xff.", id="memo index 2**32 - 1"),
        pytest.param(b"Nj\xff\xff\xff\xff.", id="reference 2**32 - 1"),
        pytest.param(b"\x8b\xff\xff\xff\x7fxx.", id="a number of 2 GiB"),
        pytest.param(b"\x8e" + b"\xff" * 7 + b"\x7fxx.", id="bytes of 2**63 - 1"),
        pytest.param(b"\x96" + b"\xff" * 7 + b"\x0fxx.", id="bytearray of 2**60"),
        pytest.param(b"\x8d" + b"\xff" * 8 + b"xx.", id="text of 2**64 - 1"),
        pytest.param(b"\x95" + b"\xff" * 8 + b"N.", id="frame of 2**64 - 1"),
        pytest.param(b"}\x8b\x40\x42\x0f\x00" + b"\x7f" * 1_000_000 + b"Ns.", id="a key of 8 million bits"),
    ],
)
def test_a_bomb_is_refused_before_it_costs_anything(program: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_torch_metadata(b"\x80\x04" + program)
    with pytest.raises(IntegrityError):
        read_plain_pickle(b"\x80\x04" + program, path="p")


@pytest.mark.parametrize("name", [b"set", b"frozenset"])
def test_copying_one_large_argument_many_times_is_refused(name: bytes) -> None:
    members = b"".join(b"J" + struct.pack("<i", number) for number in range(1000))
    once = b"cbuiltins\n" + name + b"\nh\x00\x85R0"
    with pytest.raises(MetadataFormatError, match="copies more than it holds"):
        read_torch_metadata(b"\x80\x04]\x94(" + members + b"e" + once * 10_000 + b"N.")


def test_one_large_tuple_of_arguments_used_many_times_is_refused() -> None:
    arguments = b"(" + short(b"") * 20_000 + b"t\x940"
    with pytest.raises(MetadataFormatError, match="copies more than it holds"):
        read_torch_metadata(b"\x80\x04" + arguments + b"cpathlib\nPosixPath\nh\x00R0" * 10_000 + b"N.")


def test_one_list_of_chunks_given_to_many_keys_is_refused() -> None:
    def named(name: bytes) -> bytes:
        return b"ctorch.distributed.checkpoint.metadata\n" + name + b"\n"

    def size(number: int) -> bytes:
        return b"ctorch\nSize\nK%c\x85\x85R" % number

    layout = b"ctorch.serialization\n_get_layout\n" + short(b"torch.strided") + b"\x85R"
    memory_format = named(b"_MEM_FORMAT_ENCODING") + b"K\0\x85R"
    properties = named(b"TensorProperties") + b")\x81(ctorch\nfloat32\n" + layout + b"\x89" + memory_format
    chunk = named(b"ChunkStorageMetadata") + size(0) + size(1) + b"\x86R\x940"
    tensor = named(b"TensorStorageMetadata") + properties + b"\x89tb" + size(1)
    tensor += b"](" + b"h\0" * 20_000 + b"e\x87R\x940"
    keys = b"".join(short(b"%d" % number) + b"h\1" for number in range(20_000))
    metadata = named(b"Metadata") + b")\x81}(" + short(b"state_dict_metadata") + b"}(" + keys + b"uub."
    with pytest.raises(MetadataFormatError, match="more members than"):
        read_torch_metadata(b"\x80\x04" + chunk + tensor + metadata)


def test_one_list_of_transforms_given_to_many_items_is_refused() -> None:
    transforms = b"](" + short(b"zstd") * 20_000 + b"e\x940"
    info = (
        b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}("
        + short(b"relative_path")
        + short(b"f")
    )
    info += (
        short(b"offset")
        + b"K\0"
        + short(b"length")
        + b"K\1"
        + short(b"transform_descriptors")
        + b"h\0ub\x940"
    )
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}(" + short(b"fqn")
    rows = b"".join(index + short(b"%d" % number) + b"ubh\1" for number in range(20_000))
    metadata = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}("
    metadata += short(b"state_dict_metadata") + b"}" + short(b"storage_data") + b"}(" + rows + b"uub."
    with pytest.raises(MetadataFormatError, match="more members than"):
        read_torch_metadata(b"\x80\x04" + transforms + info + metadata)


# What is refused because no checkpoint has it.


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/etc/passwd",
            "../x",
            "a/../../x",
            "..",
            ".",
            "",
            "a//b",
            "./a",
            "a/",
            "a\\b",
            "..\\x",
            "C:x",
            "c:/x",
        ),
        *("a\0b", "s3://bucket/x", "\ud800"),
    ],
)
def test_a_path_that_leaves_the_folder_is_unsafe(path: str) -> None:
    with pytest.raises(UnsafeMetadataError, match="not a plain path") as caught:
        read_torch_metadata(written(**stored(path)), path="ck/.metadata")
    assert caught.value.key == "w"
    assert caught.value.path == "ck/.metadata"


@pytest.mark.parametrize("path", ["__0_0.distcp", "a/b.distcp", "..a", "a..b", "xx:y", "é"])
def test_a_plain_relative_path_is_fine(path: str) -> None:
    assert read_torch_metadata(written(**stored(path))).storage["w", (0, 0)].path == path


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (stored(offset=-1), "which no file has"),
        (stored(nbytes=-1), "which no file has"),
        (stored(offset=2**62, nbytes=2**62), "which no file has"),
        (stored(offset=2**100_000), "which no file has"),
        (tensor((-1,)), "torch.Size"),
        (tensor((2**63,)), "torch.Size"),
        (tensor((2**40, 2**40)), r"more than 2\*\*63 bytes"),
        (tensor((2**62,)), r"more than 2\*\*63 bytes"),
        (tensor((4,), ((2,), (3,))), "reaches outside"),
        (tensor((4,), ((5,), (0,))), "reaches outside"),
        (tensor((4,), ((0, 0), (4, 1))), "2 offsets"),
        (tensor((4,), ((0,), (4, 1))), "2 lengths"),
        (tensor((), ((0,), (1,))), "1 offsets"),
        ({"version": 3}, "version"),
        ({"modules": [3]}, "storage_meta"),
        ({"save_id": 3}, "storage_meta"),
        ({"storage": [("w", (0,), n, "f", 0, 1, None) for n in (0, 1)]}, "stored twice"),
        ({"storage": [("w", (0,), 0, "f", 0, 1, (3,))]}, "transform_descriptors"),
        ({"entries": [("w", None), ("w", None)]}, "same key twice"),
    ],
)
def test_a_value_out_of_range_is_a_format_error(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(IntegrityError, match=complaint):
        read_torch_metadata(written(**changes))


def test_plain_tuples_pass_for_sizes_only_after_a_check() -> None:
    # As if torch had left torch.Size out: the field is a plain tuple, then one that hides a float and a bool.
    data = written(**tensor((1, 1)))
    size = data.index(b"K\x01K\x01\x86\x85R")
    plain_tuple = data[: size - 2] + b"K\x01K\x01\x86" + data[size + 7 :]
    assert b"K\x01K\x01\x86" in plain_tuple
    with pytest.raises(IntegrityError):
        read_torch_metadata(plain_tuple.replace(b"K\x01K\x01\x86", b"K\x01\x88\x86"))


# Damage.


def small_files() -> list[Path]:
    return sorted(file for file in GOLDEN.glob("torch-*/*/*metadata") if file.stat().st_size < 1300)


def test_there_are_files_to_damage() -> None:
    assert len(small_files()) >= 5


def outcome(data: bytes) -> None:
    try:
        assert type(read_torch_metadata(data)) is TorchMetadata
    except IntegrityError:
        pass


@pytest.mark.parametrize("file", small_files(), ids=lambda file: "-".join(file.parts[-3:-1]) + file.name)
def test_any_flipped_byte_gives_records_or_an_integrity_error(file: Path) -> None:
    data = file.read_bytes()
    for position in range(len(data)):
        for flip in (0x01, 0x80):
            outcome(data[:position] + bytes([data[position] ^ flip]) + data[position + 1 :])


def test_any_truncation_is_reported_as_one() -> None:
    data = written()
    for length in range(len(data)):
        with pytest.raises((TruncatedFileError, MetadataFormatError)):
            read_torch_metadata(data[:length])
    with pytest.raises(TruncatedFileError):
        read_torch_metadata(data[:-1])


@given(st.binary(max_size=200))
def test_any_bytes_give_records_or_an_integrity_error(data: bytes) -> None:
    outcome(data)


OPCODES = [
    *(
        b"(",
        b".",
        b"0",
        b"N",
        b"\x88",
        b"\x89",
        b"K\x00",
        b"K\x05",
        b"M\x00\x01",
        b"J\xff\xff\xff\xff",
        b"\x8a\x01\x7f",
    ),
    *(
        b"]",
        b")",
        b"}",
        b"\x8f",
        b"a",
        b"e",
        b"s",
        b"u",
        b"\x90",
        b"\x91",
        b"t",
        b"\x85",
        b"\x86",
        b"\x87",
        b"\x94",
    ),
    *(
        b"R",
        b"\x81",
        b"b",
        b"h\x00",
        b"h\x01",
        b"h\x02",
        b"q\x00",
        b"q\x01",
        b"G\x7f\xf8\x00\x00\x00\x00\x00\x00",
    ),
    *(
        short(b"fqn"),
        short(b"offset"),
        short(b"offsets"),
        short(b"sizes"),
        short(b"chunks"),
        short(b"torch.strided"),
    ),
    *(SIZE, CHUNK, FORMAT, GETATTR, b"ctorch\nfloat32\n", b"ctorch.serialization\n_get_layout\n"),
    *(b"c" + MODULE + b"\n" + name + b"\n" for name in (b"Metadata", b"MetadataIndex", b"TensorProperties")),
    *(b"cpathlib\nPosixPath\n", b"ccollections\nOrderedDict\n", b"cbuiltins\nset\n", b"c_codecs\nencode\n"),
]


@settings(deadline=None, max_examples=400)
@given(st.lists(st.sampled_from(OPCODES), max_size=40).map(b"".join))
def test_any_sequence_of_known_opcodes_gives_records_or_an_integrity_error(program: bytes) -> None:
    outcome(b"\x80\x04" + program + b".")


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_splice_of_a_real_file_gives_records_or_an_integrity_error(data: st.DataObject) -> None:
    original = (GOLDEN / "torch-2.13" / "plain" / ".metadata").read_bytes()
    start = data.draw(st.integers(0, len(original)))
    stop = data.draw(st.integers(start, min(len(original), start + 40)))
    patch = b"".join(data.draw(st.lists(st.sampled_from(OPCODES) | st.binary(max_size=3), max_size=6)))
    outcome(original[:start] + patch + original[stop:])
