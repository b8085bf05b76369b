"""Help that fits, in groups, with examples that work; names of vLLM are understood or answered with ours."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest

from pageturner import cli
from pageturner.cli import COMMANDS, other_names
from pageturner.cli.completion import flags_of
from pageturner.cli.examples import EXAMPLES
from pageturner.config import setting_flags
from pageturner.config import settings as config
from support.refusals import engine_fault


def help_of(names: tuple[str, ...]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        cli.main([*names, "--help"])
    return out.getvalue()


@pytest.mark.parametrize("names", COMMANDS)
def test_help_ends_with_two_examples_and_fits_100_columns(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = help_of(names)
    assert max(map(len, text.splitlines())) <= 100
    examples = text.split("\nexamples:\n")[1].splitlines()
    assert [line.startswith(f"  pageturner {' '.join(names)}") for line in examples] == [
        True,
        False,
    ] * 2


def examples() -> list[tuple[tuple[str, ...], str]]:
    return [(names, words) for names in COMMANDS for words, _ in EXAMPLES[" ".join(names)]]


@pytest.mark.parametrize(("names", "words"), examples())
def test_an_example_is_taken_by_its_command(
    names: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    module = COMMANDS[names][0]
    monkeypatch.setattr(f"{module}.main", called.append)
    assert cli.main([*names, *shlex.split(words.partition(">>")[0])]) == 0
    assert len(called) == 1


def test_flags_of_serve_are_in_groups() -> None:
    text = help_of(("serve",))
    for title, names in setting_flags.GROUPS.items():
        if not title.startswith("replicas"):
            group = text.split(f"\n{title}:\n")[1].split("\n\n")[0]
            known = {"--" + name.replace("_", "-") for name in names}
            assert set(flags_of("\n" + group)) & known, title


def test_every_setting_of_an_engine_is_in_one_group_and_none_is_made_up() -> None:
    grouped = [name for names in setting_flags.GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert {one.name for one in fields(config.EngineConfig)} <= set(grouped)
    assert set(grouped) <= {one.name for kind in config.SECTIONS.values() for one in fields(kind)}


def test_own_flags_of_a_command_come_first() -> None:
    text = help_of(("calibrate",))
    assert text.index("--check") < text.index("--max-model-len")


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("--scheduling-policy priority", "--order priority"),
        ("--scheduling-policy=fcfs", "--order=fcfs"),
        ("--kv-cache-memory-bytes 4G", "--kv-cache-memory 4G"),
        ("--dtype float", "--dtype float32"),
        ("--kv-cache-dtype=fp8", "--kv-cache-dtype=fp8_e4m3"),
        ("--tool-call-parser llama3_json", "--tool-call-parser llama3"),
        ("--model some.gguf --port 1", "some.gguf --port 1"),
        ("--model=some.gguf", "some.gguf"),
        ("--lora-modules a=x b=y --port 1", "--lora a=x --lora b=y --port 1"),
        ("""--lora-modules '{"name": "a", "path": "x"}'""", "--lora a=x"),
        ("--trust-remote-code -tp 2 --data-parallel-size=1", "--tensor-parallel-size 2"),
        ("-pp 2", "--pipeline-parallel-size 2"),
        ("--max-num-seqs 4 -- --trust-remote-code", "--max-num-seqs 4 -- --trust-remote-code"),
        (
            "--max_model_len 100 --kv_cache_dtype=fp8",
            "--max-model-len 100 --kv-cache-dtype=fp8_e4m3",
        ),
        ("--own_wrong 1 --lora a_b=x_y", "--own_wrong 1 --lora a_b=x_y"),
        ("-m some.gguf -t 2 -a name -cb --jinja", "some.gguf --threads 2 --served-model-name name"),
        ("m --served-model-name a b --port 1", "m --served-model-name a,b --port 1"),
        ("--served-model-name a b --model m -O3 -O 2 -O.mode=1", "--served-model-name a,b m"),
        ("m -sc.method ngram -sc.num_speculative_tokens=4", "m --speculation ngram"),
        ("m --hf-overrides.max_position_embeddings 64 -cc.a.b=1", "m --max-model-len 64"),
        ("m --max-model-len auto --own.x 1", "m --own.x 1"),
        ("--served-model-name a m.gguf", "--served-model-name a m.gguf"),
        ("""m --allowed-origins '["*"]'""", "m --allowed-origins *"),
        ("--dtype bfloat16 m", "--dtype auto m"),
        ("--quantization awq m", "m"),
        ("-c 0 -np -1 m", "m"),
        ("-c 8192 -np 4 -ngl -1 -fa m", "--max-model-len 8192 --max-num-seqs 4 m"),
        ("--gpu-memory-utilization 0.5 m", "--gpu-memory-utilization 0.5 m"),
        ("--swap-space 4 m", "--kv-host-memory 4G m"),
        ("m --no-mmap --no-enable-prefix-caching", "m --no-enable-prefix-caching"),
        ("""m --limit-mm-per-prompt '{"image": 0}'""", "m"),
        ("""m --speculative-config '{"method": "ngram"}'""", "m --speculation ngram"),
        ("""m --speculative-config '{"method":"mtp"}'""", "m --speculation mtp"),
        ("""m -sc '{"method": "suffix"}'""", "m --speculation suffix"),
        ("m -sc.method qwen3_next_mtp -sc.num_speculative_tokens 2", "m --speculation mtp"),
        ("m -sc.method=deepseek_mtp", "m --speculation mtp"),
        (
            """m --speculative-config '{"model": "d", "num_speculative_tokens": 3}'""",
            "m --speculation draft --draft-model d",
        ),
        ("m --hf-overrides {}", "m"),
    ],
)
def test_flags_of_others_that_mean_the_same_are_understood(typed: str, ours: str) -> None:
    known = flags_of(help_of(("serve",)))
    assert other_names.translate(shlex.split(typed), known)[0] == ours.split()


RULES = other_names.table()["serve"]
NOTED = [flag for flag, rule in RULES.items() if rule.rule == "noted" and "*" not in flag]
ANSWERED = [flag for flag, rule in RULES.items() if rule.rule == "answered" and "*" not in flag]
SERVE = flags_of(help_of(("serve",)))


@pytest.mark.parametrize("flag", NOTED)
def test_what_changes_nothing_is_left_out_with_a_note(flag: str) -> None:
    values = {"0": [], "1": ["-1"], "+": ["1", "2"], "?": ["on"]}[RULES[flag].takes]
    found, notes = other_names.translate(["m", flag, *values, "--port", "1"], SERVE)
    assert (found, len(notes)) == (["m", "--port", "1"], 1)
    assert notes[0].startswith(f"{flag} was left out: ")


@pytest.mark.parametrize("flag", ANSWERED)
def test_other_flags_are_answered_with_ours(flag: str) -> None:
    with engine_fault(code="bad_setting") as caught:
        other_names.translate(["m", flag, "1"], SERVE)
    assert caught.value.message == f"{flag} is not a flag here: {RULES[flag].text}"


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("--temp 0.5 --repeat-penalty=1.1", "--temperature 0.5 --repetition-penalty=1.1"),
        ("--alias x", "--alias x"),  # a chat has no --served-model-name, and says what was typed
    ],
)
def test_flags_of_others_are_those_of_the_command_that_is_asked(typed: str, ours: str) -> None:
    known = flags_of(help_of(("chat",)))
    assert other_names.translate(typed.split(), known) == (ours.split(), [])
    if "--alias" not in typed:
        with engine_fault("--generation-config FILE"):
            other_names.translate(typed.split(), SERVE)


def test_a_refused_flag_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "smollm2", "--download-dir", "/x"]) == 2
    assert "HF_HOME" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "bench serve"])
def test_no_other_name_hides_one_of_ours_and_those_that_we_name_exist(command: str) -> None:
    known = flags_of(help_of(tuple(command.split())))
    others = {*known, *flags_of(help_of(("chat",)))}  # serve is told the text
    for flag, rule in other_names.table()[command].items():
        assert flag not in known or rule.rule in ("same", "list", "json") or flag == "--model"
        for word in re.findall(r"--[a-z][a-z-]*", rule.text):
            assert word in known or word == "--draft-model", (flag, word)
        for word in re.findall(r"--[a-z][a-z-]*", rule.ours):
            assert word in (others if rule.text else known), (flag, word)


@pytest.mark.parametrize("flag", ["--mm-never-seen", "--mamba-never-seen", "--kda-never-seen"])
def test_a_flag_of_a_known_kind_is_left_out_too(flag: str) -> None:
    found, notes = other_names.translate(["m", flag, "3"], SERVE)
    assert (found, len(notes)) == (["m"], 1)


def test_variables_of_ollama_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_CONTEXT_LENGTH", "8192")
    monkeypatch.setenv("OLLAMA_BRAND_NEW", "1")
    notes = list(other_names.notes_on_variables())
    assert [note.split()[2] for note in notes] == ["OLLAMA_BRAND_NEW", "OLLAMA_CONTEXT_LENGTH"]
    assert notes[1].endswith("--max-model-len")


@pytest.mark.parametrize(
    "words",
    [
        "--lora-modules {}",
        "--speculative-config no-json",
        """--speculative-config '{"method": "eagle3", "model": "x"}'""",
        """--hf-overrides '{"rope_theta": 1}'""",
        "--data-parallel-size 2",
    ],
)
def test_values_of_vllm_without_an_equal_are_answered(words: str) -> None:
    with engine_fault(code="bad_setting"):
        other_names.translate(shlex.split(words), SERVE)


def test_commands_without_an_engine_keep_their_flags() -> None:
    assert other_names.translate(["--model", "x"], ["--plans"])[0] == ["--model", "x"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "plan",
            "the following arguments are required: model (pageturner plan --help lists the flags)",
        ),
        ("serve x -z 2", "unrecognized arguments: -z 2 (pageturner serve --help lists the flags)"),
        (
            "serve x --prot 2",
            "unrecognized arguments: --prot 2: did you mean --port? (pageturner serve --help",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(words.split())
    assert capsys.readouterr().err.startswith(f"pageturner: {said}")


def test_an_unknown_command_of_a_group_is_told_which_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "foo"]) == 2
    said = capsys.readouterr().err
    assert "bench sweep" in said
    assert said.endswith("pageturner: no such command: bench foo\n")


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pageturner.cli.importlib.import_module", interrupted)
    assert cli.main(["serve", "smollm2"]) == 130


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pageturner", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "pageturner")


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["help", "bench", "serve"])
    assert "pageturner bench serve" in capsys.readouterr().out
    assert cli.main(["help"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run smollm2", "no such command: run: pageturner chat MODEL talks"),
        ("ls", "no such command: ls: pageturner list"),
        ("ps", "no such command: ps: what a server has"),
        ("run-batch -i x", "no such command: run-batch: pageturner batch IN.jsonl OUT.jsonl"),
        (
            "bench throughput --model x",
            "no such command: bench throughput: pageturner bench engine",
        ),
    ],
)
def test_commands_of_others_are_answered_with_ours(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"pageturner: {said}")


def test_no_command_of_others_is_one_of_ours_and_those_that_we_name_exist() -> None:
    ours = {" ".join(names) for names in cli.COMMANDS}
    commands = other_names.table()["commands"]
    assert not ours & commands.keys()
    for answer in commands.values():
        for named in re.findall(r"pageturner ([a-z]+(?: [a-z]+)?)", answer):
            assert named in ours or named.split()[0] in ours, named


def test_flags_of_vllms_bench_serve_are_understood_or_answered() -> None:
    known = flags_of(help_of(("bench", "serve")))
    words = [
        "--random-input-len",
        "30",
        "--random_output_len=5",
        "--max-concurrency",
        "2",
        "--seed",
        "1",
    ]
    ours = ["--input-len", "30", "--output-len=5", "--concurrency", "2", "--seed", "1"]
    assert other_names.translate(words, known) == (ours, [])
    with engine_fault("--base-url http://HOST:PORT", code="bad_setting"):
        other_names.translate(["--port", "8001"], known)


def test_a_trace_without_its_flag_is_told_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "load.jsonl", "--rate", "2"])
    assert (
        "unrecognized arguments: load.jsonl: a trace is given as --trace load.jsonl"
        in capsys.readouterr().err
    )


def test_a_unit_apart_from_its_number_is_told_to_join_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "smollm2", "--memory", "8", "GB"])
    assert "a size is one word, such as 8GB" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--version", "-V", "-v", "version"])
def test_the_version_by_any_of_its_names(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([words]) == 0
    assert capsys.readouterr().out.startswith("pageturner ")
