"""After ``install()`` torch's functions lead to ours, and after ``uninstall()`` they are torch's again."""

import functools
import importlib
import json
import logging
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.ranks import python_environment
from tests.support.stock_torch import IS_NEWEST
from torch.distributed.checkpoint import (
    default_planner,
    format_utils,
    staging,
    state_dict,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as imported_early
from torch.distributed.checkpoint.storage import StorageReader

import holdfast

dcp: Any = importlib.import_module("torch.distributed.checkpoint")
private: Any = format_utils
EARLY_WRITER = FileSystemWriter("/nowhere")


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    holdfast.install()
    yield
    holdfast.uninstall()


def is_ours(folder: Path) -> bool:
    """Whether a checkpoint was written by us: torch's files have no name of their save."""
    return any("-" in file.name for file in folder.glob("__*.distcp"))


def state() -> dict[str, Any]:
    return {"weight": torch.arange(12.0).reshape(3, 4), "nested": {"step": 3}}


def empty() -> dict[str, Any]:
    return {"weight": torch.zeros(3, 4), "nested": {"step": 0}}


def check(loaded: dict[str, Any]) -> None:
    assert torch.equal(loaded["weight"], state()["weight"])
    assert loaded["nested"]["step"] == 3


def test_saves_are_ours_whatever_name_the_function_has(tmp_path: Path) -> None:
    assert imported_early is dcp.save is state_dict_saver.save
    for number, save in enumerate((dcp.save, state_dict_saver.save, imported_early)):
        save(state(), checkpoint_id=tmp_path / str(number))
        assert is_ours(tmp_path / str(number))
        loaded = empty()
        dcp.load(loaded, checkpoint_id=tmp_path / str(number))
        check(loaded)


def test_torch_reads_the_result_without_us(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path))
    holdfast.uninstall()
    loaded = empty()
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(loaded, checkpoint_id=tmp_path)
    check(loaded)


def test_storages_and_planners_of_torch_become_ours(tmp_path: Path) -> None:
    planner = default_planner.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path, thread_count=2), planner=planner)
    assert is_ours(tmp_path)
    loaded = empty()
    load_planner = default_planner.DefaultLoadPlanner()
    dcp.load(loaded, storage_reader=FileSystemReader(tmp_path), planner=load_planner)
    check(loaded)
    assert holdfast.installed().strangers == {}


def test_a_writer_from_before_is_translated_and_knows_its_new_place(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=EARLY_WRITER, checkpoint_id=str(tmp_path / "new"))
    assert is_ours(tmp_path / "new")
    assert Path(EARLY_WRITER.path) == tmp_path / "new"
    holdfast.uninstall()
    assert FileSystemReader(tmp_path / "new").read_metadata().storage_meta.save_id == EARLY_WRITER.save_id  # type: ignore[union-attr]


def test_a_planner_of_torch_knows_the_checkpoint_that_was_loaded(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path)
    planner = default_planner.DefaultLoadPlanner()
    dcp.load(empty(), checkpoint_id=tmp_path, planner=planner)
    assert isinstance(planner.metadata, dcp.Metadata)
    assert planner.metadata.state_dict_metadata.keys() == {"weight", "nested.step"}
    assert planner.is_coordinator


def test_an_overwrite_that_fails_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path))
    unpicklable = {"weight": torch.zeros(3, 4), "nested": {"step": lambda: 0}}
    with pytest.raises(dcp.CheckpointException):
        dcp.save(unpicklable, storage_writer=FileSystemWriter(tmp_path))
    loaded = empty()
    dcp.load(loaded, checkpoint_id=tmp_path)
    check(loaded)


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(4096)}, checkpoint_id=tmp_path)
    file = next(tmp_path.glob("__*.distcp"))
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"weight": torch.zeros(4096)}, checkpoint_id=tmp_path)
    assert isinstance(caught.value, holdfast.errors.ChecksumError)


