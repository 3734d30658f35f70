"""Owns the page of a run: its steps, their sizes, durations and metrics, what is kept and why."""

from collections.abc import Callable, Iterator, Sequence

from holdfast._human_units import rate_text, seconds_text, size_text
from holdfast.cli.pages.curve import curve
from holdfast.cli.pages.page import columns, facts, page, section, table, verdict
from holdfast.cli.run_steps import state_of, time_of, time_text
from holdfast.cli.run_summary import MOST_READ, RunStep
from holdfast.cli.text import counted

__all__ = ["run_page"]

_MOST_STEPS = 500
_MOST_METRICS = 12
_MOST_SHOWN = 4  # metrics in a line of the table


def run_page(place: str, steps: Sequence[RunStep], policy: str | None) -> str:
    """The page.

    Args:
        place: The root, as the user named it.
        steps: Its steps, the newest last.
        policy: By what the user says that steps are kept; None if nothing was said.
    """
    return page(place, f"a run of {counted(len(steps), 'step')}", _sections(steps, policy))


def _sections(steps: Sequence[RunStep], policy: str | None) -> Iterator[str]:
    sound = [one for one in steps if one.step.is_usable]
    yield _verdict(steps, sound)
    yield facts(_figures(steps, sound))
    metrics = list(dict.fromkeys(name for one in sound for name in one.metrics))
    yield columns(
        *_curve("Size", [(one.step.number, float(one.nbytes)) for one in sound if one.nbytes], _size),
        *_curve(
            "Duration of the saves",
            [(one.step.number, one.seconds) for one in sound if one.seconds is not None],
            seconds_text,
        ),
        *(
            drawn
            for name in metrics[:_MOST_METRICS]
            for drawn in _curve(
                f"Metric: {name}",
                [(one.step.number, one.metrics[name]) for one in sound if name in one.metrics],
                lambda value: f"{value:.6g}",
            )
        ),
    )
    yield _table(steps, policy)


def _verdict(steps: Sequence[RunStep], sound: Sequence[RunStep]) -> str:
    if not sound:
        return verdict("bad", "Nothing to restore", "No step is complete and sound.")
    newest = sound[-1].step
    damaged = [one.step.number for one in steps if one.step.commit and not one.step.is_usable]
    said = f"A restore begins with step {newest.number}."
    if damaged:
        names = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        return verdict("bad", "Damaged steps", f"{names}. {said}")
    said = f"It is complete. {said} Contents were not read for this page."
    return verdict("good", f"Step {newest.number} is the newest.", said)


def _figures(steps: Sequence[RunStep], sound: Sequence[RunStep]) -> dict[str, str]:
    figures = {
        "complete steps": f"{len(sound):,}",
        "incomplete": f"{sum(one.step.commit is None for one in steps):,}",
        "pinned": f"{sum(one.step.is_pinned for one in steps):,}",
        "on disk": size_text(sum(one.nbytes or 0 for one in steps))
        + (f" (newest {MOST_READ:,})" if len(steps) > MOST_READ else ""),
    }
    if sound:
        figures["newest saved"] = _when(sound[-1])
        if sound[-1].world_size is not None:
            figures["by ranks"] = f"{sound[-1].world_size:,}"
    return figures


def _curve(
    title: str, points: Sequence[tuple[int, float]], value_text: Callable[[float], str]
) -> Iterator[str]:
    if len(points) > 1:
        yield section(title, "", curve(points, value_text, label=f"{title} by step"))


def _size(value: float) -> str:
    return size_text(int(value))


def _table(steps: Sequence[RunStep], policy: str | None) -> str:
    about = (
        f"Kept by {policy}. Steps without a reason are deleted by the next prune."
        if policy
        else "The policy of the manager is not stored. Pass --last, --every, --within, --steps or --best to "
        "see what it keeps."
    )
    shown = steps[-_MOST_STEPS:]
    if len(shown) < len(steps):
        about += f" The {len(steps) - len(shown):,} oldest steps are not listed."
    head = ("step", "saved", "state", "size", "save took", "rate", "stays because", "metrics")
    rows = [_row(one) for one in reversed(shown)]
    return section(
        "Steps, the newest first", about, table(head, rows, keys=(6, 7), numbers=(3, 4, 5), stacked=True)
    )


def _row(one: RunStep) -> tuple[str, ...]:
    metrics = [f"{name}={value:.6g}" for name, value in list(one.metrics.items())[:_MOST_SHOWN]]
    state = state_of(one.step) + (", the run went back" if one.step.is_abandoned else "")
    rate = rate_text(one.nbytes / one.seconds) if one.nbytes and one.seconds else ""
    return (
        f"{one.step.number:,}",
        _when(one),
        state,
        size_text(one.nbytes),
        "" if one.seconds is None else seconds_text(one.seconds),
        rate,
        ", ".join(one.reasons),
        ", ".join(metrics),
    )


def _when(one: RunStep) -> str:
    return time_text(time_of(one.step.commit))
