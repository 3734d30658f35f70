"""Keeping Python's garbage collector out of the way of planning."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Run a with-block, or a function that it decorates, without garbage collection.

    A plan is up to millions of small records, none of them garbage and none in a cycle. The collector
    would look at all of them again and again while they are made. Only planning is short enough: whoever
    reads or writes files, or waits for other ranks, must let the garbage of the training program go.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
