"""The case of conversions: the memory that each takes, from every format into every other one."""

import itertools
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.case import Case, Goal, Job, Quantity, Samples
from benchmarks.states import KIB, MIB, Tensors

__all__ = ["FORMATS", "conversion_cases", "conversion_contents"]

FORMATS = ("holdfast", "torch", "torch_save", "safetensors")


def conversion_contents(scale: float) -> Tensors:
    """What is converted. Its tensors are larger than the pieces in which conversions read."""
    return Tensors(8, (max(1, int(128 * KIB * scale)), KIB))


def conversion_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    contents = conversion_contents(scale)
    return [
        Case(
            "convert-memory",
            f"extra memory of conversions, {contents.nbytes / MIB:,.0f} MiB in {contents.count} tensors",
            tuple(Quantity(_words(*pair), "MiB", Goal(at_most=512)) for pair in _directions()),
            int(2.1 * contents.nbytes),
            1,
            partial(_run, scale),
            "each conversion has a process of its own; what stock torch writes is the source called torch",
        )
    ]


def _directions() -> list[tuple[str, str]]:
    return list(itertools.permutations(FORMATS, 2))


def _words(source: str, target: str) -> str:
    return f"{source} to {target}"


def _run(scale: float, job: Job) -> Samples:
    samples: Samples = {_words(*pair): {"holdfast": []} for pair in _directions()}
    for _, source in itertools.product(range(job.rounds), FORMATS):
        place, target = job.folder / "source", job.folder / "target"
        _apart("make", source, place, target, scale)
        for format_ in FORMATS:
            if format_ != source:
                extra = _apart("convert", format_, place, target, scale) / MIB
                samples[_words(source, format_)]["holdfast"].append(extra)
                job.say(f"{_words(source, format_)} {extra:,.0f} MiB")
                _remove(target)
        _remove(place)
    return samples


def _apart(task: str, format_: str, source: Path, target: Path, scale: float) -> float:
    command = [sys.executable, "-m", "benchmarks.conversion_peak", task, format_]
    command += [str(source), str(target), str(scale)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()
