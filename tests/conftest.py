"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# The first example of a test may compile.
settings.register_profile("harts", deadline=None)
settings.load_profile("harts")
