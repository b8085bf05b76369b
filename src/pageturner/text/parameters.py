"""Sampling parameters before they reach an engine: their limits, and what must be looked up for
them.

Owns what a value may be, with a ClientError that names the field, for HTTP and llm.py alike. Must
not know JSON, requests or prompts' origin.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from pageturner.errors import ClientError
from pageturner.formats.tokenizer import Tokenizer
from pageturner.params import LIMITS, SamplingParams, out_of_range
from pageturner.request import Logprob

MAX_STOPS, LONGEST_STOP, MAX_STOP_TEXT = (
    64,
    1024,
    4096,
)  # strings; characters of one, and of all of them
MAX_BAD_WORDS, LONGEST_BAD_WORD, MAX_BAD_TEXT = 1024, 1024, 65_536  # likewise
MAX_STOP_IDS = 1024  # beside those that end the answers of the model anyway
# that stop ids add to a step of a beam search: each beam needs as many more
MAX_CONTINUATIONS = 1 << 15
WORD_ENTRIES = 16  # what looking for one of bad_words costs at each token, in ids of logit_bias
GREEDY = 1e-5  # temperatures below it choose the most likely token anyway, as in vLLM; float32 cannot divide
# by the smallest of them
LARGEST_BIAS = 100.0  # a larger one is taken as this, as in vLLM
SEED_BITS = 63


def check_number(name: str, value: float | None, shown: str = "") -> None:
    """ClientError unless the value of this field is within its limits; None is. shown: what the
    client calls it."""
    if value is not None and (wrong := out_of_range(name, value, shown)) is not None:
        raise invalid(shown or name, wrong)


def resolve(params: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> SamplingParams:
    """The parameters as an engine takes them: checked, end of sequence among the stop ids, bad
    words as tokens, seed drawn. ClientError names the field that is wrong."""
    for name in LIMITS:
        check_number(name, getattr(params, name))
    if params.pooling:
        raise invalid("pooling", "pooling is for embeddings, and nothing that answers takes it")
    if params.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be 1 or more, or -1")
    _check_strings("stop", params.stop, (MAX_STOPS, LONGEST_STOP, MAX_STOP_TEXT))
    _check_strings("bad_words", params.bad_words, (MAX_BAD_WORDS, LONGEST_BAD_WORD, MAX_BAD_TEXT))
    _check_ids("stop_token_ids", params.stop_ids, vocab_size)
    stops, allowed = tuple(dict.fromkeys(params.stop_ids)), params.allowed_token_ids
    _check_stop_ids(len(stops), params.beam_width)
    _check_ids("logit_bias", params.logit_bias or (), vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("force_ids", params.force_ids, vocab_size)
    _check_ids("thinking_begin", (*params.thinking_begin, *params.thinking_end), vocab_size)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise invalid("allowed_token_ids", "allowed_token_ids is empty: nothing could be chosen")
    words = (*params.bad_words_token_ids, *_word_tokens(tokenizer, params.bad_words))
    _check_ids("bad_words", [token for word in words for token in word], vocab_size)
    if params.structured_outputs is not None:
        _check_grammar(params, tokenizer)
    check_beams(params)
    if params.beam_width:  # which draws no tokens
        params = replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, speculation=False)
    if not all(words):
        raise invalid("bad_words_token_ids", "bad_words_token_ids may not hold an empty word")
    ends = () if params.ignore_eos else tokenizer.eos_ids
    return replace(
        params,
        n=1,
        best_of=None,
        temperature=params.temperature if params.temperature >= GREEDY and params.top_p else 0.0,
        top_p=params.top_p or 1.0,  # of no tokens: the likeliest alone
        top_k=max(params.top_k, 0),
        stop_ids=tuple(dict.fromkeys((*ends, *stops))),
        allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
        logit_bias=_clamped(params.logit_bias),
        bad_words_token_ids=words,
        seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
    )


def entries(params: SamplingParams) -> int:
    """The number of entries that reshape the logits of a request, which that go to the engine and
    are looked at again for each of its tokens."""
    words = params.bad_words_token_ids
    ids = len(params.stop_ids) + len(params.logit_bias or ()) + len(params.allowed_token_ids or ())
    return ids + WORD_ENTRIES * len(words) + sum(map(len, words))


def answer_counts(n: int | None, best_of: int | None, width: int, slots: int) -> tuple[int, int]:
    """The number of answers to one prompt that are made, and how many are kept; `width`: of a beam
    search, or
    0. ClientError where this cannot be or is more than the engine's `slots`."""
    return _beams(n, width, slots) if width else choices(n, best_of, slots)


def choices(n: int | None, best_of: int | None, slots: int) -> tuple[int, int]:
    """Return the counts of `answer_counts` for samples."""
    check_number("n", n)
    check_number("best_of", best_of)
    kept = 1 if n is None else n
    made = kept if best_of is None else best_of
    if made < kept:
        raise invalid("best_of", f"best_of is {made} and n is {kept}: it must be at least n")
    if made > slots:
        name = "n" if best_of is None else "best_of"
        message = f"{name} is {made}, and {slots} sequences run here at once: ask for no more"
        raise invalid(name, f"{message}, or start with a larger --max-num-seqs")
    return made, kept


