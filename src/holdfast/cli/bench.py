"""``holdfast bench``: how fast a place takes and gives checkpoints, and which settings fit it."""

import argparse
import sys
from typing import Any

from holdfast._human_units import rate_text, size_text
from holdfast.cli.exit_codes import FINE
from holdfast.cli.storage_trial import Settings, Trial, model_like
from holdfast.cli.text import Style, aligned, printable, write_json, write_lines

__all__ = ["run"]

_TRIED = (Settings(thread_count=2), Settings(thread_count=4), Settings(thread_count=8))
_WORTH_IT = 1.1
"""How much faster other settings must be to be recommended: below that it may be chance."""


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    with Trial(arguments.path, model_like(arguments.size)) as trial:
        seconds, raw = _measure(trial, arguments.rounds)
        document = _document(arguments.path, trial, seconds, raw, arguments.rounds)
    if arguments.json:
        write_json(document)
    else:
        write_lines(_lines(document))
    return FINE


def _measure(trial: Trial, rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds by case, and bytes a second of a plain file. Cases take turns, so that noise hits all alike."""
    cases: dict[str, Any] = {"save, holdfast": lambda: trial.save(Settings())}
    if trial.is_local:
        cases["save, torch"] = trial.save_with_torch
        cases |= {f"save, {settings}": (lambda s=settings: trial.save(s)) for settings in _TRIED}
        cases["cold load, holdfast"] = lambda: trial.load(cold=True)
        cases["cold load, torch"] = lambda: trial.load_with_torch(cold=True)
        cases["hot load, torch"] = lambda: trial.load_with_torch(cold=False)
    cases["hot load, holdfast" if trial.is_local else "load, holdfast"] = lambda: trial.load(cold=False)
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    raw: list[float] = []
    trial.warm_up()
    progress = Style(sys.stderr).is_terminal
    for number in range(rounds):
        if trial.is_local:
            raw.append(trial.raw_write())
        # The other way round every second time: what comes first may wait for what was written before.
        for case, act in list(cases.items())[:: -1 if number % 2 else 1]:
            if progress:
                sys.stderr.write(f"\r\033[Kround {number + 1} of {rounds}: {case}")
                sys.stderr.flush()
            seconds[case].append(act())
    if progress:
        sys.stderr.write("\r\033[K")
    return seconds, raw


def _document(
    place: str, trial: Trial, seconds: dict[str, list[float]], raw: list[float], rounds: int
) -> dict[str, Any]:
    cases = {
        case: {"seconds": sorted(found), "nbytes_per_second": trial.nbytes / min(found)}
        for case, found in seconds.items()
    }
    # Only what is faster in every round: a single quick one may be chance.
    faster = {
        str(settings): min(a / b for a, b in zip(seconds["save, holdfast"], found, strict=True))
        for settings in _TRIED
        if (found := seconds.get(f"save, {settings}"))
    }
    best = max(faster, key=lambda name: faster[name], default="")
    times = faster.get(best, 0.0)
    return {
        "schema": "holdfast.bench/1",
        "path": place,
        "nbytes": trial.nbytes,
        "rounds": rounds,
        "plain_file_nbytes_per_second": max(raw, default=None),
        "cases": cases,
        "recommended": best if times >= _WORTH_IT else "the defaults",
        "recommended_is_faster_by": round(times, 2) if times >= _WORTH_IT else 1.0,
    }


def _lines(document: dict[str, Any]) -> list[str]:
    style, cases = Style(sys.stdout), document["cases"]
    rows = [("", "holdfast", "torch", "holdfast is", "all rounds of holdfast")]
    for action in ("save", "cold load", "hot load", "load"):
        ours, theirs = cases.get(f"{action}, holdfast"), cases.get(f"{action}, torch")
        if ours is None:
            continue
        times = ours["nbytes_per_second"] / theirs["nbytes_per_second"] if theirs else None
        rows.append(
            (
                action,
                rate_text(ours["nbytes_per_second"]),
                rate_text(theirs["nbytes_per_second"]) if theirs else "not compared",
                f"{times:.1f}x" if times else "",
                ", ".join(f"{second:.2f} s" for second in ours["seconds"]),
            )
        )
    head = f"{document['path']}: {size_text(document['nbytes'])}, the best of {document['rounds']}"
    lines = [style.bold(printable(head)), *(f"  {line}" for line in aligned(rows, right=(1, 2, 3)))]
    raw = document["plain_file_nbytes_per_second"]
    if raw is not None:
        lines.append(f"  one plain file, written and flushed: {rate_text(raw)}")
    best = document["recommended"]
    if best == "the defaults":
        lines.append("  settings: the defaults fit")
    else:
        faster = document["recommended_is_faster_by"]
        lines.append(f"  settings: FileSystemWriter({best}) was at least {faster:.2f} times as fast")
    return lines
