"""Saves and loads report how far they are, and stop when the one who is told raises."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.state_dict_saver import Progress

MIB = 1 << 20


def state(value: float) -> dict[str, Any]:
    return {
        "large": torch.full((10 * MIB,), value),
        "small": [torch.full((10,), value) for _ in range(50)],
        "text": "x" * 10_000,
    }


class TooMuch(Exception):
    pass


def refuse(progress: Progress) -> None:
    if progress.nbytes_done > 16 * MIB:
        raise TooMuch(f"at {progress.nbytes_done}")


def test_a_save_and_a_load_report_until_all_is_done(tmp_path: Path) -> None:
    saved: list[Progress] = []
    loaded: list[Progress] = []
    holdfast.save(state(1.0), checkpoint_id=tmp_path, progress=saved.append)
    found = state(0.0)
    holdfast.load(found, checkpoint_id=tmp_path, progress=loaded.append)
    assert torch.equal(found["large"], state(1.0)["large"])
    for reports in (saved, loaded):
        done = [report.nbytes_done for report in reports]
        assert done == sorted(done)
        assert len(set(done)) > 4
        assert {report.nbytes_total for report in reports} == {reports[0].nbytes_total}
        assert done[-1] == reports[-1].nbytes_total > 40 * MIB
        assert reports[-1].rate > 0


def test_a_save_that_is_stopped_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    holdfast.save(state(1.0), checkpoint_id=tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(TooMuch):
        holdfast.save(state(2.0), checkpoint_id=tmp_path, progress=refuse)
    assert sorted(os.listdir(tmp_path)) == before
    found = state(0.0)
    holdfast.load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["large"], state(1.0)["large"])


def test_a_load_that_is_stopped_raises_what_stopped_it(tmp_path: Path) -> None:
    holdfast.save(state(1.0), checkpoint_id=tmp_path)
    with pytest.raises(TooMuch):
        holdfast.load(state(0.0), checkpoint_id=tmp_path, progress=refuse)
