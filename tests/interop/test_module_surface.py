"""The modules and names of torch's checkpoint package that frameworks import: they do their job here."""

import importlib.util
import io
import json
import logging
import operator
import pickle
import pkgutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.stock_torch import IS_NEWEST, stock_save
from torch import nn

import holdfast
from holdfast import _nested_dict, _traverse, planner_helpers, resharding, utils
from holdfast.errors import IncompleteWriteError, InvalidPlanError, MetadataFormatError, PlanError, UsageError

PLANNER_HELPERS = """
_chunk_for_shard _compare_save_plans _contains_usable_plan _create_chunk_from_dtensor
_create_chunk_from_tensor _create_chunk_list _create_default_metadata_only_plan
_create_read_item_for_byteio _create_read_item_for_tensor _create_read_items
_create_write_item_for_bytesio _create_write_item_for_shard _create_write_item_for_tensor
_create_write_items _create_write_items_for_dtensor _init_state_dict _iterate_state_dict
_merge_delta_local_plans _sharded_tensor_metadata create_read_items_for_chunk_list
"""
NAMES = {
    "_consolidate_hf_safetensors": """_FqnData _InputFileData _OutputFileData
        _calculate_max_contiguous_elements _parse_input_metadata _write_sub_tensor_to_file_optimized
        consolidate_safetensors_files consolidate_safetensors_files_on_every_rank""",
    "_dedup_save_plans": "dedup_save_plans",
    "_dedup_tensors": "dedup_tensors",
    "_hf_utils": """CUSTOM_METADATA_KEY DATA_KEY DATA_OFFSETS_KEY DCP_SHARDING_INFO_KEY DCP_VERSION_KEY
        DEFAULT_EXTRA_METADATA_KEY DTYPE_KEY DTYPE_MAP FILE_NAME FORMAT_KEY FORMAT_VALUE HF_DCP_VERSION
        NUM_BYTES_FOR_HEADER_LEN SAVED_OFFSETS_KEY SHAPE_KEY SHARDED_DIR_NAME SHARDED_FILE_NAME SUFFIX
        _HFStorageInfo _gen_file_name _get_dcp_custom_metadata _get_dtype _get_safetensors_file_metadata
        _metadata_fn""",
    "_nested_dict": "FLATTEN_MAPPING flatten_state_dict unflatten_state_dict",
    "_sharded_tensor_utils": "_flatten_sharded_tensors",
    "_state_dict_stager": "StateDictStager",
    "_storage_utils": "_storage_setup",
    "_traverse": """CONTAINER_TYPE OBJ_PATH PATH_ITEM STATE_DICT_ITEM _keep_visiting_tensors get_element
        print_tensor set_element traverse_state_dict traverse_state_dict_v_2_3""",
    "_version": "_derived_version",
    "api": "CheckpointException WRAPPED_EXCEPTION _is_wrapped_exception _wrap_exception",
    "default_planner": """DefaultLoadPlanner DefaultSavePlanner _EmptyStateDictLoadPlanner
        _create_default_local_metadata _validate_global_plan create_default_global_load_plan
        create_default_global_save_plan create_default_local_load_plan create_default_local_save_plan""",
    "filesystem": """CURRENT_DCP_VERSION DEFAULT_SUFFIX FileSystem FileSystemBase FileSystemReader
        FileSystemWriter SerializationFormat _FileSystemWriter _OverlappingCpuLoader _SerialCpuLoader
        _StorageInfo _StoragePrefix _StorageWriterTransforms _TensorLoader _item_size _metadata_fn
        _split_by_size_and_type _write_item""",
    "logger": "_dcp_logger _dcp_method_logger",
    "logging_handlers": "DCP_LOGGER_NAME",
    "optimizer": "load_sharded_optimizer_state_dict",
    "planner_helpers": PLANNER_HELPERS,
    "resharding": "_check_shard_metadata_pair_overlap _shards_get_overlap_region_wrt_saved_tensor",
    "state_dict": """_get_fqns _init_optim_state _patch_model_state_dict _patch_optimizer_state_dict
        get_state_dict""",
    "state_dict_loader": "_load_state_dict _load_state_dict_from_keys load load_state_dict",
    "state_dict_saver": "_save_state_dict _stateful_to_state_dict async_save save save_state_dict",
    "utils": """CheckpointException _DistWrapper _ReaderView _all_gather_keys _api_bc_check _assert_same_keys
        _create_file_view _element_wise_add _element_wise_sub _get_failure_dict _is_wrapped_exception
        _normalize_device_info _profile _wrap_exception find_state_dict_object find_tensor_shard""",
}

