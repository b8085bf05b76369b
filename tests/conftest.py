"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # tests run beside many other jobs
settings.load_profile("any machine")
