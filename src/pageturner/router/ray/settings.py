"""The file that `pageturner deploy` reads: models by name, each with its replicas and flags, in one
TOML file.

Owns the names of that file, their defaults and what is wrong with one. Must not know Ray. The
tables `engine` and `server` of a model are those of `pageturner serve --config`; `router` is that
of `pageturner route`.

    [router]                              # retries, placement ...: as `pageturner route`
    [models.story]
    model = "smollm2"                     # as `pageturner serve MODEL`
    replicas = [1, 4]                     # or one number
    [models.story.engine]
    max_num_seqs = 32
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pageturner.config import settings as config
from pageturner.config.settings import RouterConfig
from pageturner.errors import bad_setting

# what `pageturner serve` and `route` do, and a replica or the door under Ray does not
NOT_UNDER_RAY = ("preload", "otlp_traces_endpoint", "log_format")
# what Serve itself owns
NOT_IN_SERVER = ("host", "port", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "batch_dir")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model of an application.

    model     a file, a folder, an id on the hub, or an alias, on every node
    replicas  a number, or least and most: then as goodput asks for
    cpus, gpus  of the cluster, for each replica
    max_open  requests under way at one replica; more wait at Serve
    adapters  LoRA adapters by name: their folders. Requests name them as their model
    goal      share of requests with targets that are to meet them
    upscale_delay, downscale_delay  seconds for which the rule must say so
    engine, server  as in the configuration file of `pageturner serve`
    """

    model: str
    replicas: tuple[int, int] = (1, 1)
    cpus: float = 1.0
    gpus: float = 0.0
    max_open: int = 256
    adapters: dict[str, str] = field(default_factory=dict)
    goal: float = 0.99
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    engine: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)

    def tables(self, name: str) -> dict[str, dict[str, Any]]:
        """[engine] and [server] of a replica."""
        engine = {"model": self.model, **self.engine}
        if self.cpus >= 1 and not self.gpus:
            engine.setdefault("threads", int(self.cpus))
        if self.gpus:
            engine.setdefault("device", "auto")
        server = {"served_model_name": name, **self.server}
        if self.adapters:
            server["lora"] = ",".join(f"{one}={path}" for one, path in self.adapters.items())
        return {"engine": engine, "server": server}


@dataclass(frozen=True, slots=True)
class AppSettings:
    """A Serve application of ours. name: of it; doors: replicas of what stands before the models;
    host, port: of Serve's HTTP proxy; route_prefix: where it is there."""

    models: dict[str, ModelSettings]
    name: str = "pageturner"
    doors: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    route_prefix: str = "/"
    router: dict[str, Any] = field(default_factory=dict)

    @property
    def router_config(self) -> RouterConfig:
        return config.load(None, {"router": dict(self.router)}).router


def read(path: str | Path) -> AppSettings:
    """The settings of a file. EngineFault('bad_setting') says what is wrong."""
    try:
        table = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise bad_setting(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise bad_setting(f"{path} is not valid TOML: {error}") from error
    return settings_of(table)


def settings_of(table: dict[str, Any]) -> AppSettings:
    """Do the same as `read` for what is in a file, or in the args of a Serve configuration."""
    given = table.get("models")
    if not isinstance(given, dict) or not given:
        raise bad_setting("an application has a table [models.NAME] for each of its models")
    models = {name: _model(name, one) for name, one in given.items()}
    _check_adapters(models)
    rest = {key: value for key, value in table.items() if key != "models"}
    settings: AppSettings = _made(AppSettings, "the application", {**rest, "models": models})
    _only_here("router", settings.router)
    _ = settings.router_config
    return settings


def table_of(settings: AppSettings) -> dict[str, Any]:
    """Return what `settings_of` reads, of plain values: for the args of a Serve configuration."""
    table = {one.name: getattr(settings, one.name) for one in fields(AppSettings)}
    table["models"] = {name: _plain(one) for name, one in settings.models.items()}
    return table


def _plain(model: ModelSettings) -> dict[str, Any]:
    return {one.name: getattr(model, one.name) for one in fields(ModelSettings)} | {
        "replicas": list(model.replicas)
    }


def _model(name: str, given: Any) -> ModelSettings:
    if not isinstance(given, dict):
        raise bad_setting(f"[models.{name}] is a table")
    replicas = given.get("replicas", 1)
    bounds = [replicas, replicas] if isinstance(replicas, int) else replicas
    numbers = isinstance(bounds, list | tuple) and len(bounds) == 2
    if not (numbers and all(type(one) is int for one in bounds) and 1 <= bounds[0] <= bounds[1]):
        raise bad_setting(
            f"models.{name}.replicas: a number from 1 on, or [least, most], not {replicas!r}"
        )
    made: ModelSettings = _made(
        ModelSettings, f"models.{name}", {**given, "replicas": tuple(bounds)}
    )
    for key in set(made.server) & set(NOT_IN_SERVER):
        message = f"models.{name}.server.{key}: a replica has no port and no folder of its own: Serve listens"
        raise bad_setting(message)
    _only_here(f"models.{name}.server", made.server)
    config.load(None, made.tables(name))
    return made


def _only_here(where: str, table: Mapping[str, Any]) -> None:
    for key in set(table) & set(NOT_UNDER_RAY):
        raise bad_setting(f"{where}.{key} is not done under Ray yet: leave it out")


def _made(kind: Any, where: str, values: dict[str, Any]) -> Any:
    known = {one.name: one for one in fields(kind)}
    for key, value in values.items():
        if key not in known:
            raise bad_setting(f"{where}: unknown key {key!r}: there are {', '.join(known)}")
        wanted = {"float": (int, float), "int": (int,), "str": (str,)}.get(str(known[key].type))
        table = str(known[key].type).startswith("dict")
        if (
            isinstance(value, bool)
            or (wanted and not isinstance(value, wanted))
            or (table and not isinstance(value, dict))
        ):
            raise bad_setting(
                f"{where}: {key} is {'a table' if table else known[key].type}, not {value!r}"
            )
        if wanted and wanted != (str,) and value < (key == "doors"):
            raise bad_setting(f"{where}: {key} = {value} is too small")
    if kind is ModelSettings and "model" not in values:
        raise bad_setting(f"{where}: model is missing: a file, a folder, an id or an alias")
    return kind(**values)


def _check_adapters(models: dict[str, ModelSettings]) -> None:
    names = [*models, *(adapter for one in models.values() for adapter in one.adapters)]
    for name in names:
        if names.count(name) > 1:
            raise bad_setting(f"two models or adapters have the name {name!r}")
        if not name or "," in name or "=" in name:
            raise bad_setting(f"{name!r} is no name of a model")