NOT_HERE = {
    "_async_executor",
    "_async_process_executor",
    "_async_thread_executor",
    "_checkpointer",
    "_experimental",
    "_pg_transport",
}
"""Modules of torch that no framework imports, or only to change how torch's own save works inside.

docs/coming_from_torch.md names them.
"""


def both(module: str) -> tuple[Any, Any]:
    """Our module and torch's."""
    name = f"torch.distributed.checkpoint.{module}"
    if not IS_NEWEST and importlib.util.find_spec(name) is None:
        pytest.skip(f"this torch has no {name}")
    theirs = importlib.import_module(name)
    return importlib.import_module(f"holdfast.{module}"), theirs


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_there(module: str) -> None:
    ours, theirs = both(module)
    missing = [name for name in NAMES[module].split() if not hasattr(ours, name)]
    assert not missing
    if IS_NEWEST:
        assert not [name for name in NAMES[module].split() if not hasattr(theirs, name)]
    assert getattr(holdfast, module) is ours


THEIR_MODULES = {module.name for module in pkgutil.iter_modules(torch.distributed.checkpoint.__path__)}
NAMES_NOT_HERE = {
    *("PGTransport", "_ProcessBasedAsyncCheckpointExecutor", "_ThreadBasedAsyncCheckpointExecutor"),
}
"""Of the modules that are not here."""


@pytest.mark.parametrize("module", sorted(THEIR_MODULES - NOT_HERE))
def test_names_that_torchs_modules_have_from_each_other_are_there(module: str) -> None:
    package = "torch.distributed.checkpoint"
    ours, theirs = both(module)
    for name, value in vars(theirs).items():
        home = str(getattr(value, "__module__", ""))
        is_imported = home.startswith(f"{package}.") and home != theirs.__name__
        if is_imported and name not in NAMES_NOT_HERE and not name.startswith("__"):
            assert hasattr(ours, name), f"{module} has no {name} of {home}"
            its_home = importlib.import_module(home.replace(package, "holdfast"))
            assert getattr(ours, name) is getattr(its_home, name), name
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = ours.no_such_name


def test_what_torch_itself_has_elsewhere_is_there_where_programs_import_it() -> None:
    for module, names in {
        "default_planner": "DTensor STATE_DICT_TYPE STORAGE_TYPES FLATTEN_MAPPING narrow_tensor_by_index",
        "filesystem": "STATE_DICT_TYPE narrow_tensor_by_index",
        "staging": "STATE_DICT_TYPE _copy_state_dict _create_cpu_state_dict",
    }.items():
        assert [name for name in names.split() if not hasattr(both(module)[0], name)] == []


@pytest.mark.parametrize("name", ["_SerialCpuLoader", "_OverlappingCpuLoader"])
def test_loaders_of_writers_give_tensors_of_their_own(name: str) -> None:
    rows = torch.arange(12.0).reshape(3, 4)
    ours, theirs = both("filesystem")
    # torch's other loader needs an accelerator.
    for module in (ours, theirs) if name == "_SerialCpuLoader" else (ours,):
        loader = getattr(module, name)(lambda row: rows[row])
        for row in range(3):
            loader.add(row, row)
        loader.start_loading()
        found = list(loader.values())
        assert [row for _, row in found] == [0, 1, 2]
        assert all(torch.equal(tensor, rows[row]) for tensor, row in found)
        assert {tensor.untyped_storage().nbytes() for tensor, _ in found} == {16}


@pytest.mark.skipif(not IS_NEWEST, reason="other versions of torch have other modules")
def test_every_module_is_there_or_named_as_missing() -> None:
    ours = {module.name for module in pkgutil.iter_modules(holdfast.__path__)}
    assert THEIR_MODULES - ours == NOT_HERE
    page = (Path(__file__).parents[2] / "docs" / "coming_from_torch.md").read_text()
    assert [name for name in NOT_HERE if f"`{name}`" not in page] == []


