"""The suite that every pair of a StorageWriter and a StorageReader must pass."""

import abc
import contextlib
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.planner import SavePlan, SavePlanner, WriteItem
from holdfast.storage import StorageReader, StorageWriter
from holdfast.testing.drive import drive_load, drive_save
from holdfast.testing.plain_planner import PlainLoadPlanner, PlainSavePlanner

__all__ = ["StorageContract"]


_CHANGES = 40
"""How many bytes are changed, one at a time, in all files of a checkpoint together."""


def _rotated(values: list[bytes]) -> list[bytes]:
    return values[1:] + values[:1]


def _state(seed: int = 0) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    grid = torch.rand(6, 8, generator=made)
    return {
        "plain": torch.rand(5, 7, generator=made),
        "scalar": torch.tensor(3.5 + seed),
        "empty": torch.empty(0, 4),
        "view of a part": grid[1:3, ::2],
        "transposed": grid.t(),
        "half": torch.rand(9, generator=made).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "bytes": bytes([seed]) * 1000,
        "no bytes": b"",
    }


def _blank(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: torch.full_like(value, 1) if isinstance(value, torch.Tensor) else b"?"
        for key, value in state.items()
    }


def _same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
        for key, value in left.items()
    )


class _Failing(PlainSavePlanner):
    """Fails when the storage asks for the item number ``at``."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.asked: list[str] = []

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.asked.append(write_item.index.fqn)
        if len(self.asked) > self.at:
            raise OSError("the data cannot be had")
        return super().resolve_data(write_item)


class StorageContract(abc.ABC):
    """Subclass it, make your writer and your reader, and let pytest collect the subclass.

    ``place`` is a path that does not exist yet, in a folder that does; storages that are not in a file
    system may use its name as a key, and override ``stored_files`` and ``replace_stored_file``.

    Attributes:
        notices_damage: False declares that the storage does not check what it reads. The suite then skips the
            tests that change stored bytes. Say so in the storage's own documentation too: a load of it may
            give wrong values.
    """

    notices_damage = True

    @abc.abstractmethod
    def make_writer(self, place: Path) -> StorageWriter:
        """A new writer to ``place``."""

    @abc.abstractmethod
    def make_reader(self, place: Path) -> StorageReader:
        """A new reader from ``place``."""

    def stored_files(self, place: Path) -> dict[str, bytes]:
        """Everything that is stored for ``place``, by name. The default reads the files of that folder."""
        return {
            str(file.relative_to(place)): file.read_bytes() for file in place.rglob("*") if file.is_file()
        }

    def replace_stored_file(self, place: Path, name: str, data: bytes | None) -> None:
        """Give a stored file other bytes behind the storage's back, or remove it if ``data`` is None."""
        if data is None:
            (place / name).unlink()
        else:
            (place / name).write_bytes(data)

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """Where the test saves to."""
        return tmp_path / "checkpoint"

    def save(self, place: Path, state: dict[str, Any], planner: SavePlanner | None = None) -> None:
        """One rank saves ``state``."""
        drive_save([state], [planner or PlainSavePlanner()], [self.make_writer(place)])

    def load(self, place: Path, state: dict[str, Any]) -> dict[str, Any]:
        """One rank loads into tensors like those of ``state``."""
        loaded = _blank(state)
        drive_load([loaded], [PlainLoadPlanner()], [self.make_reader(place)])
        return loaded

    def test_what_was_saved_is_loaded(self, place: Path) -> None:
        """Tensors of any strides, scalars, empty tensors and bytes come back bit for bit."""
        state = _state()
        self.save(place, state)
        assert _same(self.load(place, state), state)

    def test_metadata_comes_back_equal(self, place: Path) -> None:
        """The reader's metadata describes the same keys, chunks and planner data as the planner's."""
        state = _state()
        metadata = drive_save([state], [PlainSavePlanner()], [self.make_writer(place)])
        read = self.make_reader(place).read_metadata()
        assert read.state_dict_metadata == metadata.state_dict_metadata
        assert read.planner_data == metadata.planner_data

    def test_many_ranks_write_one_checkpoint(self, place: Path) -> None:
        """What each of several ranks wrote is there, and any one reader finds all of it."""
        states = [{f"rank {rank}": torch.full((4,), float(rank))} for rank in range(3)]
        drive_save(states, [PlainSavePlanner() for _ in states], [self.make_writer(place) for _ in states])
        merged = {key: value for state in states for key, value in state.items()}
        assert _same(self.load(place, merged), merged)

    def test_one_result_for_each_item(self, place: Path) -> None:
        """``write_data`` accounts for every item of the plan exactly once."""
        planner, writer = PlainSavePlanner(), self.make_writer(place)
        plan = self._ready(planner, writer)
        results = writer.write_data(plan, planner).wait()
        assert sorted(r.index.fqn for r in results) == sorted(item.index.fqn for item in plan.items)

    def test_nothing_is_visible_before_finish(self, place: Path) -> None:
        """Without a commit there is no checkpoint, and asking for one raises."""
        planner, writer = PlainSavePlanner(), self.make_writer(place)
        writer.write_data(self._ready(planner, writer), planner).wait()
        with pytest.raises(Exception):  # noqa: B017 - which error is the storage's own affair
            self.make_reader(place).read_metadata()

    def test_a_new_save_replaces_the_old_one_whole(self, place: Path) -> None:
        """After a second save to one place only the second is found."""
        self.save(place, _state(1))
        second = {"only": torch.arange(4.0)}
        self.save(place, second)
        assert _same(self.load(place, second), second)
        assert list(self.make_reader(place).read_metadata().state_dict_metadata) == ["only"]

    def test_a_save_that_is_not_finished_leaves_the_old_one(self, place: Path) -> None:
        """Data written for a save that never commits does not change what a reader gets."""
        old = _state(1)
        self.save(place, old)
        planner, writer = PlainSavePlanner(), self.make_writer(place)
        writer.write_data(self._ready(planner, writer, _state(2)), planner).wait()
        assert _same(self.load(place, old), old)

    @pytest.mark.parametrize("at", [0, 3])
    def test_a_failing_save_raises_and_leaves_the_old_one(self, place: Path, at: int) -> None:
        """If the data cannot be had, the save raises, the old stays, and no thread goes on."""
        old = _state(1)
        self.save(place, old)
        threads_before = set(threading.enumerate())
        with pytest.raises(Exception, match="the data cannot be had"):
            self.save(place, _state(2), _Failing(at))
        assert set(threading.enumerate()) <= threads_before
        assert _same(self.load(place, old), old)

    def test_saving_changes_nothing_in_the_state(self, place: Path) -> None:
        """Tensors and bytes are the same before and after."""
        state = _state()
        before = {k: v.clone() if isinstance(v, torch.Tensor) else bytes(v) for k, v in state.items()}
        self.save(place, state)
        assert _same(state, before)

    def test_one_writer_saves_again_and_again(self, place: Path) -> None:
        """An instance can be reset and used for the next save."""
        writer, reader = self.make_writer(place), self.make_reader(place)
        for seed in range(3):
            state = _state(seed)
            drive_save([state], [PlainSavePlanner()], [writer])
            loaded = _blank(state)
            drive_load([loaded], [PlainLoadPlanner()], [reader])
            assert _same(loaded, state)

    def test_a_place_without_a_checkpoint_raises(self, place: Path) -> None:
        """Reading where nothing was saved is an error, not an empty checkpoint."""
        with pytest.raises(Exception):  # noqa: B017 - which error is the storage's own affair
            self.make_reader(place).read_metadata()

    def test_preparing_twice_is_the_same_as_once(self, place: Path) -> None:
        """``prepare_local_plan`` is safe to repeat."""
        planner, writer = PlainSavePlanner(), self.make_writer(place)
        plan = self._ready(planner, writer)
        assert writer.prepare_local_plan(plan).items == plan.items

    def test_a_changed_byte_is_noticed(self, place: Path) -> None:
        """With one byte of any stored file changed, a load raises or gives exactly what was saved."""
        state, files = self._damageable(place)
        chosen = random.Random(0)  # noqa: S311 - repeatable, and nothing is secret
        for name, data in files.items():
            for position in chosen.sample(range(len(data)), min(len(data), _CHANGES // len(files) + 1)):
                changed = bytearray(data)
                changed[position] ^= 1 << chosen.randrange(8)
                what = f"byte {position} of {name} is changed"
                self._expect_noticed(place, state, name, data, bytes(changed), what)

    def test_a_file_that_is_cut_short_is_noticed(self, place: Path) -> None:
        """With the end of any stored file missing, a load raises or gives exactly what was saved."""
        state, files = self._damageable(place)
        for name, data in files.items():
            for size in {0, len(data) // 2, max(0, len(data) - 1)} - {len(data)}:
                what = f"{name} has {size} of {len(data)} bytes"
                self._expect_noticed(place, state, name, data, data[:size], what)

    def test_a_missing_file_is_noticed(self, place: Path) -> None:
        """Without any one of the stored files, a load raises or gives exactly what was saved."""
        state, files = self._damageable(place)
        for name, data in files.items():
            self._expect_noticed(place, state, name, data, None, f"{name} is missing")

    def test_files_that_changed_places_are_noticed(self, place: Path) -> None:
        """With the bytes of a stored file in the place of another, a load raises or gives what was saved."""
        state, files = self._damageable(place)
        for (name, data), other in zip(files.items(), _rotated(list(files.values())), strict=True):
            self._expect_noticed(place, state, name, data, other, f"{name} has the bytes of another file")

    def _damageable(self, place: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
        """A state that was saved to ``place``, and what is stored for it."""
        if not self.notices_damage:
            pytest.skip("this storage declares that it does not notice damage")
        state = _state()
        self.save(place, state)
        files = self.stored_files(place)
        assert files, "no stored files found: override stored_files, or set notices_damage = False"
        return state, files

    def _expect_noticed(
        self, place: Path, state: dict[str, Any], name: str, data: bytes, damaged: bytes | None, what: str
    ) -> None:
        """A load with ``damaged`` in the place of ``data`` raises or gives ``state``; then undo it."""
        self.replace_stored_file(place, name, damaged)
        loaded = None
        with contextlib.suppress(Exception):  # which error is the storage's own affair
            loaded = self.load(place, state)
        noticed = loaded is None or _same(loaded, state)
        assert noticed, f"{what}, and a load gives wrong values without an error"
        self.replace_stored_file(place, name, data)

    def _ready(
        self, planner: PlainSavePlanner, writer: StorageWriter, state: dict[str, Any] | None = None
    ) -> SavePlan:
        """Everything up to, and not including, ``write_data``."""
        writer.reset()
        planner.set_up_planner(_state() if state is None else state, writer.storage_meta(), True)  # noqa: FBT003
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, _ = planner.create_global_plan([plan])
        return planner.finish_plan(writer.prepare_global_plan(plans)[0])
