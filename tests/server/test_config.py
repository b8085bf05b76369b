"""Settings from TOML and flags; the command line."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pageturner import cli
from pageturner.config import settings as config
from support.refusals import engine_fault

ROOT = Path(__file__).parents[2]


def parse(*words: str, toml: str | None = None) -> config.Config:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    config.add_flags(parser, "engine")
    config.add_flags(parser, "server")
    return config.load(toml, config.from_flags(parser.parse_args(words)))


def test_defaults_then_file_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        '[engine]\nmax_num_seqs = 8\nblock_size = 32\nkv_cache_memory = "1G"\n[server]\nport = 1\n'
    )
    settings = parse("--block-size", "64", "--no-enable-prefix-caching", toml=str(file))
    assert (settings.engine.max_num_seqs, settings.engine.block_size) == (8, 64)
    assert settings.engine.kv_cache_memory == 1 << 30
    assert not settings.engine.enable_prefix_caching
    assert (settings.server.port, settings.server.host) == (1, "127.0.0.1")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("2k", 2048),
        ("1.5G", 3 << 29),
        ("0", 0),
        ("7M", 7 << 20),
        ("8GiB", 8 << 30),
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("1.5TB", 1_500_000_000_000),
        ("3KB", 3000),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse("--kv-cache-memory", text).engine.kv_cache_memory == value


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--block-size", "0"], "block_size"),
        (["--block-size", "257"], "block_size"),
        (["--port", "65536"], "port"),
        (["--port", "http"], "port"),
        (["--max-num-seqs", "-1"], "max_num_seqs"),
        (["--kv-cache-memory", "1P"], "kv_cache_memory"),
        (["--policy", "magic"], "policy"),
        (["--shutdown-timeout", "soon"], "shutdown-timeout"),
        (["--shutdown-timeout", "nan"], "shutdown_timeout"),
        (["--engine-timeout", "0"], "engine_timeout"),
    ],
)
def test_wrong_flags_are_named(words: list[str], named: str) -> None:
    with engine_fault(named, code="bad_setting"):
        parse(*words)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[engine]\nblocksize = 1", "blocksize"),
        ("[motor]\nx = 1", "motor"),
        ("port = 1", "port"),
        ("[server]\nport = 1.5", "port"),
        ('[engine]\nenable_prefix_caching = "no"', "enable_prefix_caching"),
        ("[engine]\nmax_num_seqs = true", "max_num_seqs"),
        ("[engine", "TOML"),
    ],
)
def test_wrong_files_are_explained(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with engine_fault(named):
        parse(toml=str(file))


def test_sizes_are_only_spoken_of_where_there_are_bytes() -> None:
    with engine_fault("port is a whole number, not 'http'"):
        parse("--port", "http")
    with engine_fault("or a size such as 8G"):
        parse("--kv-cache-memory", "much")


def test_a_missing_file_is_explained() -> None:
    with engine_fault("/nowhere"):
        parse(toml="/nowhere/c.toml")


def test_docs_hold_the_flag_reference() -> None:
    docs = (ROOT / "docs" / "api.md").read_text()
    assert config.flag_reference().strip() in docs, "the flag reference is config.flag_reference()"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pageturner", *words],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"pageturner \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_an_unknown_command_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fly"]) == 2
    assert "no such command: fly" in capsys.readouterr().err


def test_a_group_of_commands_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == cli.main(["bench"]) == 0
    out = capsys.readouterr().out
    assert "bench engine" in out
    assert "chat" not in out
    assert cli.main(["bench", "fly"]) == 2


def test_a_wrong_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "smollm2", "--prot", "9"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--prot" in said
    assert "did you mean --port?" in said


@pytest.mark.parametrize("names", cli.COMMANDS)
def test_each_command_explains_itself(
    names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*names, "--help"])
    assert caught.value.code == 0
    assert f"pageturner {' '.join(names)}" in capsys.readouterr().out


def test_help_of_serve_imports_no_server() -> None:
    code = (
        "import sys, contextlib, io; from pageturner import cli\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    cli.main(['serve', '-h'])\n"
        "print([m for m in ('numpy', 'starlette', 'uvicorn', 'jinja2', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["serve", "/nowhere/model.gguf"], 1, "/nowhere/model.gguf"),
        (["serve", "--block-size", "999"], 2, "block_size is 256 or less, not 999"),
        (["serve", "--blok-size", "9"], 2, "--blok-size"),
    ],
)
def test_errors_are_one_line_without_a_traceback(words: list[str], code: int, message: str) -> None:
    done = run(*words)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if code != 2 or "blok" not in words[1]:
        assert done.stderr.count("\n") == 1
