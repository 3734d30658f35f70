"""Slices of stored tensors: only the bytes that they need are read, and they are the right ones."""

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.stock_torch import stock_save
from torch.distributed.checkpoint.filesystem import FileSystemWriter as StockWriter

import holdfast as hf
from holdfast._io.local import LocalStore
from holdfast._io.progress import STRIDE, ProgressTracker
from holdfast._storage.reading import read_items, read_metadata_file
from holdfast.extension import ZStandard
from holdfast.metadata import Metadata, MetadataIndex
from holdfast.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

MIB = 1 << 20


class BoxPlanner(LoadPlanner):
    """Reads one box of one stored tensor into a tensor of the box's shape."""

    def __init__(self, key: str, offsets: tuple[int, ...], target: torch.Tensor) -> None:
        self.key, self.offsets, self.target = key, offsets, target
        self.committed = 0

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        assert self.key in metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        stored = MetadataIndex(self.key, [0] * len(self.offsets))
        return LoadPlan(
            [
                ReadItem(
                    LoadItemType.TENSOR,
                    MetadataIndex("box"),
                    torch.Size([0] * len(self.offsets)),
                    stored,
                    torch.Size(self.offsets),
                    self.target.shape,
                )
            ]
        )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert tensor is self.target
        self.committed += 1


def load_box(folder: Path, key: str, offsets: tuple[int, ...], target: torch.Tensor) -> None:
    planner = BoxPlanner(key, offsets, target)
    hf.load({}, checkpoint_id=folder, planner=planner)
    assert planner.committed == 1


def save_raw(state: dict[str, Any], folder: Path) -> None:
    hf.save(state, storage_writer=hf.FileSystemWriter(folder, sync_files=False))


def save_zstd(state: dict[str, Any], folder: Path) -> None:
    hf.save(state, storage_writer=hf.FileSystemWriter(folder, sync_files=False, _extensions=[ZStandard()]))


def save_by_torch(state: dict[str, Any], folder: Path) -> None:
    stock_save(state, storage_writer=StockWriter(folder, sync_files=False))


SAVES = [save_raw, save_zstd, save_by_torch]


def bytes_read(work: Callable[[], object]) -> int:
    """How many bytes this process asked the system for while ``work`` ran, from wherever they came."""
    before = _read_so_far()
    # Reading the counter is itself counted in the next reading.
    own = _read_so_far() - before
    work()
    return _read_so_far() - before - 2 * own


def _read_so_far() -> int:
    descriptor = os.open("/proc/self/io", os.O_RDONLY)
    try:
        content = os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    return int(content.split()[1])


needs_counter = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the reads of a process")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, dict[str, Path]]:
    """A tensor of 64 MiB in 1024 rows, saved by us and by torch."""
    tensor = torch.arange(16 * MIB, dtype=torch.int32).view(1024, -1)
    folders = {}
    for save in (save_raw, save_by_torch):
        folders[save.__name__] = folder = tmp_path_factory.mktemp(save.__name__)
        save({"weight": tensor}, folder)
    return tensor, folders


@needs_counter
@pytest.mark.parametrize("by", ["save_raw", "save_by_torch"])
@pytest.mark.parametrize("part", [0, 3, 7])
def test_an_eighth_of_the_rows_reads_an_eighth_of_the_bytes(
    large: tuple[torch.Tensor, dict[str, Path]], by: str, part: int
) -> None:
    tensor, folders = large
    target = torch.zeros(128, tensor.shape[1], dtype=torch.int32)
    metadata = (folders[by] / ".metadata").stat().st_size
    read = bytes_read(lambda: load_box(folders[by], "weight", (128 * part, 0), target))
    assert torch.equal(target, tensor[128 * part : 128 * (part + 1)])
    assert read - metadata <= 1.05 * target.numel() * 4


@needs_counter
@pytest.mark.parametrize("by", ["save_raw", "save_by_torch"])
@pytest.mark.parametrize(("first", "count"), [(5, 100), (1, 1022), (1000, 24), (17, 1)])
def test_rows_from_anywhere_read_at_most_two_blocks_more(
    large: tuple[torch.Tensor, dict[str, Path]], by: str, first: int, count: int
) -> None:
    tensor, folders = large
    target = torch.zeros(count, tensor.shape[1], dtype=torch.int32)
    metadata = (folders[by] / ".metadata").stat().st_size
    read = bytes_read(lambda: load_box(folders[by], "weight", (first, 0), target))
    assert torch.equal(target, tensor[first : first + count])
    # A block is checked whole: the first and the last one may be needed only in part.
    assert read - metadata <= target.numel() * 4 + 2 * MIB + 4096


