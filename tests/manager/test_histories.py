"""Random histories of a run: the newest sound step stays and loads, and counts stay within the policy."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.checkpoints import data_files

import holdfast as hf
from holdfast.manager import Best, CheckpointManager, Every, Last

KEEP = Last(2) | Best(1, "loss") | Every(50)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(1, 20), st.integers(0, 5)),
        st.tuples(st.just("fail"), st.integers(1, 20), st.just(0)),
        st.tuples(st.just("crash in save"), st.integers(1, 20), st.just(0)),
        st.tuples(st.just("crash in prune"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("go back"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("damage newest"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("clock"), st.integers(-(10**6), 10**6), st.just(0)),
        st.tuples(st.just("prune"), st.just(0), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
        st.tuples(st.just("other manager"), st.just(0), st.just(0)),
    ),
    min_size=1,
    max_size=14,
)


class History:
    """A run whose root is changed as crashes, clocks and other managers do, with what must be true of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.order: list[int] = []  # complete and sound steps, the newest last
        self.losses: dict[int, float] = {}
        self.manager = self.other = self.make()
        self.step = 0

    def make(self) -> CheckpointManager:
        return CheckpointManager(self.root, keep=KEEP)

    def save(self, more: int, loss: int) -> None:
        self.step += more
        self.manager.save(self.step, state_of(self.step), metrics={"loss": float(loss)})
        self.order = [step for step in self.order if step != self.step] + [self.step]
        self.losses[self.step] = float(loss)
        self.manager.wait()

    def fail(self, more: int, _: int) -> None:
        with pytest.raises(hf.CheckpointError):
            self.manager.save(self.step + more, {"w": lambda: None})

    def crash_in_save(self, more: int, _: int) -> None:
        folder = self.root / f"step-{self.step + more}"
        if not folder.exists():  # what a process leaves that was killed before its commit
            folder.mkdir()
            (folder / "__0_0-0123456789ab.distcp").write_bytes(b"half")

    def crash_in_prune(self, at: int, _: int) -> None:
        doomed = self.manager.prune(dry_run=True)
        if not doomed:
            return
        folder = self.root / f"step-{doomed[0]}"
        names = sorted(set(os.listdir(folder)) - {".metadata"})
        quoted = ", ".join(f'"{name}"' for name in names)
        (self.root / f".holdfast-deleting-{folder.name}").write_text(f'{{"files": [{quoted}]}}')
        if at > 0:
            (folder / ".metadata").unlink()
            self.order.remove(doomed[0])
        if at > 1:
            (folder / names[0]).unlink()

    def go_back(self, at: int, _: int) -> None:
        if len(self.order) > at:
            self.step = self.order[at]
            self.manager = self.make()

    def damage_newest(self, how: int, _: int) -> None:
        if len(self.order) < 2:
            return
        step = self.order.pop()
        folder = self.root / f"step-{step}"
        (data,) = [name for name in data_files(folder) if "0123456789ab" not in name]
        if how == 0:
            (folder / data).unlink()
        elif how == 1:
            os.truncate(folder / data, 100)
        else:
            (folder / ".metadata").write_bytes(b"")

    def clock(self, seconds: int, _: int) -> None:
        for step in self.order[-1:]:
            path = self.root / f"step-{step}" / ".metadata"
            time = path.stat().st_mtime + seconds
            if time > 0:
                os.utime(path, (time, time))

    def prune(self, _: int, __: int) -> None:
        self.manager.prune()

    def restart(self, _: int, __: int) -> None:
        self.manager = self.make()
        state = {"w": torch.zeros(4), "n": -1}
        restored = self.manager.restore(state)
        assert (restored.step if restored else None) == (self.order[-1] if self.order else None)
        assert restored is None or state["n"] == restored.step
        self.step = max(self.step, *self.order, 0)

    def other_manager(self, _: int, __: int) -> None:
        self.other.prune()
        self.other, self.manager = self.manager, self.other

    def check(self) -> None:
        there = [step for step in self.manager.steps() if step in self.order]
        if self.order:
            newest = self.order[-1]
            assert newest in there, "the newest sound step was deleted"
            state = {"w": torch.zeros(4), "n": -1}
            hf.load(state, checkpoint_id=self.root / f"step-{newest}")
            assert state["n"] == newest
        self.order = [step for step in self.order if step in there]

    def check_at_the_end(self) -> None:
        self.restart(0, 0)
        self.manager.prune()
        self.check()
        if not self.order:
            return
        there = self.manager.steps()
        assert set(there) >= set(self.order)  # damage of a step that is not the newest is not looked for
        known = {step: self.losses[step] for step in self.order}
        best = self.manager.best("loss")
        assert best not in known or known[best] == min(known.values())
        assert len(there) <= 2 + 1 + sum(step % 50 == 0 for step in there) + 1
        assert not [name for name in os.listdir(self.root) if "deleting" in name]


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((4,), float(step)), "n": step}


def live(moves: list[tuple[str, int, int]]) -> None:
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        history = History(root)
        for name, first, second in moves:
            getattr(history, name.replace(" ", "_"))(first, second)
            history.check()
        history.check_at_the_end()
    finally:
        shutil.rmtree(root)


RELAXED = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None, derandomize=True
)


@pytest.mark.slow
@pytest.mark.one_core
@settings(RELAXED, max_examples=40)
@given(MOVES)
def test_whatever_happens_the_newest_sound_step_stays_and_is_found(moves: list[tuple[str, int, int]]) -> None:
    live(moves)


@pytest.mark.slow
@pytest.mark.soak
@settings(RELAXED, max_examples=10_000, derandomize=False)
@given(MOVES)
def test_ten_thousand_histories(moves: list[tuple[str, int, int]]) -> None:
    live(moves)
