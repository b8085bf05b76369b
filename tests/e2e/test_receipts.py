"""Answers of every kind from a real server of a tiny model, made at once; each is verified alone."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from pageturner import LLM, cli
from pageturner.lab.commands import verify
from pageturner.lab.commands.receipt_prompts import given_answers
from pageturner.text import receipt as form
from support.hf_folder import make_folder
from support.receipts import KEY, flipped, leaves, receipt_of
from support.servers import serving

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
LONG = "the old house, the old house, the old"
ENDS = "a\r\nb\rc\nd \u2028 e\n"  # of lines, as somebody sent them
TOOLS = [{"type": "function", "function": {"name": "wait"}}]
KINDS: list[dict[str, Any]] = [
    {"prompt": LONG, "temperature": 0},
    {
        "prompt": LONG,
        "temperature": 0,
        "allowed_token_ids": [70, 71],
        "max_tokens": 60,
    },  # drafts hit
    {"prompt": LONG, "seed": 5, "n": 3},
    {"prompt": [LONG, "a", [40, 41, 42]], "n": 2},
    {"prompt": [40, 41, 42], "best_of": 4, "n": 2},
    {"prompt": LONG, "use_beam_search": True, "n": 2, "best_of": 3, "length_penalty": 0.5},
    {"prompt": LONG, "structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False},
    {
        "prompt": LONG,
        "logit_bias": {"60": 3.5, "61": -100},
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
    },
    {"prompt": LONG, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
    {
        "prompt": LONG,
        "bad_words": ["a", "old"],
        "stop_token_ids": [80, 81, 82, 83],
        "min_tokens": 3,
    },
    {"prompt": LONG, "stop": ["e", "<extra1>", "o"], "include_stop_str_in_output": True},
    {"prompt": LONG, "stop": ["</s>", "<s>"], "skip_special_tokens": False, "logit_bias": {"2": 6}},
    {"prompt": LONG, "truncate_prompt_tokens": 7, "prompt_logprobs": 2, "logprobs": 1},
    {"prompt": LONG, "max_tokens": 0, "echo": True},
    {"prompt": LONG, "ignore_eos": False, "logit_bias": {"2": 6}, "add_special_tokens": False},
    {"messages": MESSAGES, "temperature": 0.3},
    {"messages": MESSAGES, "n": 2, "stream": True},
    {"messages": MESSAGES, "add_generation_prompt": False, "chat_template_kwargs": {"x": 1}},
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
        ]
    },
    {
        "messages": [*MESSAGES, {"role": "assistant", "content": "I am "}],
        "continue_final_message": True,
    },
    {"messages": MESSAGES, "chat_template": "{% for m in messages %}{{ m.content }}/{% endfor %}"},
    {"prompt": LONG, "seed": 9, "stream": True, "stream_options": {"include_usage": True}},
    {
        "messages": [{"role": "developer", "content": "Be."}, *MESSAGES],
        **{
            "tools": TOOLS,
            "tool_choice": "required",
            "ignore_eos": False,
            "thinking_token_budget": 3,
        },
    },
    {"prompt": ENDS, "seed": 3},
    {"messages": [{"role": "user", "content": ENDS}], "seed": 3},
]
BASE = {"max_tokens": 24, "ignore_eos": True, "receipt": True, "seed": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("receipts") / "model")


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[dict[str, Any]]:
    """Of all kinds, asked at once. Of a stream, what has the receipt."""
    key = folder.parent / "key"
    key.write_bytes(KEY)
    flags = (
        "--speculation",
        "ngram",
        "--receipt-key-file",
        str(key),
        "--max-num-batched-tokens",
        "32",
    )
    flags += (
        "--tool-call-parser",
        "hermes",
        "--reasoning-parser",
        "think",
        "--trust-request-chat-template",
    )
    with serving(folder, *flags) as client, ThreadPoolExecutor(len(KINDS)) as crowd:
        return list(crowd.map(lambda kind: ask(client, BASE | kind), KINDS))


def ask(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(
        CHAT if "messages" in body else "/v1/completions", json=body
    ).raise_for_status()
    if not body.get("stream"):
        return dict(response.json())
    chunks = [
        json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")
    ]
    return next(chunk for chunk in chunks if "receipt" in chunk)


@pytest.fixture(scope="module")
def llm(folder: Path, answers: list[dict[str, Any]]) -> LLM:
    return verify.load(form.read_receipt(json.dumps(answers[0])), folder)


def found(llm: LLM, value: dict[str, Any], prompt: str) -> list[verify.Finding]:
    receipt = form.read_receipt(json.dumps(value))
    findings = list(verify.unchanged(receipt, KEY))
    if verify.exit_code(findings):
        return findings
    return findings + list(
        verify.made_again(receipt, llm, prompt, given_answers(json.dumps(value)))
    )


@pytest.mark.parametrize("i", range(len(KINDS)))
def test_each_is_verified_alone_and_a_changed_bit_is_named(
    llm: LLM, answers: list[dict[str, Any]], i: int
) -> None:
    prompt = json.dumps(BASE | KINDS[i])
    findings = found(llm, answers[i], prompt)
    assert verify.exit_code(findings) == 0, findings
    assert {finding.verdict for finding in findings} == {verify.SAME}
    rng = random.Random(i)
    part, keys = rng.choice(list(leaves(answers[i]["receipt"])))
    changed = answers[i] | {"receipt": flipped(answers[i]["receipt"], keys, rng)}
    try:
        named = [finding.part for finding in found(llm, changed, prompt)]
    except form.NoReceipt as wrong:
        named = [wrong.difference.part]
    assert named == [part]


def test_the_kinds_end_in_all_ways(answers: list[dict[str, Any]]) -> None:
    """By a stop string, one that only shows among control tokens, the end of sequence, length."""
    ends = [answer["receipt"]["choices"][0] for answer in answers]
    assert [
        (end["finish_reason"], 1 <= end["tokens"] < 24) for end in (ends[10], ends[11], ends[14])
    ] == [("stop", True)] * 3
    assert ends[13]["tokens"] == 0
    assert sum(end["finish_reason"] == "length" for end in ends) > 5


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "int8", "quantization": "int8", "backend": "reference"},
        {"dtype": "float32", "kv_cache_dtype": "float32", "backend": "reference"},
        {"quantization": "int4", "activation_bits": "8", "backend": "reference"},
        {},
    ],
)
def test_an_engine_as_the_fingerprint_says(folder: Path, settings: dict[str, str]) -> None:
    made_by = LLM(str(folder), kv_cache_memory=1 << 20, **settings).built.fingerprint
    receipt = msgspec.structs.replace(receipt_of([1]), fingerprint=made_by)
    assert verify.load(receipt, folder, kv_cache_memory=1 << 20).built.fingerprint == made_by


def reseal(answer: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The answer with a receipt that somebody changed and sealed again, without the key."""
    receipt = form.read_receipt(json.dumps(answer))
    return {
        "receipt": msgspec.to_builtins(
            form.sealed(msgspec.structs.replace(receipt, **changed)), str_keys=True
        )
    }


