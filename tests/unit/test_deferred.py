"""Metadata and plans whose entries are made on the first look: nobody who looks can tell."""

import collections
import copy
import dataclasses
import itertools
import json
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader as TorchReader

import holdfast as hf
from holdfast._deferred import DeferredDict, DeferredEntries, DeferredList
from holdfast._plan.write_columns import WriteItems, columns_of
from holdfast._torch_compat.torch_records import to_torch
from holdfast.default_planner import DefaultSavePlanner
from holdfast.planner import SavePlan

COUNT = 300


@dataclasses.dataclass
class Record:
    number: int


@dataclasses.dataclass(frozen=True)
class Name:
    word: str


def deferred_list(count: int = COUNT) -> DeferredList[Record]:
    return DeferredList(count, lambda: map(Record, range(count)))


def deferred_dict(count: int = COUNT) -> DeferredDict[str, Record]:
    return DeferredDict(count, lambda: ((str(n), Record(n)) for n in range(count)))


def deferred_entries(count: int = COUNT) -> DeferredEntries[Record]:
    return DeferredEntries({str(n): n for n in range(count)}, lambda _, n: Record(n))


RECORDS = [Record(n) for n in range(COUNT)]
ENTRIES = {str(n): Record(n) for n in range(COUNT)}
dicts = pytest.mark.parametrize("make", [deferred_dict, deferred_entries])
every_kind = pytest.mark.parametrize(
    ("make", "plain"),
    [(deferred_list, RECORDS), (deferred_dict, ENTRIES), (deferred_entries, ENTRIES)],
    ids=["list", "dict", "entries"],
)


def keywords(**entries: Any) -> Any:
    return entries


def arguments(*entries: Any) -> Any:
    return entries


def updated(entries: Any) -> Any:
    made = {"more": 1}
    made.update(entries)
    return made


def extended(entries: Any) -> Any:
    made = [1]
    made.extend(entries)
    made += entries
    return made


def put_into_a_slice(entries: Any) -> Any:
    made = [1, 2]
    made[0:1] = entries
    return made


def in_words(value: Any) -> str:
    return json.dumps(value, default=lambda record: f"record {record.number}")


@every_kind
@pytest.mark.parametrize(
    "look",
    [
        in_words,
        lambda x: json.dumps(x, default=vars, indent=1),
        lambda x: json.dumps([x, {"in": x}], default=vars),
        repr,
        len,
        bool,
        list,
        tuple,
        lambda x: list(reversed(x)),
        lambda x: [*x],
        lambda x: type(x)(x),
        lambda x: type(x)(entry for entry in ([*x.items()] if isinstance(x, dict) else x)),
        lambda x: x.copy(),
        copy.copy,
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: pickle.loads(pickle.dumps(x, 2)),
        collections.deque,
        lambda x: x == x.copy(),
        lambda x: x.copy() == x,
        lambda x: x != x.copy(),
    ],
)
def test_a_look_sees_what_a_plain_container_shows(
    make: Callable[[], Any], plain: Any, look: Callable[[Any], Any]
) -> None:
    found, expected = look(make()), look(plain)
    assert found == expected
    assert type(found) is type(expected)


@dicts
@pytest.mark.parametrize(
    "look",
    [
        dict,
        lambda x: {**x},
        lambda x: dict(**x),
        lambda x: type(x)(**x),
        lambda x: x | {"more": 1},
        lambda x: {"more": 1} | x,
        lambda x: x | x,
        lambda x: keywords(**x),
        lambda x: list(x.items()),
        lambda x: list(x.values()),
        lambda x: list(x.keys()),
        lambda x: x.get("5"),
        lambda x: x.get("none", 1),
        lambda x: "5" in x,
        collections.OrderedDict,
        lambda x: collections.ChainMap({}, x)["7"],
        updated,
    ],
)
def test_a_look_at_a_dict_sees_what_a_dict_shows(make: Callable[[], Any], look: Callable[[Any], Any]) -> None:
    assert look(make()) == look(dict(ENTRIES))


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x + [1],  # noqa: RUF005
        lambda x: [1] + x,  # noqa: RUF005
        lambda x: x + x,
        lambda x: x * 2,
        lambda x: x[3],
        lambda x: x[-2:],
        lambda x: sorted(x, key=lambda record: -record.number),
        lambda x: x.index(Record(4)),
        lambda x: arguments(*x),
        extended,
        put_into_a_slice,
    ],
)
def test_a_look_at_a_list_sees_what_a_list_shows(look: Callable[[Any], Any]) -> None:
    assert look(deferred_list()) == look(list(RECORDS))


def test_adding_to_a_container_in_place_extends_that_container() -> None:
    lines: list[Record] = [Record(-1)]
    entries: dict[str, Record] = {}
    same_lines, same_entries = lines, entries
    lines += deferred_list()
    entries |= deferred_dict()
    assert lines is same_lines
    assert lines == [Record(-1), *RECORDS]
    assert entries is same_entries
    assert entries == ENTRIES
    assert [Record(-1)] + deferred_list() == lines  # noqa: RUF005 - it is the addition that is looked at
    assert sum([deferred_list(), deferred_list()], []) == RECORDS * 2  # noqa: RUF017
    with pytest.raises(TypeError):
        () + deferred_list()  # noqa: RUF005


