"""Every public name of torch's interface modules, with the same parameters, fields and behaviour."""

import dataclasses
import enum
import importlib
import inspect
import pickle
import types
from typing import Any

import pytest
import torch
from tests.support.stock_torch import HAS_EXTENSIONS, IS_NEWEST
from torch.distributed import checkpoint as torch_dcp

import holdfast

MODULES = ["metadata", "planner", "storage", "stateful", "api", *(["_extension"] if HAS_EXTENSIONS else [])]


def public_names(module: types.ModuleType) -> list[str]:
    """What a module defines itself, beyond what it imports from elsewhere."""
    own = set(getattr(module, "__all__", ()))
    for name, value in vars(module).items():
        defined_here = getattr(value, "__module__", None) == module.__name__
        is_constant = name.isupper() and name != "IO"
        if not name.startswith("_") and (defined_here or is_constant):
            own.add(name)
    return sorted(own)


def modules(name: str) -> tuple[types.ModuleType, types.ModuleType]:
    return importlib.import_module(f"holdfast.{name}"), importlib.import_module(
        f"torch.distributed.checkpoint.{name}"
    )


CASES = [(module, name) for module in MODULES for name in public_names(modules(module)[1])]
# By the type itself: on Python 3.10 an alias like dict[str, int] says that it is a class.
CLASSES = [(m, n) for m, n in CASES if issubclass(type(getattr(modules(m)[1], n)), type)]


@pytest.mark.parametrize(("module", "name"), CASES)
def test_the_name_exists(module: str, name: str) -> None:
    assert hasattr(modules(module)[0], name)


def parameters(function: Any) -> list[tuple[Any, ...]]:
    return [
        (p.name, p.kind, None if p.default is p.empty else repr(p.default))
        for p in inspect.signature(function).parameters.values()
    ]


# Ours take these besides torch's; each has a default, so that torch's calls go on working.
MORE = {
    ("ZStandard", "__init__"): ["level"],
    ("ZStandard", "transform_from"): ["max_size"],
    ("CheckpointException", "__init__"): ["step"],
}


def agree(ours: list[tuple[Any, ...]], theirs: list[tuple[Any, ...]]) -> bool:
    """Whether ours are torch's; if it is an older torch, ours may have more, in between as well."""
    return ours == theirs if IS_NEWEST else [one for one in ours if one in theirs] == theirs


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_methods_have_the_same_parameters(module: str, name: str) -> None:
    ours, theirs = (getattr(m, name) for m in modules(module))
    methods = [
        method
        for method, value in vars(theirs).items()
        if callable(getattr(theirs, method)) and (not method.startswith("_") or method == "__init__")
    ]
    for method in methods:
        if issubclass(theirs, enum.Enum) or (method == "__init__" and theirs.__name__ == "Stateful"):
            continue
        more = MORE.get((name, method), [])
        mine = [p for p in parameters(getattr(ours, method)) if p[0] not in more]
        assert agree(mine, parameters(getattr(theirs, method))), method
        for extra in more:
            assert inspect.signature(getattr(ours, method)).parameters[extra].default is not inspect._empty


@pytest.mark.parametrize(
    ("module", "name"), [c for c in CLASSES if dataclasses.is_dataclass(getattr(modules(c[0])[1], c[1]))]
)
def test_dataclasses_have_the_same_fields_in_the_same_order(module: str, name: str) -> None:
    ours, theirs = (getattr(m, name) for m in modules(module))
    described = [
        [(f.name, f.compare, f.hash, repr(f.default)) for f in dataclasses.fields(cls)]
        for cls in (ours, theirs)
    ]
    assert agree(*described)
    assert ours.__dataclass_params__.frozen == theirs.__dataclass_params__.frozen
    assert (ours.__hash__ is None) == (theirs.__hash__ is None)


@pytest.mark.parametrize("name", ["WriteItemType", "LoadItemType"])
def test_enums_have_the_same_members(name: str) -> None:
    ours, theirs = (getattr(m, name) for m in modules("planner"))
    assert {m.name: m.value for m in ours} == {m.name: m.value for m in theirs}


def test_the_package_exports_what_torchs_does_as_far_as_it_is_built() -> None:
    theirs = {n for n in vars(torch_dcp) if not n.startswith("_")}
    for name in theirs & set(holdfast.__all__):
        assert hasattr(holdfast, name)


