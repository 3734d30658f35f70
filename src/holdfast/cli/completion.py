"""``holdfast completion``: the script by which a shell completes commands, options and paths."""

import argparse
import sys
from typing import Any

from holdfast.cli.arguments import make_parser
from holdfast.cli.exit_codes import FINE
from holdfast.errors import UsageError

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Print the script for a shell.

    Raises:
        UsageError: The package that makes such scripts is not installed.
    """
    try:
        import shtab  # noqa: PLC0415 - only this command needs it
    except ImportError as error:
        raise UsageError("completion needs shtab: pip install 'holdfast[cli]'") from error
    parser = make_parser()
    _complete_paths(parser, shtab.FILE)
    sys.stdout.write(shtab.complete(parser, shell=arguments.shell))
    return FINE


def _complete_paths(parser: argparse.ArgumentParser, way: Any) -> None:
    """Mark every argument of all commands that is a path."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to look at them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for command in action.choices.values():
                _complete_paths(command, way)
        elif action.metavar in {"PATH", "SOURCE", "TARGET", "ROOT", "FILE", "A", "B"}:
            action.complete = way  # type: ignore[attr-defined]
