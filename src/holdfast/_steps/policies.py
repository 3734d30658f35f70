"""Policies: which steps of a run are saved, and which are kept. Small frozen values, joined with ``|``.

``KeepPolicy.keeps`` is a pure function of what is known of the steps, ``WhenPolicy.wants`` of the step that
is being asked for. Neither looks at a clock of this machine: what depends on time or on a signal is a
property of the policy (``seconds``, ``signals``), and the ranks agree on it.
"""

import dataclasses
import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from holdfast._steps.durations import Duration, seconds_of
from holdfast.errors import UsageError

Metric: TypeAlias = str | Callable[[Mapping[str, Any]], float]
"""The name of a metric, or a function of all metrics of a step."""


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """The facts of a complete step that policies decide by.

    Attributes:
        number: The step.
        time: When it was committed, in seconds since 1970; None if the storage does not tell.
        metrics: What was passed as ``metrics`` when it was saved.
        is_pinned: Whether somebody has pinned it.
    """

    number: int
    time: float | None = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_pinned: bool = False


class SaveMoment(NamedTuple):
    """The facts of a step that may be saved. They are the same on every rank.

    Attributes:
        step: The step.
        is_first: Whether the run has no checkpoint, and this is the first step that is asked for.
        is_last: Whether the caller said that this is the last step.
    """

    step: int
    is_first: bool = False
    is_last: bool = False


class Policy:
    """A policy. Policies are joined with ``|``: a step is saved, or kept, if one of them says so."""

    def __or__(self, other: object) -> "AnyOf":
        if not isinstance(other, Policy):
            kinds = tuple(kind for kind in (KeepPolicy, WhenPolicy) if isinstance(self, kind))
            raise UsageError(
                f"{self!r} | {other!r}: {other!r} is no policy.{_what_was_meant(other, kinds)}", found=other
            )
        return AnyOf((*policies_in(self), *policies_in(other)))

    # Called only if the left side is no policy: the same mistake.
    __ror__ = __or__


class KeepPolicy(Policy):
    """Says which steps are kept. Subclasses of users work, too."""

    needs_metrics = False

    def keeps(self, steps: Sequence[StepFacts]) -> Iterable[int]:
        """The numbers of the steps to keep.

        Args:
            steps: All complete steps, in the order in which the run saved them: the newest is the last.
        """
        raise NotImplementedError


class WhenPolicy(Policy):
    """Says when a step is saved."""

    def wants(self, moment: SaveMoment) -> bool:  # noqa: ARG002 - what ranks must agree on is decided elsewhere
        """Whether the step is to be saved, as far as every rank can know it by itself."""
        return False


@dataclasses.dataclass(frozen=True)
class AnyOf(KeepPolicy, WhenPolicy):
    """Several policies joined with ``|``: a step counts if one of them wants it."""

    policies: tuple[Policy, ...]

    def keeps(self, steps: Sequence[StepFacts]) -> Iterable[int]:
        """The steps that one of the policies keeps."""
        return {
            number for part in self.policies if isinstance(part, KeepPolicy) for number in part.keeps(steps)
        }

    def wants(self, moment: SaveMoment) -> bool:
        """Whether one of the policies wants the step."""
        return any(part.wants(moment) for part in self.policies if isinstance(part, WhenPolicy))


@dataclasses.dataclass(frozen=True)
class Last(KeepPolicy, WhenPolicy):
    """As ``keep=Last(3)``: the newest 3 steps. As ``when=Last()``: the step that is called the last.

    The last step is the one for which ``should_save(step, last=True)`` is called.
    """

    count: int = 1

    def __post_init__(self) -> None:
        _check_positive("Last", self.count)

    def keeps(self, steps: Sequence[StepFacts]) -> Iterable[int]:
        """The newest steps."""
        return [step.number for step in steps[-self.count :]]

    def wants(self, moment: SaveMoment) -> bool:
        """Whether this is the last step."""
        return moment.is_last