def samples(package: Any) -> list[Any]:
    """The same instances, built positionally, of torch's classes or of ours."""
    m = importlib.import_module(f"{package}.metadata")
    p = importlib.import_module(f"{package}.planner")
    s = importlib.import_module(f"{package}.storage")
    size = torch.Size
    chunk = m.ChunkStorageMetadata(size([0, 2]), size([3, 4]))
    properties = m.TensorProperties(torch.bfloat16, torch.strided, True, torch.channels_last, False)
    index = m.MetadataIndex("layer.weight", [0, 2], 5)
    data = p.TensorWriteData(chunk, properties, size([3, 6]))
    item = p.WriteItem(index, p.WriteItemType.SHARD, None, data)
    read = p.ReadItem(p.LoadItemType.TENSOR, index, size([0]), index, size([1]), size([2]))
    return [
        chunk,
        properties,
        m.TensorProperties(),
        m.TensorStorageMetadata(properties, size([3, 6]), [chunk]),
        m.BytesStorageMetadata(),
        m.StorageMeta("place", "save", "load", ["a"]),
        m.Metadata({"k": m.BytesStorageMetadata()}, {"k": ("k",)}, None, None, "1"),
        index,
        m.MetadataIndex("k"),
        p.BytesIOWriteData(5),
        data,
        item,
        read,
        p.SavePlan([item], "s", "p", False),
        p.LoadPlan([read], "s", "p"),
        s.WriteResult(index, 7, "here"),
    ]


OURS = samples("holdfast")
# The records of older torch have fewer fields.
THEIRS = samples("torch.distributed.checkpoint") if hasattr(torch_dcp.metadata.Metadata, "version") else []


@pytest.mark.skipif(not THEIRS, reason="the records of this torch have fewer fields")
@pytest.mark.parametrize("number", range(len(OURS)))
def test_instances_compare_hash_print_and_pickle_as_torchs_do(number: int) -> None:
    ours, theirs, again = OURS[number], THEIRS[number], samples("holdfast")[number]
    assert ours == again
    assert pickle.loads(pickle.dumps(ours)) == ours
    assert repr(ours) == repr(theirs)
    if theirs.__class__.__hash__ is None:
        with pytest.raises(TypeError):
            hash(ours)
        return
    try:
        expected = hash(theirs)
    except TypeError:  # frozen, with a field that cannot be hashed
        with pytest.raises(TypeError):
            hash(ours)
    else:
        # Enums hash by identity, so across packages only the fact of hashing can be compared.
        assert isinstance(expected, int)
        assert hash(ours) == hash(again)


def test_an_index_hint_changes_neither_equality_nor_hash() -> None:
    index = holdfast.MetadataIndex
    assert index("k", [1, 2], 3) == index("k", (1, 2), 9) == index("k", torch.Size([1, 2]))
    assert len({index("k", [1, 2], 3), index("k", [1, 2])}) == 1
    assert index("k", [1, 2]) != index("k", [1, 3])
    assert index("k") != index("k", [])
    assert hash(index("k", [1])) == hash(modules("metadata")[1].MetadataIndex("k", [1]))
    assert dataclasses.replace(index("k", [1], 2), index=7).index == 7


@pytest.mark.parametrize(
    "memory_format",
    [torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format],
)
def test_every_memory_format_pickles(memory_format: torch.memory_format) -> None:
    properties = holdfast.metadata.TensorProperties(torch.int8, memory_format=memory_format)
    assert pickle.loads(pickle.dumps(properties)) == properties


def test_properties_are_taken_from_a_tensor() -> None:
    tensor = torch.zeros(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    ours, theirs = (m.TensorProperties.create_from_tensor(tensor) for m in modules("metadata"))
    assert vars(ours) == vars(theirs)


def test_the_tensor_storage_size_is_that_of_the_whole_tensor() -> None:
    for item in (OURS[11], *THEIRS[11:12]):
        assert item.tensor_storage_size() == 3 * 6 * 2
    assert holdfast.WriteItem(OURS[8], holdfast.planner.WriteItemType.BYTE_IO).tensor_storage_size() is None


def test_stateful_is_known_by_its_methods() -> None:
    assert isinstance(torch.nn.Linear(1, 1), holdfast.Stateful)
    assert not isinstance({}, holdfast.Stateful)


def test_what_a_load_planner_leaves_out_is_named_when_it_is_called() -> None:
    class Half(holdfast.LoadPlanner):
        pass

    with pytest.raises(NotImplementedError, match=r"Half does not implement LoadPlanner.create_local_plan"):
        Half().create_local_plan()


def test_an_incomplete_save_planner_cannot_be_made() -> None:
    class Half(holdfast.SavePlanner):
        pass

    with pytest.raises(TypeError, match="resolve_data"):
        Half()  # type: ignore[abstract]