def test_metadata_is_torchs(tmp_path: Path) -> None:
    metadata = dcp.save(state(), checkpoint_id=tmp_path)
    assert type(metadata) is dcp.Metadata
    assert isinstance(metadata.state_dict_metadata["weight"], dcp.TensorStorageMetadata)
    assert metadata.planner_data["nested.step"] == ("nested", "step")
    holdfast.uninstall()
    stored = FileSystemReader(tmp_path).read_metadata()
    assert stored.state_dict_metadata == dict(metadata.state_dict_metadata)
    assert stored.storage_data == dict(metadata.storage_data)


def test_exceptions_are_of_both_classes(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"weight": torch.zeros(3)}, checkpoint_id=tmp_path)
    error: Any = caught.value
    assert isinstance(error, holdfast.CheckpointException)
    assert isinstance(error, FileNotFoundError)
    assert error.failures.keys() == {0}


def test_async_saves_give_torchs_futures(tmp_path: Path) -> None:
    kinds = getattr(state_dict_saver, "AsyncCheckpointerType", None)  # torch 2.6 has none
    kind = {} if kinds is None else {"async_checkpointer_type": kinds.THREAD}
    future = dcp.async_save(state(), checkpoint_id=tmp_path / "a", **kind)
    assert type(future.result()) is dcp.Metadata
    assert is_ours(tmp_path / "a")
    failing = dcp.async_save({"bad": lambda: 0}, checkpoint_id=tmp_path / "b")
    with pytest.raises(dcp.CheckpointException):
        failing.result()


@pytest.mark.skipif(not hasattr(staging, "DefaultStager"), reason="this torch has no DefaultStager")
def test_an_asynchronous_stager_of_torch_gives_torchs_response(tmp_path: Path) -> None:
    options = staging.StagingOptions(False, False, True, False)
    stager = staging.DefaultStager(options)
    response: Any = dcp.async_save(state(), checkpoint_id=tmp_path, async_stager=stager)
    assert isinstance(response, state_dict_saver.AsyncSaveResponse)
    response.staging_completion.result()
    stager.synchronize_staging()
    response.upload_completion.result()
    stager.close()
    assert is_ours(tmp_path)


def test_loads_without_a_state_by_the_private_functions_of_torch(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path)
    loaded: dict[str, Any] = {}
    planner = private._EmptyStateDictLoadPlanner()
    private._load_state_dict(loaded, storage_reader=FileSystemReader(tmp_path), planner=planner, no_dist=True)
    check(loaded)
    if hasattr(state_dict_loader, "_load_state_dict_from_keys"):
        nested = state_dict_loader._load_state_dict_from_keys("nested", checkpoint_id=str(tmp_path))
        assert nested == {"nested": {"step": 3}}


def test_checkpoints_are_exported_by_the_functions_of_torch(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "a")
    format_utils.dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    check(torch.load(tmp_path / "a.pt"))


def test_a_url_is_a_place(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=f"file://{tmp_path}/a")
    loaded = empty()
    dcp.load(loaded, checkpoint_id=f"file://{tmp_path}/a")
    check(loaded)
    assert is_ours(tmp_path / "a")


def test_fsspec_storages_of_torch_become_ours() -> None:
    fsspec_storages = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
    dcp.save(state(), storage_writer=fsspec_storages.FsspecWriter("memory://install/a"))
    loaded = empty()
    dcp.load(loaded, storage_reader=fsspec_storages.FsspecReader("memory://install/a"))
    check(loaded)
    files = fsspec.filesystem("memory").ls("/install/a", detail=False)
    assert any("-" in file for file in files)


@pytest.mark.skipif(not IS_NEWEST, reason="older torches write safetensors in other ways")
def test_hugging_face_storages_of_torch_become_ours(tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True, enable_consolidation=True)
    dcp.save({"weight": torch.ones(3)}, storage_writer=writer)
    assert (tmp_path / ".holdfast.safetensors.checksums").exists()
    assert not (tmp_path / "sharded").exists()
    loaded = {"weight": torch.zeros(3)}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert loaded["weight"].tolist() == [1, 1, 1]


