"""/v1/rerank and /v1/score: how well documents go with queries.

Owns the fields of both, which of two ways a pair is judged in, and how scores are told. Must not
know how a row is computed (executor/pooling.py), nor how a model is asked (text/judging.py).

By cosine each text gets a row, as of /v1/embeddings. By yes_no each pair is a prompt, and a beam
search over the two tokens of the answer tells how likely both are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from pageturner.params import LARGEST, SamplingParams
from pageturner.server.admission.limits import RequestLimits
from pageturner.server.api.base.body import Count, PairOptions, RequestBody, bad_request
from pageturner.server.api.base.call import Call, check_model, check_text
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.replies import InParts, Reply, ReplyShape, encode
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.base.translate import FIELD_MAPS, FieldMap, Fields, fields_of, value_of
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.server.api.openai import completions
from pageturner.server.api.openai.embeddings import read_rows
from pageturner.text.chat_template import TemplateTooLong
from pageturner.text.judging import Judge, made_for_it
from pageturner.text.output_stream import OutputStream

AT_ONCE = 16  # texts whose prompts are rendered in the event loop
NOT_NEGATIVE = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]


# -- requests --------------------------------------------------------------------------------------
def decode_rerank(raw: bytes, limits: RequestLimits) -> RequestBody:
    """query, documents, top_n, return_documents; or TEI's form of it, with texts."""
    fields = fields_of(raw, limits)
    if tei := "texts" in fields and "documents" not in fields:
        fields["documents"] = fields.pop("texts")
        fields["return_documents"] = fields.pop("return_text", msgspec.Raw(b"false"))
    query, documents = value_of(fields, "query", str), _texts(fields, "documents")
    if query is None:
        raise bad_request("missing_field", "query is missing", "query")
    back = value_of(fields, "return_documents", bool, True)
    top = value_of(fields, "top_n", NOT_NEGATIVE) or len(documents)  # 0: all of them, as in vLLM
    taken = ("query", "documents", "top_n", "return_documents", "raw_scores", "truncate")
    told = documents if back else None
    pairs = _pairs(fields, queries=1, documents=told, top_n=top, listed=tei)
    return _understood(fields, taken, [query, *documents], pairs, limits)


def decode_score(raw: bytes, limits: RequestLimits) -> RequestBody:
    """One text with one or several others, or as many with as many, under the names of either
    way."""
    fields = fields_of(raw, limits)
    names = ("queries", "documents") if "queries" in fields else ("text_1", "text_2")
    first, second = (_texts(fields, name) for name in names)
    if len(first) not in (1, len(second)):
        raise bad_request(
            "invalid_value",
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: send one, or as many",
            names[0],
        )
    pairs = _pairs(fields, queries=len(first))
    return _understood(fields, names, [*first, *second], pairs, limits)


def _texts(fields: Fields, name: str) -> list[str]:
    """A text, or a list of texts, each as it is or within an object."""
    if name not in fields:
        raise bad_request("missing_field", f"{name} is missing", name)
    given = value_of(fields, name, str | list[str | dict[str, Any]])
    listed = [given] if isinstance(given, str) else given
    texts = [one.get("text") if isinstance(one, dict) else one for one in listed]
    if not texts or not all(isinstance(text, str) for text in texts):
        message = f'{name} is a text or a list of texts, each plain or as {{"text": ...}}'
        raise bad_request("invalid_value", message, name)
    return [str(text) for text in texts]


def _pairs(fields: Fields, **known: Any) -> PairOptions:
    by = value_of(fields, "rerank_by", Literal["auto", "cosine", "yes_no"], "auto")
    pooling = value_of(fields, "pooling", Literal["mean", "last", "cls"], "mean")
    instruction = value_of(fields, "instruction", str, "")
    most = value_of(fields, "max_tokens_per_doc", Count)
    return PairOptions(by=by, pooling=pooling, instruction=instruction, most=most, **known)


def _understood(
    fields: Fields,
    taken: tuple[str, ...],
    texts: list[str],
    pairs: PairOptions,
    limits: RequestLimits,
) -> RequestBody:
    map = field_map(taken)
    body = map.to_openai_request(map.passed_on(fields) | {"prompt": texts, "max_tokens": 1}, limits)
    body.pairs = pairs
    return body


def field_map(taken: tuple[str, ...]) -> FieldMap:
    """The fields of a body. taken: its own names; the second is that of the documents."""
    names = dict.fromkeys(("prompt", "max_tokens", "n", "beam_width"), taken[1])
    ours = FIELD_MAPS["pairs"]
    return msgspec.structs.replace(ours, taken=(*taken, *ours.taken), names=names)


def _read(body: RequestBody, served: ServedModel) -> Call:
    check_model(body, served)
    pairs, by = body.pairs or PairOptions(), served.rerank_by
    if pairs.by != "auto":
        by = pairs.by
    elif by == "auto":
        by = "yes_no" if made_for_it(served.tokenizer) else "cosine"
    assert isinstance(body.prompt, list)
    texts = [check_text(text, "prompt", body, served) for text in body.prompt]
    if pairs.most is not None:
        texts[pairs.queries :] = [_cut(text, pairs.most, served) for text in texts[pairs.queries :]]
    return _by_cosine(texts, body, served) if by == "cosine" else _by_yes_no(texts, body, served)


