"""The command: ``python -m benchmarks`` measures everything; ``--help`` says what else there is."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.case import Case
from benchmarks.catalog import all_cases
from benchmarks.machine import describe_machine
from benchmarks.results import Results, read_results, write_results
from benchmarks.runner import NoSpaceError, check_space, run_all, scratch_folder
from benchmarks.table import render, rewrite_page

__all__ = ["main"]

_OUTPUT = Path("bench-output")
_PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0 done, 1 a case failed, 2 it could not begin."""
    options = _parser().parse_args(arguments)
    if options.table:
        return _write_table(options.json, options.page)
    cases = all_cases(options.scale)
    names = {case.name for case in cases}
    unknown = [name for name in options.only or () if name not in names]
    if unknown:
        return _refuse(f"no case is called {', '.join(unknown)}; there are {', '.join(sorted(names))}")
    chosen = [case for case in cases if not options.only or case.name in options.only]
    if options.list:
        for case in chosen:
            print(f"{case.name:18} {case.title}")
        return 0
    return _measure(chosen, options)


def _measure(cases: list[Case], options: argparse.Namespace) -> int:
    # A terminated run removes its files too.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        with scratch_folder(options.folder) as folder:
            check_space(cases, folder)
            before = os.getloadavg()[0]
            command = ["python", "-m", "benchmarks", *sys.argv[1:]]
            machine = describe_machine(folder, command)
            found = run_all(cases, scale=options.scale, rounds=options.rounds, folder=folder, say=_say)
    except NoSpaceError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        _say("interrupted; the files are removed and nothing was recorded")
        return 130
    results = Results(machine, options.scale, found, before)
    write_results(options.json, results)
    print(render(results))
    _say(f"written to {options.json}; --table puts it into {_PAGE.name}")
    return 1 if any(case.failed for case in found) else 0


def _write_table(source: Path, page: Path) -> int:
    try:
        rewrite_page(page, read_results(source))
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    _say(f"{page} now shows {source}")
    return 0


def _refuse(reason: str) -> int:
    print(f"benchmarks: {reason}", file=sys.stderr)
    return 2


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _exit_on_signal(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Holdfast side by side with torch.distributed.checkpoint, taking turns in one run.",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these cases")
    parser.add_argument("--scale", type=_positive, default=1.0, help="multiply all sizes by this (1)")
    parser.add_argument("--rounds", type=_count, metavar="N", help="rounds for every case (each has its own)")
    parser.add_argument(
        "--json",
        type=Path,
        default=_OUTPUT / "results.json",
        metavar="FILE",
        help="the results (%(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=_OUTPUT,
        metavar="DIR",
        help="where the files go for a while (%(default)s)",
    )
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument(
        "--table", action="store_true", help="put the results of --json into the page and end"
    )
    parser.add_argument("--page", type=Path, default=_PAGE, help=argparse.SUPPRESS)
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1000:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1000, not {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
