"""A config.json that remembers what was asked of it, so that nothing in it is ignored in silence.

Owns the types of its values, and the rule by which a key that nobody asked for says nothing: it is
known to say nothing about the computation, or its value turns nothing on, or repeats what is
computed anyway. Anything else is refused by name. Must not know what the keys mean.
"""

from __future__ import annotations

import fnmatch
import operator
from typing import Any, TypeVar, overload

from pageturner.errors import EngineFault
from pageturner.models.hf_keys import ALWAYS, HARMLESS, KEYS, SAME
from pageturner.models.spec import LARGEST, ModelSpec, turns_nothing_on, unsupported

Value = TypeVar("Value", int, float, bool, str)
Json = dict[str, Any]


class HFConfig:
    """A config.json, or an object in one.

    where       the file, for messages
    arch, name  of the model
    """

    def __init__(self, values: Json, where: str, arch: str = "", name: str = "") -> None:
        self.arch = arch
        self.name = name
        self._values = dict(values)
        self._where = where
        self._used: set[str] = set()

    def raw(self, key: str) -> Any:
        """Any value, None if absent."""
        return self._values.get(self._called(key))

    def _called(self, key: str) -> str:
        """The name of a key in this model type; of several names the first that has a value."""
        names = KEYS.get(self.arch, {}).get(key, key).split()
        self._used.update(names)
        return next((name for name in names if self._values.get(name) is not None), names[0])

    @overload
    def get(self, key: str, kind: type[Value]) -> Value: ...
    @overload
    def get(self, key: str, kind: type[Value], default: Value) -> Value: ...
    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        """A scalar; null is absent. EngineFault('config_invalid') if it is missing or of another
        type."""
        value = self.raw(key)
        key = self._called(key)
        if value is None:
            value = default
        if value is None:
            raise EngineFault("config_invalid", f"{self._where} lacks {key!r}")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise EngineFault(
                "config_invalid",
                f"{self._where}: {key} should be of type {kind.__name__}, not {value!r}",
            )
        return value

    def size(self, key: str, default: int | None = None, most: int = LARGEST - 1) -> int:
        """A positive int of at most `most`."""
        value = self.get(key, int) if default is None else self.get(key, int, default)
        key = self._called(key)
        if not 0 < value <= most:
            raise EngineFault(
                "model_invalid", f"{self._where}: {key} is {value}: it should be 1 to {most:,}"
            )
        return value

    def share(self, key: str, default: float) -> float:
        """A part of a whole: 0 to 1."""
        value = self.get(key, float, default)
        if not 0 <= value <= 1:
            raise EngineFault("model_invalid", f"{self._where}: {key} is {value}")
        return value

    def section(self, key: str) -> HFConfig | None:
        """An object within, None if absent or null."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise EngineFault(
                "config_invalid", f"{self._where}: {key} should be an object, not {value!r}"
            )
        return HFConfig(value, f"{self._where}, {key}")

    def expect(self, key: str, wanted: object) -> None:
        """EngineFault('model_unsupported') if the key is there with another value."""
        value = self.raw(key)
        if value is not None and value != wanted:
            raise unsupported(f"{self._where} sets {key} = {value!r}; only {wanted!r} is supported")

    def take(self, key: str) -> Any:
        """A value that nobody who asks later shall find, None if absent."""
        return self._values.pop(key, None)

    def put(self, key: str, value: object) -> None:
        """A value that follows from others of the file."""
        self._values[key] = value

    def ignore(self, keys: str) -> None:
        """The keys of this list, in which * is any text, say nothing in this model."""
        for pattern in keys.split():
            self._used.update(fnmatch.filter(self._values, pattern))

    def done(self, spec: ModelSpec | None = None) -> None:
        """EngineFault('model_unsupported') if something was set that nobody asked for, and that
        says something about a model with this spec."""
        for key, value in self._values.items():
            if key not in self._used and not _says_nothing(key, value, spec):
                raise unsupported(f"{self._where} sets {key} = {value!r}, which is not supported")


def _says_nothing(key: str, value: object, spec: ModelSpec | None) -> bool:
    """Return whether only tools read this key, it turns nothing on, or repeats what the spec
    says."""
    if key in ALWAYS:
        return value in (None, ALWAYS[key])
    if key.startswith("_") or turns_nothing_on(key, value):
        return True
    if any(fnmatch.fnmatchcase(key, pattern) for pattern in HARMLESS):
        return True
    for name, keys in SAME.items():
        if spec is not None and key in keys.split() and not _lacks(name, spec):
            said = operator.attrgetter(name)(spec)
            # the name of one of several kinds is a switch in some files
            return said == value or (value is True and bool(said))
    return False


def _lacks(name: str, spec: ModelSpec) -> bool:
    return name.startswith("experts.") and spec.experts is None
