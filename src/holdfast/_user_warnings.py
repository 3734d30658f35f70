"""Warnings that point at the line of the program that called the package."""

import contextlib
import os
import sys
import threading
import warnings

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def warn_user(message: str) -> None:
    """Give a UserWarning at the first line outside of the package; inside of it if a thread of ours warns."""
    frame, level = sys._getframe(), 1  # noqa: SLF001 - skip_file_prefixes of warnings.warn needs Python 3.12
    # A function that is decorated by a context manager is called from contextlib.
    while frame.f_back and (
        frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_code.co_filename == contextlib.__file__
    ):
        frame, level = frame.f_back, level + 1
    if frame.f_code.co_filename == threading.__file__:
        level = 2
    warnings.warn(message, stacklevel=level)
