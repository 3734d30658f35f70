"""What a run found: its numbers, what follows from them, and the file that keeps them."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.case import SIDES, Goal, Quantity, Samples
from benchmarks.machine import Machine

__all__ = ["CaseResult", "Results", "Row", "Spread", "read_results", "rows_of", "write_results"]

_WITHOUT_RATIO = {"MiB", "pages/page", "s/s"}


@dataclass(frozen=True)
class Spread:
    """The best, middle and worst of several samples; less is better."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, samples: list[float]) -> "Spread":
        """The spread of at least one sample."""
        return cls(min(samples), statistics.median(samples), max(samples))


@dataclass(frozen=True)
class Row:
    """The samples of one quantity, one for each round and side, and what follows from them.

    Attributes:
        samples: Of every side that was measured, the first ones being those of ``SIDES``.
        ratio: Their best by our best: so many times are we as good. Theirs is torch's, unless the goal names
            others; of the middle rounds, where the goal says so. None for memory and pages: what counts there
            is the bound, and either side may be next to zero. None as well if no other was measured, or
            we took nothing.
        ratios: The same for each round by itself. The turns of a round stand next to each other in time, so
            that their ratio is what the machine's other work disturbs least.
        met: Whether the goal is reached; None without a goal, or without anybody to compare with.
    """

    quantity: str
    unit: str
    samples: dict[str, list[float]]
    goal: Goal | None
    spread: dict[str, Spread]
    ratio: float | None
    ratios: list[float]
    met: bool | None

    @classmethod
    def of(cls, quantity: Quantity, samples: dict[str, list[float]]) -> "Row":
        """The row of a quantity whose sides have the same number of samples."""
        spread = {side: Spread.of(numbers) for side, numbers in samples.items()}
        goal = quantity.goal or Goal()
        others = [side for side in goal.against if side in samples]
        ratio, ratios = None, []
        if quantity.unit not in _WITHOUT_RATIO and others and spread[SIDES[0]].min > 0:
            shown = {side: found.median if goal.typically else found.min for side, found in spread.items()}
            ratio = min(shown[side] for side in others) / shown[SIDES[0]]
            theirs = map(min, zip(*(samples[side] for side in others), strict=True))
            ratios = [their / our for our, their in zip(samples[SIDES[0]], theirs, strict=True)]
        met = _is_met(quantity.goal, spread[SIDES[0]], ratio)
        return cls(quantity.name, quantity.unit, samples, quantity.goal, spread, ratio, ratios, met)


def _is_met(goal: Goal | None, ours: Spread, ratio: float | None) -> bool | None:
    if goal is None:
        return None
    if goal.at_most is not None:
        # A bound on memory or bytes must hold in every round, not in the best one or a usual one.
        return (ours.median if goal.typically else ours.max) <= goal.at_most
    if ratio is None:
        return None
    return ratio >= (goal.times or 0) if goal.within is None else 1 / ratio <= goal.within


@dataclass(frozen=True)
class CaseResult:
    """What one case gave, or why it gave nothing.

    Attributes:
        skipped: Why it could not be measured here.
        failed: What went wrong.
        load_average: The system's, over one minute, when the case began and when it ended. It counts the
            benchmark too.
        others: Cores kept busy by something else meanwhile.
        absent: By side: why it was not measured.
    """

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    note: str = ""
    skipped: str | None = None
    failed: str | None = None
    seconds: float = 0
    load_average: tuple[float, float] = (0, 0)
    others: float | None = None
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """A whole run."""

    machine: Machine
    scale: float
    cases: list[CaseResult]
    load_average_before: float = 0


def rows_of(quantities: tuple[Quantity, ...], samples: Samples) -> list[Row]:
    """One row for each quantity, in their order."""
    return [Row.of(quantity, samples[quantity.name]) for quantity in quantities]


def write_results(path: Path, results: Results) -> None:
    """Write a run as JSON; what follows from the samples is in it too, for readers that do not calculate."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")


def read_results(path: Path) -> Results:
    """Read what ``write_results`` wrote. Raises ValueError if it is something else."""
    return msgspec.json.decode(path.read_bytes(), type=Results)
