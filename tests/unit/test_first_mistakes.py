"""What somebody gets who calls save and load for the first time, and not quite as the manual says."""

import inspect
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tools import need_root

import holdfast
from holdfast.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    NotAFolderError,
    PlanError,
    UsageError,
)

hf: Any = holdfast  # the types know the signatures of torch, and nothing of what people do

CALLS: dict[str, Callable[..., Any]] = {"save": hf.save, "async_save": hf.async_save, "load": hf.load}
Call = Callable[..., Any]


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    return CALLS[request.param]


def state(value: float = 1.0) -> dict[str, Any]:
    return {"a": torch.full((3,), value), "step": int(value)}


@pytest.mark.parametrize("make", [str, Path])
def test_the_path_may_come_second(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    hf.save(state(5.0), make(tmp_path / "one"))
    hf.async_save(state(6.0), make(tmp_path / "two")).result()
    for folder, value in (("one", 5), ("two", 6)):
        found = state(0.0)
        hf.load(found, make(tmp_path / folder))
        assert found["step"] == value


def test_a_storage_may_still_come_second_with_a_warning_that_points_here(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="storage_writer=") as warned:
        hf.save(state(), hf.FileSystemWriter(tmp_path))
    assert warned[0].filename == __file__
    with pytest.warns(FutureWarning, match="storage_reader="):
        hf.load(state(), hf.FileSystemReader(tmp_path))


@pytest.mark.parametrize("place", [b"folder", 100], ids=["bytes", "number"])
@pytest.mark.parametrize("call", [hf.save, hf.async_save, hf.load])
def test_a_second_argument_that_is_neither_path_nor_storage_is_named(call: Any, place: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UsageError, match="must be the path of a folder") as caught:
            call(state(), place)
    assert caught.value.found == place


def test_a_warning_of_a_load_points_at_the_line_that_calls_it(tmp_path: Path) -> None:
    hf.save({"a": torch.ones(3, dtype=torch.float64)}, tmp_path)
    with pytest.warns(UserWarning, match="are cast on load") as warned:
        hf.load({"a": torch.ones(3)}, tmp_path)
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="dedup_replicated_tensors") as warned:
        hf.DefaultSavePlanner(dedup_replicated_tensors=True)
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("args", "options", "says"),
    [
        (("here", "there"), {}, "takes the state first"),
        (("here", {}), {}, "takes the state first"),
        (("here",), {}, "takes the state first"),
        (({}, "here"), {"checkpoint_id": "there"}, "checkpoint_id twice"),
        (({}, "here", None), {}, "3 arguments without a name"),
    ],
)
def test_positions_that_cannot_be_meant_are_refused(
    call: Call, args: tuple[Any, ...], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(TypeError, match=says):
        call(*args, **options)


def test_a_module_or_an_optimizer_may_be_the_whole_state(tmp_path: Path) -> None:
    model, fresh = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    hf.save(model, tmp_path / "model")
    hf.load(fresh, tmp_path / "model")
    assert torch.equal(fresh.weight, model.weight)
    as_dict = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    hf.load(as_dict, tmp_path / "model")
    assert torch.equal(as_dict["weight"], model.weight)

    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    hf.async_save(optimizer, tmp_path / "optimizer").result()
    new = torch.optim.Adam(fresh.parameters())
    hf.load(new, tmp_path / "optimizer")
    assert torch.equal(new.state[fresh.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


@pytest.mark.parametrize("wrong", [None, [1, 2], torch.ones(2), 7, torch.nn.Linear], ids=repr)
def test_a_state_that_is_no_dict_is_refused_and_says_what_to_do(
    call: Call, wrong: Any, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"must be a dict, such as .* under a name that you choose"):
        call(wrong, checkpoint_id=tmp_path)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("place", [None, ""])
def test_a_missing_place_is_asked_for(call: Call, place: str | None) -> None:
    with pytest.raises(UsageError, match=f"is {place!r}: pass the path of a folder"):
        call(state(), checkpoint_id=place)


def test_a_place_that_is_no_path_is_refused(call: Call) -> None:
    with pytest.raises(UsageError, match="not 7 of type int"):
        call(state(), checkpoint_id=7)


@pytest.mark.parametrize(
    ("name", "says"),
    [("model.pt", "A checkpoint is a folder"), (".metadata", "Name the folder that it is in")],
)
def test_a_file_in_place_of_the_folder_is_not_a_first_start(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / name).write_text("precious")
    for place in (name, f"{name}/deeper"):
        for call in (hf.load, hf.save):
            with pytest.raises(NotAFolderError, match=f"{name} is a file, not the folder.*{says}") as caught:
                call(state(), checkpoint_id=tmp_path / place)
            assert not isinstance(caught.value, FileNotFoundError)
    assert (tmp_path / name).read_text() == "precious"


def test_a_data_file_in_place_of_its_folder_names_the_folder(tmp_path: Path) -> None:
    hf.save(state(), tmp_path)
    file = next(tmp_path.glob("*.distcp"))
    with pytest.raises(NotAFolderError, match=f"Name the folder that it is in: {tmp_path}$"):
        hf.load(state(), file)


def test_a_place_below_a_file_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model.pt").touch()
    with pytest.raises(NotAFolderError):
        hf.save(state(), tmp_path / "model.pt" / "deeper")
    assert not caplog.records


def test_a_folder_that_must_not_be_written_is_named_with_the_right_that_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    need_root("to take the right to write from itself")
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        os.seteuid(65534)
        try:
            with pytest.raises(
                PermissionError, match="needs the right to make files in this folder"
            ) as caught:
                hf.save(state(), place)
        finally:
            os.seteuid(0)
        assert caught.value.filename == place
        assert ".lease" not in str(caught.value)
        assert not caplog.records


def test_overwrite_and_check_replicas_are_options_of_a_save(tmp_path: Path) -> None:
    hf.save(state(1.0), tmp_path, overwrite=False, check_replicas=False)
    with pytest.raises(CheckpointExistsError):
        hf.save(state(2.0), tmp_path, overwrite=False)
    with pytest.raises(CheckpointExistsError):
        hf.async_save(state(2.0), tmp_path, overwrite=False).result()
    hf.save(state(2.0), tmp_path, overwrite=True, check_replicas="full")
    for call in (hf.save, hf.async_save):
        with pytest.raises(UsageError, match=r"FileSystemWriter\(overwrite=True\)"):
            call(state(), storage_writer=hf.FileSystemWriter(tmp_path), overwrite=True)
        with pytest.raises(UsageError, match=r"DefaultSavePlanner\(check_replicas='full'\)"):
            call(state(), tmp_path, planner=hf.DefaultSavePlanner(), check_replicas="full")


def test_options_of_the_load_planner_go_to_the_planner_that_is_passed(tmp_path: Path) -> None:
    hf.save(state(), tmp_path)
    with pytest.raises(UsageError, match="give strict, safe_globals to the planner"):
        hf.load(state(), tmp_path, planner=hf.DefaultLoadPlanner(), strict=False, safe_globals=[int])
    hf.load(state(), tmp_path, planner=hf.DefaultLoadPlanner())


@pytest.mark.parametrize(
    ("function", "name", "says"),
    [
        (
            "save",
            "thread_count",
            r"FileSystemWriter\(path, thread_count=...\), and pass that as storage_writer=",
        ),
        ("async_save", "single_file_per_rank", r"FileSystemWriter\(path, single_file_per_rank=...\)"),
        ("save", "enable_plan_caching", r"DefaultSavePlanner\(enable_plan_caching=...\)"),
        ("load", "thread_count", r"FileSystemReader\(path, thread_count=...\)"),
        ("load", "flatten_state_dict", r"DefaultLoadPlanner\(flatten_state_dict=...\)"),
        ("save", "strict", "an option of load"),
        ("load", "overwrite", "an option of save"),
        ("load", "map_location", "to where the state has them"),
        ("load", "weights_only", "no code of a checkpoint is run"),
        ("save", "path", "do you mean checkpoint_id="),
        ("load", "checkpoint_dir", "do you mean checkpoint_id="),
        ("async_save", "save_dir", "do you mean checkpoint_id="),
        ("save", "peer_timout", "do you mean peer_timeout="),
        ("load", "reader", "do you mean storage_reader="),
        ("save", "xyz", "unexpected keyword argument 'xyz'$"),
    ],
)
def test_an_argument_that_a_call_does_not_have_is_answered_with_its_place(
    function: str, name: str, says: str
) -> None:
    with pytest.raises(
        TypeError, match=rf"{function}\(\) got an unexpected keyword argument '{name}'.*"
    ) as caught:
        CALLS[function](state(), **{name: 1})
    assert caught.match(says)


@pytest.mark.parametrize(
    ("function", "plugin"),
    [
        ("save", hf.FileSystemWriter),
        ("async_save", hf.DefaultSavePlanner),
        ("load", hf.FileSystemReader),
        ("load", hf.DefaultLoadPlanner),
    ],
)
def test_every_option_of_the_default_plugins_is_taken_or_answered_with_the_plugin(
    function: str, plugin: type
) -> None:
    taken = inspect.signature(CALLS[function]).parameters
    for name in inspect.signature(plugin).parameters:
        if name not in taken and name != "path":
            with pytest.raises(TypeError, match=rf"{plugin.__name__}\(.*{name}="):
                CALLS[function](state(), **{name: 1})


def test_values_that_are_not_loaded_are_told_in_one_line_with_cause_and_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf.save({"model": {name: torch.ones(1) for name in "abcdef"}}, tmp_path)
    hf.load({"model": {"a": torch.zeros(1)}}, tmp_path)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    said = record.getMessage()
    assert "5 value(s) of the checkpoint are not loaded, because the state does not have them" in said
    assert "model.b, model.c, model.d and 2 more " in said
    assert "strict=True makes this an error, strict=False hides it" in said


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"net": {"weight": torch.ones(2), "bias": torch.ones(1)}}, "not under 'net': {'model': ...}"),
        ({"weight": torch.ones(2), "bias": torch.ones(1)}, "key that the checkpoint has: {'model': ...}"),
        ({"model": {"extra": torch.ones(1)}}, "allow_partial_load=True"),
        ({"model": {"weight": torch.ones(9)}}, "ignore_mismatched_sizes=True"),
        ({"model": None}, "Put there what is to be filled"),
    ],
    ids=["another key", "no key", "missing", "shape", "None"],
)
def test_what_does_not_fit_is_answered_with_the_remedy(
    tmp_path: Path, wanted: dict[str, Any], says: str
) -> None:
    hf.save({"model": {"weight": torch.ones(2), "bias": torch.ones(1)}}, tmp_path)
    with pytest.raises(PlanError) as caught:
        hf.load(wanted, tmp_path)
    assert says in str(caught.value)
    # Who has given a wrong key does not want to go on without the values.
    assert ("allow_partial_load" in str(caught.value)) == ("allow_partial_load" in says)


