"""Which chat template a conversation goes through, and messages that go on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pageturner.formats import hub
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.formats.tokenizer import Marks, Tokenizer
from pageturner.server.api.base import answer_grammar
from pageturner.server.api.base.body import decode
from pageturner.server.api.base.call import Call
from pageturner.server.api.openai import chat, completions
from pageturner.text import answer_format, conversation, template_choice
from pageturner.text.chat_template import ChatTemplate, TemplateTooLong, continued_prompt
from pageturner.text.template_choice import BY_NAME, give_template
from support.hf_folder import make_folder
from support.refusals import client_error, engine_fault
from support.vocabs import vocab_path

from .bytes_tokenizer import TEMPLATE, BytesCodec, BytesTokenizer, answer
from .conftest import Server
from .test_openai import SERVED

SYSTEM = {"role": "system", "content": "Be kind."}
HELLO = {"role": "user", "content": "Hello"}
TURNS = [
    HELLO,
    {"role": "assistant", "content": "Hi there."},
    {"role": "user", "content": " Bye? "},
]
TRUSTING = replace(SERVED, request_templates=True, in_worker=True)
OTHER = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
CALLING = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return conversation.template_messages(conversation.read_messages(messages))


def ask(served: Any = TRUSTING, messages: Any = (HELLO,), **fields: Any) -> Call:
    return chat.read(decode(json.dumps({"messages": list(messages), **fields}).encode()), served)


def text_of(call: Call) -> str:
    return BytesTokenizer().decode(call.prompts[0], skip_special=False)


# -- of families ---------------------------------------------------------------------------------------------
@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "family", "conversations"),
    [
        ("qwen2", "chatml", [[SYSTEM, HELLO], [SYSTEM, *TURNS]]),
        ("qwen2.5-coder-0.5b-instruct-q4_k_m", "chatml", [[SYSTEM, HELLO], [SYSTEM, *TURNS]]),
        pytest.param("gemma-4", "gemma-4", [[HELLO], [SYSTEM, *TURNS]], marks=pytest.mark.slow),
        ("phi-3", "phi-3", [[HELLO], TURNS]),
        pytest.param("command-r", "command-r", [[HELLO], [SYSTEM, *TURNS]], marks=pytest.mark.slow),
    ],
)
def test_ours_are_as_the_real_ones(name: str, family: str, conversations: list[list[Any]]) -> None:
    tokenizer = load_tokenizer(vocab_path(name))
    real, marks = tokenizer.chat_template, (tokenizer.bos_token, tokenizer.eos_token)
    tokenizer.chat_template = None
    assert give_template(tokenizer, "") == family
    assert real
    assert tokenizer.chat_template
    for messages in conversations:
        wanted = ChatTemplate(real, *marks).render(messages)
        assert ChatTemplate(tokenizer.chat_template, *marks).render(messages) == wanted


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "family", "conversations"),
    [
        ("google-gemma-2-2b-it", "gemma", [[HELLO], TURNS]),
        (
            "mistralai-Mistral-Nemo-Instruct-2407",
            "mistral-tekken",
            [[HELLO], TURNS, [SYSTEM, *TURNS]],
        ),
        ("Mistral-Small-3.2-24B-Instruct-2506", "mistral-v7", [[SYSTEM, HELLO], [SYSTEM, *TURNS]]),
        ("Qwen-Qwen3-0.6B", "chatml", [[HELLO], TURNS, [SYSTEM, *TURNS]]),
    ],
)
def test_ours_are_as_more_real_ones(name: str, family: str, conversations: list[list[Any]]) -> None:
    folder = os.environ.get("PAGETURNER_TEMPLATES") or hub.cache_folder().parent / "templates"
    path = Path(folder, f"{name}.jinja")
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    real = ChatTemplate(path.read_text(), "<s>", "</s>")
    ours = ChatTemplate(BY_NAME[family].template, "<s>", "</s>")
    for messages in conversations:
        assert ours.render(messages) == real.render(messages)


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gemma3-270m-q4_k_m", "gemma"),
        ("llama-bpe", "llama-3"),
        ("deepseek-llm", "deepseek-llm"),
        ("deepseek-coder", "deepseek-coder"),
        ("llama-spm", None),
        ("gpt-2", None),
        ("falcon", None),
        ("starcoder", None),
    ],
)
def test_families_of_files_without_a_template(name: str, family: str | None) -> None:
    tokenizer = load_tokenizer(vocab_path(name))
    assert tokenizer.chat_template is None
    found = template_choice.recognised(tokenizer)
    assert (found and found.name) == family


@pytest.mark.parametrize(
    ("name", "architecture", "family"),
    [
        ("Llama-2-7b-chat-hf", "llama", "llama-2"),
        ("CodeLlama 13B Instruct", "llama", "llama-2"),
        ("Llama 2 7b", "llama", None),  # a base model
        ("Mistral-7B-Instruct-v0.1", "llama", "mistral"),
        ("Mistral 7B v0.1", "llama", None),
        ("zephyr-7b-beta", "llama", "zephyr"),
        ("TinyLlama 1.1B Chat v1.0", "llama", "zephyr"),
        ("vicuna-7b-v1.5", "llama", "vicuna"),
        ("alpaca-7b", "llama", "alpaca"),
        ("alpaca-7b", "gpt2", None),
        ("", "llama", None),
    ],
)
def test_families_that_a_name_tells(name: str, architecture: str, family: str | None) -> None:
    tokenizer = Tokenizer(BytesCodec(), Marks(name=name, architecture=architecture))
    found = template_choice.recognised(tokenizer)
    assert (found and found.name) == family


def rendered(family: str, messages: list[Any], **more: Any) -> str:
    template = ChatTemplate(BY_NAME[family].template, "<s>", "</s>")
    return template.render(template_messages(messages), **more)


WRITTEN = {
    "llama-2": "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHello [/INST] Hi there. </s><s>[INST] Bye? [/INST]",
    "llama-3": "<s><H>system</H>\n\nBe kind.<E><H>user</H>\n\nHello<E><H>assistant</H>\n\nHi there.<E>"
    "<H>user</H>\n\nBye?<E><H>assistant</H>\n\n",
    "mistral": "<s>[INST] Be kind.\n\nHello [/INST] Hi there.</s>[INST]  Bye?  [/INST]",
    "mistral-v3": "<s>[INST] Hello[/INST] Hi there.</s>[INST] Be kind.\n\n Bye? [/INST]",
    "mistral-tekken": "<s>[INST]Hello[/INST]Hi there.</s>[INST]Be kind.\n\n Bye? [/INST]",
    "mistral-v7": "<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT]"
    "[INST]Hello[/INST]Hi there.</s>[INST] Bye? [/INST]",
    "gemma": "<s><T>user\nBe kind.\n\nHello</T>\n<T>model\nHi there.</T>\n<T>user\nBye?</T>\n<T>model\n",
    "zephyr": "<|system|>\nBe kind.</s>\n<|user|>\nHello</s>\n<|assistant|>\nHi there.</s>\n<|user|>\n"
    " Bye? </s>\n<|assistant|>\n",
    "deepseek": "<s>Be kind.<｜User｜>Hello<｜Assistant｜>Hi there.</s><｜User｜> Bye? <｜Assistant｜>",
    "deepseek-llm": "<s>Be kind.\n\nUser: Hello\n\nAssistant: Hi there.</s>User:  Bye? \n\nAssistant:",
    "deepseek-coder": "<s>Be kind.### Instruction:\nHello\n### Response:\nHi there.\n<|EOT|>\n"
    "### Instruction:\n Bye? \n### Response:\n",
    "vicuna": "<s>Be kind. USER: Hello ASSISTANT: Hi there.</s>USER: Bye? ASSISTANT:",
    "alpaca": "<s>Be kind.\n\n### Instruction:\nHello\n\n### Response:\nHi there.</s>\n\n"
    "### Instruction:\nBye?\n\n### Response:\n",
}
SHORT = {
    "<H>": "<|start_header_id|>",
    "</H>": "<|end_header_id|>",
    "<E>": "<|eot_id|>",
    "<T>": "<start_of_turn>",
    "</T>": "<end_of_turn>",
}


@pytest.mark.parametrize("family", WRITTEN)
def test_what_the_others_write(family: str) -> None:
    text = WRITTEN[family]
    for short, mark in SHORT.items():
        text = text.replace(short, mark)
    assert rendered(family, [SYSTEM, *TURNS]) == text


@pytest.mark.parametrize("family", ["llama-2", "mistral", "gemma"])
def test_turns_that_cannot_be_written_are_refused(family: str) -> None:
    with client_error("take turns"):
        rendered(family, [HELLO, HELLO])


TOLD = [HELLO, CALLING, {"role": "tool", "content": "x"}]


@pytest.mark.parametrize("family", sorted(BY_NAME))
def test_no_message_is_written_as_what_it_is_not(family: str) -> None:
    if answer_format.recognised(BY_NAME[family].template) is None:
        with client_error("no tools"):
            rendered(family, TOLD)
    late = [*TURNS[:2], SYSTEM, HELLO]
    if "first one" in BY_NAME[family].template:
        with client_error(r"first one|take turns"):
            rendered(family, late)
        return
    text = rendered(family, late)
    before = text[text.rindex("Hi there.") : text.index("Be kind.")].lower()
    assert "system" in before or family in ("deepseek-llm", "deepseek-coder")


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("chatml", "hermes"),
        ("llama-3", "llama3"),
        ("mistral-v3", "mistral_list"),
        ("mistral-tekken", "mistral_list"),
        ("gemma", None),
        ("phi-3", None),
    ],
)
def test_tools_of_families(family: str, format: str | None) -> None:
    known = answer_format.recognised(BY_NAME[family].template)
    assert (known and known.name) == format
    if format is None:
        return
    call = {"id": "abcdefghi", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
    ]
    text = rendered(family, messages, tools=[WEATHER])
    assert text.count("weather") == 2  # as a tool, and called
    assert '{"city": "Rome"}' in text
    assert "sunny" in text


@pytest.mark.model
def test_a_family_says_where_answers_end() -> None:
    tokenizer = load_tokenizer(vocab_path("deepseek-coder"))
    end = tokenizer.token_of("<|EOT|>")
    tokenizer.eos_ids = tuple(id for id in tokenizer.eos_ids if id != end)
    assert give_template(tokenizer, "") == "deepseek-coder"
    assert tokenizer.eos_ids[-1] == end


def test_a_folder_says_its_architecture_and_its_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "Zephyr-Nano")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.architecture, tokenizer.name) == ("llama", "Zephyr-Nano")
    tokenizer.chat_template = None
    assert give_template(tokenizer, "") == "zephyr"
    cached = tmp_path / "models--org--vicuna-7b" / "snapshots" / "0a1b2c"
    cached.parent.mkdir(parents=True)
    folder.rename(cached)
    assert load_tokenizer(cached).name == "models--org--vicuna-7b"


# -- that are given ------------------------------------------------------------------------------------------
def test_a_template_is_given_by_file_text_or_family(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(OTHER)
    for given, source in (
        (str(tmp_path / "t.jinja"), OTHER),
        (OTHER, OTHER),
        ("chatml", BY_NAME["chatml"].template),
        ("llama2-sys-bos", BY_NAME["llama-2"].template),
        ("mistral-v3-tekken", BY_NAME["mistral-tekken"].template),
    ):
        tokenizer = BytesTokenizer()
        assert give_template(tokenizer, given) == ""
        assert tokenizer.chat_template == source
    tokenizer = BytesTokenizer()
    assert give_template(tokenizer, "") == ""
    assert tokenizer.chat_template == TEMPLATE
    for wrong in (str(tmp_path), str(tmp_path / "absent"), "{% for %}", "chatmll"):
        with engine_fault("--chat-template"):
            give_template(BytesTokenizer(), wrong)


@pytest.mark.slow
def test_a_server_with_another_template(start: Callable[..., Server]) -> None:
    server = start("--chat-template", OTHER, "--trust-request-chat-template")
    body = {"messages": [HELLO], "max_tokens": 9}

    def said(**fields: Any) -> Any:
        return server.http.post("/v1/chat/completions", json=body | fields).json()["choices"][0][
            "message"
        ]["content"]

    assert said() == answer("[user]Hello>", 9)
    assert said(chat_template="{{ messages[0].content }}!") == answer("Hello!", 9)
    turns = [HELLO, {"role": "assistant", "content": "Hi"}]
    assert said(messages=turns, continue_final_message=True) == answer(
        "[user]Hello[assistant]Hi", 9
    )
    fields = {"messages": turns, "continue_final_message": True}
    told = server.http.post("/tokenize", json=fields).json()
    assert bytes(told["tokens"]) == b"[user]Hello[assistant]Hi"
    assert server.http.get("/props").json()["chat_template"] == OTHER
    broken = server.http.post(
        "/v1/chat/completions", json=body | {"chat_template": "{% if %}"}
    ).json()["error"]
    assert (broken["reason"], broken["param"]) == ("template_error", "chat_template")
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    refused = server.http.post("/v1/chat/completions", json=body | {"chat_template": endless})
    assert refused.status_code == 400
    failed = start("--chat-template", "{% if %}", wait=False)
    assert failed.process.wait(20) == 1
    assert "--chat-template" in failed.finished()


def test_a_template_of_a_request_needs_trust() -> None:
    call = ask(chat_template=OTHER)
    assert text_of(call) == "[user]Hello>"
    for served, code in ((replace(TRUSTING, request_templates=False), "unsupported_parameter"),):
        with client_error(code=code, param="chat_template"):
            ask(served, chat_template=OTHER)
    with pytest.raises(TemplateTooLong):  # a worker compiles it
        ask(replace(TRUSTING, in_worker=False), chat_template=OTHER)
    with client_error("chats"):
        completions.read(decode(b'{"prompt": "a", "chat_template": "x"}'), TRUSTING)
    assert text_of(
        ask(chat_template="{{ mood }}{{ messages[0].content }}", chat_template_kwargs={"mood": "!"})
    ) == ("!Hello")


def test_tools_go_by_the_template_of_the_request() -> None:
    call = ask(
        replace(TRUSTING, context=2000, capacity=2000),
        chat_template=BY_NAME["chatml"].template,
        tools=[WEATHER],
    )
    assert call.answer is not None
    assert call.answer.tools == "hermes"
    bodies = [
        decode(
            json.dumps({"messages": [HELLO], "tools": [WEATHER], "chat_template": source}).encode()
        )
        for source in ("a", "b")
    ]
    assert answer_grammar.asked(bodies[0]) != answer_grammar.asked(bodies[1])


def test_without_any_template_the_refusal_says_how_to_give_one() -> None:
    with client_error("--chat-template", code="no_chat_template"):
        ask(replace(SERVED, template=None))


# -- messages that go on -------------------------------------------------------------------------------------
def on(content: str) -> list[dict[str, Any]]:
    return [HELLO, {"role": "assistant", "content": content}]


def test_a_message_goes_on_where_its_content_ends() -> None:
    call = ask(messages=on("Hi th"), continue_final_message=True, add_generation_prompt=False)
    assert text_of(call) == "<|bos|>user\nHello<|end|>\n<|bos|>assistant\nHi th"
    whole = ask(messages=on("Hi th"), add_generation_prompt=False)
    assert text_of(whole) == text_of(call) + "<|end|>\n"
    parts = [HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Hi th"}]}]
    assert ask(messages=parts, continue_final_message=True).prompts == call.prompts
    assert text_of(ask(messages=on(""), continue_final_message=True)).endswith("<|bos|>assistant\n")
    assert (
        ask(messages=on("a"), continue_final_message=False).prompts == ask(messages=on("a")).prompts
    )


@pytest.mark.parametrize(
    "content", ["Hi", "Hi ", " Hi\n\n", "", "Hello", "ENDxOFxTHExCONTENT", "assistant\n"]
)
@pytest.mark.parametrize("family", sorted(BY_NAME))
def test_the_prompt_is_the_beginning_of_what_the_template_writes(family: str, content: str) -> None:
    template = ChatTemplate(BY_NAME[family].template, "<s>", "</s>")
    messages = template_messages(on(content))
    prompt = continued_prompt(template, messages)
    assert template.render(messages, generate=False).startswith(prompt)
    assert prompt.rstrip().endswith(content.strip())
    assert len(prompt) >= len(template.render(messages[:1], generate=False))


def test_a_template_that_writes_a_message_in_its_own_way_is_refused() -> None:
    for source in (
        "{{ messages[-1].content | upper }}",
        "x",
        "{{ messages[-1].content | length }}",
    ):
        with client_error(code="template_error"):
            continued_prompt(ChatTemplate(source), template_messages(on("Hi")))


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        (on("Hi"), {"add_generation_prompt": True}, "continue_final_message"),
        ([HELLO], {}, "messages"),
        ([HELLO, CALLING], {}, "messages"),
    ],
)
def test_what_cannot_go_on(messages: list[Any], fields: dict[str, Any], param: str) -> None:
    with client_error(code="invalid_value", param=param):
        ask(messages=messages, continue_final_message=True, **fields)


def test_thoughts_that_have_begun_go_on() -> None:
    served = replace(SERVED, reasoning_parser="think")
    for content, thinking in (("<think>I", True), ("<think>I</think>So", False), ("So", False)):
        call = ask(served, messages=on(content), continue_final_message=True)
        assert call.answer is not None
        assert call.answer.thinking is thinking