@every_kind
def test_a_dataclass_with_a_deferred_container_becomes_plain_dicts(
    make: Callable[[], Any], plain: Any
) -> None:
    holder = dataclasses.make_dataclass("Holder", ["held"])
    found = dataclasses.asdict(holder(make()))
    assert found == dataclasses.asdict(holder(plain))
    assert type(found["held"]) is type(plain)


def test_asdict_turns_a_key_that_is_a_record_into_a_tuple() -> None:
    holder = dataclasses.make_dataclass("Holder", ["held"])
    held: DeferredDict[Name, int] = DeferredDict(1, lambda: [(Name("a"), 5)])
    assert dataclasses.asdict(holder(held)) == {"held": {("a",): 5}}


@every_kind
def test_code_that_reads_the_memory_does_not_take_it_for_empty(make: Callable[..., Any], plain: Any) -> None:
    assert type(plain).__len__(make()) > 0
    assert type(plain).__len__(make(0)) == 0


@every_kind
def test_an_exception_while_entries_are_made_leaves_nothing_short(
    make: Callable[[], Any], plain: Any
) -> None:
    fails = iter([True])

    def entries() -> Iterator[Any]:
        for number, entry in enumerate(plain.items() if isinstance(plain, dict) else plain):
            if number == 5 and next(fails, False):
                raise OSError("once")
            yield entry

    looked: Any = (DeferredDict if isinstance(plain, dict) else DeferredList)(COUNT, entries)
    with pytest.raises(OSError, match="once"):
        list(looked)
    assert looked == plain


@pytest.fixture
def short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def seen_by_threads(look: Callable[[], Any], count: int = 4) -> list[Any]:
    """What each of several threads finds that look at the same time."""
    start, found = threading.Barrier(count), []

    def run() -> None:
        start.wait()
        found.append(look())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == count
    return found


@every_kind
@pytest.mark.usefixtures("short_turns")
def test_all_threads_see_all_entries_and_the_same_ones(make: Callable[[], Any], plain: Any) -> None:
    for _ in range(20):
        container = make()
        seen = seen_by_threads(lambda: [*(container.values() if isinstance(plain, dict) else container)])  # noqa: B023
        assert seen[0] == RECORDS
        for other in seen[1:]:
            assert all(a is b for a, b in zip(seen[0], other, strict=True))


@pytest.mark.usefixtures("short_turns")
def test_threads_that_look_at_one_key_and_at_all_see_the_same_entry() -> None:
    for _ in range(20):
        entries = deferred_entries()
        turn = itertools.count()
        first, *others = seen_by_threads(
            lambda: entries["7"] if next(turn) % 2 else [*entries.values()][7]  # noqa: B023
        )
        assert all(other is first for other in others)
        assert entries["7"] is first


@every_kind
def test_a_look_does_not_count_as_a_change(make: Callable[[], Any], plain: Any) -> None:
    container = make()
    assert not container.is_open
    repr(container)
    assert not container.is_open


CHANGES_OF_DICTS: list[Callable[[Any], Any]] = [
    lambda x: x.__setitem__("more", 1),
    lambda x: x.__delitem__("5"),
    lambda x: x.pop("5"),
    lambda x: x.popitem(),
    lambda x: x.clear(),
    lambda x: x.update(more=1),
    lambda x: x.setdefault("more", 1),
    lambda x: x.__ior__({"more": 1}),
    lambda x: setattr(x["5"], "number", -1),
    lambda x: [*x.values()][5].__setattr__("number", -1),
]
CHANGES_OF_LISTS: list[Callable[[Any], Any]] = [
    lambda x: x.append(1),
    lambda x: x.extend([1]),
    lambda x: x.insert(0, 1),
    lambda x: x.pop(),
    lambda x: x.remove(Record(5)),
    lambda x: x.clear(),
    lambda x: x.reverse(),
    lambda x: x.sort(key=lambda record: -record.number),
    lambda x: x.__setitem__(0, 1),
    lambda x: x.__delitem__(0),
    lambda x: x.__iadd__([1]),
    lambda x: x.__imul__(2),
    lambda x: setattr(x[5], "number", -1),
]


@pytest.mark.parametrize(
    ("make", "plain", "change"),
    [
        *(
            (make, ENTRIES, change)
            for make in (deferred_dict, deferred_entries)
            for change in CHANGES_OF_DICTS
        ),
        *((deferred_list, RECORDS, change) for change in CHANGES_OF_LISTS),
    ],
)
def test_a_change_is_noticed_and_kept(
    make: Callable[[], Any], plain: Any, change: Callable[[Any], Any]
) -> None:
    container, expected = make(), copy.deepcopy(plain)
    change(container)
    change(expected)
    assert container.is_open
    assert container == expected
    assert len(container) == len(expected)


