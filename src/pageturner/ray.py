"""`pageturner.ray:app` is the name that a configuration of Ray Serve uses for our application."""

from __future__ import annotations

from pageturner.router.ray import app

__all__ = ["app"]
