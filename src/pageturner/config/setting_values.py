"""Values of settings, from what a file or a flag says: types, bounds, choices, sizes.

Owns the errors for what does not fit. Must not know any setting. Ground floor, standard library
only.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import Field
from typing import Any

from pageturner.errors import bad_setting


def checked(setting: Field[Any], value: Any, choices: tuple[str, ...]) -> Any:
    """The value in the type of the setting's default, if it is allowed. choices: what it may be; ()
    if it is free. EngineFault('bad_setting') says what is wrong."""
    kind, name = type(setting.default), setting.name
    if kind is int and isinstance(value, str):
        value = parse_size(value, name, "bytes" in setting.metadata["help"])
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise bad_setting(f"{name} is of type {kind.__name__}, not {value!r}")
    if choices and value not in choices:
        raise bad_setting(
            f"{name} is one of {', '.join(choices)}, not {value!r}{_meant(value, choices)}"
        )
    least = setting.metadata["least"]
    if least is not None and not value >= least:
        raise bad_setting(f"{name} is {least} or more, not {value!r}")
    most = setting.metadata["most"]
    if most is not None and value > most:
        raise bad_setting(f"{name} is {most} or less, not {value!r}")
    return value


def parse_size(text: str, name: str = "size", of_memory: bool = True) -> int:
    """A whole number, with an optional suffix: K, M, G, T or KiB, MiB, GiB, TiB are powers of 1024,
    and KB, MB, GB, TB of 1000, as in coreutils and on data sheets. EngineFault('bad_setting') for
    anything else, with examples of sizes if it is `of_memory`."""
    found = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([KMGT])(|B|iB)\s*", text, re.IGNORECASE)
    try:
        if found is None:
            return int(text)
        number, prefix, unit = found.groups()
        power = "KMGT".index(prefix.upper()) + 1
        return round(float(number) * float((1000 if unit.upper() == "B" else 1024) ** power))
    except (ValueError, OverflowError):
        such = ", or a size such as 8G, 8GiB or 8GB" if of_memory else ""
        raise bad_setting(f"{name} is a whole number{such}, not {text!r}") from None


def _meant(value: Any, choices: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(str(value), choices, 1)
    return f": did you mean {near[0]}?" if near else ""