@pytest.mark.slow
@pytest.mark.one_core
def test_no_module_needs_torchs_package_or_safetensors() -> None:
    program = f"""
import importlib, sys
sys.modules["safetensors"] = None
for name in {sorted(NAMES)!r}:
    importlib.import_module("holdfast." + name)
assert "torch.distributed.checkpoint" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_constants_are_torchs() -> None:
    ours, theirs = both("filesystem")
    assert (ours.DEFAULT_SUFFIX, ours._metadata_fn) == (theirs.DEFAULT_SUFFIX, theirs._metadata_fn)
    assert vars(theirs).get("CURRENT_DCP_VERSION", "1.0.0") == ours.CURRENT_DCP_VERSION
    ours, theirs = both("_hf_utils")
    for name in NAMES["_hf_utils"].split():
        if name.isupper() and name != "DTYPE_MAP":
            assert getattr(ours, name) == getattr(theirs, name), name
    assert theirs.DTYPE_MAP.items() <= ours.DTYPE_MAP.items()


STATES: list[dict[Any, Any]] = [
    {"a": {"b": 1, "c": [torch.ones(1), {"d": 2}]}, "e": [1, 2], "f": (torch.ones(2), 3), "g": {}},
    {"k0": [1], "k2": [torch.zeros(1), 99, [{"k3": torch.ones(1)}]], "k3": ["x", 99, [{"k3": "y"}]]},
    {"params": {0: {"lr": 0.1}, 1: {"lr": 0.2}}, "plain": {"x": {"y": "z"}}},
]


@pytest.mark.parametrize("state", STATES)
def test_flattening_gives_torchs_keys_and_paths(state: dict[Any, Any]) -> None:
    (leaves, mapping), (their_leaves, their_mapping) = (
        m.flatten_state_dict(state) for m in both("_nested_dict")
    )
    assert list(leaves) == list(their_leaves)
    assert all(leaves[key] is their_leaves[key] for key in leaves)
    assert mapping == their_mapping


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", ["traverse_state_dict", "traverse_state_dict_v_2_3"])
def test_traversing_visits_what_torch_visits(state: dict[Any, Any], name: str) -> None:
    visited: list[list[Any]] = []
    for module in both("_traverse"):
        visited.append([])
        getattr(module, name)(state, lambda path, value: visited[-1].append((path, id(value))))
    assert visited[0] == visited[1]
    assert {type(step) for path, _ in visited[0] for step in path} <= {str, int}


def test_unflattening_restores_what_was_flattened() -> None:
    state = {"a": OrderedDict(x=1, y=[torch.ones(1), None]), 7: {}, "n": {1: 2}}
    leaves, mapping = _nested_dict.flatten_state_dict(state)
    again = _nested_dict.unflatten_state_dict(leaves, mapping)
    assert again == state
    assert type(again["a"]) is OrderedDict
    assert _nested_dict.unflatten_state_dict({"n.1": 2}, mapping) == {"n": {1: 2}}
    plain: dict[str, Any] = {"a.x": ("a", "x"), "l.1": ("l", 1)}
    assert _nested_dict.unflatten_state_dict({"l.1": 5}, plain) == {"l": [None, 5]}
    with pytest.raises(KeyError):
        _nested_dict.unflatten_state_dict({"unknown": 1}, mapping)


def test_two_leaves_of_one_flat_key_are_refused() -> None:
    for module in both("_nested_dict"):
        with pytest.raises(ValueError, match=r"a\.b"):
            module.flatten_state_dict({"a": {"b": 1}, "a.b": 2})


def test_the_rule_of_torch_2_3_is_switched_on_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast._version._derived_version", "2_3")
    assert _nested_dict.flatten_state_dict({"a": {"b": 1}})[0] == {"a": {"b": 1}}


def test_elements_are_set_and_found_as_torch_does() -> None:
    steps: list[tuple[Any, Any]] = [(("k",), 1), (("l", 2), 3), (("l", 0, "x"), 4), (("m", "n", 1, 0), 5)]
    results = []
    for module in both("_traverse"):
        state: dict[str, Any] = {}
        for path, value in steps:
            module.set_element(state, path, value)
        assert all(module.get_element(state, path) == value for path, value in steps)
        assert module.get_element(state, ("l", 33), "none") == "none"
        results.append(state)
    assert results[0] == results[1]
    assert _traverse.get_element({"l": [1]}, ("l", 1)) is None


def test_printing_tells_sizes_and_types() -> None:
    printed: list[list[str]] = []
    for module in both("_traverse"):
        lines: list[str] = []
        module.print_tensor(("a", 0), torch.ones(2, 3), lines.append)
        module.print_tensor(("b",), "text", lines.append)
        printed.append(lines)
    assert printed[0] == printed[1]


def chunk(package: Any, offsets: list[int], sizes: list[int]) -> Any:
    return package.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def test_overlaps_are_torchs() -> None:
    pairs = [([0, 0], [4, 4], [2, 1], [5, 2]), ([0], [4], [4], [2]), ([], [], [], []), ([3], [9], [1], [4])]
    for a, n, b, m in pairs:
        found = []
        for package, module in zip((holdfast, both("metadata")[1]), both("resharding"), strict=True):
            first, second = chunk(package, a, n), chunk(package, b, m)
            overlaps = module._check_shard_metadata_pair_overlap(first, second)
            found.append(
                (overlaps, overlaps and module._shards_get_overlap_region_wrt_saved_tensor(first, second))
            )
        assert found[0] == found[1]
    with pytest.raises(ValueError, match="no element in common"):
        resharding._shards_get_overlap_region_wrt_saved_tensor(
            chunk(holdfast, [0], [1]), chunk(holdfast, [1], [1])
        )


def test_read_items_of_chunks_are_torchs() -> None:
    found = []
    for package, module in zip(
        (holdfast.metadata, both("metadata")[1]), both("planner_helpers"), strict=True
    ):
        stored = package.TensorStorageMetadata(
            package.TensorProperties(torch.float32),
            torch.Size([16, 4]),
            [chunk(package, [row, 0], [4, 4]) for row in (0, 4, 8, 12)],
        )
        wanted = [chunk(package, [2, 1], [7, 2]), chunk(package, [12, 0], [4, 4])]
        items = module.create_read_items_for_chunk_list("k", stored, wanted)
        found.append([repr(item) for item in items])
    assert sorted(found[0]) == sorted(found[1])


@pytest.mark.skipif(not IS_NEWEST, reason="records of older versions of torch print other fields")
def test_write_items_are_torchs() -> None:
    values: list[Any] = [torch.ones(2, 3, requires_grad=True), torch.tensor(5), [1, 2], "text"]
    for value in values:
        ours, theirs = (module._create_write_items("k", value) for module in both("planner_helpers"))
        plain = [holdfast.WriteItem(one.index, one.type, one.bytes_io_data, one.tensor_data) for one in ours]
        assert [repr(item).replace("index=0)", "index=None)") for item in plain] == list(map(repr, theirs))
    with pytest.raises(ValueError, match="no tensor"):
        planner_helpers._create_chunk_list("text")
    stored = holdfast.TensorStorageMetadata(holdfast.metadata.TensorProperties(), torch.Size([1]), [])
    with pytest.raises(ValueError, match="a value of type str"):
        planner_helpers._create_read_items("k", stored, "text")


def test_plans_are_compared_and_merged() -> None:
    plans = [
        holdfast.default_planner.create_default_local_save_plan({"k": torch.ones(n)}, True) for n in (2, 3)
    ]
    same = holdfast.default_planner.create_default_local_save_plan({"k": torch.zeros(2)}, True)
    assert planner_helpers._compare_save_plans(plans[0], same)
    assert not planner_helpers._compare_save_plans(*plans)
    as_last_time = holdfast.SavePlan([], usable=False)
    assert planner_helpers._contains_usable_plan([as_last_time, same])
    assert not planner_helpers._contains_usable_plan([as_last_time])
    merged = planner_helpers._merge_delta_local_plans(plans, [as_last_time, same])
    assert list(map(id, merged)) == [id(plans[0]), id(same)]


def test_tensors_on_the_meta_device_get_memory_in_place() -> None:
    state: dict[str, Any] = {"a": torch.empty(2, device="meta"), "l": [torch.empty(3, device="meta"), 1]}
    planner_helpers._init_state_dict(state)
    assert state["a"].device.type == "cpu"
    assert state["l"][0].device.type == "cpu"


@pytest.mark.parametrize("lowest", [False, True])
def test_each_item_stays_in_one_plan(lowest: bool) -> None:
    state = {"large": torch.ones(100), "small": torch.ones(3), "n": 1}
    plans = [holdfast.default_planner.create_default_local_save_plan(state, True) for _ in range(2)]
    deduped = holdfast._dedup_save_plans.dedup_save_plans(plans, save_to_lowest_rank=lowest)
    kept = [[item.index.fqn for item in plan.items] for plan in deduped]
    assert sorted(key for of_rank in kept for key in of_rank) == sorted(state)
    assert kept[0] == list(state) if lowest else all(kept)
    assert list(map(len, (plan.items for plan in holdfast._dedup_tensors.dedup_tensors(plans)))) == [3, 0]


def test_problems_of_a_plan_are_listed() -> None:
    properties = holdfast.metadata.TensorProperties(torch.float32)
    chunks = [chunk(holdfast, [0], [2]), chunk(holdfast, [1], [2])]
    metadata = holdfast.Metadata({"k": holdfast.TensorStorageMetadata(properties, torch.Size([4]), chunks)})
    validate = holdfast.default_planner._validate_global_plan
    assert len(validate([holdfast.SavePlan([])], metadata)) == 1
    assert len(validate([holdfast.SavePlan([])] * 2, metadata)) >= 1
    chunks[1] = chunk(holdfast, [2], [2])
    assert validate([holdfast.SavePlan([])] * 2, metadata) == []


def failing(error: Exception) -> Any:
    raise error


class LocalError(Exception):
    """One that cannot be found by name elsewhere."""


def test_a_wrapped_exception_knows_where_it_was_raised_and_pickles() -> None:
    with pytest.raises(OSError, match="broken") as raised:
        failing(OSError(5, "broken"))
    wrapped = holdfast.api._wrap_exception(raised.value)
    assert wrapped[0] is raised.value
    assert wrapped[1][-1].name == "failing"
    assert holdfast.api._is_wrapped_exception(pickle.loads(pickle.dumps(wrapped)))
    assert not holdfast.api._is_wrapped_exception((ValueError(), "text"))
    assert utils._get_failure_dict([1, wrapped, None]) == {1: wrapped}


def test_steps_of_one_process_return_or_raise_the_failure() -> None:
    alone = utils._DistWrapper(None, use_dist=False, coordinator_rank=0)
    assert alone.is_coordinator
    assert alone.get_world_size() == 1
    assert alone.reduce_scatter("plan", lambda: 2, lambda found: [found[0] + 1]) == 3
    assert alone.all_reduce("plan", lambda: 2, len) == 1
    assert alone.all_gather("plan", lambda: 2) == [2]
    assert alone.broadcast("plan", lambda: 2) == 2
    alone.barrier()
    steps: list[Any] = [
        lambda: alone.reduce_scatter("plan", lambda: failing(LocalError("here")), list),
        lambda: alone.reduce_scatter("plan", lambda: 1, lambda _: failing(LocalError("here"))),
        lambda: alone.all_reduce("plan", lambda: failing(LocalError("here")), list),
        lambda: alone.all_gather("plan", lambda: failing(LocalError("here"))),
        lambda: alone.broadcast("plan", lambda: failing(LocalError("here"))),
    ]
    for step in steps:
        with pytest.raises(utils.CheckpointException, match="here") as raised:
            step()
        assert isinstance(raised.value, LocalError)
        assert list(raised.value.failures) == [0]


def test_values_are_found_by_index() -> None:
    state = {"t": torch.ones(2, 2), "n": 5}
    index = holdfast.MetadataIndex
    for named in (index("t"), index("t", [0, 0]), index("t", index=7)):
        assert utils.find_state_dict_object(state, named) is state["t"]
    assert utils.find_state_dict_object(state, index("n")) == 5
    for wrong in (index("unknown"), index("n", [0]), index("t", [1, 1])):
        with pytest.raises(ValueError, match=wrong.fqn):
            utils.find_state_dict_object(state, wrong)


def test_a_view_of_a_file_is_a_stream_of_its_own() -> None:
    whole = io.BytesIO(b"0123456789")
    view: Any = utils._create_file_view(whole, 2, 5)
    assert (view.read(2), view.tell(), view.read(), view.read(1)) == (b"23", 2, b"456", b"")
    assert view.seek(-2, 2) == 3
    assert view.read() == b"56"
    view.seek(1)
    assert view.seek(1, 1) == 2
    room = bytearray(9)
    assert view.readinto(room) == 3
    assert bytes(room[:3]) == b"456"
    saved = io.BytesIO(b"x" * 7)
    saved.seek(7)
    torch.save({"a": 1}, saved)
    part: Any = utils._create_file_view(saved, 7, len(saved.getvalue()) - 7)
    assert torch.load(part) == {"a": 1}


def test_small_helpers() -> None:
    assert utils._element_wise_add([1, 2], [3, 4]) == [4, 6]
    assert utils._element_wise_sub([1, 2], (3, 5)) == [-2, -3]
    assert utils._normalize_device_info("cpu", 3) == "cpu"
    assert utils._normalize_device_info("cuda", 3) == "cuda:3"


class Kept(logging.Handler):
    """Keeps what is logged, as it was then: torch changes the same dict."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        message: Any = record.msg
        self.messages.append({**message, "level": record.levelname})


