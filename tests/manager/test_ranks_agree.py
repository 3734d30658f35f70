"""Managers of several ranks: one decision, one step, one answer."""

from pathlib import Path

import pytest
from tests.manager import rank_programs as programs
from tests.support.checkpoints import data_files, flip_bit
from tests.support.ranks import rank_processes, run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("signalled", "lock_step"),
    [(0, True), (2, False)],
    ids=["rank 0, in step", "rank 2, each at its own pace"],
)
def test_a_signal_to_one_rank_makes_all_save_the_same_step_and_end_well(
    tmp_path: Path, signalled: int, lock_step: bool
) -> None:
    found = rank_processes().run(
        programs.train_until_preempted, 3, str(tmp_path / "run"), signalled, lock_step, timeout=60
    )
    assert [one.status for one in found] == [0, 0, 0], found
    steps = {one.value[0] for one in found}
    assert len(steps) == 1, found
    assert all(one.value[1] == [*steps] for one in found)


def test_a_signal_during_an_evaluation_is_noticed_at_the_same_batch(tmp_path: Path) -> None:
    found = run_ranks(programs.evaluate_until_preempted, 3, str(tmp_path / "run"))
    assert [kind for kind, _ in found] == ["returned"] * 3, found
    assert len({value[0] for _, value in found}) == 1
    assert all(value[1] == [8] for _, value in found)


def test_the_clock_of_one_rank_decides_for_all(tmp_path: Path) -> None:
    found = run_ranks(programs.save_by_time, 2, str(tmp_path / "run"))
    assert found[0] == found[1]
    assert found[0][0] == "returned"
    assert len(found[0][1]) == 2


def test_a_damaged_newest_step_is_named_on_all_ranks_and_the_one_before_is_used(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert run_ranks(programs.save_steps, 2, str(root), [10, 20, 30])[0] == ("returned", [20, 30])
    for name in data_files(root / "step-30"):
        flip_bit(root / "step-30" / name, (root / "step-30" / name).stat().st_size // 2)
    found = rank_processes().run(programs.restore_damaged, 3, str(root), destroy=True)
    assert [one.value for one in found] == [(20, [30], 20.0, 20)] * 3, found
    assert all("step 30 cannot be restored" in one.stderr for one in found)
    assert (root / "step-30" / ".metadata").exists()


def test_a_run_that_cannot_note_that_it_goes_back_fails_to_save_on_all_ranks(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run_ranks(programs.save_steps, 2, str(root), [10, 20, 30])
    (root / ".holdfast-abandoned.json").mkdir()
    found = run_ranks(programs.save_steps, 2, str(root), [15])
    assert [kind for kind, _ in found] == ["raised"] * 2, found
    assert all("could not be noted" in str(error) for _, error in found), found
    assert sorted(path.parent.name for path in root.glob("*/.metadata")) == ["step-20", "step-30"]
