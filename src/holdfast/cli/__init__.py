"""The command ``holdfast``: looks into checkpoints, checks, compares, copies and converts them.

Results go to stdout, errors to stderr in one line. Only ``cp``, ``convert``, ``prune`` and ``clean`` change
anything on disk.
"""

import argparse
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence

from holdfast.cli.arguments import make_parser
from holdfast.cli.exit_codes import FINE, INTERRUPTED, NOBODY_READS, TERMINATED, complain, explain
from holdfast.errors import CheckpointError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Prints; raises nothing that a user can cause.

    Args:
        argv: The words after ``holdfast``; those of this process if None.
    """
    # A program that is started with closed streams has none: what it prints goes nowhere, as with /dev/null.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    parser = make_parser()
    try:
        arguments, rest = parser.parse_known_args(argv)
        # argparse gives globs that stand behind an option to nobody.
        if rest and (arguments.command != "ls" or any(word.startswith("-") for word in rest)):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
    except SystemExit as stop:
        return int(stop.code or 0)
    if arguments.command is None:
        parser.print_help()
        return FINE
    if rest:
        arguments.globs += rest
    # A checkpoint of 100,000 tensors makes a million objects that all live to the end; looking for garbage
    # among them takes a third of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _run(arguments)
    finally:
        if collecting:
            gc.enable()


def _run(arguments: argparse.Namespace) -> int:
    # A scheduler ends a command so: what it wrote is removed, as after Ctrl-C.
    before = signal.getsignal(signal.SIGTERM)
    is_ours = before is signal.SIG_DFL and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        # Each command brings what it needs, and only that.
        code = int(importlib.import_module(f"holdfast.cli.{arguments.command}").run(arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return NOBODY_READS
    except _Terminated:
        return complain("terminated", TERMINATED)
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)
    except (CheckpointError, OSError) as error:
        return explain(error)
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, before)
    return code


class _Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


def _terminate(*_: object) -> None:
    raise _Terminated


def _silence_stdout() -> None:
    """Whoever read our output is gone: let the interpreter's last flush go nowhere."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass
