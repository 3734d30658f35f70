"""One process writes a model as safetensors files, and everybody reads it bit for bit."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.hf.model_files import (
    DTYPES,
    export,
    load,
    model_files,
    of_dtype,
    room_for,
    same,
    same_bits,
    some_state,
    with_safetensors,
)
from tests.support.stock_torch import stock_hf_storage
from torch.distributed.checkpoint import state_dict_loader as stock

import holdfast as dcp
from holdfast.errors import CheckpointException, InvalidPlanError, UsageError
from holdfast.state_dict_saver import AsyncCheckpointerType
from holdfast.testing import FakeRank, FakeRanks

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({}, ["model-00001-of-00001.safetensors", INDEX]),
        ({"max_shard_size": "1GB"}, ["model.safetensors"]),
        (
            {"max_shard_size": "2MB", "thread_count": 3},
            ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", INDEX],
        ),
        (
            {"save_distributed": True, "enable_consolidation": True},
            ["model-00001-of-00001.safetensors", INDEX],
        ),
        ({"memory_budget": 1}, ["model-00001-of-00001.safetensors", INDEX]),
    ],
)
def test_every_dtype_and_kind_of_tensor_comes_back(
    tmp_path: Path, options: dict[str, Any], files: list[str]
) -> None:
    state = some_state()
    export(state, tmp_path, **options)
    assert set(files) <= set(model_files(tmp_path))
    assert same(with_safetensors(tmp_path), state)
    assert same(load(tmp_path, state), state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torch_reads_what_is_written(tmp_path: Path) -> None:
    unknown_to_stock = {"float8_e8m0fnu", "float4_e2m1fn_x2"}
    state = {key: value for key, value in some_state().items() if key not in unknown_to_stock}
    export(state, tmp_path, max_shard_size="2MB")
    found = room_for(state)
    stock.load(found, storage_reader=stock_hf_storage().HuggingFaceStorageReader(str(tmp_path)))
    assert same(found, state)


def test_the_index_says_where_each_tensor_is(tmp_path: Path) -> None:
    export({"a": torch.zeros(4), "b": torch.zeros(2)}, tmp_path, fqn_to_index_mapping={"a": 2, "b": 1})
    assert json.loads((tmp_path / INDEX).read_text()) == {
        "metadata": {"total_size": 24},
        "weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"},
    }


def test_shard_names_of_another_model_are_kept(tmp_path: Path) -> None:
    names = {
        "a": "model.safetensors-00001-of-00002.safetensors",
        "b": "model.safetensors-00002-of-00002.safetensors",
    }
    export({"a": torch.zeros(4), "b": torch.zeros(2)}, tmp_path, fqn_to_index_mapping=names)
    assert model_files(tmp_path) == sorted([*names.values(), INDEX])


def test_an_export_over_another_leaves_nothing_of_it(tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{"max_shard_size": "1KB"}, {}, {"max_shard_size": "1GB"}]
    for seed, options in enumerate([*layouts, *reversed(layouts), *layouts]):
        state = {"a": torch.full((300,), float(seed)), "b": torch.full((300,), -float(seed))}
        export(state, tmp_path, **options)
        assert same(load(tmp_path, state), state)
        assert same(with_safetensors(tmp_path), state)
    assert model_files(tmp_path) == ["model.safetensors"]


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"of somebody else")
    for _ in range(2):
        export({"a": torch.zeros(3)}, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == b"of somebody else"
    assert (tmp_path / "config.json").exists()


def test_dtype_and_names_change_on_the_way_out(tmp_path: Path) -> None:
    weight = torch.randn(3000, 500)
    state = {
        "model.w": weight,
        "model.t": weight.t(),
        "model.n": torch.arange(5),
        "model.s": torch.tensor(0.1),
    }
    export(
        state, tmp_path, dtype=torch.bfloat16, rename=lambda key: key.removeprefix("model."), memory_budget=1
    )
    found = with_safetensors(tmp_path)
    assert found.keys() == {"w", "t", "n", "s"}
    assert same_bits(found["w"], weight.bfloat16())
    assert same_bits(found["t"], weight.t().bfloat16())
    assert same_bits(found["n"], torch.arange(5))
    export(state, tmp_path, rename={"model.w": "other"})
    assert with_safetensors(tmp_path).keys() == {"other", "model.t", "model.n", "model.s"}


@pytest.mark.parametrize(
    ("state", "options", "key"),
    [
        ({"a": torch.zeros(2), "step": 7}, {}, "step"),
        ({"a": torch.zeros(2), "deep": {"list": [torch.zeros(1), "text"]}}, {}, r"deep\.list\.1"),
        ({"c": torch.zeros(2, dtype=torch.complex128)}, {}, "c"),
        ({"a": torch.zeros(2)}, {"fqn_to_index_mapping": {"a": 1, "lm_head": 1}}, "lm_head"),
        ({"a": torch.zeros(2), "b": torch.zeros(2)}, {"fqn_to_index_mapping": {"a": 1}}, "b"),
        ({"a": torch.zeros(2), "b": torch.zeros(2)}, {"rename": {"a": "b"}}, "same name"),
        ({"a": torch.zeros(2)}, {"rename": lambda _: ""}, "a: rename gives ''"),
        ({"a": torch.zeros(2)}, {"rename": lambda _: 5}, "a: rename gives 5"),
        ({"a": torch.zeros(2)}, {"rename": {"a": None}}, "a: rename gives None"),
        *(
            (
                {"a": torch.zeros(2), "bad": torch.zeros(2)},
                {"fqn_to_index_mapping": {"a": 1, "bad": place}},
                re.escape(f"bad: fqn_to_index_mapping puts it into {place!r}"),
            )
            for place in (True, 2.0, None, 0, -1, (), "x.bin", "../x.safetensors", "x/y.safetensors")
        ),
        ({"__metadata__": torch.zeros(2)}, {}, "cannot be the name"),
        (
            {"c": torch.zeros(2, 3, dtype=torch.complex128), "d": torch.zeros(1, dtype=torch.complex128)},
            {},
            r"c \(and 1 more: d\): .* torch.complex128 and shape \[2, 3\]",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_written(
    tmp_path: Path, state: dict[str, Any], options: dict[str, Any], key: str
) -> None:
    old = {"old": torch.ones(3)}
    export(old, tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises((InvalidPlanError, UsageError), match=key):
        export(state, tmp_path, **options)
    assert sorted(tmp_path.iterdir()) == before
    assert same(load(tmp_path, old), old)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"dtype": torch.int32}, "floating-point dtype such as bfloat16, not torch.int32"),
        ({"dtype": torch.bool}, "floating-point dtype"),
        ({"dtype": torch.complex64}, "floating-point dtype"),
        ({"dtype": "floaty"}, "floating-point dtype such as bfloat16, not floaty"),
        ({"rename": 5}, "rename is a function of a key, or a dict with new names, not 5"),
        ({"rename": {5: "a"}}, "rename has a new name for 5"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(
    tmp_path: Path, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        dcp.HuggingFaceStorageWriter(tmp_path, **options)


def test_every_floating_point_dtype_is_cast_but_packed_pairs(tmp_path: Path) -> None:
    state = {str(dtype)[6:]: of_dtype(dtype, 3, 8) for dtype in DTYPES}
    packed = {"float4_e2m1fn_x2"}
    export(state, tmp_path, dtype="bfloat16")
    found = with_safetensors(tmp_path)
    for key, value in state.items():
        is_cast = value.dtype.is_floating_point and key not in packed
        assert same_bits(found[key], value.bfloat16() if is_cast else value), key


def test_numbers_of_files_may_be_those_of_numpy(tmp_path: Path) -> None:
    numbers = {"a": np.int64(2), "b": 1}
    export({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path, fqn_to_index_mapping=numbers)
    assert model_files(tmp_path) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_a_failure_while_writing_leaves_the_old_model_alone(tmp_path: Path) -> None:
    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "b":
                raise OSError(5, "no data")
            return super().resolve_data(write_item)

    old = {"a": torch.ones(3), "b": torch.zeros(3)}
    export(old, tmp_path)
    before = sorted(tmp_path.iterdir())
    writer = dcp.HuggingFaceStorageWriter(tmp_path)
    with pytest.raises(CheckpointException, match="no data"):
        dcp.save({"a": torch.zeros(3), "b": torch.ones(3)}, storage_writer=writer, planner=Failing())
    assert sorted(tmp_path.iterdir()) == before
    assert same(load(tmp_path, old), old)


def test_ranks_cannot_each_write_a_model_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use_collectives"):
        dcp.save(
            {"a": torch.zeros(2)},
            storage_writer=dcp.HuggingFaceStorageWriter(tmp_path),
            use_collectives=False,
        )


def test_both_ways_to_divide_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="either"):
        dcp.HuggingFaceStorageWriter(tmp_path, {"a": 1}, max_shard_size=1)


def test_subclasses_that_count_on_the_files_of_torchs_writer_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Mine replaces _split_by_storage_plan.*fqn_to_index_mapping"):
        type("Mine", (dcp.HuggingFaceStorageWriter,), {"_split_by_storage_plan": None})

    class Sharding(dcp.HuggingFaceStorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            raise AssertionError(plan.storage_data.get("shard_index"))

    with pytest.raises(UsageError, match=r"plan\.storage_data has no 'shard_index'"):
        dcp.save({"a": torch.ones(3)}, storage_writer=Sharding(tmp_path), no_dist=True)


def test_save_returns_metadata_of_the_files(tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(tmp_path, rename={"a": "x"}, dtype=torch.float16)
    metadata: Any = dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    assert metadata.state_dict_metadata["x"].properties.dtype == torch.float16
    assert {info.relative_path for info in metadata.storage_data.values()} == {
        "model-00001-of-00001.safetensors"
    }


@pytest.mark.parametrize("kind", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS])
def test_a_background_save_writes_the_same_files(tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    options: dict[str, Any] = {"max_shard_size": "2MB", "rename": lambda key: f"model.{key}"}
    state = some_state()
    writer = dcp.HuggingFaceStorageWriter(tmp_path / "async", **options)
    saving: Any = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
    saving.result()
    export(state, tmp_path / "here", **options)
    assert model_files(tmp_path / "async") == model_files(tmp_path / "here")
    for path in (tmp_path / "here").iterdir():
        assert path.read_bytes() == (tmp_path / "async" / path.name).read_bytes(), path.name


def test_what_is_written_is_the_model_and_little_more(tmp_path: Path) -> None:
    """No byte is written twice: 1.01 bytes for each of the model, under one per cent for headers and sums."""
    state = {f"layer.{number}": torch.randn(512, 1024) for number in range(8)}

    def written() -> int:
        rows = dict(row.split(": ") for row in Path("/proc/self/io").read_text().splitlines())
        return int(rows["wchar"])

    before = written()
    export(state, tmp_path, max_shard_size="5MB")
    assert written() - before <= 1.01 * sum(value.nbytes for value in state.values())


@pytest.mark.parametrize("page_cache", ["keep", "bypass"])
def test_runs_that_begin_and_end_anywhere_are_written_past_the_page_cache_or_through_it(
    tmp_path: Path, page_cache: Any
) -> None:
    state = {f"t{n}": of_dtype(torch.uint8, 3_000_001 + 1_000_003 * n, seed=n) for n in range(4)}
    writer = dcp.HuggingFaceStorageWriter(tmp_path, thread_count=2)
    writer.page_cache = page_cache
    dcp.save(state, storage_writer=writer)
    assert same(with_safetensors(tmp_path), state)
    assert same(load(tmp_path, state), state)


def test_a_folder_that_takes_files_from_front_to_back_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mount of an object store does: whoever opens a file again to write to it is refused."""
    plain = os.open

    def refusing(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if str(path).startswith(str(tmp_path)) and flags & os.O_WRONLY and not flags & os.O_CREAT:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported", path)
        return plain(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refusing)
    for seed in range(2):
        state = some_state(seed)
        export(state, tmp_path, max_shard_size="2MB")
        assert same(load(tmp_path, state), state)
    assert same(with_safetensors(tmp_path), state)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_an_empty_state_is_a_file_without_tensors(tmp_path: Path) -> None:
    export({}, tmp_path, max_shard_size=10)
    assert load_file(tmp_path / "model.safetensors") == {}


def test_values_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    def save(rank: FakeRank) -> None:
        state = {"norm.mean": torch.full((4,), float(rank.rank)), "w": torch.ones(3)}
        rank.save(state, storage_writer=dcp.HuggingFaceStorageWriter(tmp_path / "out"))

    with pytest.raises(InvalidPlanError, match=r"norm\.mean: ranks have different values.*broad") as caught:
        FakeRanks(2).run(save)
    assert caught.value.key == "norm.mean"