@dataclasses.dataclass(frozen=True)
class Every(KeepPolicy):
    """Keep one step of each interval, for ever.

    ``Every(1000)`` keeps the steps that are multiples of 1000. ``Every(1000, nearest=True)`` keeps the first
    step at or after each multiple, for runs that do not save exactly there. ``Every("6h")`` keeps steps that
    were saved at least six hours after the one kept before; a jump of the clock may keep one more.
    """

    interval: int | str
    nearest: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.interval, str):
            seconds_of(self.interval)
        else:
            _check_positive("Every", self.interval)

    def keeps(self, steps: Sequence[StepFacts]) -> Iterable[int]:
        """One step of each interval."""
        if isinstance(self.interval, str):
            return _spaced(steps, seconds_of(self.interval))
        if not self.nearest:
            return [step.number for step in steps if step.number % self.interval == 0]
        first: dict[int, int] = {}
        for number in sorted(step.number for step in steps):
            first.setdefault(number // self.interval, number)
        return first.values()


@dataclasses.dataclass(frozen=True)
class Best(KeepPolicy):
    """Keep the steps with the best values of a metric: the lowest, or with ``highest=True`` the highest.

    Of equal ones the newer is better. Steps without the metric, or with NaN, are not kept by this.
    """

    count: int
    metric: Metric
    highest: bool = False
    needs_metrics = True

    def __post_init__(self) -> None:
        _check_positive("Best", self.count)
        if not isinstance(self.metric, str) and not callable(self.metric):
            raise UsageError(f'Best needs the name of a metric, as in Best(2, "loss"), not {self.metric!r}')

    def keeps(self, steps: Sequence[StepFacts]) -> Iterable[int]:
        """The best steps."""
        return [step.number for step in self.sorted(steps)[: self.count]]

    def sorted(self, steps: Sequence[StepFacts]) -> list[StepFacts]:
        """The steps that have the metric, the best first."""
        values = [(self._value(step), at, step) for at, step in enumerate(steps)]
        known = [(value, at, step) for value, at, step in values if value is not None]
        known.sort(key=lambda found: (-found[0] if self.highest else found[0], -found[1]))
        return [step for _, _, step in known]

    def _value(self, step: StepFacts) -> float | None:
        try:
            value = step.metrics[self.metric] if isinstance(self.metric, str) else self.metric(step.metrics)
            number = float(value)
        except (KeyError, TypeError, ValueError):
            return None
        return None if math.isnan(number) else number


@dataclasses.dataclass(frozen=True)
class Within(KeepPolicy):
    """Keep the steps that were saved within a time before the newest one, such as ``Within("24h")``.

    The time counts back from the newest step and not from now: a clock that is wrong, or a run that stands
    still for a week, deletes nothing.
    """

    duration: Duration

    def __post_init__(self) -> None:
        seconds_of(self.duration)

    def keeps(self, steps: Sequence[StepFacts]) -> Iterable[int]:
        """The steps that are not too old. One whose time is not known is not."""
        newest = next((step.time for step in reversed(steps) if step.time is not None), None)
        if newest is None:
            return [step.number for step in steps]
        oldest = newest - seconds_of(self.duration)
        return [step.number for step in steps if step.time is None or step.time >= oldest]


@dataclasses.dataclass(frozen=True)
class Steps(KeepPolicy, WhenPolicy):
    """Keep, or save, these steps: ``Steps({10, 100, 1000})``."""

    numbers: frozenset[int]

    def __init__(self, numbers: Iterable[int]) -> None:
        passed: object = numbers
        given: list[Any] = list(passed) if isinstance(passed, Iterable) else [None]
        if not all(type(number) is int and number >= 0 for number in given):
            raise UsageError(
                f"Steps takes whole numbers of 0 or more, as in Steps({{10, 100}}), not {numbers!r}",
                found=numbers,
            )
        object.__setattr__(self, "numbers", frozenset(given))

    def keeps(self, steps: Sequence[StepFacts]) -> Iterable[int]:
        """Those of the steps that there are."""
        return self.numbers.intersection(step.number for step in steps)

    def wants(self, moment: SaveMoment) -> bool:
        """Whether this is one of the steps."""
        return moment.step in self.numbers


@dataclasses.dataclass(frozen=True)
class Pinned(KeepPolicy):
    """Keep what is pinned. Every manager does so; this says it, as in ``keep=Pinned()``."""

    def keeps(self, steps: Sequence[StepFacts]) -> Iterable[int]:
        """The pinned steps."""
        return [step.number for step in steps if step.is_pinned]


@dataclasses.dataclass(frozen=True)
class All(KeepPolicy):
    """Keep everything: the default."""

    def keeps(self, steps: Sequence[StepFacts]) -> Iterable[int]:
        """All steps."""
        return [step.number for step in steps]


@dataclasses.dataclass(frozen=True)
class EverySteps(WhenPolicy):
    """Save the steps that are multiples of a number."""

    interval: int

    def __post_init__(self) -> None:
        _check_positive("EverySteps", self.interval)

    def wants(self, moment: SaveMoment) -> bool:
        """Whether the step is a multiple."""
        return moment.step % self.interval == 0


@dataclasses.dataclass(frozen=True)
class First(WhenPolicy):
    """Save the first step of a run that has no checkpoint yet."""

    def wants(self, moment: SaveMoment) -> bool:
        """Whether it is the first step."""
        return moment.is_first


@dataclasses.dataclass(frozen=True)
class EverySeconds(WhenPolicy):
    """Save when so much time has passed since the last save began, by the clock of rank 0."""

    interval: Duration

    def __post_init__(self) -> None:
        seconds_of(self.interval)

    @property
    def seconds(self) -> float:
        """The interval in seconds."""
        return seconds_of(self.interval)


@dataclasses.dataclass(frozen=True)
class Continuous(WhenPolicy):
    """Save as soon as the last save is durable, and at least so many seconds after it began."""

    min_seconds: Duration = 0

    def __post_init__(self) -> None:
        seconds_of(self.min_seconds)

    @property
    def seconds(self) -> float:
        """The shortest interval in seconds."""
        return seconds_of(self.min_seconds)


@dataclasses.dataclass(frozen=True)
class Preempted(WhenPolicy):
    """Save, and tell the caller to end, when a signal comes to any one rank: by default SIGTERM."""

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "signals", tuple(signal.Signals(number) for number in self.signals))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"Preempted takes a tuple of signals, as in Preempted((signal.SIGUSR1,)): {error}"
            ) from None


