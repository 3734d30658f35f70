"""Settings of all tests."""

from hypothesis import settings

# Speed is never a test: a busy machine must not fail one.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")
