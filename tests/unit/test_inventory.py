"""An inventory says the same of a checkpoint, whether Holdfast or torch described it."""

import subprocess
import sys

import pytest
from tests.support.torch_pickles import write_torch_metadata

from holdfast._contents.inventory import Inventory, ObjectEntry, TensorEntry, read_inventory
from holdfast._format import metadata_file
from holdfast._format.description import column
from holdfast._format.item_table import StorageInfo
from holdfast._format.manifest import Manifest, encode
from holdfast._format.metadata_file import MARK
from holdfast._format.paths import TypedKey
from holdfast._format.torch_pickle_records import TorchProperties, TorchTensor
from holdfast.errors import MetadataFormatError

CRCS = b"\1\0\0\0\2\0\0\0"


def manifest(**changes: object) -> Manifest:
    """A tensor in two chunks, with an object before it."""
    fields = {
        "save_id": "cafe",
        "created_ns": 5,
        "software": "a test",
        "world_size": 2,
        "block_size": 16,
        "checkpoint_id": "there",
        "file_names": ["f", "g"],
        "file_nbytes": column([30, 300], "q"),
        "keys": ["n", "t"],
        "kinds": b"\1\0",
        "properties": [("float32", "strided", False, "contiguous_format", False)],
        "tensor_properties": column([0], "I"),
        "tensor_ndims": b"\1",
        "tensor_shapes": column([7], "q"),
        "tensor_chunks": column([2], "I"),
        "chunk_offsets": column([0, 4], "q"),
        "chunk_lengths": column([4, 3], "q"),
        "transforms": [[], ["stream.zstd/1"]],
        "item_files": column([0, 0, 1], "I"),
        "item_offsets": column([0, 10, 100], "q"),
        "item_nbytes": column([10, 20, 200], "q"),
        "item_payload_offsets": column([0, 2, 0], "q"),
        "item_payload_nbytes": column([0, 16, 16], "q"),
        "item_raw_nbytes": column([10, 20, 30], "q"),
        "item_transforms": column([0, 0, 1], "I"),
        "item_blocks": column([0, 1, 1], "I"),
        "item_wrap_checksums": column([7, 8, 9], "I"),
        "checksums": CRCS,
        "paths": [None, ["deep", ["int", "3"], 0]],
        "containers": [],
        **changes,
    }
    return Manifest(**fields)  # type: ignore[arg-type]


def ours(pickle: bytes = b"", **changes: object) -> bytes:
    return b"".join(metadata_file.join(pickle, encode(manifest(**changes))))


def torchs(**changes: object) -> bytes:
    tensor = TorchTensor(TorchProperties("float32"), (7,), [((0,), (4,)), ((4,), (3,))])
    fields = {
        "entries": [("n", None), ("t", tensor)],
        "storage": [
            ("n", None, None, "f", 0, 10, None),
            ("t", (0,), 0, "f", 10, 20, None),
            ("t", (4,), 1, "g", 100, 200, ("outer/1", "inner/1")),
        ],
        "planner_data": {"n": ("n",), "t": ("deep", "3", 0)},
        "checkpoint_id": "there",
        "save_id": "cafe",
        "modules": [],
        "version": "1.0.0",
        **changes,
    }
    return write_torch_metadata(**fields)  # type: ignore[arg-type]


def place(item: StorageInfo | None) -> tuple[str, int, int] | None:
    return None if item is None else (item.relative_path, item.offset, item.length)


def boxes(inventory: Inventory) -> list[object]:
    return [
        (chunk.offsets, chunk.lengths, place(chunk.item))
        for tensor in inventory.tensors
        for chunk in tensor.chunks
    ]


@pytest.mark.parametrize("data", [ours(), torchs()], ids=["holdfast", "torch"])
def test_keys_shapes_chunks_and_places_are_the_same_from_both_sources(data: bytes) -> None:
    found = read_inventory(data, path="p", rank=4)
    (tensor,), (value,) = found.tensors, found.objects
    assert (tensor.key, tensor.dtype, tensor.shape, tensor.nbytes) == ("t", "float32", (7,), 28)
    assert boxes(found) == [((0,), (4,), ("f", 10, 20)), ((4,), (3,), ("g", 100, 200))]
    assert (value.key, place(value.item)) == ("n", ("f", 0, 10))
    assert found.files == {"f": 30, "g": 300}
    assert (found.rank, found.path, found.nbytes) == (4, "p", len(data))
    assert (found.save_id, found.checkpoint_id) == ("cafe", "there")