@needs_counter
def test_a_slice_shared_by_threads_reads_no_block_twice(tmp_path: Path) -> None:
    save_raw({"weight": torch.zeros(140 * MIB, dtype=torch.uint8)}, tmp_path)
    target = torch.zeros(136 * MIB, dtype=torch.uint8)
    metadata = (tmp_path / ".metadata").stat().st_size
    read = bytes_read(lambda: load_box(tmp_path, "weight", (MIB // 2,), target))
    assert read - metadata <= target.numel() + 2 * MIB + 4096


@needs_counter
def test_a_few_columns_do_not_read_the_whole_tensor_many_times(
    large: tuple[torch.Tensor, dict[str, Path]],
) -> None:
    tensor, folders = large
    target = torch.zeros(1024, 3, dtype=torch.int32)
    read = bytes_read(lambda: load_box(folders["save_raw"], "weight", (0, 7), target))
    assert torch.equal(target, tensor[:, 7:10])
    assert read <= 1.1 * tensor.numel() * 4


@needs_counter
def test_keys_that_are_not_asked_for_are_not_read(tmp_path: Path) -> None:
    save_raw({"large": torch.zeros(4 * MIB), "small": torch.ones(10), "object": "x"}, tmp_path)
    state = {"small": torch.zeros(10)}
    read = bytes_read(lambda: hf.load(state, checkpoint_id=tmp_path, strict=False))
    assert state["small"].all()
    assert read < 20_000


def boxes(data: st.DataObject) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """A shape, and a box in it."""
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    box = []
    for extent in shape:
        start = data.draw(st.integers(0, extent))
        box.append(slice(start, data.draw(st.integers(start, extent))))
    return shape, tuple(box)


DTYPES = [torch.float32, torch.uint8, torch.bfloat16, torch.complex128, torch.bool]


def destination(data: st.DataObject, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Memory for the box: contiguous, transposed, or every other element of something larger."""
    layout = data.draw(st.sampled_from(["contiguous", "reversed", "stepped"]))
    if layout == "reversed":
        return torch.zeros(tuple(reversed(shape)), dtype=dtype).permute(*reversed(range(len(shape))))
    if layout == "stepped":
        larger = torch.zeros([2 * extent for extent in shape], dtype=dtype)
        return larger[tuple(slice(None, None, 2) for _ in shape)]
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("save", SAVES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_box_of_any_tensor_equals_slicing(
    tmp_path_factory: pytest.TempPathFactory, save: Callable[..., None], data: st.DataObject
) -> None:
    shape, box = boxes(data)
    dtype = data.draw(st.sampled_from(DTYPES))
    count = torch.Size(shape).numel()
    tensor = torch.arange(count).remainder(251).to(dtype).view(shape)
    folder = tmp_path_factory.mktemp("box")
    save({"weight": tensor}, folder)
    expected = tensor[box]
    target = destination(data, expected.shape, dtype)
    load_box(folder, "weight", tuple(s.start for s in box), target)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("wanted", [torch.float64, torch.bfloat16, torch.int16])
def test_a_box_is_cast_to_its_destination(
    tmp_path: Path, save: Callable[..., None], wanted: torch.dtype
) -> None:
    tensor = torch.arange(60.0).view(3, 4, 5)
    save({"weight": tensor}, tmp_path)
    target = torch.zeros(2, 2, 5, dtype=wanted)
    load_box(tmp_path, "weight", (1, 1, 0), target)
    assert torch.equal(target, tensor[1:, 1:3].to(wanted))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    "box",
    [
        (slice(0, 300), slice(0, 5000)),
        (slice(3, 290), slice(0, 5000)),
        (slice(3, 290), slice(17, 4000)),
        (slice(0, 300), slice(4999, 5000)),
        (slice(150, 151), slice(10, 20)),
        (slice(0, 300), slice(100, 130)),
    ],
    ids=str,
)
def test_boxes_of_a_tensor_of_many_blocks_equal_slicing(
    save: Callable[..., None],
    box: tuple[slice, slice],
    several_blocks: dict[str, tuple[torch.Tensor, Path]],
) -> None:
    tensor, folder = several_blocks[save.__name__]
    expected = tensor[box]
    for target in (torch.zeros_like(expected), torch.zeros(expected.shape[::-1]).t()):
        load_box(folder, "weight", (box[0].start, box[1].start), target)
        assert torch.equal(target, expected)


@pytest.fixture(scope="module")
def several_blocks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, Path]]:
    """Nearly 6 MiB, not a whole number of blocks."""
    tensor = torch.arange(300 * 5000.0).view(300, 5000)
    made = {}
    for save in SAVES:
        folder = tmp_path_factory.mktemp(save.__name__)
        save({"weight": tensor}, folder)
        made[save.__name__] = (tensor, folder)
    return made


def test_damage_outside_the_slice_does_not_matter_and_inside_it_does(tmp_path: Path) -> None:
    save_raw({"weight": torch.zeros(8, MIB, dtype=torch.uint8)}, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[6 * MIB] ^= 1
    file.write_bytes(content)
    load_box(tmp_path, "weight", (0, 0), torch.zeros(3, MIB, dtype=torch.uint8))
    with pytest.raises(hf.errors.ChecksumError, match="box"):
        load_box(tmp_path, "weight", (4, 0), torch.zeros(4, MIB, dtype=torch.uint8))


def test_a_load_reports_the_bytes_that_it_reads(tmp_path: Path) -> None:
    state = {"large": torch.zeros(5 * MIB), "small": torch.zeros(7), "object": "x"}
    save_raw(state, tmp_path)
    reports: list[int] = []
    progress = ProgressTracker(reports.append)
    read_all(tmp_path, state, progress)
    assert progress.nbytes_done >= 20 * MIB + 28
    assert progress.nbytes_done < 20 * MIB + 10_000
    assert all(0 < after - before <= STRIDE for before, after in itertools.pairwise([0, *reports]))


def test_a_load_stops_when_its_progress_raises(tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt("enough")

    state = {"large": torch.ones(5 * MIB)}
    save_raw(state, tmp_path)
    with pytest.raises(KeyboardInterrupt, match="enough"):
        read_all(tmp_path, state, ProgressTracker(stop))


def read_all(folder: Path, state: dict[str, Any], progress: ProgressTracker) -> None:
    store = LocalStore(folder)
    metadata = read_metadata_file(store)
    planner = hf.DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    plan = planner.create_local_plan()
    read_items(
        store,
        plan,
        planner,
        metadata,
        registry=hf.extension.ExtensionRegistry(),
        threads=2,
        budget=64 * MIB,
        verify=True,
        progress=progress,
    )


@pytest.fixture(scope="module")
def odd_rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, Path]:
    """20 MiB in rows of which no number fills a block."""
    tensor = torch.arange(3 * 500 * 3501, dtype=torch.int32).view(3, 500, 3501)
    folder = tmp_path_factory.mktemp("odd rows")
    save_raw({"weight": tensor}, folder)
    return tensor, folder


COLUMNS = [(slice(0, 3), slice(0, 500), slice(0, 1)), (slice(0, 3), slice(7, 493), slice(3000, 3501))]
COLUMNS += [(slice(1, 2), slice(0, 500), slice(5, 3500)), (slice(0, 2), slice(250, 500), slice(1750, 1751))]


@needs_counter
@pytest.mark.parametrize("box", COLUMNS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_columns_are_right_and_no_block_is_read_twice(
    odd_rows: tuple[torch.Tensor, Path], box: tuple[slice, ...], dtype: torch.dtype
) -> None:
    tensor, folder = odd_rows
    wanted = tensor[box]
    target = torch.zeros(wanted.shape, dtype=dtype)
    offsets = tuple(part.start for part in box)
    read = bytes_read(lambda: load_box(folder, "weight", offsets, target))
    assert torch.equal(target, wanted.to(dtype))
    # Neighbouring planes share a block. The metadata is read, too.
    assert read <= tensor.nbytes + 2 * MIB + 10_000


@pytest.mark.parametrize("columns", [1, 300])
def test_a_flipped_bit_beside_columns_is_found(tmp_path: Path, columns: int) -> None:
    save_raw({"weight": torch.ones(6000, 301)}, tmp_path)
    path = next(tmp_path.glob("*.distcp"))
    with path.open("r+b") as file:
        file.seek(5 * MIB + 1)
        byte = file.read(1)[0]
        file.seek(5 * MIB + 1)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(hf.errors.ChecksumError):
        load_box(tmp_path, "weight", (0, 1), torch.zeros(6000, columns))


def test_columns_that_reach_beyond_what_is_stored_are_refused(tmp_path: Path) -> None:
    save_raw({"weight": torch.ones(6000, 301)}, tmp_path)
    with pytest.raises(hf.errors.MetadataFormatError, match="were asked of a payload"):
        load_box(tmp_path, "weight", (1000, 1), torch.zeros(6000, 7))
    with pytest.raises(hf.errors.MetadataFormatError, match="were asked of a payload"):
        load_box(tmp_path, "weight", (7000, 1), torch.zeros(3000, 7))


def test_many_small_values_that_are_no_tensors_take_few_reads(tmp_path: Path) -> None:
    numbers = {f"param_groups.{n}.lr": n / 10 for n in range(1000)}
    hf.save({"numbers": numbers, "note": "x" * 500_000}, checkpoint_id=tmp_path / "c")
    state: dict[str, Any] = {"numbers": dict.fromkeys(numbers, 0.0), "note": ""}
    before = _reads_of_this_process()
    hf.load(state, checkpoint_id=tmp_path / "c")
    assert _reads_of_this_process() - before < 100
    assert state == {"numbers": numbers, "note": "x" * 500_000}


def test_a_flipped_bit_among_many_small_values_is_found_with_its_key(tmp_path: Path) -> None:
    texts = {f"text {n}": f"{n:03}" * 100 for n in range(100)}
    hf.save(texts, checkpoint_id=tmp_path)
    path = next(tmp_path.glob("*.distcp"))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"042042", b"042043", 1))
    with pytest.raises(hf.errors.ChecksumError, match="text 42"):
        hf.load(dict.fromkeys(texts, ""), checkpoint_id=tmp_path)


def _reads_of_this_process() -> int:
    return int(Path("/proc/self/io").read_text().split("syscr: ")[1].split()[0])