def test_keys_that_are_there_without_a_key_above_them_are_loaded_by_themselves(tmp_path: Path) -> None:
    hf.save({"weight": torch.ones(2), "bias": torch.ones(1)}, tmp_path)
    with pytest.raises(PlanError, match=r"without 'model': load what stands there in your state by itself"):
        hf.load({"model": {"weight": torch.ones(2), "bias": torch.ones(1)}}, tmp_path)


def test_a_checkpoint_of_objects_is_not_loaded_under_the_key_of_a_training_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    hf.save({"model": model, "optimizer": optimizer, "step": 3}, tmp_path)
    with pytest.raises(PlanError, match=r"has them without 'training': load what stands there .* by itself"):
        hf.load({"training": hf.TrainingState(model, optimizer, rng=False)}, tmp_path)
    training = hf.TrainingState(model, optimizer, rng=False)
    hf.load(training, tmp_path)
    assert training.step == 3


def test_a_partial_load_under_a_wrong_key_names_what_the_checkpoint_has(tmp_path: Path) -> None:
    hf.save({"model": torch.nn.Linear(2, 2), "step": 1}, tmp_path)
    for beside in ({}, {"step": 0}):
        with pytest.raises(
            PlanError, match=r"checkpoint has 'model\.weight'; the state asks for 'net\.weight'"
        ):
            hf.load({"net": torch.nn.Linear(2, 2), **beside}, tmp_path, allow_partial_load=True)


