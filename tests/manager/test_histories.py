"""Random histories of a run: the newest sound step stays and loads, and counts stay within the policy.

Crashes are real: a forked process saves and prunes, and kills itself at one of its system calls.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.checkpoints import data_files
from tests.support.kills import run_and_kill

import holdfast as hf
from holdfast.manager import Best, CheckpointManager, Every, KeepPolicy, Last, Within

HOUR = 3600
KEEP: list[KeepPolicy] = [
    Last(1),
    Last(2) | Best(1, "loss") | Every(50),
    Best(3, "loss"),
    Last(1) | Within("24h"),
    Last(1) | Every("6h"),
]
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(1, 20), st.integers(0, 5)),
        st.tuples(st.just("save in the background"), st.integers(1, 20), st.integers(0, 5)),
        st.tuples(st.just("fail"), st.integers(1, 20), st.just(0)),
        st.tuples(st.just("crash in save"), st.integers(1, 20), st.integers(1, 160)),
        st.tuples(st.just("crash in prune"), st.integers(1, 60), st.just(0)),
        st.tuples(st.just("go back"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("damage newest"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("clock"), st.integers(-40 * HOUR, 40 * HOUR), st.just(0)),
        st.tuples(st.just("pin"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("prune"), st.just(0), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
        st.tuples(st.just("other manager"), st.just(0), st.just(0)),
    ),
    min_size=1,
    max_size=14,
)
HISTORIES = st.tuples(st.integers(0, len(KEEP) - 1), MOVES)


class History:
    """A run whose root is changed as crashes, clocks and other managers do, with what must be true of it."""

    def __init__(self, root: Path, keep: KeepPolicy) -> None:
        self.root = root
        self.keep = keep
        self.step = 0
        self.clock_is_off_by = 0.0
        self.complete: set[int] = set()
        self.left_behind: set[int] = set()  # complete, and from before the run went back
        self.damaged: dict[int, int] = {}  # how
        self.known_damage: set[int] = set()
        self.pinned: set[int] = set()
        self.losses: dict[int, float] = {}
        self.times: dict[int, float] = {}
        self.newest_of: dict[CheckpointManager, int | None] = {}
        self.manager, self.other = self.make(), self.make()

    def make(self) -> CheckpointManager:
        manager = CheckpointManager(self.root, keep=self.keep)
        self.newest_of[manager] = self.counted()[-1] if self.counted() else None
        return manager

    # What must be true.

    def order(self) -> list[int]:
        return sorted(self.complete, key=lambda step: (step not in self.left_behind, step))

    def sound(self) -> list[int]:
        return [step for step in self.order() if step not in self.damaged]

    def counted(self) -> list[int]:
        """What a policy counts: damage of steps that are not the newest is not looked for."""
        return [step for step in self.order() if step not in self.known_damage]

    def kept(self) -> set[int]:
        """What the policy keeps, computed in another way than the policies do."""
        counted = self.counted()
        while counted and counted[-1] in self.damaged:
            counted.pop()
        if not counted:
            return set()
        times = self.times
        losses = {step: self.losses[step] for step in counted if self.damaged.get(step) != 2}
        ranked = sorted(losses, key=lambda step: (losses[step], -counted.index(step)))
        spaced, last = list[int](), -math.inf
        for step in counted:
            if abs(times[step] - last) >= 6 * HOUR:
                spaced, last = [*spaced, step], times[step]
        by_policy = [
            [],
            [*counted[-2:], *ranked[:1], *(step for step in counted if step % 50 == 0)],
            ranked[:3],
            [step for step in counted if times[step] >= times[counted[-1]] - 24 * HOUR],
            spaced,
        ]
        return {counted[-1], *by_policy[KEEP.index(self.keep)], *(self.pinned & set(counted))}

    def commit_file(self, step: int) -> Path:
        return self.root / f"step-{step}" / ".metadata"

    def check(self) -> None:
        there = {step for step in self.complete if self.commit_file(step).exists()}
        assert self.kept() <= there, "a step was deleted that the policy keeps"
        assert set(self.damaged) & self.known_damage <= there, (
            "a step that is known to be damaged was touched"
        )
        self.forget(self.complete - there)
        if self.sound():
            self.check_loads(self.sound()[-1])

    def check_loads(self, step: int) -> None:
        state = {"w": torch.zeros(4), "n": -1}
        hf.load(state, checkpoint_id=self.root / f"step-{step}")
        assert state["n"] == step

    def check_at_the_end(self) -> None:
        self.restart(0, 0)
        self.manager.prune()
        self.check()
        there = set(self.manager.steps())
        most = self.kept() | set(self.damaged)
        assert there <= most, "more stays than the policy keeps"
        # Best of a restarted run is the best that there is.
        known = {step: self.losses[step] for step in there if self.damaged.get(step) != 2}
        assert not known or self.losses[self.manager.best("loss") or 0] == min(known.values())
        assert not [name for name in os.listdir(self.root) if "deleting" in name]

    # What happens.

    def note_save(self, step: int, loss: float, newest: int | None) -> None:
        if newest is not None and step < newest:
            self.left_behind |= {other for other in self.complete if other > step}
        self.complete.add(step)
        self.left_behind.discard(step)
        self.damaged.pop(step, None)
        self.known_damage.discard(step)
        self.losses[step] = loss
        self.times[step] = self.commit_file(step).stat().st_mtime
        self.step = step

    def forget(self, gone: set[int]) -> None:
        self.complete -= gone
        self.left_behind -= gone
        self.known_damage -= gone
        self.pinned -= gone
        for step in gone:
            self.damaged.pop(step, None)

    def save(self, more: int, loss: int, *, in_background: bool = False) -> None:
        step, manager = self.step + more, self.manager
        save: Callable[..., Any] = manager.async_save if in_background else manager.save
        save(step, state_of(step), metrics={"loss": float(loss)})
        manager.wait()
        self.note_save(step, float(loss), self.newest_of[manager])
        self.newest_of[manager] = step
        self.check_loads(step)  # also if another manager has saved higher ones

    def save_in_the_background(self, more: int, loss: int) -> None:
        self.save(more, loss, in_background=True)

    def fail(self, more: int, _: int) -> None:
        with pytest.raises(hf.CheckpointError):
            self.manager.save(self.step + more, {"w": lambda: None})

    def crash_in_save(self, more: int, at: int) -> None:
        step, before = self.step + more, self.counted()

        def save() -> None:
            with CheckpointManager(self.root, keep=self.keep) as victim:
                victim.save(step, state_of(step), metrics={"loss": 1.0})

        version = version_of(self.commit_file(step))
        run_and_kill(save, at)
        if version_of(self.commit_file(step)) not in (None, version):
            self.note_save(step, 1.0, before[-1] if before else None)

    def crash_in_prune(self, at: int, _: int) -> None:
        victim = CheckpointManager(self.root, keep=self.keep)

        def prune() -> None:
            victim.prune()

        run_and_kill(prune, at)

    def go_back(self, at: int, _: int) -> None:
        if len(self.sound()) > at:
            self.step = self.sound()[at]
            self.manager = self.make()
            self.manager.restore({"w": torch.zeros(4), "n": -1}, self.step)

    def damage_newest(self, how: int, _: int) -> None:
        if len(self.sound()) < 2:
            return
        step = self.sound()[-1]
        folder = self.root / f"step-{step}"
        self.damaged[step] = how
        if how == 2:
            self.commit_file(step).write_bytes(b"")
            self.times[step] = self.commit_file(step).stat().st_mtime
            return
        for name in data_files(folder):  # those of saves that were killed, too
            if how == 0:
                (folder / name).unlink()
            else:
                os.truncate(folder / name, min(100, (folder / name).stat().st_size // 2))

    def clock(self, seconds: int, _: int) -> None:
        self.clock_is_off_by += seconds

    def pin(self, at: int, _: int) -> None:
        if len(self.sound()) > at:
            self.manager.pin(self.sound()[at])
            self.pinned.add(self.sound()[at])

    def prune(self, _: int, __: int) -> None:
        self.manager.prune()

    def restart(self, _: int, __: int) -> None:
        self.manager = self.make()
        state = {"w": torch.zeros(4), "n": -1}
        restored = self.manager.restore(state)
        sound = self.sound()
        assert (restored.step if restored else None) == (sound[-1] if sound else None)
        assert restored is None or state["n"] == restored.step
        tried = self.order()[self.order().index(sound[-1]) :] if sound else self.order()
        self.known_damage |= set(self.damaged) & set(tried)
        assert self.manager.latest() == (sound[-1] if sound else None)
        self.step = sound[-1] if sound else self.step

    def other_manager(self, _: int, __: int) -> None:
        self.other.prune()
        self.other, self.manager = self.manager, self.other


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((4,), float(step)), "n": step}


def version_of(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextmanager
def other_clock(history: History) -> Iterator[None]:
    """Commit files get the time of a clock that may be wrong."""

    def timed(call: Callable[..., None], old: Any, new: Any, **options: Any) -> None:
        call(old, new, **options)
        if os.path.basename(new) == ".metadata":
            folder = options.get("dst_dir_fd")
            time = os.stat(new, dir_fd=folder).st_mtime + history.clock_is_off_by
            os.utime(new, (time, time), dir_fd=folder)

    rename, link = os.rename, os.link
    os.rename, os.link = partial(timed, rename), partial(timed, link)
    try:
        yield
    finally:
        os.rename, os.link = rename, link


def live(keep: int, moves: list[tuple[str, int, int]]) -> None:
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        history = History(root, KEEP[keep])
        with other_clock(history):
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
@given(HISTORIES)
def test_whatever_happens_the_newest_sound_step_stays_and_is_found(
    history: tuple[int, list[tuple[str, int, int]]],
) -> None:
    live(*history)


@pytest.mark.slow
@pytest.mark.one_core
def test_a_deletion_that_was_cut_off_before_a_damaged_commit_file_went_is_over_at_the_next_prune() -> None:
    before = [("save", 1, 0), ("save", 1, 0), ("damage newest", 2, 0)]
    for at in range(50, 80):  # among them the calls of the deletion
        live(2, [*before, ("crash in save", 1, at), ("damage newest", 0, 0)])


@pytest.mark.slow
@pytest.mark.soak
@settings(RELAXED, max_examples=10_000, derandomize=False)
@given(HISTORIES)
def test_ten_thousand_histories(history: tuple[int, list[tuple[str, int, int]]]) -> None:
    live(*history)
