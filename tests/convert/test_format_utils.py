"""torch's functions and classes of ``format_utils``, and a format of torch's writer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_ranks
from tests.support.stock_torch import stock_load, stock_save
from torch.distributed.checkpoint import filesystem as torchs_filesystem

import holdfast as dcp
from holdfast import format_utils
from holdfast.errors import CheckpointException, UnsafeMetadataError, UsageError
from holdfast.filesystem import SerializationFormat


def test_torchs_two_functions(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(3, 4).state_dict(), "step": 3}
    stock_save(state, checkpoint_id=tmp_path / "a")
    format_utils.dcp_to_torch_save(tmp_path / "a", tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt")
    assert torch.equal(found["model"]["weight"], state["model"]["weight"])  # type: ignore[index]
    format_utils.torch_save_to_dcp(tmp_path / "x.pt", tmp_path / "b")
    room: dict[str, Any] = {"model": torch.nn.Linear(3, 4).state_dict(), "step": 0}
    stock_load(room, checkpoint_id=tmp_path / "b")
    assert torch.equal(room["model"]["weight"], state["model"]["weight"])  # type: ignore[index]
    assert room["step"] == 3


def test_the_names_that_frameworks_import() -> None:
    assert callable(format_utils._load_state_dict)
    assert issubclass(format_utils._EmptyStateDictLoadPlanner, dcp.DefaultLoadPlanner)


def test_a_file_of_torch_save_is_loaded_as_torch_does_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    torch.save({"model": model.state_dict(), "step": 7}, tmp_path / "x.pt")
    state: dict[str, Any] = {"model": torch.nn.Linear(3, 4), "step": 0}
    dcp.load(
        state,
        storage_reader=format_utils.BroadcastingTorchSaveReader(),
        planner=format_utils.DynamicMetaLoadPlanner(),
        checkpoint_id=tmp_path / "x.pt",
        no_dist=True,
    )
    assert torch.equal(state["model"].weight, model.weight)
    assert state["step"] == 7
    assert format_utils.BroadcastingTorchSaveReader.validate_checkpoint_id(tmp_path / "x.pt")
    assert not format_utils.BroadcastingTorchSaveReader.validate_checkpoint_id(tmp_path / "y.pt")
    with pytest.raises((UsageError, CheckpointException), match="no file was named"):
        dcp.load(state, storage_reader=format_utils.BroadcastingTorchSaveReader(), no_dist=True)


def test_the_planner_with_a_storage_that_does_not_know_what_it_holds() -> None:
    planner = format_utils.DynamicMetaLoadPlanner()
    planner.set_up_planner({"x": torch.zeros(3)}, dcp.Metadata({}))
    (item,) = planner.create_local_plan().items
    assert item.storage_index.fqn == "x"
    with pytest.raises(UsageError, match="step"):
        planner.set_up_planner({"step": 3}, dcp.Metadata({}))


def load_on_ranks(path: str) -> list[Any]:
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor import Shard, distribute_tensor  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {
        "x": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]),
        "t": torch.zeros(4, 6),
        "step": 0,
        "names": None,
    }
    dcp.load(state, storage_reader=format_utils.BroadcastingTorchSaveReader(path))
    return [state["x"].full_tensor(), state["t"], state["step"], state["names"]]


@pytest.mark.slow
def test_ranks_load_their_parts_of_a_file(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(6, 4)
    torch.save({"x": whole, "t": whole.t(), "step": 3, "names": {"a", "b"}}, tmp_path / "x.pt")
    for kind, found in run_ranks(load_on_ranks, 2, str(tmp_path / "x.pt")):
        assert kind == "returned", found
        x, t, step, names = found
        assert torch.equal(x, whole)
        assert torch.equal(t, whole.t())
        assert (step, names) == (3, {"a", "b"})


class Unknown:
    pass


def test_safety_is_the_default(tmp_path: Path) -> None:
    torch.save({"x": Unknown()}, tmp_path / "x.pt")
    with pytest.raises(UnsafeMetadataError, match=r"x.*Unknown"):
        format_utils.torch_save_to_dcp(tmp_path / "x.pt", tmp_path / "a")
    format_utils.torch_save_to_dcp(tmp_path / "x.pt", tmp_path / "a", safe_globals=[Unknown])


def test_safetensors_as_the_format_of_a_checkpoint(tmp_path: Path) -> None:
    state = {"x": torch.arange(5.0)}
    # torch 2.6 has no such name.
    theirs = vars(torchs_filesystem).get("SerializationFormat", SerializationFormat)
    for number, kind in enumerate((SerializationFormat.SAFETENSORS, theirs.SAFETENSORS)):
        with pytest.warns(UserWarning, match="HuggingFaceStorageWriter"):
            writer = dcp.FileSystemWriter(tmp_path / str(number), serialization_format=kind)
        dcp.save(state, storage_writer=writer, no_dist=True)
        room = {"x": torch.zeros(5)}
        stock_load(room, checkpoint_id=tmp_path / str(number))
        assert torch.equal(room["x"], state["x"])
