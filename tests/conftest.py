"""Settings for all tests."""

import os

from hypothesis import settings

# A slow machine is not a failure: pytest-timeout bounds what hangs. A check of a change is to be repeatable; at a desk, each run tries new examples.
settings.register_profile("mtkit", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("mtkit")