def test_calls_are_logged_as_torch_logs_them() -> None:
    told = []
    for module in both("logger"):
        handler = Kept()
        module._dcp_logger.addHandler(handler)
        try:
            decorate = module._dcp_method_logger(log_exceptions=True, checkpoint_id="place")
            assert decorate(operator.add)(1, 2) == 3
            with pytest.raises(ZeroDivisionError):
                decorate(operator.truediv)(1, 0)
        finally:
            module._dcp_logger.removeHandler(handler)
        assert len({message.pop("uuid") for message in handler.messages}) == 2
        for message in handler.messages:
            message["time"], message["times_spent"] = type(message["time"]), "times_spent" in message
        told.append(handler.messages)
    assert told[0] == told[1]


def test_safetensors_headers_and_names() -> None:
    ours, theirs = both("_hf_utils")
    for numbers in ((1, 3), (12, 345, 6)):
        assert ours._gen_file_name(*numbers) == theirs._gen_file_name(*numbers)
    noted = {"__metadata__": {ours.CUSTOM_METADATA_KEY: json.dumps({"k": {"saved_offsets": [0, 1]}})}}
    header = json.dumps({**noted, "k": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    raw = len(header).to_bytes(8, "little") + header + b"data"
    found, begin = ours._get_safetensors_file_metadata(io.BytesIO(raw))
    assert (found, begin) == theirs._get_safetensors_file_metadata(io.BytesIO(raw))
    assert (
        ours._get_dcp_custom_metadata(found)
        == theirs._get_dcp_custom_metadata(found)
        == {"k": {"saved_offsets": [0, 1]}}
    )
    assert ours._get_dcp_custom_metadata({}) is None
    assert ours._get_dtype("BF16") is torch.bfloat16
    for damaged in (raw[:20], b"\xff" * 8 + header, b"\x02" + b"\0" * 7 + b"no"):
        with pytest.raises(MetadataFormatError):
            ours._get_safetensors_file_metadata(io.BytesIO(damaged))
    with pytest.raises(MetadataFormatError, match="F3"):
        ours._get_dtype("F3")


def items_of(state: dict[str, Any]) -> list[holdfast.WriteItem]:
    return list(holdfast.default_planner.create_default_local_save_plan(state, True).items)


def test_items_are_dealt_as_torch_deals_them() -> None:
    state = {"a": torch.ones(9), "b": 1, "c": torch.ones(5), "d": torch.ones(3), "e": "x", "f": torch.ones(2)}
    dealt = []
    for module, planner in zip(both("filesystem"), both("default_planner"), strict=True):
        items = list(planner.create_default_local_save_plan(state, True).items)
        assert module._split_by_size_and_type(1, items) == [items]
        buckets = module._split_by_size_and_type(2, items)
        dealt.append([[item.index.fqn for item in bucket] for bucket in buckets])
    assert dealt[0] == dealt[1]
    with pytest.raises(UsageError, match="b is not a tensor"):
        holdfast.filesystem._item_size(items_of({"b": 1})[0])


class OwnFiles(holdfast.FileSystemWriter):
    """Writes its files itself, with the functions that torch's writer uses."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        fs = holdfast.filesystem
        transforms = fs._StorageWriterTransforms(self.extensions)
        name = f"{plan.storage_data.prefix}0{fs.DEFAULT_SUFFIX}"
        with (Path(self.path) / name).open("wb") as stream:
            results = [
                fs._write_item(
                    transforms,
                    stream,
                    planner.resolve_data(item),
                    item,
                    name,
                    fs.SerializationFormat.TORCH_SAVE,
                )
                for item in plan.items
            ]
        future: Any = torch.futures.Future()
        future.set_result(results)
        return future


@pytest.mark.parametrize("extensions", [[], [holdfast.testing.Rot13Example()]])
def test_a_writer_that_writes_its_own_files_makes_a_checkpoint(extensions: list[Any], tmp_path: Path) -> None:
    base = torch.arange(20.0)
    for step in range(2):
        state = {"t": base[2:6] + step, "n": {"x": step}}
        holdfast.save(state, storage_writer=OwnFiles(tmp_path, _extensions=extensions))
        reader = holdfast.FileSystemReader(
            tmp_path, _extension_registry=holdfast.testing.get_test_extension_registry()
        )
        into = {"t": torch.zeros(4), "n": {"x": -1}}
        holdfast.load(into, storage_reader=reader)
        assert into["n"] == {"x": step}
        assert torch.equal(into["t"], state["t"])  # type: ignore[arg-type]
    (place, *_) = reader.read_metadata().storage_data.values()
    assert isinstance(place, holdfast.filesystem._StorageInfo)
    assert (Path(tmp_path) / place.relative_path).stat().st_size < 4000
    assert len(list(tmp_path.glob("*.distcp"))) == 1


def test_a_writer_whose_places_have_no_checksums_commits_nothing(tmp_path: Path) -> None:
    class Unchecked(holdfast.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            info = holdfast.filesystem._StorageInfo
            future: Any = torch.futures.Future()
            future.set_result([holdfast.storage.WriteResult(i.index, 8, info("x", 0, 8)) for i in plan.items])
            return future

    with pytest.raises(IncompleteWriteError, match=r"t: .*no checksums"):
        holdfast.save({"t": torch.ones(2)}, storage_writer=Unchecked(tmp_path))
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.parametrize(
    "record", [holdfast.filesystem._StoragePrefix, lambda prefix: SimpleNamespace(prefix=prefix)]
)
def test_a_prefix_of_a_subclass_names_the_files(tmp_path: Path, record: Any) -> None:
    class Named(holdfast.FileSystemWriter):
        def prepare_global_plan(self, plans: Any) -> Any:
            named = [record(f"__{rank}_") for rank in range(len(plans))]
            plans = [holdfast.SavePlan(p.items, n, p.planner_data) for p, n in zip(plans, named, strict=True)]
            return super().prepare_global_plan(plans)

    for value in (1, 2):
        holdfast.save({"t": torch.full((3,), value)}, storage_writer=Named(tmp_path))
        # The files of the save before are gone.
        (file,) = tmp_path.glob("*.distcp")
        assert file.name.startswith("__0_0-")
        into = torch.zeros(3, dtype=torch.int64)
        holdfast.load({"t": into}, checkpoint_id=tmp_path)
        assert into.tolist() == [value] * 3


def test_saves_and_loads_under_their_old_names(tmp_path: Path) -> None:
    writer, reader = holdfast.FileSystemWriter(tmp_path), holdfast.FileSystemReader(tmp_path)
    holdfast.state_dict_saver._save_state_dict({"m": {"w": torch.ones(2)}}, writer, no_dist=True)
    into = {"m": {"w": torch.zeros(2)}}
    holdfast.state_dict_loader._load_state_dict(into, reader, no_dist=True)
    assert torch.equal(into["m"]["w"], torch.ones(2))
    empty: dict[str, Any] = {}
    planner = holdfast.default_planner._EmptyStateDictLoadPlanner()
    holdfast.state_dict_loader._load_state_dict(empty, reader, no_dist=True, planner=planner)
    assert torch.equal(empty["m"]["w"], torch.ones(2))
    found = holdfast.state_dict_loader._load_state_dict_from_keys("m", checkpoint_id=tmp_path)
    assert torch.equal(found["m"]["w"], torch.ones(2))


def test_state_dict_helpers_are_torchs() -> None:
    model = nn.Linear(2, 2)
    assert holdfast.state_dict._get_fqns(model, "weight") == {"weight"}
    optimizer = torch.optim.AdamW(model.parameters())
    holdfast.state_dict._init_optim_state(optimizer)
    assert set(optimizer.state) == set(model.parameters())


def test_a_plan_of_contradicting_ranks_is_refused() -> None:
    plans = [holdfast.SavePlan(items_of({"k": torch.ones(n)})) for n in (2, 3)]
    with pytest.raises(InvalidPlanError, match="k"):
        holdfast._dedup_save_plans.dedup_save_plans(plans)


def test_an_error_of_a_helper_is_a_plan_error() -> None:
    assert issubclass(PlanError, ValueError)
    with pytest.raises(PlanError):
        utils.find_tensor_shard(torch.ones(2), holdfast.MetadataIndex("k", [1]))


def test_the_metadata_of_a_state_is_torchs(tmp_path: Path) -> None:
    state = {"t": torch.ones(2, 3), "n": 5}
    ours, theirs = (module._create_default_local_metadata(state) for module in both("default_planner"))
    assert {k: repr(v) for k, v in ours.state_dict_metadata.items()} == {
        k: repr(v) for k, v in theirs.state_dict_metadata.items()
    }
    assert set(stock_save(state, checkpoint_id=tmp_path).state_dict_metadata) == set(ours.state_dict_metadata)


def test_storages_are_found_by_torchs_helper(tmp_path: Path) -> None:
    setup = importlib.import_module("holdfast._storage_utils")._storage_setup
    writer = setup(None, str(tmp_path / "one"))
    assert setup(writer, tmp_path / "two") is writer
    holdfast.save({"a": torch.ones(2)}, storage_writer=writer)
    reader = setup(None, tmp_path / "two", reader=True)
    assert list(reader.read_metadata().state_dict_metadata) == ["a"]
    with pytest.raises(UsageError, match="checkpoint_id"):
        setup(None, None)


def test_a_state_is_staged_in_one_call_again_and_again() -> None:
    kind = importlib.import_module("holdfast._state_dict_stager").StateDictStager
    stager, weights = kind(share_memory=True), torch.ones(3)
    for number in range(3):
        staged = stager.stage({"w": weights, "n": [number]})
        weights += 1
        assert staged["w"].tolist() == [1.0 + number] * 3
        assert staged["n"] == [number]
        stager.close()
    with pytest.raises(UsageError, match="_offload_tensor"):
        type("Other", (kind,), {"_offload_tensor": None})


def test_states_of_stateful_objects_replace_them() -> None:
    module = torch.nn.Linear(1, 1)
    ours, theirs = both("state_dict_saver")
    found = ours._stateful_to_state_dict({"m": module, "n": 1})
    assert found == theirs._stateful_to_state_dict({"m": module, "n": 1})


def test_a_storage_may_come_second() -> None:
    ours, _ = both("utils")

    def old_load(state: Any, *, storage_reader: Any = None) -> Any:
        return state, storage_reader

    load = ours._api_bc_check(old_load)
    with ours._profile(), pytest.warns(FutureWarning, match="storage_reader="):
        assert load(1, 2) == (1, 2)
    assert load(1, storage_reader=2) == (1, 2)


def test_shapes_of_tensors_are_found_from_their_parts() -> None:
    ours, theirs = both("_consolidate_hf_safetensors")
    headers = [
        {
            "w": {"shape": [2, 4], "dtype": "F32"},
            "__metadata__": {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [row, 0]}})},
        }
        for row in (0, 2)
    ]
    found = []
    for module in (ours, theirs):
        parts = {str(n): module._InputFileData(metadata=header) for n, header in enumerate(headers)}
        made = {"out": module._OutputFileData(fqn_data={"w": None})}
        module._parse_input_metadata(parts, made)
        found.append(vars(made["out"].fqn_data["w"]))
    assert found[0] == found[1]
    with pytest.raises(ValueError, match="parts"):
        ours._parse_input_metadata({"x": ours._InputFileData(metadata={"w": {}})}, {})
