"""Ray Serve around our engine: replicas that Serve starts, watches and scales, and our placement
before them.

The only room that knows Ray (extra `ray`). `pageturner deploy` starts an application from a file
(deploy.py); `pageturner.ray:app` is what a Serve configuration names.
"""

from __future__ import annotations

from typing import Any


def app(args: dict[str, Any]) -> Any:
    """A Serve application. args: `config`, a file as `pageturner deploy` reads it; else what would
    be in one. EngineFault('bad_setting') says what is wrong."""
    from pageturner.router.ray import deployments, settings

    given = dict(args)
    path = given.pop("config", None)
    return deployments.build(settings.read(path) if path else settings.settings_of(given))
