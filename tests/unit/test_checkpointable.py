"""Values that say themselves which chunks they hold, saved and loaded by one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.stock_torch import stock_load, stock_save
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner as torch_planner

import holdfast
from holdfast import metadata as our_metadata
from holdfast import planner as our_planner
from holdfast.errors import PlanError
from holdfast.state_dict_saver import AsyncCheckpointerType

WHOLE = torch.arange(15, dtype=torch.float64).reshape(3, 5)


class Columns:
    """Columns of a matrix, from ``begins[n]`` on in shard ``n``. Not a tensor."""

    metadata: Any = torch_metadata
    planner: Any = torch_planner

    def __init__(self, whole: torch.Tensor, *begins: int) -> None:
        self.shape = whole.shape
        ends = [*begins[1:], whole.shape[1]]
        self.shards = {a: whole[:, a:b].clone() for a, b in zip(begins, ends, strict=True)}

    def __create_chunk_list__(self) -> list[Any]:
        size = torch.Size
        return [
            self.metadata.ChunkStorageMetadata(size([0, a]), shard.size()) for a, shard in self.shards.items()
        ]

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        p, properties = self.planner, self.metadata.TensorProperties(torch.float64)
        return [
            p.WriteItem(
                self.metadata.MetadataIndex(fqn, chunk.offsets),
                p.WriteItemType.SHARD,
                tensor_data=p.TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        assert type(index) is self.metadata.MetadataIndex
        return self.shards[index.offset[1]]

    def together(self) -> torch.Tensor:
        return torch.cat(list(self.shards.values()), 1)


class ColumnsTensor(torch.Tensor):
    """The same as a tensor subclass, as torch needs it."""

    _columns: Columns

    @staticmethod
    def __new__(cls, columns: Columns) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, columns.shape, dtype=torch.float64)
        made._columns = columns
        return made

    def __create_chunk_list__(self) -> list[Any]:
        return self._columns.__create_chunk_list__()

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        return self._columns.__create_write_items__(fqn, value)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self._columns.__get_tensor_shard__(index)

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(str(args[0]))


class NamedColumns(Columns):
    """The same, made for one key: it names its items by that key, and answers to no other."""

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        return super().__create_write_items__("layer.weight", value)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        assert index.fqn == "layer.weight"
        return super().__get_tensor_shard__(index)


@pytest.mark.parametrize("as_saved", [lambda columns: columns, ColumnsTensor], ids=["object", "tensor"])
def test_a_value_that_answers_only_to_its_own_key_is_saved_and_loaded(tmp_path: Path, as_saved: Any) -> None:
    holdfast.save({"layer": {"weight": as_saved(NamedColumns(WHOLE, 0, 2))}}, checkpoint_id=tmp_path)

    columns = NamedColumns(torch.zeros_like(WHOLE), 0, 1, 4)
    holdfast.load({"layer": {"weight": as_saved(columns)}}, checkpoint_id=tmp_path)

    assert torch.equal(columns.together(), WHOLE)


class OurColumns(Columns):
    """The same with our records; it is asked by torch's index, if torch's package is there."""

    planner = our_planner

    def __create_chunk_list__(self) -> list[Any]:
        size = torch.Size
        return [
            our_metadata.ChunkStorageMetadata(size([0, a]), shard.size()) for a, shard in self.shards.items()
        ]

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        data = our_planner.TensorWriteData
        properties = our_metadata.TensorProperties(torch.float64)
        return [
            holdfast.WriteItem(
                holdfast.MetadataIndex(fqn, chunk.offsets),
                our_planner.WriteItemType.SHARD,
                tensor_data=data(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


@pytest.mark.parametrize("kind", [Columns, OurColumns])
def test_it_is_stored_as_the_chunks_that_it_names(kind: type[Columns], tmp_path: Path) -> None:
    saved = holdfast.save({"deep": [{"w": kind(WHOLE, 0, 2)}]}, checkpoint_id=tmp_path)
    entry = saved.state_dict_metadata["deep.0.w"]
    assert isinstance(entry, holdfast.TensorStorageMetadata)
    assert entry.size == WHOLE.shape
    assert [tuple(chunk.offsets) for chunk in entry.chunks] == [(0, 0), (0, 2)]


@pytest.mark.parametrize("kind", [Columns, OurColumns])
def test_it_is_loaded_in_place_in_other_pieces(kind: type[Columns], tmp_path: Path) -> None:
    holdfast.save({"w": kind(WHOLE, 0, 2)}, checkpoint_id=tmp_path)
    into = kind(torch.zeros_like(WHOLE), 0, 1, 4)
    memory = into.shards[1]
    result = holdfast.load({"w": into}, checkpoint_id=tmp_path)
    assert result.loaded == ("w",)
    assert torch.equal(into.together(), WHOLE)
    assert into.shards[1] is memory


def test_it_goes_into_a_plain_tensor_and_comes_from_one(tmp_path: Path) -> None:
    holdfast.save({"w": Columns(WHOLE, 0, 3)}, checkpoint_id=tmp_path / "a")
    plain = torch.zeros_like(WHOLE)
    holdfast.load({"w": plain}, checkpoint_id=tmp_path / "a")
    assert torch.equal(plain, WHOLE)
    holdfast.save({"w": plain}, checkpoint_id=tmp_path / "b")
    into = Columns(torch.zeros_like(WHOLE), 0, 4)
    holdfast.load({"w": into}, checkpoint_id=tmp_path / "b")
    assert torch.equal(into.together(), WHOLE)


def test_torch_and_we_read_each_others_tensor_subclass(tmp_path: Path) -> None:
    stock_save({"w": ColumnsTensor(Columns(WHOLE, 0, 2))}, checkpoint_id=tmp_path / "theirs")
    holdfast.save({"w": ColumnsTensor(Columns(WHOLE, 0, 2))}, checkpoint_id=tmp_path / "ours")
    for place in ("theirs", "ours"):
        for load in (stock_load, holdfast.load):
            into = Columns(torch.zeros_like(WHOLE), 0, 1, 3)
            load({"w": ColumnsTensor(into)}, checkpoint_id=tmp_path / place)
            assert torch.equal(into.together(), WHOLE), (place, load)


@pytest.mark.parametrize(
    "mode",
    [AsyncCheckpointerType.THREAD, pytest.param(AsyncCheckpointerType.PROCESS, marks=pytest.mark.slow)],
)
def test_a_background_save_has_the_values_of_its_call(mode: AsyncCheckpointerType, tmp_path: Path) -> None:
    value = Columns(WHOLE, 0, 2)
    saving: Any = holdfast.async_save({"w": value}, checkpoint_id=tmp_path, async_checkpointer_type=mode)
    value.shards[0].zero_()
    saving.result()
    plain = torch.zeros_like(WHOLE)
    holdfast.load({"w": plain}, checkpoint_id=tmp_path)
    assert torch.equal(plain, WHOLE)


class Whole(Columns):
    """Writes itself as one object."""

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        return [
            torch_planner.WriteItem(torch_metadata.MetadataIndex(fqn), torch_planner.WriteItemType.BYTE_IO)
        ]


def test_one_that_writes_itself_as_an_object_is_loaded_as_one(tmp_path: Path) -> None:
    holdfast.save({"w": Whole(WHOLE, 0)}, checkpoint_id=tmp_path)
    state = {"w": Whole(torch.zeros_like(WHOLE), 0)}
    holdfast.load(state, checkpoint_id=tmp_path, safe_globals=[Whole])
    assert torch.equal(state["w"].together(), WHOLE)


def test_other_shapes_and_dtypes_are_refused_with_the_key(tmp_path: Path) -> None:
    holdfast.save({"w": Columns(WHOLE, 0, 2)}, checkpoint_id=tmp_path)
    with pytest.raises(holdfast.errors.ShapeMismatchError, match="w: Size mismatch"):
        holdfast.load({"w": Columns(torch.zeros(3, 6, dtype=torch.float64), 0)}, checkpoint_id=tmp_path)
    with pytest.raises(holdfast.errors.DtypeMismatchError, match="int64"):
        holdfast.load({"w": Columns(torch.zeros(3, 5, dtype=torch.int64), 0)}, checkpoint_id=tmp_path)


class OfAnotherKey(Columns):
    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        return super().__create_write_items__(f"{fqn}.more", value)


class TooShort(Columns):
    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return super().__get_tensor_shard__(index)[:1]


@pytest.mark.parametrize(
    ("kind", "reason"), [(OfAnotherKey, "no item of this key"), (TooShort, "gave .1, 5.")]
)
def test_one_that_contradicts_itself_is_refused(kind: type[Columns], reason: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=reason):
        holdfast.save({"w": kind(WHOLE, 0)}, checkpoint_id=tmp_path)
