"""The error of a load that failed half-way names what it may have changed, and nothing that it has not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import data_files

import holdfast as hf
from holdfast.errors import ChecksumError


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 600)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 5, "more": {"epoch": 2}}


def damage(folder: Path, tensor: torch.Tensor) -> None:
    """Flip a bit of a tensor in the checkpoint."""
    path = folder / data_files(folder)[0]
    content = bytearray(path.read_bytes())
    content[content.index(tensor.detach().numpy().tobytes()[:64]) + 4] ^= 1
    path.write_bytes(content)


def flat(state: dict[str, Any]) -> dict[str, Any]:
    optimizer = state["optimizer"].state_dict()
    return {
        **{f"model.{key}": value.clone() for key, value in state["model"].state_dict().items()},
        **{
            f"optimizer.state.{number}.{key}": value.clone()
            for number, entry in optimizer["state"].items()
            for key, value in entry.items()
        },
        "step": state["step"],
        "more.epoch": state["more"]["epoch"],
    }


@pytest.mark.parametrize("is_new", [True, False])
def test_the_error_names_what_was_changed_and_nothing_else(tmp_path: Path, is_new: bool) -> None:
    saved = trained()
    hf.save(saved, checkpoint_id=tmp_path)
    damage(tmp_path, saved["optimizer"].state[saved["model"][1].weight]["exp_avg"])
    state = trained()
    if is_new:
        state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), lr=0.5)
    state.update(step=0, more={"epoch": 0})
    before = flat(state)
    with pytest.raises(ChecksumError) as caught:
        hf.load(state, checkpoint_id=tmp_path)
    after = flat(state)
    changed = {
        key for key in before if not torch.equal(torch.as_tensor(before[key]), torch.as_tensor(after[key]))
    }
    note = next(line for line in str(caught.value).splitlines() if "may have changed" in line)
    named = note.partition("values: ")[2].split(", ")
    assert changed
    assert set(named) >= changed
    assert "more.epoch" in named  # its dict is the caller's
    assert not [key for key in named if key == "step" or "param_groups" in key]
    assert not is_new or not [key for key in named if key.startswith("optimizer")]
    assert f"may have changed {len(named)} values" in note


def test_a_tensor_that_is_cast_is_not_called_changed_if_its_bytes_are_damaged(tmp_path: Path) -> None:
    big = torch.randn(700, 700)
    hf.save({"big": big}, checkpoint_id=tmp_path)
    damage(tmp_path, big)
    with pytest.raises(ChecksumError, match="nothing was changed here by this load"):
        hf.load({"big": torch.zeros(700, 700, dtype=torch.float64)}, checkpoint_id=tmp_path, cast=True)