def steps_to_delete(keep: KeepPolicy, steps: Sequence[StepFacts]) -> list[int]:
    """The steps that a policy does not keep, the oldest first. Never the newest one, and none that is pinned.

    Args:
        keep: The policy.
        steps: The complete and sound steps in the order of the run, the newest last. Others count for
        nothing.
    """
    if not steps:
        return []
    kept = {*keep.keeps(steps), steps[-1].number, *(step.number for step in steps if step.is_pinned)}
    return [step.number for step in steps if step.number not in kept]


def check_policy(policy: object, kind: type[Policy], argument: str) -> None:
    """Raise UsageError if a policy, or a part of it, is not of the kind that an argument takes."""
    for part in policies_in(policy) if isinstance(policy, Policy) else [policy]:
        if isinstance(part, kind):
            continue
        other = {KeepPolicy: "when", WhenPolicy: "keep"}[kind]
        hint = f" It belongs into {other}=." if isinstance(part, Policy) else _what_was_meant(part, (kind,))
        raise UsageError(
            f"{argument}={policy!r}: {part!r} does not say "
            f"{'which steps to keep' if kind is KeepPolicy else 'when to save'}.{hint}",
            found=part,
        )


def _what_was_meant(found: object, kinds: Sequence[type[Policy]]) -> str:
    """What to write instead of something that is no policy, as the last sentence of an error; may be empty.

    Args:
        found: What is no policy.
        kinds: What is wanted: KeepPolicy, WhenPolicy, or what is both.
    """
    if isinstance(found, type) and issubclass(found, Policy):
        return f" Say which, as in {found.__name__}(...)."
    if isinstance(found, list | tuple | set | frozenset) and found:
        if all(isinstance(part, Policy) for part in found):
            return f" Join policies with |: {' | '.join(map(repr, found))}."
        return f" Did you mean Steps({found!r})?" if all(type(part) is int for part in found) else ""
    forms = {int: ("Last", "EverySteps"), str: ("Within", "EverySeconds")}.get(type(found), ())
    names = [form for form, kind in zip(forms, (KeepPolicy, WhenPolicy), strict=False) if kind in kinds]
    return f" Did you mean {' or '.join(f'{name}({found!r})' for name in names)}?" if names else ""


def policies_in(policy: Policy) -> tuple[Policy, ...]:
    """A policy as its parts: those that ``|`` has joined."""
    return policy.policies if isinstance(policy, AnyOf) else (policy,)


def unknown_metric(policy: Policy, steps: Sequence[StepFacts]) -> str | None:
    """In words, that a policy asks for the best of a metric that no step has: it keeps none. Else None."""
    there = sorted({name for step in steps for name in step.metrics})
    for part in policies_in(policy):
        if isinstance(part, Best) and isinstance(part.metric, str) and part.metric not in there:
            known = f"the metrics are {', '.join(there)}" if there else "no step has metrics"
            return f"no step has the metric {part.metric!r}; {known}"
    return None


def _spaced(steps: Sequence[StepFacts], seconds: float) -> list[int]:
    # In the order of the run, not of time: then a step that was kept once stays kept, however clocks jump.
    kept, last = list[int](), -math.inf
    for step in steps:
        if step.time is None or abs(step.time - last) >= seconds:
            kept.append(step.number)
            last = step.time if step.time is not None else last
    return kept


def _check_positive(what: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise UsageError(f"{what} takes a whole number of 1 or more, not {number!r}", found=number)
