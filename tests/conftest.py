"""Settings of all tests."""

import signal

from hypothesis import settings

# Speed is never a test: a busy machine must not fail one.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")

# A shell lets jobs in the background ignore Ctrl-C, and programs that the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
