"""Cases of planning at scale: a thousand ranks and a thousand tensors, simulated without a network."""

import subprocess
import sys
from functools import partial

import msgspec

from benchmarks.case import SIDES, Case, Goal, Job, Quantity, Samples, interleave
from benchmarks.planning_fleet import Fleet, Layout
from benchmarks.planning_stages import Stages
from benchmarks.states import MIB

__all__ = ["planning_cases"]

_LAYOUTS: dict[str, tuple[Layout, str]] = {
    "planning": ("shards", "each divided over all ranks"),
    "planning-hsdp": ("hsdp", "each divided over half of the ranks, on the other half once more"),
    "planning-replicas": ("replicas", "each whole on every rank"),
}

_QUANTITIES = (
    Quantity("plan: dedup, describe, validate", "s"),
    Quantity("write .metadata", "s"),
    Quantity("read .metadata", "s"),
    Quantity("sum of these", "s", Goal(times=10)),
    Quantity("write .metadata, not for torch", "s"),
    Quantity("sum, not for torch", "s", Goal(times=20)),
    Quantity("unpack and pack messages", "s"),
    Quantity("load plan of a rank", "s"),
    Quantity("memory of the coordinator", "MiB", Goal(at_most=1024)),
    Quantity("a rank's offer and answer", "bytes"),
    Quantity("the same, unchanged second save", "bytes", Goal(at_most=1024)),
    Quantity("a rank's results", "bytes"),
    Quantity("size of .metadata", "bytes"),
)

_NOTE = (
    "ranks are simulated, the coordinator's work is not; torch's file is always for torch; garbage "
    "collection is on for torch, as its users have it, and paused for holdfast, as its save and load do"
)


def planning_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    # Even, for two replicas of shards.
    ranks, tensors = max(2, int(512 * scale) * 2), max(2, int(1000 * scale))
    return [
        Case(
            name,
            f"{ranks:,} simulated ranks with {tensors:,} tensors, {words}",
            _QUANTITIES,
            # Offers, and 170 bytes of .metadata for a shard on either side.
            500 * ranks * tensors,
            1,
            partial(_run, Fleet(layout, ranks, tensors)),
            _NOTE if layout == "shards" else "",
        )
        for name, (layout, words) in _LAYOUTS.items()
    ]


def _run(fleet: Fleet, job: Job) -> Samples:
    _play("offers", fleet, job)

    def act(side: str) -> dict[str, float]:
        found = msgspec.json.decode(_play(side, fleet, job), type=Stages)
        return dict(zip((quantity.name for quantity in _QUANTITIES), _figures(found), strict=True))

    return interleave(SIDES, act, rounds=job.rounds, name_of=str, say=job.say)


def _play(part: str, fleet: Fleet, job: Job) -> bytes:
    command = [sys.executable, "-m", "benchmarks.planning_side", part]
    command += [fleet.layout, str(fleet.ranks), str(fleet.tensors), str(job.folder)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


def _figures(found: Stages) -> list[float]:
    """In the order of the quantities."""
    seconds, nbytes = found.seconds, found.nbytes
    plan_and_read = seconds["plan"] + seconds["read"]
    return [
        seconds["plan"],
        seconds["write"],
        seconds["read"],
        plan_and_read + seconds["write"],
        seconds["write without"],
        plan_and_read + seconds["write without"],
        seconds["messages"],
        seconds["load plan"],
        found.memory / MIB,
        nbytes["offer"] + nbytes["answer"],
        nbytes["second save"],
        nbytes["results"],
        nbytes[".metadata"],
    ]
