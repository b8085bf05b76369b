"""Completion is asked of the shells themselves; what is mistyped is answered."""

import contextlib
import io
import shutil
import subprocess

import pytest

from pageturner.cli import COMMANDS, main
from pageturner.cli.completion import SCRIPTS, flags_of

ASK = {
    "bash": "COMP_WORDS=(pageturner {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
    '_pageturner; printf "%s\\n" "${{COMPREPLY[@]}}"',
    "zsh": "words=(pageturner {words}); CURRENT=$#words; _pageturner",
    "fish": 'complete -C "pageturner {words}"',
}
# outside its line editor zsh has no completion: what it would be given is printed
BEFORE = {"zsh": 'compdef() { :; }; _files() { :; }; compadd() { shift; print -l -- "$@"; }\n'}
NO_STARTUP = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}


@pytest.fixture(scope="module")
def scripts():
    made = {}
    for shell in SCRIPTS:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["completion", shell]) == 0
        made[shell] = out.getvalue()
    return made


@pytest.mark.parametrize("shell", list(SCRIPTS))
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("se", "serve"),
        ("bench en", "engine"),
        ("serve --max-num-s", "--max-num-seqs"),
        ("serve --kv-cache-dtype bf", "bfloat16"),
        ("serve --tool-call-parser herm", "hermes"),
    ],
)
def test_a_shell_completes(scripts, shell, typed, wanted):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    text = BEFORE.get(shell, "") + scripts[shell] + "\n" + ASK[shell].format(words=typed)
    run = subprocess.run(
        [shell, *NO_STARTUP[shell], "-c", text],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    found = run.stdout.split()
    # zsh itself keeps only what begins as the word typed: there the candidates are seen before that
    assert wanted in found if shell == "zsh" else found[0] == wanted, run.stderr


def test_every_command_is_in_every_script(scripts):
    assert all(names[-1] in script for script in scripts.values() for names in COMMANDS)


def test_flags_and_choices_are_read_from_help():
    text = "usage: x\n\noptions:\n  -h, --help  show --other\n  --kind {a,b}\n              not --this\n"
    assert flags_of(text) == {"--help": (), "--kind": ("a", "b")}


def test_choices_too_long_to_stand_beside_their_flag_are_read_from_its_text():
    text = "x\n\n  --kind KIND  what (one of\n              a, b) (default: a)\n\nothers:\n  --more N  more\n"
    assert flags_of(text) == {"--kind": ("a", "b"), "--more": ()}


@pytest.mark.parametrize(("typed", "meant"), [("serv", "serve"), ("bench engin", "bench engine")])
def test_a_mistyped_command_is_asked_about(capsys, typed, meant):
    assert main(typed.split()) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_a_command_like_no_other_is_not_guessed(capsys):
    assert main(["xyzzy"]) == 2
    assert "did you mean" not in capsys.readouterr().err
