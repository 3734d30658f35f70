"""``holdfast cp``, ``diff`` and ``bench`` between a folder and an object store."""

import json
from pathlib import Path

import obstore
import pytest
from tests.object_stores.states import load, save, state_of, store_of
from tests.support.s3_server import S3Server

import holdfast
from holdfast._io.bucket_client import BucketAccess
from holdfast.cli import main

pytestmark = pytest.mark.slow

LARGE = 20 << 20


def test_a_checkpoint_goes_to_a_bucket_and_back(
    s3: S3Server, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holdfast.save(state_of(1.0, LARGE), checkpoint_id=tmp_path / "a")
    save(place, 2.0)
    assert main(["cp", str(tmp_path / "a"), place]) == 2
    assert load(place) == 2.0
    assert main(["cp", str(tmp_path / "a"), place, "--overwrite"]) == 0
    assert load(place, LARGE) == 1.0
    assert len(store_of(place, s3).names()) == 2
    assert main(["cp", place, str(tmp_path / "b")]) == 0
    capsys.readouterr()
    assert main(["diff", place, str(tmp_path / "b"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["by_checksum"] == found["equal"] == 2
    holdfast.save(state_of(3.0, LARGE), checkpoint_id=tmp_path / "b")
    assert main(["diff", place, str(tmp_path / "b"), "--json"]) == 1
    assert [value["key"] for value in json.loads(capsys.readouterr().out)["values"]] == ["a", "nested.text"]


def test_bench_leaves_nothing_in_the_bucket(
    s3: S3Server, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", place, "--size", "1MiB", "--rounds", "1"]) == 0
    assert "save" in capsys.readouterr().out
    client = BucketAccess(place).open()
    assert list(obstore.list(client).collect()) == []
