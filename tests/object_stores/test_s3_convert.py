"""Conversion from and to an object store, also over what is there."""

from pathlib import Path

import pytest
import torch
from tests.support.s3_server import S3Server

import holdfast
from holdfast._io.places import open_place
from holdfast.errors import CheckpointExistsError

pytestmark = pytest.mark.slow

STATE = {"model": {"w": torch.arange(5_000_000.0), "small": torch.ones(3)}, "step": 4}


def test_a_bucket_is_source_and_target(s3: S3Server, place: str, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "x.pt")
    holdfast.convert(tmp_path / "x.pt", f"{place}/ours", to="holdfast")
    holdfast.convert(f"{place}/ours", f"{place}/model.pt")
    with pytest.raises(CheckpointExistsError):
        holdfast.convert(f"{place}/ours", f"{place}/model.pt")
    holdfast.convert(f"{place}/ours", f"{place}/model.pt", overwrite=True)
    options = {"keys": "model", "rename": {"model": ""}}
    holdfast.convert(f"{place}/model.pt", f"{place}/hf", to="safetensors", **options)  # type: ignore[arg-type]
    holdfast.convert(f"{place}/hf", tmp_path / "y.pt")
    assert torch.equal(torch.load(tmp_path / "y.pt")["w"], STATE["model"]["w"])  # type: ignore[index]
    holdfast.convert(f"{place}/model.pt", tmp_path / "z.pt")
    assert torch.load(tmp_path / "z.pt")["step"] == 4
    assert open_place(place).names() == {"model.pt"}


def test_an_upload_that_fails_leaves_the_old_file(
    s3: S3Server, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1.0, 2.0):
        torch.save({"x": torch.full((8_000_000,), number)}, tmp_path / f"{number}.pt")
    holdfast.convert(tmp_path / "1.0.pt", f"{place}/model.pt")

    def stop(_: object) -> None:
        raise KeyError("stop here")

    with pytest.raises(KeyError, match="stop here"):
        holdfast.convert(tmp_path / "2.0.pt", f"{place}/model.pt", overwrite=True, progress=stop)
    holdfast.convert(f"{place}/model.pt", tmp_path / "y.pt")
    assert torch.load(tmp_path / "y.pt")["x"].unique().tolist() == [1.0]
    assert open_place(place).names() == {"model.pt"}
