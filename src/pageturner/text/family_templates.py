"""Chat templates for models whose files have none: one for each family, and by what a family is recognised.

Owns the templates, which are our own, as data. Must not know how one is rendered (chat_template.py) nor where
a server's template comes from (template_choice.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pageturner.formats.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatFamily:
    """Models that were taught one way to write a conversation.

    tokens    all of which a vocabulary has, and none of `without`; (): its marks are plain text, which tells
              nothing, so the model has to say what it is by its name, `called`
    architectures  as the files name them; (): any
    called    a pattern of the model's name, in which everything but letters and digits counts as a dash
    spaced    whether its tokenizer puts a space in front of a text; None: either
    end       the token behind an answer, which not every file says; "": end of sequence
    """

    name: str
    template: str
    tokens: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    called: str = ""
    spaced: bool | None = None
    end: str = ""


# What several templates have in common. Of those that know no tools:
_PLAIN = """\
{%- for message in messages %}
    {%- if message.role == 'tool' or message.tool_calls %}
        {{- raise_exception('the template of this family knows no tools') }}
    {%- endif %}
{%- endfor %}
"""
# Where a system message is that of the first place, or none:
_SPLIT = """\
{%- set ns = namespace(system='', pairs=messages) %}
{%- if messages and messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content | trim %}
    {%- set ns.pairs = messages[1:] %}
{%- endif %}
{%- for message in ns.pairs %}
    {%- if message.role == 'system' %}
        {{- raise_exception('the message of the system must be the first one') }}
    {%- endif %}
{%- endfor %}
"""
_ALTERNATING = """\
{%- for message in ns.pairs %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('after the system message, user and assistant take turns') }}
    {%- endif %}
{%- endfor %}
"""

_CHATML = """\
{%- set ns = namespace(system='', rest=messages) %}
{%- if messages and messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content %}
    {%- set ns.rest = messages[1:] %}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if ns.system %}{{- ns.system + '\\n\\n' }}{%- endif %}
    {{- 'Functions that you may call, as JSON schemas:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n\\nTo call one, write its name and its arguments as JSON between two marks:\\n' }}
    {{- '<tool_call>\\n{"name": "the function", "arguments": {"its": "arguments"}}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + ns.system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in ns.rest %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_LLAMA_3 = """\
{{- bos_token }}
{%- set ns = namespace(rest=messages, told=not tools) %}
{%- for message in ns.rest %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'user' and not ns.told %}
        {%- set ns.told = true %}
        {{- 'You may call one of these functions. To call one, answer with nothing but ' }}
        {{- '{"name": the function, "parameters": dictionary of argument name and value}.\\n\\n' }}
        {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

_LLAMA_2 = (
    _PLAIN
    + _SPLIT
    + _ALTERNATING
    + """\
{%- for message in ns.pairs %}
    {%- if message.role == 'user' %}
        {{- bos_token + '[INST] ' }}
        {%- if loop.first and ns.system %}{{- '<<SYS>>\\n' + ns.system + '\\n<</SYS>>\\n\\n' }}{%- endif %}
        {{- (message.content | trim) + ' [/INST]' }}
    {%- else %}
        {{- ' ' + (message.content | trim) + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
)

# Mistral's first form: the marks are plain text.
_MISTRAL = (
    _PLAIN
    + _SPLIT
    + _ALTERNATING
    + """\
{{- bos_token }}
{%- for message in ns.pairs %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' }}
        {%- if loop.first and ns.system %}{{- ns.system + '\\n\\n' }}{%- endif %}
        {{- message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + (message.content | trim) + eos_token }}
    {%- endif %}
{%- endfor %}
"""
)

# Where the marks are tokens. GAP: a space behind marks, as the older vocabularies have it, or nothing.
_MISTRAL_TOKENS = (
    _SPLIT
    + """\
{{- bos_token }}
{%- set ns.last = -1 %}
{%- for message in ns.pairs %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
SYSTEM
{%- for message in ns.pairs %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS]GAP' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]GAP' }}
        {%- if ns.system and loop.index0 == ns.last %}{{- ns.system + '\\n\\n' }}{%- endif %}
        {{- message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]GAP{"content": ' + (message.content | tojson) }}
        {{- ', "call_id": "' + (message.tool_call_id or '') + '"}[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS]GAP[' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
            {{- ', "id": "' + (call.id or '') + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- else %}
        {{- 'GAP' + (message.content | trim) + eos_token }}
    {%- endif %}
{%- endfor %}
"""
)
_SYSTEM_TOKENS = """\
{%- if ns.system %}{{- '[SYSTEM_PROMPT]' + ns.system + '[/SYSTEM_PROMPT]' }}{%- endif %}
{%- set ns.system = '' %}"""

_GEMMA = (
    _PLAIN
    + _SPLIT
    + _ALTERNATING
    + """\
{{- bos_token }}
{%- for message in ns.pairs %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
    {%- if loop.first and ns.system %}{{- ns.system + '\\n\\n' }}{%- endif %}
    {{- (message.content | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
)

_GEMMA_4 = (
    _PLAIN
    + """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<|turn>' + role + '\\n' + (message.content | trim) + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\\n<|channel>thought\\n<channel|>' }}{%- endif %}
"""
)

_PHI_3 = (
    _PLAIN
    + """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
)

_COMMAND_R = (
    _PLAIN
    + """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'chatbot' if message.role == 'assistant' else message.role %}
    {{- '<|START_OF_TURN_TOKEN|><|' + (role | upper) + '_TOKEN|>' + (message.content | trim) }}
    {{- '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}
"""
)

_ZEPHYR = (
    _PLAIN
    + """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
)

_DEEPSEEK = (
    _PLAIN
    + _SPLIT
    + """\
{{- bos_token + ns.system }}
{%- for message in ns.pairs %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
    {%- else %}
        {{- '<｜Assistant｜>' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}
"""
)

_DEEPSEEK_LLM = (
    _PLAIN
    + """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- 'User: ' + message.content + '\\n\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- 'Assistant: ' + message.content + eos_token }}
    {%- else %}
        {{- message.content + '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}
"""
)

_DEEPSEEK_CODER = (
    _PLAIN
    + """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '### Instruction:\\n' + message.content + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '### Response:\\n' + message.content + '\\n<|EOT|>\\n' }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Response:\\n' }}{%- endif %}
"""
)

_VICUNA = (
    _PLAIN
    + _SPLIT
    + """\
{{- bos_token }}
{%- if ns.system %}{{- ns.system + ' ' }}{%- endif %}
{%- for message in ns.pairs %}
    {%- if message.role == 'user' %}
        {{- 'USER: ' + (message.content | trim) + ' ' }}
    {%- else %}
        {{- 'ASSISTANT: ' + (message.content | trim) + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{%- endif %}
"""
)

_ALPACA = (
    _PLAIN
    + _SPLIT
    + """\
{{- bos_token }}
{%- if ns.system %}{{- ns.system + '\\n\\n' }}{%- endif %}
{%- for message in ns.pairs %}
    {%- if message.role == 'user' %}
        {{- '### Instruction:\\n' + (message.content | trim) + '\\n\\n' }}
    {%- else %}
        {{- '### Response:\\n' + (message.content | trim) + eos_token + '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Response:\\n' }}{%- endif %}
"""
)


def _mistral_tokens(gap: str, system: str) -> str:
    return _MISTRAL_TOKENS.replace("GAP", gap).replace("SYSTEM\n", system)


_LLAMAS = ("llama", "mistral", "mixtral")
_INST = ("[INST]", "[/INST]")
# The first one that fits is a model's. Those that tokens tell come before those that a name tells.
FAMILIES = (
    ChatFamily("llama-3", _LLAMA_3, ("<|start_header_id|>", "<|end_header_id|>"), end="<|eot_id|>"),
    ChatFamily("gemma", _GEMMA, ("<start_of_turn>",), end="<end_of_turn>"),
    ChatFamily("gemma-4", _GEMMA_4, ("<|turn>",), end="<turn|>"),
    ChatFamily("deepseek", _DEEPSEEK, ("<｜User｜>", "<｜Assistant｜>")),
    ChatFamily(
        "deepseek-coder",
        _DEEPSEEK_CODER,
        ("<｜fim▁hole｜>",),
        architectures=("llama",),
        end="<|EOT|>",
    ),
    ChatFamily(
        "deepseek-llm", _DEEPSEEK_LLM, ("<｜begin▁of▁sentence｜>",), without=("<｜fim▁hole｜>",)
    ),
    ChatFamily("mistral-v7", _mistral_tokens("", _SYSTEM_TOKENS), (*_INST, "[SYSTEM_PROMPT]")),
    ChatFamily("mistral-v3", _mistral_tokens(" ", ""), _INST, spaced=True),
    ChatFamily("mistral-tekken", _mistral_tokens("", ""), _INST, spaced=False),
    ChatFamily("chatml", _CHATML, ("<|im_start|>",), without=("<|im_sep|>",), end="<|im_end|>"),
    ChatFamily(
        "phi-3",
        _PHI_3,
        ("<|user|>", "<|assistant|>"),
        architectures=("phi3", "phimoe"),
        end="<|end|>",
    ),
    ChatFamily("command-r", _COMMAND_R, ("<|START_OF_TURN_TOKEN|>",), end="<|END_OF_TURN_TOKEN|>"),
    ChatFamily(
        "zephyr", _ZEPHYR, ("<|user|>", "<|assistant|>"), architectures=("llama", "stablelm")
    ),
    ChatFamily("zephyr", _ZEPHYR, architectures=_LLAMAS, called=r"zephyr|tinyllama.*chat"),
    ChatFamily(
        "llama-2", _LLAMA_2, architectures=_LLAMAS, called=r"llama-?2.*chat|codellama.*instruct"
    ),
    ChatFamily("mistral", _MISTRAL, architectures=_LLAMAS, called=r"mi[sx]tral.*instruct"),
    ChatFamily("vicuna", _VICUNA, architectures=_LLAMAS, called=r"vicuna"),
    ChatFamily("alpaca", _ALPACA, architectures=_LLAMAS, called=r"alpaca"),
)
BY_NAME = {family.name: family for family in FAMILIES}
NAMES = tuple(BY_NAME)


def recognised(tokenizer: Tokenizer) -> ChatFamily | None:
    """The family of the model with this tokenizer, or None where nothing says it."""
    name = re.sub(r"[^a-z0-9]+", "-", tokenizer.name.lower())
    return next((one for one in FAMILIES if _fits(one, tokenizer, name)), None)


def _fits(family: ChatFamily, tokenizer: Tokenizer, name: str) -> bool:
    if family.architectures and tokenizer.architecture not in family.architectures:
        return False
    if family.called:
        return re.search(family.called, name) is not None
    if family.spaced is not None and family.spaced != tokenizer.space_prefix:
        return False
    needed = (*family.tokens, family.end) if family.end else family.tokens
    if any(tokenizer.token_of(token) is None for token in needed):
        return False
    return all(tokenizer.token_of(token) is None for token in family.without)
