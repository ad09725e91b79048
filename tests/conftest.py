"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# The first example of a test may compile. Examples are the same in every run, so that a failure is a change's.
settings.register_profile("harts", deadline=None, derandomize=True)
settings.load_profile("harts")