def test_a_device_that_is_not_there_is_refused_only_if_memory_is_needed_on_it(tmp_path: Path) -> None:
    hf.save({"model": torch.nn.Linear(2, 2)}, tmp_path)
    # An index that no machine has, so that the test is the same on those with a GPU.
    hf.load({"model": torch.nn.Linear(2, 2)}, tmp_path, device="cuda:99")
    model = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(UsageError, match="device='cuda:99': this process cannot use that device"):
        hf.load({"model": model}, tmp_path, device="cuda:99")
    assert model.weight.is_meta


def test_a_relative_path_names_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf.save(state(), tmp_path / "there" / "1")
    monkeypatch.chdir(tmp_path)
    hf.load(state(), "there/1")
    with pytest.raises(CheckpointNotFoundError, match=rf"no checkpoint at 1: .*directory is {tmp_path}"):
        hf.load(state(), "1")


@pytest.mark.parametrize("key", ["model.wieght", "wieght", "Model.Weight", "weight", "module.model.weight"])
def test_a_misspelt_key_of_a_view_is_answered_with_the_nearest(tmp_path: Path, key: str) -> None:
    hf.save({"model": torch.nn.Linear(2, 2), "lr": 0.1}, tmp_path)
    with pytest.raises(KeyError, match=r"there (is|are) model\.weight\b.* more$"):
        hf.open(tmp_path)[key]


