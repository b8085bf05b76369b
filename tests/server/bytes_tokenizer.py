"""A tokenizer for tests: a token for each byte, and control tokens that tell the fake engine what to do."""

from __future__ import annotations

import os
import re
import time

from pageturner.formats.tokenizer import Marks, Tokenizer

SPECIALS = {
    "<|bos|>": 256,
    "<|end|>": 257,
    "<|poison|>": 258,  # crashes the engine in every step that it is in
    "<|slow|>": 259,  # every step with it takes 20 ms
    "<|crash|>": 260,  # crashes the engine once, at its fifth token
    "<|hang|>": 261,  # stops the engine once, at its fifth token
    "<|short|>": 262,  # ends with <|end|> as the sixth token
    "<|fail|>": 263,  # fails at its third token
    "<|leap|>": 264,  # three tokens at a time
    "<|stall|>": 265,  # never gets a token
    "<|gap|>": 266,  # once, at its fifth token, skips a position
    "<|noise|>": 267,  # once, at its fifth token, sends what is no message
    "<|untakable|>": 268,  # crashes the engine that is handed it, before any step
}
VOCAB = 269
TEXT = 'The quick brown fox: naïve café, 東京, 😀 jumps over <b>"lazy"</b> dogs\n\t& goes on. '.encode()
TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


def token_at(prompt: tuple[int, ...], n: int, index: int = 0) -> int:
    """The n-th token of the answer: the fake model reads TEXT aloud, from a place that the prompt decides,
    and which of several answers it is."""
    if SPECIALS["<|short|>"] in prompt and n == 5:
        return SPECIALS["<|end|>"]
    return TEXT[(sum(prompt) + 7 * index + n) % len(TEXT)]


def prompt_logprob(token: int, k: int) -> tuple[float, int, tuple[tuple[int, float], ...]]:
    """What the fake model thinks of a token of a prompt: its logprob, its rank, the k most likely ones."""
    return (
        -0.25 * (token % 7 + 1),
        token % 7 + 1,
        tuple(((token + j) % 256, -0.25 - j) for j in range(k)),
    )


class BytesCodec:
    vocab_size = VOCAB

    def encode(self, text: str, parse_special: bool) -> list[int]:
        time.sleep(float(os.environ.get("FAKE_TOKENIZE_SECONDS", "0")))
        if not parse_special:
            return list(text.encode())
        ids: list[int] = []
        for part in re.split(r"(<\|\w+\|>)", text):
            ids += [SPECIALS[part]] if part in SPECIALS else list(part.encode())
        return ids

    def least_tokens(self, text: str) -> int:
        return -(-len(text) // max(map(len, SPECIALS)))

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return next(text for text, id in SPECIALS.items() if id == token).encode()


FIM = {
    "prefix": SPECIALS["<|bos|>"],
    "suffix": SPECIALS["<|end|>"],
    "middle": SPECIALS["<|short|>"],
}


class BytesTokenizer(Tokenizer):
    """fills_gaps: it has tokens for that, FIM."""

    def __init__(self, eos_ids: tuple[int, ...] = (257,), fills_gaps: bool = False) -> None:
        fills_gaps = fills_gaps or bool(os.environ.get("FAKE_FIM"))
        marks = Marks(
            bos_id=256,
            eos_ids=eos_ids,
            special_ids=frozenset((256, 257)),  # the others are read wherever they stand
            chat_template=TEMPLATE,
            fim_ids=FIM if fills_gaps else {},
        )
        super().__init__(BytesCodec(), marks)


def answer(prompt: str | list[int], n: int, index: int = 0) -> str:
    """The text that n tokens of an answer make, or of another answer to the same prompt."""
    if isinstance(prompt, str):
        prompt = BytesTokenizer().encode(prompt, add_special=True, parse_special=True)
    raw = bytes(t for t in (token_at(tuple(prompt), i, index) for i in range(n)) if t < 256)
    return raw.decode("utf-8", "replace")
