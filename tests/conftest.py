"""Settings for all tests."""

from hypothesis import settings

# A slow machine is not a failure: pytest-timeout bounds what hangs.
settings.register_profile("mtkit", deadline=None)
settings.load_profile("mtkit")
