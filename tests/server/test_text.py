"""Text streams: whatever the split, the same text; stop strings; chat templates."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.formats.tokenizer import Marks, Tokenizer
from pageturner.text.chat_template import ChatTemplate
from pageturner.text.detokenizer import Detokenizer
from support.refusals import client_error

from .bytes_tokenizer import BytesTokenizer

TOKENIZER = BytesTokenizer()


class Pieces:
    """A vocabulary whose tokens are any byte strings: token i is pieces[i]."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.vocab_size = len(pieces)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def stream_of(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    stream = Detokenizer(Tokenizer(Pieces(pieces), Marks()), stop)
    return [*(stream.push(i) for i in range(len(pieces))), stream.finish()], stream


def cut_slowly(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The specification: the text cut at the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stop if text[:end].endswith(s)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.binary(max_size=60), st.lists(st.integers(0, 60)))
def test_any_split_decodes_like_the_whole(data: bytes, cuts: list[int]) -> None:
    deltas, stream = stream_of(split(data, cuts))
    assert "".join(deltas) == data.decode("utf-8", "replace")
    assert stream.decoded == len("".join(deltas))


@given(st.text(max_size=40), st.lists(st.integers(0, 200)))
def test_no_broken_character_is_shown(text: str, cuts: list[int]) -> None:
    shown = ""
    for delta in stream_of(split(text.encode("utf-8", "replace"), cuts))[0]:
        shown += delta
        assert text.encode("utf-8", "replace").decode().startswith(shown)


SMALL = st.text(alphabet="abé😀", min_size=1, max_size=4)


@given(
    st.text(alphabet="abé😀", max_size=30),
    st.lists(st.integers(0, 90)),
    st.lists(SMALL, max_size=3),
)
def test_stop_strings_cut_exactly_whatever_the_split(
    text: str, cuts: list[int], stop: list[str]
) -> None:
    deltas, stream = stream_of(split(text.encode(), cuts), tuple(stop))
    expected, matched = cut_slowly(text, tuple(stop))
    assert "".join(deltas) == expected
    assert stream.stopped == matched


@given(st.text(alphabet="ab", max_size=20), st.lists(SMALL, min_size=1, max_size=3))
def test_what_is_shown_is_never_taken_back_and_never_late(text: str, stop: list[str]) -> None:
    """After each character: shown is a prefix of the final text, and only a possible stop is held back."""
    stream = Detokenizer(Tokenizer(Pieces([c.encode() for c in text]), Marks()), tuple(stop))
    final, shown = cut_slowly(text, tuple(stop))[0], ""
    for i in range(len(text)):
        shown += stream.push(i)
        assert final.startswith(shown)
        if stream.stopped is not None:
            break
        held = text[len(shown) : i + 1]
        assert held == "" or any(s.startswith(held) for s in stop)


def test_the_token_that_completes_a_stop_string_is_known_at_once() -> None:
    stream = Detokenizer(TOKENIZER, ("END",))
    assert [stream.push(t) for t in b"aEND"] == ["a", "", "", ""]
    assert stream.stopped == "END"
    assert stream.push(ord("x")) == "" == stream.finish()


def test_a_stop_string_may_be_kept() -> None:
    stream = Detokenizer(TOKENIZER, ("END",), include_stop=True)
    assert "".join(map(stream.push, b"aENDx")) == "aEND"


def test_stop_strings_within_min_tokens_do_not_count() -> None:
    stream = Detokenizer(TOKENIZER, ("b",), min_tokens=3)
    assert "".join(map(stream.push, b"abab")) == "aba"
    assert stream.stopped == "b"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokens = [104, 105, 257]
    assert "".join(map(Detokenizer(TOKENIZER).push, tokens)) == "hi"
    assert "".join(map(Detokenizer(TOKENIZER, skip_special=False).push, tokens)) == "hi<|end|>"


def test_held_back_text_comes_when_no_more_tokens_do() -> None:
    stream = Detokenizer(TOKENIZER, ("END",))
    assert "".join(map(stream.push, b"the EN")) == "the "
    assert stream.finish() == "EN"


def test_a_broken_end_becomes_one_replacement_character() -> None:
    stream = Detokenizer(TOKENIZER)
    assert "".join(map(stream.push, "é".encode()[:1])) == ""
    assert stream.finish() == "�"


# -- templates -----------------------------------------------------------------------------------------------
HI = [{"role": "user", "content": "<hi> & 'you'"}]


def test_template_is_rendered_with_the_usual_variables() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}go{% endif %}{{ extra }}",
        "<s>",
        "</s>",
    )
    assert template.render(HI, extra=1) == "<s>user: <hi> & 'you'</s>\ngo1"
    assert template.render(HI, generate=False) == "<s>user: <hi> & 'you'</s>\n"


def test_blocks_are_trimmed_and_loops_can_be_left() -> None:
    source = "{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\nx\n{% endfor %}\ny"
    assert ChatTemplate(source).render(HI * 3) == "x\ny"


def test_tojson_does_not_escape_html() -> None:
    value = {"a": "<b>&é"}
    assert json.loads(ChatTemplate("{{ v | tojson }}").render(HI, v=value)) == value
    assert ChatTemplate("{{ v | tojson }}").render(HI, v="<é>") == '"<é>"'
    assert ChatTemplate("{{ v | tojson(indent=1) }}").render(HI, v=[1]) == "[\n 1\n]"


def test_generation_blocks_and_strftime_now_are_known() -> None:
    assert ChatTemplate("{% generation %}{{ 1 }}{% endgeneration %}").render(HI) == "1"
    assert len(ChatTemplate("{{ strftime_now('%Y') }}").render(HI)) == 4


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10**5000 }}",
        "{{ 10**(10**9) }}",
        "{% if 10**(10**9) %}{% endif %}",
        "{{ 'a' * 10**12 }}",
        "{{ 'x' | center(10**9) }}",
        "{% set x = range(10**12) | list %}",
    ],
)
def test_reading_a_template_computes_nothing(source: str) -> None:
    assert ChatTemplate(source).broken == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in a %}" * 25 + "{% endfor %}" * 25,
        "{{ \ud800 }}",
        "{% \x1b[2J %}",
        "(" * 300_000,
        "{{ " + "(" * 9999,
    ],
)
def test_whatever_a_template_is_it_can_be_asked_about(source: str) -> None:
    template = ChatTemplate(source)
    assert template.broken.startswith("the model's chat template")
    assert template.broken.isprintable()
    with client_error("the model's chat template"):
        template.render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{% for m in messages %}{{ m.content",
        "{{ 1 | no_such_filter }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_a_400(source: str) -> None:
    with client_error(status=400, code="template_error"):
        ChatTemplate(source).render(HI)
