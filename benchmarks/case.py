"""The words of the benchmark: a case, what it measures, and rounds in which the sides take turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

__all__ = ["SIDES", "Case", "Goal", "Job", "Quantity", "Samples", "SkippedError", "Unit", "interleave"]

SIDES = ("holdfast", "torch")
"""The sides that every case has: the order in which they take turns, and the order of columns."""

Unit = Literal["s", "MiB", "bytes", "bytes/byte", "pages/page", "s/GiB", "s/s", "requests"]

Samples = dict[str, dict[str, list[float]]]
"""By quantity, then by side: one number for each round, in the order of the rounds."""


class SkippedError(Exception):
    """A case cannot be measured here; the message is the reason that the table gives."""


@dataclass(frozen=True)
class Goal:
    """What holdfast should reach. One of the first three.

    Attributes:
        times: So many times as good as the others, comparing the best rounds.
        within: At most so many times what the others take, comparing the best rounds.
        at_most: At most so much, in every round.
        typically: Compare the middle rounds instead: for what the machine's own moods change as much.
        against: The others: the best of these sides counts.
    """

    times: float | None = None
    within: float | None = None
    at_most: float | None = None
    typically: bool = False
    against: tuple[str, ...] = SIDES[1:]


@dataclass(frozen=True)
class Quantity:
    """One number that a case measures for each side in each round; less is better."""

    name: str
    unit: Unit
    goal: Goal | None = None


@dataclass(frozen=True)
class Job:
    """What a case gets to run with.

    Attributes:
        folder: An empty folder of its own, removed afterwards.
        rounds: How many samples to take of each side.
        say: Prints one line of progress.
        absent: By side: why it could not be measured, for the table. The case fills it.
    """

    folder: Path
    rounds: int
    say: Callable[[str], None]
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Something to measure, with its sizes fixed.

    Attributes:
        name: What ``--only`` takes.
        title: What is saved or loaded, sizes included.
        quantities: What ``run`` returns samples of.
        disk_nbytes: The most that its files take at any time.
        rounds: How many are taken unless ``--rounds`` says otherwise.
        run: Measures. It raises SkippedError where that is not possible, and anything else if a side
            fails or loads wrong values.
        note: What a reader must know to compare the sides.
    """

    name: str
    title: str
    quantities: tuple[Quantity, ...]
    disk_nbytes: int
    rounds: int
    run: Callable[[Job], Samples]
    note: str = ""


S = TypeVar("S")


def interleave(
    sides: Sequence[S],
    act: Callable[[S], Mapping[str, float]],
    *,
    rounds: int,
    name_of: Callable[[S], str],
    say: Callable[[str], None],
) -> Samples:
    """Let the sides take turns, A B A B, so that whatever else the machine does falls on all alike.

    Args:
        sides: Who takes turns.
        act: One turn: returns what it measured, by quantity.
        rounds: How often each has its turn.
        name_of: A side's name.
        say: Gets one line after each round.
    """
    samples: Samples = {}
    for number in range(1, rounds + 1):
        line = []
        for side in sides:
            measured = act(side)
            for quantity, value in measured.items():
                samples.setdefault(quantity, {}).setdefault(name_of(side), []).append(value)
            line.append(
                name_of(side) + "".join(f"  {quantity} {value:.3f}" for quantity, value in measured.items())
            )
        say(f"round {number} of {rounds}:  " + "  |  ".join(line))
    return samples
