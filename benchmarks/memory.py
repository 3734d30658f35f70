"""Cases of peak memory: what a save or a load takes besides the state, each in a process of its own."""

import subprocess
import sys
from functools import partial

from benchmarks.case import SIDES, Case, Goal, Job, Quantity, Samples
from benchmarks.states import KIB, MIB, BytesValue, State, Tensors, bulk

__all__ = ["memory_cases", "memory_contents"]

_BUDGET = Goal(at_most=256)


def memory_contents(scale: float) -> dict[str, tuple[str, State, State]]:
    """By the name of the case: what it is called, and what each side is given, in the order of SIDES."""

    def same(title: str, contents: State) -> tuple[str, State, State]:
        return f"{title}, {contents.nbytes / MIB:,.0f} MiB", contents, contents

    many = bulk(int(2048 * MIB * scale))
    views = Tensors(max(1, int(16 * scale)), (4096, max(1, int(4096 * min(1, 16 * scale)))), transposed=True)
    blobs = BytesValue(max(1, int(1024 * scale)) * MIB), BytesValue(max(1, int(128 * scale)) * MIB)
    small = Tensors(max(2, int(20_000 * scale)), (KIB,))
    return {
        "memory-many": same(f"{many.count} tensors", many),
        "memory-one": same("one tensor", Tensors(1, (max(1, int(512 * KIB * scale)), KIB))),
        "memory-views": same(f"{views.count} transposed views", views),
        "memory-bytes": (
            f"one bytes value, {blobs[0].nbytes / MIB:,.0f} MiB (torch: {blobs[1].nbytes / MIB:,.0f} MiB)",
            *blobs,
        ),
        "memory-small": same(f"{small.count:,} tensors of 4 KiB", small),
    }


def memory_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    cases = []
    for name, (title, ours, theirs) in memory_contents(scale).items():
        note = ""
        if ours.nbytes != theirs.nbytes:
            note = (
                "torch is given an eighth, since the whole takes it 9 GiB and a minute; what a load returns "
                "to its caller is not counted on either side"
            )
        cases.append(
            Case(
                name,
                f"extra memory, {title}",
                (Quantity("save", "MiB", _BUDGET), Quantity("load", "MiB", _BUDGET)),
                int(1.6 * (ours.nbytes + theirs.nbytes)),
                1,
                partial(_run, name, scale),
                note,
            )
        )
    return cases


def _run(name: str, scale: float, job: Job) -> Samples:
    samples: Samples = {"save": {side: [] for side in SIDES}, "load": {side: [] for side in SIDES}}
    for number in range(1, job.rounds + 1):
        for side in SIDES:
            # The load reads what the save of the same side left.
            folder = job.folder / f"{side}-{number}"
            for operation in samples:
                extra = _measure_apart(name, side, operation, str(folder), scale)
                samples[operation][side].append(extra)
                job.say(f"round {number} of {job.rounds}:  {side}  {operation} {extra:,.0f} MiB")
    return samples


def _measure_apart(name: str, side: str, operation: str, folder: str, scale: float) -> float:
    command = [sys.executable, "-m", "benchmarks.peak", name, side, operation, folder, str(scale)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout) / MIB
