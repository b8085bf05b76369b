"""/v1/rerank and /v1/score: by rows, on the engine of the product without a model; by yes and no, on a tiny
one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pageturner.server.admission.limits import NO_LIMITS
from pageturner.server.api.base.call import Call
from pageturner.server.api.openai.rerank import RERANK, SCORE
from pageturner.text.chat_template import TemplateTooLong
from pageturner.text.judging import Judge, made_for_it, read_template
from support.refusals import client_error, engine_fault
from support.servers import serving

from .bytes_tokenizer import BytesTokenizer
from .conftest import Server, shared
from .test_openai import SERVED

TINY = Path(__file__).parents[1] / "goldens" / "tiny_llama.gguf"
PAIR = {"query": "a", "documents": ["b"]}
ROOMY = replace(SERVED, context=2000, capacity=2000)


def cosine(a: str, b: str) -> float:
    """Of the rows of the engine without a model: the mean of the tokens, and 1."""
    x, y = (sum(text.encode()) / len(text) for text in (a, b))
    return (x * y + 1) / (math.hypot(x, 1) * math.hypot(y, 1))


server = shared(FAKE_ENGINE="own")


def read(dialect: Any, served: Any = ROOMY, **fields: Any) -> Call:
    call: Call = dialect.read(dialect.decode(json.dumps(fields).encode(), NO_LIMITS), served)
    return call


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/reranking", "/rerank/"])
def test_documents_come_back_the_best_first(server: Server, path: str) -> None:
    documents = ["zzzz", "!!", {"text": "aabb"}]
    told = server.http.post(
        path, json={"query": "aaaa", "documents": documents, "model": "fake"}
    ).json()
    assert told["id"].startswith("rerank-")
    assert [one["document"]["text"] for one in told["results"]] == ["aabb", "zzzz", "!!"]
    assert [one["index"] for one in told["results"]] == [2, 0, 1]
    for one in told["results"]:
        assert one["relevance_score"] == pytest.approx(
            cosine("aaaa", one["document"]["text"]), abs=1e-12
        )
    assert told["usage"] == {"prompt_tokens": 14, "total_tokens": 14}
    first = server.http.post(
        path, json={"query": "aaaa", "documents": documents, "top_n": 1, "return_documents": False}
    ).json()["results"]
    assert [set(one) for one in first] == [{"index", "relevance_score"}]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_of_one_with_several_and_of_as_many_with_as_many(server: Server, path: str) -> None:
    def scores(**fields: Any) -> list[float]:
        told = server.http.post(path, json=fields).json()
        assert [one["index"] for one in told["data"]] == list(range(len(told["data"])))
        return [one["score"] for one in told["data"]]

    assert scores(text_1="ab", text_2="cd") == pytest.approx([cosine("ab", "cd")])
    both = [cosine("ab", "cd"), cosine("ab", "!!")]
    assert scores(text_1="ab", text_2=["cd", "!!"]) == pytest.approx(both)
    assert scores(queries=["ab", "!"], documents=["cd", "xx"]) == pytest.approx(
        [both[0], cosine("!", "xx")]
    )


@pytest.mark.slow
def test_yes_and_no_are_as_likely_as_the_model_says() -> None:
    fields = {"query": "who", "documents": ["me", "you there"], "instruction": "find"}
    with serving(
        TINY, "--rerank-template", "{instruction} {query} <doc> {document} <answer>\n"
    ) as client:
        told = client.post("/v1/rerank", json=fields).json()[
            "results"
        ]  # the template says by which way
        assert sorted(one["index"] for one in told) == [0, 1]
        for one in told:
            prompt = f"find who <doc> {one['document']['text']} <answer>\n"
            assert one["relevance_score"] == pytest.approx(share_of_yes(client, prompt), rel=1e-6)
        assert told[0]["relevance_score"] >= told[1]["relevance_score"]


def share_of_yes(client: httpx.Client, prompt: str) -> float:
    """By the probabilities of the two tokens, each chosen alone."""
    likely = []
    for word in ("yes", "no"):
        ids = client.post(
            "/tokenize", json={"prompt": f"☺{word}", "add_special_tokens": False}
        ).json()
        alone = client.post("/tokenize", json={"prompt": "☺", "add_special_tokens": False}).json()
        token = ids["tokens"][alone["count"]]
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": 0, "allowed_token_ids": [token]}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        likely.append(math.exp(choice["logprobs"]["token_logprobs"][0]))
    return likely[0] / sum(likely)


def test_how_a_pair_is_judged_is_told_by_the_model_the_flag_and_the_request() -> None:
    pair = {"query": "q", "documents": ["d"]}
    assert read(RERANK, **pair).params[0].pooling == "mean"
    assert read(RERANK, **pair, pooling="last").params[0].pooling == "last"
    assert read(RERANK, **pair, rerank_by="yes_no").params[0].beam_width == 2
    by_flag = replace(ROOMY, rerank_by="yes_no")
    assert read(RERANK, by_flag, **pair).params[0].beam_width == 2
    assert read(RERANK, by_flag, **pair, rerank_by="cosine").params[0].pooling == "mean"
    made = BytesTokenizer()
    made.name = "Qwen3 Reranker 0.6B"
    assert made_for_it(made)
    assert read(RERANK, replace(ROOMY, tokenizer=made), **pair).params[0].beam_width == 2
    assert not made_for_it(BytesTokenizer())


def test_what_a_model_is_asked() -> None:
    tokenizer = BytesTokenizer()
    tokenizer.rerank_template = "<q>{query}</q><d>{document}</d> yes?"
    judge = Judge(tokenizer, ROOMY.template)
    assert (
        judge.prompt("a {document}", "b {query}", "") == "<q>a {document}</q><d>b {query}</d> yes?"
    )
    assert judge.tokens("yes or no?\n") == judge.tokens("<answer>") == (ord("y"), ord("n"))
    with client_error("yes from no"):
        judge.tokens("yes?")  # both begin with a space
    asked = Judge(BytesTokenizer(), ROOMY.template).prompt("Q1", "D1", "find")
    assert asked.startswith("<|bos|>system\n")
    assert asked.endswith("<|bos|>assistant\n")
    assert all(text in asked for text in ("Q1", "D1", "find"))
    call = read(RERANK, query="q", documents=["d"], rerank_by="yes_no", instruction="find")
    assert call.params[0].allowed_token_ids == (ord("y"), ord("n"))
    assert call.params[0].repetition_penalty == 1.0
    usual = replace(ROOMY, defaults={"repetition_penalty": 1.3})
    assert (
        read(RERANK, usual, query="q", documents=["d"], rerank_by="yes_no")
        .params[0]
        .repetition_penalty
        == 1
    )


def test_many_prompts_are_rendered_by_a_worker() -> None:
    fields = {"query": "q", "documents": ["d"] * 20, "rerank_by": "yes_no"}
    with pytest.raises(TemplateTooLong):
        read(RERANK, **fields)
    assert len(read(RERANK, replace(ROOMY, in_worker=True), **fields).prompts) == 40


def test_a_document_may_be_cut() -> None:
    call = read(RERANK, query="qqqq", documents=["dddddd"], max_tokens_per_doc=2)
    assert [bytes(prompt) for prompt in call.prompts] == [b"qqqq", b"dd"]


@pytest.mark.parametrize(
    ("dialect", "fields", "code", "param"),
    [
        (RERANK, {"documents": ["a"]}, "missing_field", "query"),
        (RERANK, {"query": "a"}, "missing_field", "documents"),
        (RERANK, {**PAIR, "documents": []}, "invalid_value", "documents"),
        (RERANK, {**PAIR, "documents": [{"title": "x"}]}, "invalid_value", "documents"),
        (RERANK, {**PAIR, "documents": [5]}, "invalid_type", "documents"),
        (RERANK, {**PAIR, "documents": [""]}, "empty_prompt", "documents"),
        (RERANK, {**PAIR, "top_n": -1}, "invalid_type", "top_n"),
        (RERANK, {**PAIR, "rank_fields": ["x"]}, "unsupported_parameter", "rank_fields"),
        (RERANK, {**PAIR, "rerank_by": "x"}, "invalid_type", "rerank_by"),
        (RERANK, {**PAIR, "instruction": "x"}, "unsupported_parameter", "instruction"),
        (RERANK, {**PAIR, "documents": ["b" * 5000]}, "context_length_exceeded", "documents"),
        (RERANK, {**PAIR, "model": "other"}, "model_not_found", "model"),
        (RERANK, {**PAIR, "n": 2}, "unsupported_parameter", "n"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "invalid_value", "text_1"),
        (SCORE, {"text_1": "a"}, "missing_field", "text_2"),
        (SCORE, {"queries": "a"}, "missing_field", "documents"),
    ],
)
def test_refusals(dialect: Any, fields: dict[str, Any], code: str, param: str) -> None:
    with client_error(code=code, param=param):
        read(dialect, **fields)


def test_a_template_of_a_flag_has_places(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("{query} {document}")
    assert (
        read_template(str(tmp_path / "t"))
        == read_template("{query} {document}")
        == "{query} {document}"
    )
    assert read_template("") == ""
    for wrong in ("{query} alone", str(tmp_path / "absent")):
        with engine_fault("rerank-template"):
            read_template(wrong)
