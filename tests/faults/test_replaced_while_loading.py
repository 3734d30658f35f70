"""Loads beside saves that replace the checkpoint: they get the new one, whole, or an error that says so."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks

import holdfast as hf
from holdfast import LoadPlan, LoadPlanner
from holdfast.errors import IncompleteCheckpointError, MissingKeyError, ReplacedCheckpointError

LAYERS = 5


def state_of(value: float, **more: Any) -> dict[str, Any]:
    layers = {f"layer.{n}": torch.full((1000,), float(value)) for n in range(LAYERS)}
    return {**layers, "text": str(float(value)), **more}


def is_state_of(value: float, state: dict[str, Any]) -> bool:
    return state["text"] == str(float(value)) and all(
        torch.equal(state[f"layer.{n}"], torch.full((1000,), float(value))) for n in range(LAYERS)
    )


class Beside(hf.FileSystemReader):
    """Reads while other states are saved into its folder: one for each attempt to read."""

    def __init__(self, folder: Path | str, *others: dict[str, Any]) -> None:
        super().__init__(folder, thread_count=1)
        self.others = list(others)
        self.attempts = 0

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(*args, **kwargs)
        self.attempts += 1
        if self.others:
            hf.save(self.others.pop(0), checkpoint_id=self.checkpoint_id, no_dist=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf.save(state_of(1), checkpoint_id=tmp_path / "run")
    return tmp_path / "run"


def test_a_load_beside_an_overwriting_save_gets_the_new_checkpoint(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of(0)
    with caplog.at_level(logging.WARNING, "holdfast"):
        result = hf.load(state, storage_reader=Beside(folder, state_of(2), state_of(3)))
    assert is_state_of(3, state)
    assert set(result.loaded) == set(state)
    assert "The load begins again" in caplog.text


def test_it_gives_up_if_each_attempt_meets_another_save(folder: Path) -> None:
    state, reader = state_of(0), Beside(folder, *(state_of(n) for n in range(2, 9)))
    with pytest.raises(ReplacedCheckpointError, match="Another save has replaced the checkpoint") as caught:
        hf.load(state, storage_reader=reader)
    assert isinstance(caught.value, IncompleteCheckpointError)
    assert reader.attempts == 3
    assert is_state_of(0, state)


@pytest.mark.parametrize("option", ["allow_partial_load", "ignore_mismatched_sizes"])
def test_a_load_that_may_leave_values_alone_is_not_repeated(folder: Path, option: str) -> None:
    """It would leave values of the old checkpoint where the new one has none."""
    state, reader = state_of(0), Beside(folder, state_of(2))
    with pytest.raises(ReplacedCheckpointError, match=r"Load again"):
        hf.load(state, storage_reader=reader, **{option: True})  # type: ignore[arg-type]
    assert reader.attempts == 1
    assert is_state_of(0, state)


def test_a_new_checkpoint_that_does_not_fit_is_an_error_of_its_own(folder: Path) -> None:
    state = state_of(0)
    with pytest.raises(MissingKeyError, match="nothing was changed") as caught:
        hf.load(state, storage_reader=Beside(folder, {"step": 2}))
    assert "had begun before" not in str(caught.value)
    assert is_state_of(0, state)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes on exceptions")
def test_what_the_first_attempt_changed_is_not_concealed(tmp_path: Path) -> None:
    state, folder = state_of(0), tmp_path / "a file for each value"
    hf.save(state_of(1), storage_writer=hf.FileSystemWriter(folder, single_file_per_rank=False))

    class Late(Beside):
        """Replaced when the first values have been read."""

        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
            if self.others:
                take = planner.load_bytes

                def take_and_save(*args: Any) -> None:
                    take(*args)
                    hf.save(self.others.pop(0), checkpoint_id=self.checkpoint_id, no_dist=True)

                planner.load_bytes = take_and_save  # type: ignore[method-assign, assignment]
            return super().read_data(plan, planner)

        def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
            hf.FileSystemReader.set_up_storage_reader(self, *args, **kwargs)

    with pytest.raises(MissingKeyError, match="had begun before"):
        hf.load(state, storage_reader=Late(folder, {"step": 2}))


def test_a_file_that_is_only_missing_is_not_waited_for(folder: Path) -> None:
    reader = Beside(folder)
    for file in folder.glob("*.distcp"):
        file.unlink()
    with pytest.raises(IncompleteCheckpointError, match="Put it back") as caught:
        hf.load(state_of(0), storage_reader=reader)
    assert not isinstance(caught.value, ReplacedCheckpointError)
    assert reader.attempts == 1


def test_stateful_objects_get_the_new_checkpoint(tmp_path: Path) -> None:
    def trained(steps: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    hf.save(trained(1), checkpoint_id=tmp_path)
    found, wanted = trained(0), trained(4)
    hf.load(found, storage_reader=Beside(tmp_path, wanted))
    assert torch.equal(found["model"].weight, wanted["model"].weight)
    assert [float(s["step"]) for s in found["optimizer"].state.values()] == [4.0, 4.0]


def load_on_a_rank(folder: str, others: list[float], partial: list[bool]) -> str:
    rank = dist.get_rank()
    reader = Beside(folder, *map(state_of, others if rank == 1 else ()))
    state = state_of(0)
    try:
        hf.load(state, storage_reader=reader, allow_partial_load=partial[rank])
    except ReplacedCheckpointError:
        return f"replaced after {reader.attempts}"
    return f"{state['text']} after {reader.attempts}: {is_state_of(float(state['text']), state)}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "partial", "outcome"),
    [
        ([2.0], [False, False, False], "2.0 after 2: True"),
        ([2.0, 3.0], [False, False, False], "3.0 after 3: True"),
        ([2.0, 3.0, 4.0], [False, False, False], "replaced after 3"),
        ([2.0], [True, True, True], "replaced after 1"),
        ([2.0], [False, False, True], "replaced after 1"),
    ],
)
def test_ranks_begin_again_together(
    folder: Path, others: list[float], partial: list[bool], outcome: str
) -> None:
    found = run_ranks(load_on_a_rank, 3, str(folder), others, partial)
    assert found == [("returned", outcome)] * 3
