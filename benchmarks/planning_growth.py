"""How the cost of planning grows: with the ranks of a job, and with the shards of one tensor.

``python -m benchmarks.planning_growth`` writes bench-output/planning.json and a picture of it;
``--help`` says what else there is.
"""

import argparse
import gc
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import planning_ours, planning_stock
from benchmarks.case import SIDES
from benchmarks.planning_fleet import Fleet, Layout
from benchmarks.planning_plot import Curve, Panel, draw
from benchmarks.planning_stages import Stages

__all__ = ["Growth", "main", "measure_growth", "panels_of"]

_FEWEST = 64
_DIVISIONS: dict[Layout, str] = {"rows": "#d33", "columns": "#27b", "grid": "#2a5"}
_OUTPUT = Path("bench-output")


@dataclass
class Growth:
    """What was measured.

    Attributes:
        tensors: How many tensors each job has, in ``jobs``.
        numbers: The numbers of ranks, or of shards.
        jobs: By side: the seconds of planning, writing and reading a job of so many ranks.
        shards: By side and division: the seconds of planning one tensor of so many shards.
    """

    tensors: int
    numbers: list[int]
    jobs: dict[str, list[float]] = field(default_factory=dict)
    shards: dict[str, dict[str, list[float]]] = field(default_factory=dict)


def measure_growth(numbers: Sequence[int], tensors: int, rounds: int, say: Callable[[str], None]) -> Growth:
    """Let both sides plan for every number; the best of the rounds counts."""
    found = Growth(tensors, list(numbers))
    found.jobs = {side: [] for side in SIDES}
    found.shards = {side: {division: [] for division in _DIVISIONS} for side in SIDES}
    for number in numbers:
        for side, seconds in _job_seconds(Fleet("shards", number, tensors), rounds).items():
            found.jobs[side].append(seconds)
        for division in _DIVISIONS:
            fleet = Fleet(division, number, 1)
            offers = [pickle.loads(pickle.dumps(offer)) for offer in planning_ours.offers_of(fleet)]
            plans = planning_stock.plans_of(fleet)
            ours = _seconds_of(planning_ours.plan_together, offers, rounds)
            theirs = _seconds_of(planning_stock.plan_together, plans, rounds)
            for side, seconds in zip(SIDES, (ours, theirs), strict=True):
                found.shards[side][division].append(seconds)
        line = (f"{side} {found.jobs[side][-1]:.3f} s" for side in SIDES)
        say(f"{number}: {tensors} tensors " + ", ".join(line))
    return found


def _job_seconds(fleet: Fleet, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        offers = Path(folder, "offers")
        planning_ours.write_offers(fleet, offers)
        best = dict.fromkeys(SIDES, float("inf"))
        for _ in range(rounds):
            for side in SIDES:
                place = Path(folder, side)
                stages = (
                    planning_ours.run_ours(fleet, offers, place)
                    if side == SIDES[0]
                    else planning_stock.run_stock(fleet, place)
                )
                best[side] = min(best[side], _whole(stages))
        return best


def _whole(stages: Stages) -> float:
    return sum(stages.seconds[stage] for stage in ("plan", "write", "read"))


def _seconds_of(plan: Callable[[list[Any]], object], plans: list[Any], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        gc.collect()
        start = time.perf_counter()
        plan(plans)
        best = min(best, time.perf_counter() - start)
    return best


def panels_of(growth: Growth) -> list[Panel]:
    """The picture: a job's whole time; and the time for each shard, level where the cost is linear."""
    jobs = [
        Curve(side, growth.jobs[side], colour, dashed=side != SIDES[0])
        for side, colour in zip(SIDES, ("#d33", "#27b"), strict=True)
    ]
    shards = [
        Curve(f"{side}, {division}", _each(seconds, growth.numbers), _DIVISIONS[division], side != SIDES[0])
        for division in _DIVISIONS
        for side, seconds in ((side, growth.shards[side][division]) for side in SIDES)
    ]
    title = f"Plan, write and read .metadata: {growth.tensors} tensors"
    return [
        Panel(title, "ranks, each with a shard of every tensor", "seconds", growth.numbers, jobs),
        Panel("Plan one tensor", "shards", "microseconds for each shard", growth.numbers, shards),
    ]


def _each(seconds: Sequence[float], numbers: Sequence[int]) -> list[float]:
    return [1e6 * second / number for second, number in zip(seconds, numbers, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning_growth", description=__doc__)
    parser.add_argument("--most", type=int, default=4096, help="the largest number of ranks (%(default)s)")
    parser.add_argument("--tensors", type=int, default=100, help="tensors of a job (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts (%(default)s)")
    parser.add_argument("--json", type=Path, default=_OUTPUT / "planning.json", metavar="FILE")
    parser.add_argument("--svg", type=Path, default=_OUTPUT / "planning.svg", metavar="FILE")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    doublings = range((options.most // _FEWEST).bit_length())
    numbers = [_FEWEST << doubling for doubling in doublings] or [options.most]
    growth = measure_growth(numbers, options.tensors, options.rounds, lambda line: print(line, flush=True))
    for file, text in ((options.json, _as_text(growth)), (options.svg, draw(panels_of(growth)))):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return 0


def _as_text(growth: Growth) -> str:
    return msgspec.json.format(msgspec.json.encode(growth), indent=2).decode() + "\n"


if __name__ == "__main__":
    sys.exit(main())
