"""Filling a gap in a text (FIM, fill in the middle): the tokens a model was taught it with, and the
prompt.

Owns which tokens those are, from what a file names or by their texts, and the order: prefix,
suffix, middle. Must not know requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pageturner.formats.tokenizer import Tokenizer

# Texts of the tokens before prefix, suffix and middle, in several families
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Refact, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
_REPO = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILE = ("<|file_sep|>", "<file_sep>")
# behind what fills a gap
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|endoftext|>", "<|file_separator|>", "▁<EOT>")
_PROJECT = "project\n"  # the name of a repository that nobody has said
_BETWEEN = "\n\n"  # texts, where the model has no token between files


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Ids. repo, file: before the name of a repository and of a file, None: the model has none;
    ends: behind what fills a gap."""

    prefix: int
    suffix: int
    middle: int
    repo: int | None
    file: int | None
    ends: tuple[int, ...]


@lru_cache(maxsize=8)
def fim_tokens(tokenizer: Tokenizer) -> FimTokens | None:
    """The tokens of a model, None where it was not taught to fill gaps."""
    named = tokenizer.fim_ids
    marks: list[int | None] = [named.get(role) for role in ("prefix", "suffix", "middle")]
    for texts in _MARKS:
        if None in marks:
            marks = [tokenizer.token_of(text) for text in texts]
    prefix, suffix, middle = marks
    if prefix is None or suffix is None or middle is None:
        return None
    repo = named.get("repo", _first(tokenizer, _REPO))
    file = named.get("file", _first(tokenizer, _FILE))
    ends = [prefix, suffix, middle, repo, file, named.get("pad")]
    ends += [tokenizer.token_of(text) for text in _ENDS]
    known = tuple(dict.fromkeys(one for one in ends if one is not None))
    return FimTokens(prefix, suffix, middle, repo, file, known)


def fim_prompt(
    tokens: FimTokens,
    tokenizer: Tokenizer,
    prefix: str | Sequence[int],
    suffix: str,
    extra: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """The prompt behind which the model fills the gap between prefix and suffix. Marks within the
    texts are text, as far as the vocabulary has it so.

    extra  (name, text) of other files that the model should know
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=False)

    prompt = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    if extra and tokens.repo is not None:
        prompt += [tokens.repo, *tokenizer.encode_inside(_PROJECT)]
    for name, text in extra:
        head = encode(_BETWEEN)
        if tokens.file is not None:
            head = [tokens.file, *tokenizer.encode_inside(f"{name}\n")]
        prompt += head + encode(text)
    if extra and tokens.file is not None:
        prompt += [tokens.file, *tokenizer.encode_inside("here\n")]
    prompt += [tokens.prefix, *(encode(prefix) if isinstance(prefix, str) else prefix)]
    return [*prompt, tokens.suffix, *tokenizer.encode_inside(suffix), tokens.middle]


def _first(tokenizer: Tokenizer, texts: Sequence[str]) -> int | None:
    return next((id for text in texts if (id := tokenizer.token_of(text)) is not None), None)