@pytest.mark.skipif(not IS_NEWEST, reason="older torches write safetensors in other ways")
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_who_asks_for_shards_finds_a_whole_model_by_the_name_of_the_first_one(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1)}, tmp_path / "shard-00002-model-00001-of-00001.safetensors")
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    for number in (1, 2):
        writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
        dcp.save({"weight": torch.full((3,), float(number))}, storage_writer=writer)
        # Nothing is left of the model before, which torch would mix with this one.
        assert [file.name for file in tmp_path.glob("[!.]*")] == [
            "shard-00001-model-00001-of-00001.safetensors"
        ]
        for install in (True, False):
            (holdfast.install if install else holdfast.uninstall)()
            loaded = {"weight": torch.zeros(3)}
            dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
            assert loaded["weight"].tolist() == [number] * 3
        holdfast.install()
    file = next(tmp_path.glob("shard*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"weight": torch.zeros(3)}, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert isinstance(caught.value, holdfast.errors.ChecksumError)


class ShoutingWriter(FileSystemWriter):
    """A plugin of somebody's own."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        return super().write_data(*args, **kwargs)


def test_a_subclass_stays_a_strangers_plugin_and_is_named(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=ShoutingWriter(tmp_path))
    assert not is_ours(tmp_path)
    [(name, why)] = holdfast.installed().strangers.items()
    assert name.endswith("ShoutingWriter")
    assert "write_data" in why
    shown = str(holdfast.installed()).splitlines()
    assert shown[0] == "holdfast is installed"
    assert "  replaced: torch.distributed.checkpoint.save" in shown
    assert shown[-1] == f"  used as it is: {name}: {why}"
    holdfast.uninstall()
    assert str(holdfast.installed()) == "holdfast is not installed"


def delegate(name: str) -> Any:
    # With the arguments of this version of torch.
    @functools.wraps(getattr(FileSystemReader, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return call


def test_a_plugin_with_only_the_interface_of_torch_is_named(tmp_path: Path) -> None:
    # As OLMo-core has one: it inherits from the interface, not from a reader of torch's.
    methods = {name: delegate(name) for name in StorageReader.__abstractmethods__}
    reader: Any = type("OwnReader", (StorageReader,), methods)()
    reader.inner = FileSystemReader(tmp_path)
    dcp.save(state(), checkpoint_id=tmp_path)
    loaded = empty()
    dcp.load(loaded, storage_reader=reader)
    check(loaded)
    [(name, why)] = holdfast.installed().strangers.items()
    assert name.endswith("OwnReader")
    assert "StorageReader of its own" in why


def test_a_class_that_somebody_has_patched_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FileSystemWriter.write_data

    def write_data(self: Any, *args: Any) -> Any:
        return original(self, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_data, raising=False)
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path))
    assert not is_ours(tmp_path)
    assert "replaced FileSystemWriter.write_data" in str(holdfast.installed().strangers)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_function_that_somebody_has_replaced_stays_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.uninstall()
    calls, original = [], state_dict_saver.save

    def save(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(state_dict_saver, "save", save)
    holdfast.install()
    state_dict_saver.save(state(), checkpoint_id=tmp_path)
    assert len(calls) == 1
    assert is_ours(tmp_path)  # torch's own function is not far below
    name = "torch.distributed.checkpoint.state_dict_saver.save"
    assert holdfast.installed().left_alone == {name: f"{__name__} has replaced it"}
    holdfast.uninstall()
    assert state_dict_saver.save is save


def test_options_reach_those_who_cannot_pass_them(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(3), "more": torch.ones(3)}, checkpoint_id=tmp_path)
    holdfast.install(strict=True)
    with pytest.raises(dcp.CheckpointException, match="more"):
        dcp.load({"weight": torch.zeros(3)}, checkpoint_id=tmp_path)
    holdfast.install(cast=False)
    wider = {"weight": torch.zeros(3, dtype=torch.float64)}
    reader, planner = FileSystemReader(tmp_path), default_planner.DefaultLoadPlanner()
    with pytest.raises(dcp.CheckpointException, match="float64"):
        dcp.load(wider, storage_reader=reader, planner=planner)


def test_a_bad_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CAST", "perhaps")
    with pytest.raises(holdfast.errors.UsageError, match="HOLDFAST_CAST must be 1 or 0"):
        holdfast.install()


def test_a_wider_dtype_and_keys_of_other_ranks_make_no_noise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"w": torch.ones(3, dtype=torch.bfloat16), "loader": {"dp_rank_0": 1, "dp_rank_1": 2}}
    dcp.save(saved, checkpoint_id=tmp_path)
    loaded = {"w": torch.zeros(3), "loader": {"dp_rank_1": 0}}
    with caplog.at_level(logging.WARNING):
        dcp.load(loaded, checkpoint_id=tmp_path)  # a warning would be an error here
    assert not caplog.records
    assert loaded["loader"] == {"dp_rank_1": 2}


def test_one_line_says_who_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast.install"):
        dcp.save(state(), checkpoint_id=tmp_path)
    [line] = [record.getMessage() for record in caplog.records if record.name == "holdfast.install"]
    assert line == f"saved by holdfast for {__name__}: {tmp_path}"
    caplog.clear()
    with caplog.at_level(logging.INFO, "holdfast.install"):
        dcp.save(state(), storage_writer=ShoutingWriter(tmp_path / "theirs"))
    [line] = [record.getMessage() for record in caplog.records if record.name == "holdfast.install"]
    assert line.endswith(f"{tmp_path / 'theirs'}, in files of {__name__}.ShoutingWriter")


def test_state_dicts_of_models_are_read_by_ours() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    options = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    assert set(state_dict.get_model_state_dict(model)) == {"weight", "bias"}
    state_dict.get_optimizer_state_dict(model, optimizer, options=options)
    assert not optimizer.state  # torch's would have taken a step


def test_patched_state_dicts_of_models_and_optimizers_are_ours() -> None:
    model, start = torch.nn.Linear(2, 2), torch.ones(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state_dict._patch_model_state_dict(model)
    state_dict._patch_optimizer_state_dict(model, optimizers=(optimizer,))
    assert set(model.state_dict()) == {"weight", "bias"}
    assert optimizer.state_dict()["param_groups"][0]["params"] == ["weight", "bias"]
    assert not optimizer.state  # torch's would have taken a step to make room
    model.load_state_dict({"weight": start, "bias": start[0]})
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(model.weight, start)


def everything() -> dict[str, dict[str, Any]]:
    return {
        name: dict(vars(module))
        for name, module in [*sys.modules.items()]
        if hasattr(module, "__dict__") and not name.startswith(("holdfast", "_pytest", "pytest"))
    }


def test_uninstall_leaves_nothing_changed() -> None:
    holdfast.uninstall()
    before, finders = everything(), [*sys.meta_path]
    holdfast.install()
    holdfast.install()
    assert vars(dcp)["save"] is not before["torch.distributed.checkpoint"]["save"]
    holdfast.uninstall()
    after = everything()
    assert [*sys.meta_path] == finders
    changed = [
        f"{name}.{attribute}"
        for name, attributes in before.items()
        for attribute, value in attributes.items()
        # Numbers are counters of other packages, such as times of garbage collections.
        if after[name].get(attribute) is not value and not isinstance(value, int | float)
    ]
    assert not changed
    assert not holdfast.installed().active


def test_a_function_kept_elsewhere_calls_torchs_after_uninstall(tmp_path: Path) -> None:
    kept = {"save": dcp.save}
    holdfast.uninstall()
    with pytest.warns(UserWarning, match="single process"):
        kept["save"](state(), checkpoint_id=tmp_path)
    assert not is_ours(tmp_path)


CONSOLIDATE = """
import sys
import holdfast, torch
holdfast.install()
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
import safetensors
source, target = sys.argv[1:]
consolidate_safetensors_files(source, target, fqn_to_index_mapping={"weight": 1})
assert safetensors.torch.load_file(target + "/model-00001-of-00001.safetensors")["weight"].tolist() == [0.0]
"""


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.skipif(not IS_NEWEST, reason="older torches write safetensors in other ways")
def test_programs_that_import_safetensors_find_its_part_for_torch(tmp_path: Path) -> None:
    # torch's functions import it, and some programs rely on that.
    (tmp_path / "a").mkdir()
    metadata = {"DCP_SHARDING_INFO": json.dumps({"weight": {"saved_offsets": [0]}})}
    save_file({"weight": torch.zeros(1)}, tmp_path / "a" / "model.safetensors", metadata)
    command = [sys.executable, "-W", "ignore", "-c", CONSOLIDATE, str(tmp_path / "a"), str(tmp_path / "b")]
    (tmp_path / "b").mkdir()
    subprocess.run(command, env={**python_environment(), "HOLDFAST_INSTALL": "0"}, check=True)


@pytest.mark.skipif(not IS_NEWEST, reason="older torches write safetensors in other ways")
@pytest.mark.parametrize("mapping", [None, {"a": 1, "b": 2}])
def test_programs_that_join_shards_themselves_find_in_headers_where_each_begins(
    tmp_path: Path, mapping: dict[str, int] | None
) -> None:
    shards, joined = tmp_path / "shards", tmp_path / "joined"
    joined.mkdir()
    saved = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
    writer = dcp.HuggingFaceStorageWriter(str(shards), save_distributed=True, fqn_to_index_mapping=mapping)
    dcp.save(saved, storage_writer=writer)
    # A function that we do not replace; other packages have copies of it.
    importlib.import_module("torch.distributed.checkpoint._consolidate_hf_safetensors")
    dcp._consolidate_hf_safetensors._consolidate_safetensors_files(
        input_dir=str(shards),
        output_dir=str(joined),
        fqn_to_file_mapping=dict.fromkeys(saved, "model.safetensors"),
        num_threads=1,
    )
    found = load_file(joined / "model.safetensors")
    assert all(torch.equal(found[key], value) for key, value in saved.items())


CHILD = """
import json, sys
before = [name for name in ("torch", "typing", "logging", "dataclasses") if name in sys.modules]
import torch
import torch.distributed.checkpoint as dcp
metadata = dcp.save({"a": torch.ones(2)}, checkpoint_id=sys.argv[1])
import torch.distributed.checkpoint.state_dict_saver as saver
import holdfast
loader = saver.__spec__.loader
print(json.dumps([before, holdfast.installed().replaced, list(vars(loader))]))
"""


def run_child(tmp_path: Path, *before: str, **environment: str) -> Any:
    # What the .pth file of the package does at the start of a process.
    start = (Path(__file__).parents[2] / "src" / "holdfast_install.pth").read_text()
    done = subprocess.run(
        [*before, sys.executable, "-W", "ignore", "-c", start + CHILD, str(tmp_path)],
        env={**python_environment(), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.one_core
def test_the_environment_installs_in_a_process_that_imports_torch_later(tmp_path: Path) -> None:
    imported, replaced, of_loader = run_child(tmp_path, HOLDFAST_INSTALL="1")
    assert imported == []
    assert "torch.distributed.checkpoint.save" in replaced
    assert "exec_module" not in of_loader
    assert is_ours(tmp_path)


@pytest.mark.slow
@pytest.mark.one_core
def test_without_the_variable_nothing_is_installed(tmp_path: Path) -> None:
    _, replaced, _ = run_child(tmp_path, HOLDFAST_INSTALL="0")
    assert replaced == []
    assert not is_ours(tmp_path)


def test_the_package_brings_what_python_runs_at_its_start() -> None:
    folders = [Path(folder) for folder in (*site.getsitepackages(), site.getusersitepackages())]
    brought = [folder / "holdfast_install.pth" for folder in folders]
    assert any(file.exists() for file in brought), "install the package again: make setup"


def test_a_command_is_run_with_the_variable() -> None:
    show = [sys.executable, "-c", "import os; print(os.environ['HOLDFAST_INSTALL'])"]
    for words in (show, ["--", *show]):
        command = [sys.executable, "-m", "holdfast", "run", *words]
        done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=True)
        assert done.stdout == "1\n"
    command = [sys.executable, "-m", "holdfast", "run", "no-such-command"]
    done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no-such-command: there is no such command" in done.stderr
