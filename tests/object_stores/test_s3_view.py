"""A view, and the command line, on an object store."""

import json

import pytest
import torch
from tests.support.s3_faults import Answer
from tests.support.s3_proxy import S3Proxy

import holdfast as hf
from holdfast.cli import main

pytestmark = pytest.mark.one_core


def test_a_view_and_the_commands_read_a_bucket(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = {str(number): number for number in range(40)}
    weight = torch.arange(200_000.0).reshape(400, 500)
    state = {"w": weight, "epoch": 3, "small": small}
    hf.save(state, checkpoint_id=place)
    with hf.open(place) as view:
        assert torch.equal(view["w"][10:20, 5:], weight[10:20, 5:])
        found = view.read()
        assert (found["epoch"], found["small"]) == (3, small)
        assert view.verify().ok
    run = place.rpartition("/")[0]
    capsys.readouterr()
    assert main(["ls", place, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["objects"]) == 41
    assert main(["ls", run, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (row["step"], row["complete"]) == (1, True)
    assert main(["show", run]) == 3
    assert f"Name one of them, such as {run}/step-1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_right_to_list_is_not_needed_to_look_or_to_copy(place: str, proxy: S3Proxy) -> None:
    hf.save({"w": torch.ones(30)}, checkpoint_id=place)
    model = f"{place}-model"
    hf.save({"w": torch.ones(30)}, storage_writer=hf.HuggingFaceStorageWriter(model))
    proxy.on(Answer(403), method="GET", query="list-type")
    copies = {place: f"{place}-copy", model: f"{place}-converted"}
    assert main(["cp", place, copies[place]]) == 0
    hf.convert(model, copies[model], to="safetensors")
    for each in (*copies, *copies.values()):
        with hf.open(each) as view:
            assert view["w"][...].sum() == 30
        for command in ("ls", "show", "verify"):
            assert main([command, each]) == 0


def test_small_neighbours_are_one_request(place: str, proxy: S3Proxy) -> None:
    state = {f"w{number}": torch.full((10,), float(number)) for number in range(200)}
    hf.save(state, checkpoint_id=place)
    before = len(proxy.requests)
    with hf.open(place) as view:
        found = view.read()
    assert all(torch.equal(found[key], value) for key, value in state.items())
    assert len(proxy.requests) - before < 12


def test_files_in_a_bucket_are_opened_by_their_names(place: str) -> None:
    hf.save({"w": torch.ones(30)}, storage_writer=hf.ObjectStoreWriter(place))
    with pytest.raises(hf.errors.CheckpointNotFoundError):
        hf.open(f"{place}-not-there")
    with pytest.raises(hf.errors.CheckpointNotFoundError):
        hf.open(f"{place}/nobody.safetensors")
