"""`pageturner completion SHELL`: prints a script that completes commands, flags and their choices.

Owns the scripts of the three shells. What there is to complete is read from the help of the
commands' own parsers, which the command line gives it, so that a new flag is completed without a
line here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping

# of each command: its flags, and of each flag the values it may have (none: a file, a number, a
# name)
Commands = Mapping[tuple[str, ...], Mapping[str, tuple[str, ...]]]

_FLAG = re.compile(r"(--[a-z][\w-]*)(?: \{([^}]*)\})?")


def flags_of(help_text: str) -> dict[str, tuple[str, ...]]:
    """The long flags that argparse's help lists, with their choices."""
    entries = re.split(r"\n(?=  -)", help_text)[1:]
    found: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        text = entry.split("\n\n")[0]
        listed = re.search(r"\(one of ([\w, ]+)\)", " ".join(text.split()))
        for flag, choices in _FLAG.findall(re.split(r"\s{2,}", text.strip())[0]):
            named = choices or (listed[1].replace(" ", "") if listed else "")
            found[flag] = tuple(named.split(",")) if named else ()
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=list(SCRIPTS), help="the shell that is to complete")


def main(arguments: argparse.Namespace) -> int:
    """Print the script."""
    helps: Mapping[tuple[str, ...], str] = arguments.helps()
    print(SCRIPTS[arguments.shell]({names: flags_of(text) for names, text in helps.items()}))
    return 0


def _words(commands: Commands) -> dict[str, list[str]]:
    """Return the words that may follow the words so far: at the start, after a group, after a
    command and after a flag."""
    follow: dict[str, list[str]] = {"": []}
    for names, flags in commands.items():
        for i, name in enumerate(names):
            known = follow.setdefault(" ".join(names[:i]), [])
            known += [] if name in known else [name]
        follow[" ".join(names)] = list(flags)
        follow |= {
            " ".join((*names, flag)): list(values) for flag, values in flags.items() if values
        }
    return follow


def _bash_cases(commands: Commands) -> str:
    return "\n".join(
        f'    "{key}") echo "{" ".join(words)}" ;;' for key, words in _words(commands).items()
    )


def _groups(commands: Commands) -> str:
    return "|".join(sorted({names[0] for names in commands if len(names) > 1}))


def _lookup(commands: Commands) -> str:
    """Functions that bash and zsh share: `_pageturner_candidates WORD...`, the words before the
    cursor."""
    return f"""_pageturner_table() {{
  case "$1" in
{_bash_cases(commands)}
    *) return 1 ;;
  esac
}}
_pageturner_candidates() {{
  local name="$1" last=""
  case "$1" in {_groups(commands)}) [ $# -gt 1 ] && name="$1 $2" && shift ;; esac
  [ $# -gt 0 ] && shift
  while [ $# -gt 0 ]; do last="$1"; shift; done
  case "$last" in --*) _pageturner_table "$name $last" && return ;; esac
  _pageturner_table "$name"
}}"""


def _bash(commands: Commands) -> str:
    return f"""{_lookup(commands)}
_pageturner() {{
  COMPREPLY=($(compgen -W "$(_pageturner_candidates "${{COMP_WORDS[@]:1:COMP_CWORD-1}}")" \\
    -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _pageturner pageturner"""


def _zsh(commands: Commands) -> str:
    return f"""{_lookup(commands)}
_pageturner() {{
  local -a found
  found=(${{=$(_pageturner_candidates "${{(@)words[2,CURRENT-1]}}")}})
  compadd -- $found
  [[ ${{words[CURRENT]}} == -* ]] || (( CURRENT == 2 )) || _files
}}
compdef _pageturner pageturner"""


def _fish(commands: Commands) -> str:
    cases = "\n".join(
        f"    case '{key}'; string split ' ' -- '{' '.join(words)}'"
        for key, words in _words(commands).items()
    )
    groups = " ".join(_groups(commands).split("|"))
    return f"""function __pageturner_table
  switch "$argv[1]"
{cases}
    case '*'; return 1
  end
end
function __pageturner_candidates
  set -l words (commandline -opc)[2..-1]
  set -l name "$words[1]"
  if contains -- "$words[1]" {groups}; and test (count $words) -gt 1
    set name "$words[1] $words[2]"
  end
  if string match -q -- '--*' "$words[-1]"; and __pageturner_table "$name $words[-1]"
    return
  end
  __pageturner_table "$name"
end
complete -c pageturner -a '(__pageturner_candidates)'"""


SCRIPTS: dict[str, Callable[[Commands], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