def _beams(n: int | None, width: int, slots: int) -> tuple[int, int]:
    """Return the counts of `answer_counts` for a beam search: the n best of its answers."""
    check_number("beam_width", width)
    made, _ = choices(n, None, slots)
    if width < made:
        raise invalid("n", f"n is {made}, and {width} beams have no more than {width} answers")
    if width > slots:
        message = f"{width} beams, and {slots} sequences run here at once: ask for no more"
        raise invalid("beam_width", f"{message}, or start with a larger --max-num-seqs")
    return made, made


def beam_score(logprobs: Sequence[Logprob], length_penalty: float) -> float:
    """The score by which the answers of a beam search are ranked: 0 for one that is empty."""
    length = float(len(logprobs) or 1)
    return math.fsum(value for value, _ in logprobs) / float(length**length_penalty)


def most_likely(logprobs: Sequence[Sequence[Logprob]], keep: int) -> list[int]:
    """The answers that have the largest mean logprob of a token, the best first."""
    means = [math.fsum(value for value, _ in one) / max(len(one), 1) for one in logprobs]
    return sorted(range(len(means)), key=lambda i: (-means[i], i))[:keep]


def truncate(tokens: Sequence[int], keep: int | None, room: int, context: int) -> Sequence[int]:
    """The last `keep` tokens of a prompt, as vLLM does it: whatever stands in front goes, BOS too.

    keep     None: all of them; -1: as many as there is `room` for beside the answer
    context  no prompt can keep more
    """
    if keep is None:
        return tokens
    if keep > context:
        message = f"truncate_prompt_tokens is {keep}, and the context of this server holds {context} tokens"
        raise invalid("truncate_prompt_tokens", message)
    return tokens[-(max(room, 1) if keep == -1 else keep) :]


def invalid(name: str, message: str) -> ClientError:
    """A 400 for the value of a field."""
    return ClientError(400, "invalid_value", message, name)


def check_beams(params: SamplingParams) -> None:
    """ClientError for what cannot be had with beam search."""
    if not params.beam_width:
        return
    scored, budget = params.prompt_logprobs, params.max_thinking_tokens
    forced = params.force_ids or params.forced_end is not None
    for name, given, message in (
        (
            "stop",
            params.stop,
            "stop strings do not end a beam: use stop_token_ids, or cut the text",
        ),
        (
            "prompt_logprobs",
            scored is not None,
            "prompt_logprobs (echo too) cannot be had with beam search",
        ),
        (
            "thinking_token_budget",
            budget is not None,
            "the thoughts of beams cannot be ended: leave it away",
        ),
        ("forced_end", forced, "forced tokens leave a beam search nothing to find"),
    ):
        if given:
            raise invalid(name, message)


def _check_grammar(params: SamplingParams, tokenizer: Tokenizer) -> None:
    """A grammar says where the answer may end; whatever says otherwise leaves nothing to choose."""
    if not isinstance(params.structured_outputs, str):
        made = "structured_outputs takes what StructuredOutputsParams(...) returns"
        raise invalid("structured_outputs", made)
    for name, given in (("ignore_eos", params.ignore_eos), ("min_tokens", params.min_tokens)):
        if given:
            raise invalid(
                name, f"{name} contradicts a grammar, which says itself where the answer may end"
            )
    if not tokenizer.eos_ids:
        raise invalid(
            "structured_outputs", "this model has no end of sequence: a grammar could never end"
        )


def _word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> list[tuple[int, ...]]:
    """The token sequences that write the words: at the beginning of a text, and behind a space
    where that takes as many tokens and another first one (vLLM's rule)."""
    found: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = (
            tuple(tokenizer.encode(text, add_special=False, parse_special=True))
            for text in (word.lstrip(), " " + word.lstrip())
        )
        if not plain:
            raise invalid("bad_words", f"bad_words: {word[:40]!r} has no tokens")
        found.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found


def _check_strings(name: str, strings: tuple[str, ...], limits: tuple[int, int, int]) -> None:
    """limits: how many strings, and the most characters of one and of all."""
    if not strings:
        return
    most, longest, text = limits
    if len(strings) > most:
        raise invalid(name, f"{name} has {len(strings)} strings, at most {most} are taken")
    if not all(strings):
        raise invalid(name, f"{name} may not hold an empty string")
    lengths = [len(string) for string in strings]
    if max(lengths) > longest or sum(lengths) > text:
        message = f"a string may have {longest} characters, and all of them together {text}"
        raise invalid(name, f"{name} has strings of {sum(lengths)} characters: {message}")


def _check_stop_ids(count: int, beams: int) -> None:
    if count > MAX_STOP_IDS:
        raise invalid(
            "stop_token_ids",
            f"stop_token_ids has {count} tokens, at most {MAX_STOP_IDS} are taken",
        )
    if beams * beams * count > MAX_CONTINUATIONS:
        most = MAX_CONTINUATIONS // (beams * beams)
        message = f"stop_token_ids has {count} tokens, and {beams} beams take at most {most}: each beam looks"
        raise invalid(
            "stop_token_ids",
            f"{message} for as many more continuations. Send fewer, or fewer beams",
        )


def _check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise invalid(name, f"{name}: token ids are 0 to {vocab_size - 1}")


def _clamped(bias: dict[int, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    if not all(map(math.isfinite, bias.values())):
        raise invalid("logit_bias", "logit_bias must be finite")
    return {token: min(max(value, -LARGEST_BIAS), LARGEST_BIAS) for token, value in bias.items()}