def test_parameters_that_did_not_make_the_answer_are_found_out(
    llm: LLM, answers: list[dict[str, Any]]
) -> None:
    receipt = form.read_receipt(json.dumps(answers[2]))
    other = reseal(answers[2], params=msgspec.structs.replace(receipt.params, seed="6"))
    forged = form.read_receipt(json.dumps(other))
    findings = list(verify.made_again(forged, llm, LONG))
    assert verify.exit_code(findings) == 1
    assert [f.part for f in findings if f.verdict == verify.DIFFERS] == [
        f"choices[{i}].hash" for i in range(3)
    ]
    assert "the first token that differs is one of" in findings[-1].what


@pytest.mark.parametrize(
    "changed",
    [{"force_ids": (10**9,)}, {"n": 10**6, "best_of": 10**6}, {"top_k": 2**60}, {"stop": ("",)}],
)
def test_parameters_that_nobody_could_have_sent(
    llm: LLM, answers: list[dict[str, Any]], changed: dict[str, Any]
) -> None:
    params = form.read_receipt(json.dumps(answers[0])).params
    other = reseal(answers[0], params=msgspec.structs.replace(params, **changed))
    findings = list(verify.made_again(form.read_receipt(json.dumps(other)), llm, LONG))
    assert verify.exit_code(findings) == 2
    assert "this engine refuses the request" in findings[-1].what


