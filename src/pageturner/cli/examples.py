"""Two examples of each command, which its `--help` ends with.

Owns the texts, which are in examples.json. A test parses every one with the command's own flags.
"""

from __future__ import annotations

import json
from pathlib import Path

# command -> what is typed behind it, and what that does
EXAMPLES: dict[str, list[tuple[str, str]]] = json.loads(
    Path(__file__).with_name("examples.json").read_bytes()
)


def epilog(command: str) -> str:
    """Return the examples that end the help of a command; "" for a command without examples."""
    lines = []
    for words, does in EXAMPLES.get(command, ()):
        lines.append(f"  {' '.join(('pageturner', command, words)).rstrip()}\n      {does}")
    return "\n".join(["examples:", *lines]) if lines else ""
