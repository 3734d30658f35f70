"""A run in numbers: for each step its size, how long its save took, its metrics, and why it is kept."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from holdfast._format import metadata_file
from holdfast._format.manifest import decode
from holdfast._format.metadata_file import LARGEST_METADATA
from holdfast._format.names import METADATA
from holdfast._io import pool
from holdfast._io.store import FileSource
from holdfast._steps.policies import KeepPolicy, Policy, policies_in
from holdfast._steps.run_root import RunRoot
from holdfast._steps.step_list import Step, StepList
from holdfast._steps.step_metadata import METRICS, facts_of
from holdfast.errors import CheckpointError

__all__ = ["MOST_READ", "RunStep", "policy_text", "summarize_run"]

MOST_READ = 1000
"""Of how many steps, the newest, the size, duration and metrics are read: each takes two requests."""


class RunStep(NamedTuple):
    """One step of a run.

    Attributes:
        step: What is known without reading its files.
        nbytes: The size of its files; None if the folder could not be listed.
        seconds: How long its save took; None if that is not recorded.
        world_size: How many ranks saved it; None if that is not recorded.
        metrics: What it was saved with.
        reasons: Why it stays, in a few words each; empty if nothing keeps it.
    """

    step: Step
    nbytes: int | None
    seconds: float | None
    world_size: int | None
    metrics: Mapping[str, float]
    reasons: Sequence[str]


class _Read(NamedTuple):
    """The facts that were read of one step; None if unknown."""

    nbytes: int | None = None
    seconds: float | None = None
    world_size: int | None = None


def summarize_run(root: RunRoot, keep: KeepPolicy | None) -> list[RunStep]:
    """All steps of a root, the newest last. A step that cannot be read has less to tell.

    Args:
        root: The root.
        keep: By which policy steps are kept; None if the user did not say, as no file says it.
    """
    found = root.find_steps()
    needs_metrics = keep is not None and any(
        getattr(part, "needs_metrics", False) for part in policies_in(keep)
    )
    known = root.metadata.of(found.usable if needs_metrics else found.usable[-MOST_READ:], found.files)
    read: dict[str, _Read] = {}

    def read_step(step: Step) -> None:
        read[step.folder] = _read_step(root.open_step(step.folder), step)

    newest = found.steps[-MOST_READ:]
    pool.run([partial(read_step, step) for step in newest], threads=root.store.traits.requests_in_flight)
    reasons = _reasons(found, known, keep)
    return [
        RunStep(
            step,
            *read.get(step.folder, _Read()),
            metrics=known.get(step.number, {}).get(METRICS, {}),
            reasons=reasons.get(step.number, ()),
        )
        for step in found
    ]


def _read_step(place: FileSource, step: Step) -> _Read:
    try:
        nbytes = sum(place.list().values())
    except (CheckpointError, OSError):
        return _Read()
    if step.commit is None:
        return _Read(nbytes)
    path = f"{place.url}/{METADATA}"
    try:
        stored = metadata_file.split(place.read(METADATA, max_bytes=LARGEST_METADATA), path=path).manifest
        manifest = None if stored is None else decode(stored, path=path)
    except (CheckpointError, OSError):
        return _Read(nbytes)
    if manifest is None:
        return _Read(nbytes)
    return _Read(nbytes, manifest.record.seconds if manifest.record else None, manifest.world_size)


def _reasons(
    found: StepList, known: Mapping[int, Mapping[str, Mapping[str, float]]], keep: KeepPolicy | None
) -> dict[int, list[str]]:
    """For each step the reasons why a prune leaves it, in a few words each."""
    reasons: dict[int, list[str]] = {}
    usable = found.usable
    for step in found:
        if not step.is_usable:
            said = "damaged: left as it is" if step.commit else "incomplete: counts for nothing"
            reasons.setdefault(step.number, []).append(said)
        if step.is_pinned:
            reasons.setdefault(step.number, []).append("pinned")
    if usable:
        reasons.setdefault(usable[-1].number, []).append("the newest")
    facts = facts_of(usable, known)
    for part in policies_in(keep) if keep is not None else ():
        for number in part.keeps(facts) if isinstance(part, KeepPolicy) else ():
            reasons.setdefault(number, []).append(policy_text(part))
    return reasons


def policy_text(policy: Policy) -> str:
    """A policy as the user would write it: ``Last(3) | Best(2, 'loss')``."""
    return " | ".join(map(_part_text, policies_in(policy)))


def _part_text(part: Policy) -> str:
    given = [
        repr(value)
        for field in dataclasses.fields(part)  # type: ignore[arg-type]
        if (value := getattr(part, field.name)) not in (False, None) or value != field.default
    ]
    return f"{type(part).__name__}({', '.join(given)})"