def test_an_answer_that_is_not_the_receipts_is_found_out(
    llm: LLM, answers: list[dict[str, Any]]
) -> None:
    text = answers[0]["choices"][0]["text"]
    receipt = form.read_receipt(json.dumps(answers[0]))
    assert verify.exit_code(list(verify.made_again(receipt, llm, LONG, given_answers(text)))) == 0
    other = text[:9] + "~" + text[10:]
    (wrong,) = [
        f
        for f in verify.made_again(receipt, llm, LONG, given_answers(other))
        if f.verdict == verify.DIFFERS
    ]
    assert "from character 10 on" in wrong.what


# -- the command ---------------------------------------------------------------------------------------------
@pytest.fixture
def command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """command(answer, *flags) -> exit code and what was printed."""

    def run(answer: dict[str, Any], *flags: str) -> tuple[int, str]:
        file = tmp_path / "answer.json"
        file.write_text(json.dumps(answer))
        code = cli.main(["verify", str(file), "--model", str(folder), *flags])
        return code, capsys.readouterr().out

    return run


def test_the_command_verifies(command: Any, answers: list[dict[str, Any]], folder: Path) -> None:
    code, said = command(answers[0], "--prompt", LONG, "--key-file", str(folder.parent / "key"))
    assert (code, said.splitlines()[-1]) == (0, "verified")
    assert "same: signature" in said


FILED = {  # how a file came to be: what its program did to a text
    "as it is": str.encode,
    "a line end more": lambda text: f"{text}\r\n".encode(),
    "a byte order mark": lambda text: f"\ufeff{text}".encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "mark and line end": lambda text: f"\ufeff{text}\n".encode(),
}


@pytest.mark.parametrize("number", [-2, -1])
@pytest.mark.parametrize("filed", FILED.values(), ids=FILED)
def test_files_of_honest_answers(
    llm: LLM, answers: list[dict[str, Any]], tmp_path: Path, number: int, filed: Any
) -> None:
    answer, choice = answers[number], answers[number]["choices"][0]
    said = choice["text"] if "text" in choice else choice["message"]["content"]
    for name, text in (("asked", ENDS), ("said", said), ("receipt", json.dumps(answer))):
        (tmp_path / name).write_bytes(filed(text))
    asked, given, receipt = (
        verify.read(f"{tmp_path}/{name}") for name in ("asked", "said", "receipt")
    )
    findings = list(verify.made_again(form.read_receipt(receipt), llm, asked, given_answers(given)))
    assert {finding.verdict for finding in findings} == {verify.SAME}, findings
    changed = asked.replace("d", "x")
    assert verify.exit_code(list(verify.made_again(form.read_receipt(receipt), llm, changed))) == 1


def test_the_command_says_what_differs(
    command: Any, answers: list[dict[str, Any]], folder: Path
) -> None:
    code, said = command(answers[0], "--prompt", "another")
    assert code == 1
    assert "differs: prompts[0].hash" in said
    code, said = command(reseal(answers[0], model_hash="sha256:00"), "--prompt", LONG)
    assert code == 1
    assert "differs: model_hash is sha256:00" in said
    code, said = command({"receipt": {}}, "--prompt", LONG)
    assert code == 1


def test_the_command_says_what_it_cannot_check(command: Any, answers: list[dict[str, Any]]) -> None:
    code, said = command(answers[0])
    assert (code, "without what was asked" in said) == (2, True)
    code, said = command(
        reseal(answers[0], fingerprint="native-other-0-auto-act_auto4-kv_float16"), "-p", LONG
    )
    assert (code, "cannot be checked: fingerprint is native-other" in said) == (2, True)
    code, said = command(reseal(answers[0], version=2), "--prompt", LONG)
    assert (code, "this program knows 1" in said) == (2, True)
    assert said.splitlines()[-1] == "neither proved nor disproved"


def test_a_receipt_chooses_no_model(answers: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answers[0]))
    assert cli.main(["verify", str(file), "--prompt", LONG]) == 2
