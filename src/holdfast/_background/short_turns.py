"""Short turns for the threads of Python while a save runs in the background."""

import contextlib
import sys
import threading
from collections.abc import Iterator

_TURN = 0.0005
"""Seconds after which a thread that wants to run interrupts another one. Python's own value is 5 ms."""

_lock = threading.Lock()
_count = 0
_before = 0.0


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Let the threads of this process take turns more often inside of a with-block, of any number of threads.

    A save needs the interpreter's lock for a moment after each buffer that it has copied or written. Beside a
    loop that never leaves Python it waits a whole turn for it each time. With a turn of 2 ms a save of 2 GiB
    took 3.1 s, with 0.5 ms 1.1 s, and the loop lost about as little in all: what costs it time is the number
    of exchanges.

    A shorter turn of the program's own stays, and so does one that it sets meanwhile.
    """
    global _count, _before  # noqa: PLW0603 - the interpreter has one such value, too
    with _lock:
        _count += 1
        if _count == 1:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, _TURN))
    try:
        yield
    finally:
        with _lock:
            _count -= 1
            if _count == 0 and sys.getswitchinterval() == min(_before, _TURN):
                sys.setswitchinterval(_before)