def test_a_look_at_one_key_makes_one_entry() -> None:
    made: list[str] = []

    def make(key: str, number: int) -> Record:
        made.append(key)
        return Record(0)

    entries = DeferredEntries({"a": 0, "b": 1}, make)
    assert (entries["b"], entries.get("c"), "a" in entries, list(entries)) == (
        Record(0),
        None,
        True,
        ["a", "b"],
    )
    assert made == ["b"]


STATE = {"a": torch.arange(4.0), "b": {"c": 3, 1: torch.zeros(2, 2)}, "l": [torch.ones(2), {"x": "y"}]}


def metadatas(folder: Path) -> list[hf.Metadata]:
    """What a save returns, and what a reader gives."""
    saved = hf.save(copy.deepcopy(STATE), checkpoint_id=folder)
    return [saved, hf.FileSystemReader(folder).read_metadata()]


def test_metadata_in_json_has_all_keys(tmp_path: Path) -> None:
    for metadata in metadatas(tmp_path):
        found = json.loads(json.dumps(metadata.state_dict_metadata, default=str))
        assert list(found) == ["a", "b.c", "b.1", "l.0", "l.1.x"]
        assert "torch.Size([4])" in found["a"]


def test_metadata_as_dicts_has_everything(tmp_path: Path) -> None:
    for metadata in metadatas(tmp_path):
        found = dataclasses.asdict(metadata)
        assert found["state_dict_metadata"]["a"]["chunks"] == [
            {"offsets": torch.Size([0]), "sizes": torch.Size([4])}
        ]
        assert found["state_dict_metadata"]["b.c"] == {}
        assert len(found["storage_data"]) == 5


def test_metadata_survives_copies_and_pickles(tmp_path: Path) -> None:
    for number in range(2):
        ways: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
        for again in ways:
            metadata = metadatas(tmp_path)[number]
            assert again(metadata) == metadata
            repr(metadata)
            assert again(metadata) == metadata


def test_metadata_equals_torchs_when_it_is_converted(tmp_path: Path) -> None:
    for metadata in metadatas(tmp_path):
        theirs = TorchReader(tmp_path).read_metadata()
        for name in ("state_dict_metadata", "planner_data", "storage_data"):
            ours = getattr(to_torch(metadata), name)
            assert ours == getattr(theirs, name)
            assert getattr(theirs, name) == ours


@pytest.mark.usefixtures("short_turns")
def test_threads_that_read_metadata_see_all_of_it(tmp_path: Path) -> None:
    hf.save({f"t{n}": torch.zeros(1) for n in range(100)}, checkpoint_id=tmp_path)
    for _ in range(10):
        metadata = hf.FileSystemReader(tmp_path).read_metadata()
        for whole in seen_by_threads(
            lambda: (len(dict(metadata.state_dict_metadata)), len(list(metadata.storage_data)))  # noqa: B023
        ):
            assert whole == (100, 100)


def test_a_planner_that_changes_what_it_sees_of_a_line_is_obeyed(tmp_path: Path) -> None:
    class Marking(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.requires_grad = True
            return plan

    metadata = hf.save({"a": torch.zeros(2)}, checkpoint_id=tmp_path, planner=Marking())
    entry: Any = metadata.state_dict_metadata["a"]
    assert entry.properties.requires_grad


def test_an_entry_of_the_metadata_that_was_changed_counts(tmp_path: Path) -> None:
    hf.save({"a": torch.zeros(2), "b": torch.ones(2)}, checkpoint_id=tmp_path)

    class Changing(hf.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> hf.Metadata:
            metadata = super().read_metadata(*args, **kwargs)
            entry: Any = metadata.state_dict_metadata["b"]
            entry.size = torch.Size([3])
            return metadata

    with pytest.raises(hf.CheckpointException, match=r"\b3\b"):
        hf.load({"b": torch.zeros(2)}, storage_reader=Changing(tmp_path))


def test_lists_of_one_origin_are_compared_without_being_made() -> None:
    def make() -> list[Record]:
        raise AssertionError("made")

    assert DeferredList(5, make) == DeferredList(5, make)


def test_equal_items_with_other_numbers_are_equal() -> None:
    def planned(*keys: str) -> SavePlan:
        planner = DefaultSavePlanner()
        planner.set_up_planner({key: torch.ones(2 + (key == "b")) for key in keys}, None, True)
        return planner.create_local_plan()

    alone, (first, second) = planned("b"), planned("a", "b").items
    assert first != second
    rest = planned("a", "b").items
    del rest[0]
    assert list(alone.items) == list(rest)
    assert alone.items == rest
    assert not alone.items != rest  # noqa: SIM202 - both operators are looked at
    columns = columns_of(planned("a", "b")).take([1])
    assert WriteItems(columns) == alone.items
    assert not WriteItems(columns) != alone.items  # noqa: SIM202


def test_keys_can_be_reversed() -> None:
    assert [*reversed(deferred_entries().keys())] == [*reversed(ENTRIES)]