def _cut(text: str, most: int, served: ServedModel) -> str:
    """The beginning of a text, as so many tokens write it."""
    tokens = served.tokenizer.encode(text, add_special=False, parse_special=True)
    if len(tokens) <= most:
        return text
    return served.tokenizer.decode_whole(tokens[:most], skip_special=False)


def _by_cosine(texts: list[str], body: RequestBody, served: ServedModel) -> Call:
    pairs = body.pairs or PairOptions()
    if pairs.instruction:
        message = "instruction is for rerank_by yes_no: write it into the query"
        raise bad_request("unsupported_parameter", message, "instruction")
    pairs = msgspec.structs.replace(pairs, by="cosine")
    body = msgspec.structs.replace(body, prompt=texts, pairs=pairs)
    return read_rows(body, served, pairs.pooling)


def _by_yes_no(texts: list[str], body: RequestBody, served: ServedModel) -> Call:
    """A call whose prompts are pairs; its two answers to each are yes and no, with their
    logprobs."""
    pairs = body.pairs or PairOptions()
    if body.truncate_prompt_tokens is not None:
        message = (
            "truncate_prompt_tokens would cut into what the model is asked: send max_tokens_per_doc"
        )
        raise bad_request("unsupported_parameter", message, "truncate_prompt_tokens")
    if len(texts) > AT_ONCE and not served.in_worker:
        raise TemplateTooLong(f"it would be rendered for {len(texts)} texts")
    judge = Judge(served.tokenizer, served.template)
    queries, documents = texts[: pairs.queries], texts[pairs.queries :]
    queries = queries * len(documents) if len(queries) == 1 else queries
    prompts = [
        judge.prompt(query, document, pairs.instruction)
        for query, document in zip(queries, documents, strict=True)
    ]
    yes, no = judge.tokens(prompts[0])
    asked = msgspec.structs.replace(
        body,
        prompt=prompts,
        pairs=msgspec.structs.replace(pairs, by="yes_no", yes=yes),
        add_special_tokens=judge.special,
        use_beam_search=True,
        n=2,
        logprobs=0,
        allowed_token_ids=[yes, no],
    )
    call = completions.read(asked, served)
    return replace(call, params=tuple(map(_unpenalised, call.params)))


def _unpenalised(params: SamplingParams) -> SamplingParams:
    """The parameters without what a model's files say about answers: it would count as
    likelihood."""
    return replace(
        params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=None
    )


# -- answers ---------------------------------------------------------------------------------------
def _scores(reply: Reply, streams: list[OutputStream]) -> InParts[list[float]]:
    """Compute the score of each pair."""
    pairs = reply.call.body.pairs or PairOptions()
    found = []
    if pairs.by == "yes_no":
        for i in range(0, len(streams), 2):
            found.append(_share_of_yes(streams[i : i + 2], pairs.yes))
            yield
        return found
    rows = []
    for stream in streams:
        rows.append(stream.pooled.vector(pairs.pooling))
        yield
    for i, document in enumerate(rows[pairs.queries :]):
        query = rows[i if pairs.queries > 1 else 0]
        found.append(math.fsum(a * b for a, b in zip(query, document, strict=True)))
        yield
    return found


def _share_of_yes(streams: list[OutputStream], yes: int) -> float:
    """Return the probability of yes against no."""
    told = {stream.tokens[0]: stream.logprobs[0][0] for stream in streams if stream.tokens}
    said = told.pop(yes, -math.inf)
    other = next(iter(told.values()), -math.inf)
    return 0.0 if said == -math.inf else 1 / (1 + math.exp(min(other - said, 700.0)))


def _used(streams: list[OutputStream]) -> dict[str, int]:
    prompt = sum(len(stream.request.prompt) for stream in streams if stream.request.index == 0)
    return {"prompt_tokens": prompt, "total_tokens": prompt}


def whole_rerank(reply: Reply, streams: list[OutputStream], _: WholeAnswer) -> InParts[bytes]:
    """The documents, the best first; of equals the first one."""
    pairs = reply.call.body.pairs or PairOptions()
    scores = yield from _scores(reply, streams)
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: pairs.top_n]
    if pairs.listed:
        texts = pairs.documents
        return encode(
            [{"index": i, "score": scores[i]} | ({"text": texts[i]} if texts else {}) for i in best]
        )
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
    if pairs.documents is not None:
        for result in results:
            result["document"] = {"text": pairs.documents[result["index"]]}
    return encode(
        {
            "id": reply.id,
            "object": "list",
            "model": reply.model,
            "results": results,
            "usage": _used(streams),
        }
    )


def whole_score(reply: Reply, streams: list[OutputStream], _: WholeAnswer) -> InParts[bytes]:
    """The scores, pair by pair."""
    scores = yield from _scores(reply, streams)
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    used = {**_used(streams), "completion_tokens": 0}
    about = {"id": reply.id, "object": "list", "created": reply.about()["created"]}
    return encode({**about, "model": reply.model, "data": data, "usage": used})


RERANK = Dialect(
    id_prefix="rerank",
    shape=ReplyShape("list"),
    read=field_map(("query", "documents")).renames(_read),
    whole=whole_rerank,
    decode=decode_rerank,
)
SCORE = Dialect(
    id_prefix="score",
    shape=ReplyShape("list"),
    read=field_map(("text_1", "text_2")).renames(_read),
    whole=whole_score,
    decode=decode_score,
)