@pytest.mark.parametrize("data", [ours(), torchs()], ids=["holdfast", "torch"])
def test_entries_stand_in_the_order_of_the_checkpoint(data: bytes) -> None:
    found = read_inventory(data, path="p")
    assert [type(entry) for entry in found.entries] == [ObjectEntry, TensorEntry]
    assert [key for key, _, _ in found.items()] == ["n", "t", "t"]


def test_what_only_holdfast_records() -> None:
    found = read_inventory(ours(), path="p")
    assert (found.source, found.format, found.software) == ("holdfast", "holdfast 1.3", "a test")
    assert (found.created_ns, found.world_size, found.block_size) == (5, 2, 16)
    first, second = found.tensors[0].chunks
    assert first.item is not None
    assert second.item is not None
    assert (first.item.payload_offset, first.item.payload_nbytes, first.item.checksums) == (2, 16, CRCS[:4])
    assert (second.item.wrap_checksum, second.item.checksums) == (9, CRCS[4:])


def test_what_torch_does_not_record_is_none() -> None:
    found = read_inventory(torchs(), path="p")
    assert (found.source, found.format) == ("torch", "torch 1.0.0")
    assert (found.software, found.created_ns, found.world_size, found.block_size) == (None,) * 4
    item = found.tensors[0].chunks[0].item
    assert item is not None
    assert (item.payload_nbytes, item.raw_nbytes, item.checksums) == (-1, -1, b"")


def test_whether_torch_can_read_it_depends_on_the_pickle() -> None:
    assert read_inventory(torchs(), path="p").torch_readable
    assert read_inventory(ours(torchs()), path="p").torch_readable
    assert not read_inventory(ours(), path="p").torch_readable


def test_transforms_come_in_the_order_in_which_they_are_undone() -> None:
    assert read_inventory(ours(), path="p").transforms == {("stream.zstd/1",): 1}
    # torch records them in the order of writing.
    assert read_inventory(torchs(), path="p").transforms == {("inner/1", "outer/1"): 1}


def test_paths_keep_the_types_of_keys_where_they_are_recorded() -> None:
    deep = read_inventory(ours(), path="p").paths["t"]
    assert deep == ("deep", "3", 0)
    assert isinstance(deep[1], TypedKey)
    assert deep[1].value == 3
    assert read_inventory(torchs(), path="p").paths == {"n": ("n",), "t": ("deep", "3", 0)}
    assert read_inventory(ours(paths=[]), path="p").paths == {}


@pytest.mark.parametrize("data", [None, ["a"], {"t": "no path"}, {"t": (None,)}])
def test_planner_data_that_is_no_table_of_paths_gives_none(data: object) -> None:
    assert read_inventory(torchs(planner_data=data), path="p").paths == {}


def test_a_chunk_without_a_place_has_no_item() -> None:
    found = read_inventory(torchs(storage=[("t", (4,), 1, "g", 100, 200, None)]), path="p")
    assert [chunk.item is None for chunk in found.tensors[0].chunks] == [True, False]
    assert found.objects[0].item is None


def test_a_dtype_of_the_future_has_no_size() -> None:
    properties = [("float3", "strided", False, "contiguous_format", False)]
    (tensor,) = read_inventory(ours(properties=properties), path="p").tensors
    assert (tensor.dtype, tensor.nbytes) == ("float3", None)


def test_a_pickle_of_ours_that_lost_the_rest_is_damaged_and_not_torchs() -> None:
    with pytest.raises(MetadataFormatError, match="lost its end") as caught:
        read_inventory(torchs(modules=[MARK]), path="p")
    assert caught.value.expected is None


def test_a_newer_format_says_what_was_expected() -> None:
    with pytest.raises(MetadataFormatError, match="of format 2") as caught:
        read_inventory(ours(version=(2, 0)), path="p")
    assert (caught.value.expected, caught.value.found) == (1, 2)


def test_it_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, holdfast._contents.inventory; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
