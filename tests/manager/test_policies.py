"""Policies as pure functions: what they keep, and when they want a save."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from holdfast._steps.policies import StepFacts, steps_to_delete
from holdfast._steps.step_names import StepNames, guess_names
from holdfast.errors import UsageError
from holdfast.manager import (
    All,
    Best,
    CheckpointManager,
    Every,
    EverySteps,
    KeepPolicy,
    Last,
    Pinned,
    Steps,
    Within,
)

HOUR = 3600.0

Manager: Any = CheckpointManager  # mypy would refuse what is tried here
LAST: Any = Last(2)
EVERY: Any = Every(2)
NAMED: Any = Steps


def steps(*numbers: int, hours: float = 1.0, **metrics: list[float]) -> list[StepFacts]:
    """Steps that were saved an hour after each other, with these metrics."""
    return [
        StepFacts(number, at * hours * HOUR, {name: values[at] for name, values in metrics.items()})
        for at, number in enumerate(numbers)
    ]


def kept(policy: KeepPolicy, given: list[StepFacts]) -> list[int]:
    gone = steps_to_delete(policy, given)
    return [step.number for step in given if step.number not in gone]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Last(2), [8, 10]),
        (Last(), [10]),
        (Every(4), [0, 4, 8, 10]),
        (Every(3, nearest=True), [0, 4, 6, 10]),
        (Every("2h"), [0, 4, 8, 10]),
        (Within("2h"), [6, 8, 10]),
        (Within(timedelta(hours=1)), [8, 10]),
        (Steps({2, 3}), [2, 10]),
        (Best(1, "loss"), [4, 10]),
        (Best(2, "loss", highest=True), [0, 8, 10]),
        (Best(1, lambda metrics: metrics["loss"] ** 2), [4, 10]),
        (Pinned(), [10]),
        (All(), [0, 2, 4, 6, 8, 10]),
        (Last(1) | Steps({0}) | Best(1, "loss"), [0, 4, 10]),
    ],
)
def test_what_a_policy_keeps(policy: KeepPolicy, expected: list[int]) -> None:
    given = steps(0, 2, 4, 6, 8, 10, loss=[9.0, 3, 1, float("nan"), 7, 5])
    assert kept(policy, given) == expected


def test_the_newest_is_kept_by_every_policy_in_whatever_order_a_run_saved() -> None:
    assert kept(Steps(set()), steps(30, 40, 10, 20)) == [20]
    assert kept(Best(1, "loss"), steps(1, 2)) == [2]


def test_pinned_steps_are_kept_by_every_policy() -> None:
    given = [StepFacts(1, is_pinned=True), StepFacts(2), StepFacts(3)]
    assert kept(Last(1), given) == [1, 3]


def test_of_equal_metrics_the_newer_step_is_better() -> None:
    assert kept(Best(1, "loss"), steps(1, 2, 3, 4, loss=[5.0, 5, 5, 9])) == [3, 4]


@pytest.mark.parametrize("jump", [-100, -1, 100])
def test_a_clock_that_jumps_makes_no_step_that_was_kept_before_one_to_delete(jump: int) -> None:
    given, stay = list[StepFacts](), set[int]()
    for number in range(40):
        hours = number / 2 + (jump if number >= 20 else 0)
        given = [step for step in given if step.number in stay or step is given[-1]]
        given.append(StepFacts(number, hours * HOUR))
        now = set(Every("3h").keeps(given))
        assert stay <= now
        stay = now
    assert 20 / 3 <= len(stay) + 1 <= 20 / 3 + 3


def test_policies_are_values() -> None:
    assert Last(3) | Every(10) == Last(3) | Every(10)
    assert len({Last(3), Last(3), Last(2)}) == 2
    assert repr(Last(3) | Within("1h")) == "AnyOf(policies=(Last(count=3), Within(duration='1h')))"


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: Last(0),
        lambda: Every(-1),
        lambda: Every("soon"),
        lambda: Within("-1h"),
        lambda: Best(1, None),  # type: ignore[arg-type]
        lambda: EverySteps(0),
        lambda: CheckpointManager("run", keep=EverySteps(3)),  # type: ignore[arg-type]
        lambda: CheckpointManager("run", when=Last(1) | Every(3)),
        lambda: CheckpointManager("run", keep=3),  # type: ignore[arg-type]
        lambda: CheckpointManager("run", name="step"),
        lambda: CheckpointManager("run", name="a/{step}"),
        lambda: CheckpointManager("run", name="v1{step}"),
        lambda: CheckpointManager("run", name="{step:x}{step}"),
    ],
)
def test_mistakes_are_refused(mistake: object) -> None:
    with pytest.raises(UsageError):
        mistake()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: Manager("run", keep=3), r"Did you mean Last\(3\)\?$"),
        (lambda: Manager("run", when=10), r"Did you mean EverySteps\(10\)\?$"),
        (lambda: Manager("run", keep="24h"), r"Did you mean Within\('24h'\)\?$"),
        (lambda: Manager("run", when="10m"), r"Did you mean EverySeconds\('10m'\)\?$"),
        (lambda: Manager("run", keep={10}), r"Did you mean Steps\(\{10\}\)\?$"),
        (lambda: Manager("run", keep=[Last(3), Every(9)]), r"Join policies with \|: Last\(count=3\) \| "),
        (lambda: Manager("run", keep=Last), r"as in Last\(\.\.\.\)"),
        (lambda: LAST | 3, r"3 is no policy\. Did you mean Last\(3\) or EverySteps\(3\)\?"),
        (lambda: 3 | EVERY, r"3 is no policy\. Did you mean Last\(3\)\?"),
        (lambda: EVERY | None, r"None is no policy\.$"),
        (lambda: Manager("run", keep=Last(2) | EverySteps(3)), r"EverySteps.* belongs into when="),
        (lambda: NAMED(5), r"as in Steps\(\{10, 100\}\), not 5"),
        (lambda: NAMED({"5"}), "whole numbers"),
    ],
)
def test_what_is_no_policy_is_answered_with_one(mistake: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        mistake()


@pytest.mark.parametrize(
    "form", ["step-{step}", "checkpoint-{step}", "{step}", "{step:08d}", "ep{step}-final"]
)
def test_names_lead_back_to_their_steps(form: str) -> None:
    names = StepNames(form)
    assert [names.step(names.folder(step)) for step in (0, 7, 12345)] == [0, 7, 12345]
    assert names.step("other") is None
    assert names.step(names.folder(3) + "x") is None


def test_names_are_guessed_from_what_is_there() -> None:
    assert guess_names(["checkpoint-1", "checkpoint-20", "runs", "step-3"]).form == "checkpoint-{step}"
    assert guess_names(["1", "2"]).form == "{step}"
