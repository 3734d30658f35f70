"""``holdfast run``: a command whose Python processes all run on Holdfast."""

import argparse
import os
import sys

from holdfast.errors import UsageError

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Become the command, with ``HOLDFAST_INSTALL=1`` in its environment. Returns only if it cannot.

    Raises:
        UsageError: There is no such command.
    """
    words: list[str] = arguments.words
    if words[0] == "--" and len(words) > 1:
        words = words[1:]  # as other commands that run a command have it
    if words[0].endswith(".py"):
        words = [sys.executable, *words]
    sys.stdout.flush()
    try:
        os.execvpe(words[0], words, {**os.environ, "HOLDFAST_INSTALL": "1"})  # noqa: S606 - as the user asks
    except FileNotFoundError as error:
        raise UsageError(f"{words[0]}: there is no such command", found=words[0]) from error
