"""Whether the text of an answer is all there: in its content, its thoughts and its calls, in their order.

White space is left out of the comparison: what stands around calls and thoughts belongs to them.
"""

from __future__ import annotations

import json
import re

from api_tools_http import Answer

from pageturner.text.reasoning import reasoning_format
from pageturner.text.tool_formats import JSON, tool_format

MESSAGE = (
    r"(?:<\|start\|>)?(?:assistant)?(?:to=functions[^<]*)?"
    r"<\|channel\|>[^<]*(?:<\|constrain\|>json)?<\|message\|>"
)


LONGEST_HEAD = 160  # characters of a message's head, with the name of a tool


def _solid(text: str) -> str:
    return re.sub(r"\s+", "", text)


def lost(answer: Answer, raw: str, format: str, thinks: str) -> str:
    """ "" where nothing is lost or made up, else what the text is and what was told of it.

    raw     text of all tokens of the answer, marks among them
    thinks  format of its thoughts, or ""
    """
    text = _solid(raw)
    rest = (
        _harmony(answer, text) if format == "harmony" else _patterned(answer, text, format, thinks)
    )
    return (
        ""
        if rest
        else json.dumps({"raw": raw[-400:], "content": answer.content, "calls": answer.calls})[:900]
    )


def _harmony(answer: Answer, text: str) -> bool:
    """All that is no head of a message is thoughts, content or arguments."""
    text = re.sub(r"<\|(end|return|call)\|>|<\|im_end\|>$", "", text)
    said = "".join(re.split(MESSAGE, text))
    told = answer.thoughts + answer.content + "".join(call["arguments"] for call in answer.calls)
    if answer.finish == "length":  # the head of a message that never came
        cut = re.sub(r"(<\|?(start|channel|constrain|m|e|s|c)?|assistant)[^>{}]*$", "", said)
        solid = _solid(told)
        return any(  # or no head at all: a model of random words writes "<" as well
            sorted(one) == sorted(solid)
            or (one.startswith(solid) and len(one) - len(solid) <= LONGEST_HEAD)
            for one in (cut, said)
        )
    return _same(said, told) or sorted(said) == sorted(_solid(told))


def _same(one: str, other: str) -> bool:
    return _solid(one) == _solid(other)


def _patterned(answer: Answer, text: str, format: str, thinks: str) -> bool:
    if thinks:
        marks = reasoning_format(thinks)
        inside = re.escape(_solid(answer.thoughts))
        thought = f"(?:{re.escape(marks.begin)})?{inside}(?:{re.escape(marks.end)})?"
    else:
        thought = ""
    row = tool_format(format)
    literal = [*map(re.escape, map(_solid, (row.opening, row.between, row.closing)))]
    free, calls = "(.*?)", ""
    for i, call in enumerate(answer.calls, 1):
        cut = i == len(answer.calls) and answer.finish == "length"
        heads = "|".join(_head(one, call["name"]) for one in row.calls)
        tails = "|".join(re.escape(_solid(one.partition("$ARGS")[2])) for one in row.calls)
        arguments = re.escape(_solid(call["arguments"])) if row.arguments == JSON else ".*?"
        ends = f"(?:{tails})" + ("?" if cut else "")
        if cut and row.arguments != JSON:  # how far they have come cannot be told here
            arguments, ends = ".*", ""
        calls += (
            f"{free}(?:{literal[0]}|{literal[1]})?(?:{heads}){arguments}{ends}(?:{literal[2]})?"
        )
    whole = re.fullmatch(f"{thought}{calls}(.*?)(?:<\\|im_end\\|>)?", text, re.S)
    if whole is None:
        return False
    said = "".join(whole.groups())
    if answer.calls and answer.finish == "length" and not answer.content:
        return True  # what follows the last call is the beginning of the next one
    content = _solid(answer.content)
    if answer.calls and answer.finish == "length" and row.arguments != JSON:
        return text.endswith(
            content
        )  # what follows the last call, which has taken all the rest here
    return said == content


def _head(pattern: str, name: str) -> str:
    """What stands in front of a call's arguments."""
    head = re.escape(_solid(pattern.partition("$ARGS")[0]))
    return head.replace(re.escape("$NAME"), re.escape(name)).replace(
        re.escape("$ID"), "[A-Za-z0-9]+"
    )