def test_a_key_like_no_other_is_answered_with_some_of_those_that_there_are(tmp_path: Path) -> None:
    hf.save({"b": 1, "a": 2}, tmp_path)
    with pytest.raises(KeyError, match=r"has no key 'Q'; there are b, a$"):
        hf.open(tmp_path)["Q"]


@pytest.mark.parametrize("place", [None, b"folder", 7, ""], ids=repr)
@pytest.mark.parametrize("call", [hf.open, hf.CheckpointManager])
def test_a_root_or_a_view_of_what_is_no_path_says_what_to_pass(call: Any, place: object) -> None:
    with pytest.raises(UsageError, match='must be a path or URL, such as "runs/1"'):
        call(place)


def test_a_model_and_an_optimizer_in_the_wrong_order_are_told_apart() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError, match="not SGD; the optimizer comes second"):
        hf.TrainingState(optimizer, model)
    helpers = hf.state_dict
    for swapped in (helpers.get_state_dict, helpers.get_optimizer_state_dict):
        with pytest.raises(UsageError, match=r"pass the model\s+first, then the optimizer"):
            swapped(optimizer, model)
    with pytest.raises(UsageError, match=r"must be a torch\.nn\.Module, and is of the class SGD"):
        helpers.get_model_state_dict(optimizer)
    with pytest.raises(UsageError, match=r"must be a torch\.nn\.Module, and is of the class dict"):
        helpers.set_model_state_dict(dict(model.state_dict()), model.state_dict())


def test_a_tilde_in_a_path_is_explained() -> None:
    with pytest.raises(CheckpointNotFoundError, match="expanduser"):
        hf.load(state(), "~/there/is/no/such/folder")
