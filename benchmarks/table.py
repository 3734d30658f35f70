"""The results as a table, and its place in the page that shows it."""

from pathlib import Path

from benchmarks.case import SIDES, Goal
from benchmarks.results import CaseResult, Results, Row, Spread

__all__ = ["BEGIN", "END", "render", "rewrite_page"]

BEGIN = "<!-- table: written by python -m benchmarks --table -->"
END = "<!-- end of table -->"


def render(results: Results) -> str:
    """Markdown: what it was measured on, a row for each quantity, the other sides, and the notes."""
    lines = [*_setting(results), "", *_head()]
    for case in results.cases:
        lines += _case_lines(case)
    for case in results.cases:
        lines += _everybody(case)
    notes = [f"- `{case.name}`: {case.note}." for case in results.cases if case.note]
    if notes:
        lines += ["", *notes]
    return "\n".join(lines) + "\n"


def _setting(results: Results) -> list[str]:
    machine = results.machine
    highest = max([results.load_average_before, *(max(case.load_average) for case in results.cases)])
    others = max((case.others for case in results.cases if case.others is not None), default=0.0)
    peers = "".join(f"{name} {found}, " for name, found in machine.peers.items())
    made_of = (
        f"holdfast {machine.holdfast}, torch {machine.torch}, {peers}zstandard {machine.zstandard}, "
        f"Python {machine.python}; {machine.cores} cores ({machine.cpu}), {machine.memory_gib:g} GiB of "
        f"memory, {machine.file_system}, {machine.kernel}."
    )
    busy = (
        f"Load average {results.load_average_before:.2f} before the run, {highest:.2f} at its highest "
        f"(with the benchmark itself); up to {others:.2f} cores were busy with something else during a case."
    )
    lines = [f"{machine.date}, `{machine.command}`", "", made_of, "", busy]
    if results.load_average_before > 1:
        lines.append("**The machine was busy with other work: expect other figures on a quiet one.**")
    if results.scale != 1:
        lines.append(f"**Sizes were multiplied by {results.scale:g}: the goals are for full sizes.**")
    return lines


def _head() -> list[str]:
    columns = ["case", "quantity", *SIDES, "ratio of bests", "ratio by round", "goal"]
    return [_line(columns), _line(["---"] * 2 + ["---:"] * 5)]


def _case_lines(case: CaseResult) -> list[str]:
    name = f"`{case.name}`: {case.title}"
    reason = f"skipped: {case.skipped}" if case.skipped else f"failed: {case.failed}" if case.failed else ""
    if reason:
        return [_line([name, reason, "", "", "", "", ""])]
    return [_line([name if number == 0 else "", *_cells(row)]) for number, row in enumerate(case.rows)]


def _everybody(case: CaseResult) -> list[str]:
    """A second table, if there were further sides than those that have columns in the first."""
    measured = {side: None for row in case.rows for side in row.samples}
    if not case.absent and len(measured) <= len(SIDES):
        return []
    lines = ["", f"`{case.name}`: the best round of everybody, and how many times ours it is", ""]
    lines.append(_line(["", *(row.quantity for row in case.rows)]))
    lines.append(_line(["---"] + ["---:"] * len(case.rows)))
    lines += [_line([side, *(_against_ours(row, side) for row in case.rows)]) for side in measured]
    lines += [_line([side, why, *[""] * (len(case.rows) - 1)]) for side, why in case.absent.items()]
    return lines


def _against_ours(row: Row, side: str) -> str:
    if side not in row.spread:
        return ""
    best, ours = row.spread[side].min, row.spread[SIDES[0]].min
    return f"{best:.3f} {row.unit}" + (f" ({best / ours:.2f}x)" if side != SIDES[0] else "")


def _cells(row: Row) -> list[str]:
    by_round = ""
    if len(row.ratios) > 1:
        by_round = f"{min(row.ratios):.2f} to {max(row.ratios):.2f}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
    if ratio and row.goal is not None:
        ratio += " of middles" if row.goal.typically else ""
        ratio += "" if row.goal.against == SIDES[1:] else f" of {_names(row.goal)}"
    spreads = [_spread(row.spread[side], row.unit) if side in row.spread else "" for side in SIDES]
    return [row.quantity, *spreads, ratio, by_round, _goal(row.goal, row.unit, row.met)]


def _spread(spread: Spread, unit: str) -> str:
    digits = 0 if unit in {"MiB", "bytes", "requests"} else 3
    shown = [f"{value:,.{digits}f}" for value in (spread.min, spread.median, spread.max)]
    return f"{shown[0] if len(set(shown)) == 1 else ' / '.join(shown)} {'' if '/' in unit else unit}".strip()


def _goal(goal: Goal | None, unit: str, met: bool | None) -> str:
    if goal is None:
        return ""
    if goal.times is not None:
        wanted = f"{goal.times:g}x"
    elif goal.within is not None:
        wanted = f"at most {goal.within:g} times {_names(goal)}"
    else:
        wanted = f"at most {goal.at_most:g} {'' if '/' in unit else unit}".strip()
        wanted += " in half of the rounds" if goal.typically else ""
    return f"{wanted}: {'not measured' if met is None else 'reached' if met else '**missed**'}"


def _names(goal: Goal) -> str:
    return " or ".join(goal.against)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def rewrite_page(page: Path, results: Results) -> None:
    """Put the table between the page's two marks. Raises ValueError if it does not have them once each."""
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{page} must have the line {BEGIN} once and after it the line {END} once")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{render(results)}\n{END}{after}", encoding="utf-8")
