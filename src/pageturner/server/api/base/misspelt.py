"""Fields of a request that are most likely a known one, written wrongly.

Owns what counts as near. A client may send fields that nobody here knows, for other servers, so
only what is within one slip of a known field is taken for it: a letter too many, too few, wrong or
moved, or another way of writing the words (`topP`, `top-p`). Must not know what fields mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

# letters of a field in which one may be wrong: `mode` and `models`, which clients send, are not
# `model`
LEAST = 6
LONGEST = 48  # letters of a name that is looked at
MOST = 64  # names of a body that are looked at


class Spelling:
    """known: the names that are right."""

    def __init__(self, known: Iterable[str]) -> None:
        spelt = {_letters(name): name for name in known}
        long = sorted(letters for letters in spelt if len(letters) >= LEAST)
        self._near = {
            written: spelt[letters] for letters in long for written in _variants(letters)
        } | spelt

    def meant(self, unknown: Iterable[str]) -> tuple[str, str] | None:
        """The first of these names, in their order, that is near a known one, and that one."""
        for name in islice(unknown, MOST):
            for written in _variants(_letters(name)) if len(name) <= LONGEST else ():
                known = self._near.get(written)
                if known is not None and (
                    written == _letters(name) or len(_letters(known)) >= LEAST
                ):
                    return name, known
        return None


def _letters(name: str) -> str:
    """Return the name in lower case, without the separators of its words."""
    return name.replace("_", "").replace("-", "").lower()


def _variants(letters: str) -> Iterator[str]:
    """It, and what is left without one of its letters: of names one slip apart, some are equal."""
    yield letters
    yield from (letters[:at] + letters[at + 1 :] for at in range(len(letters)))
