"""Bodies at random, for the shapes of rows, scores and gaps, and for fields of conversations: each becomes a
call or is refused, and nothing else happens."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from pageturner.errors import ClientError
from pageturner.server.admission.limits import RequestLimits
from pageturner.server.api.base.call import Call
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.replies import at_once
from pageturner.server.api.ollama.ollama import OLLAMA_GENERATE
from pageturner.server.api.ollama.ollama_embed import OLLAMA_EMBED, OLLAMA_EMBEDDINGS
from pageturner.server.api.openai.chat import CHAT_COMPLETIONS
from pageturner.server.api.openai.completions import COMPLETIONS
from pageturner.server.api.openai.infill import INFILL
from pageturner.server.api.openai.rerank import RERANK, SCORE
from pageturner.server.text_workers.text_jobs import pack_call, unpack_call

from .bytes_tokenizer import BytesTokenizer
from .test_openai import SERVED

HI = {"role": "user", "content": "hi"}
FIELDS: dict[str, tuple[Dialect, dict[str, list[Any]]]] = {
    "rerank": (
        RERANK,
        {
            "query": ["q"],
            "documents": [["a", "b"], [{"text": "a"}], "a"],
            "top_n": [1, 0],
            "instruction": ["i"],
            "rerank_by": ["yes_no", "cosine", "auto"],
            "max_tokens_per_doc": [1],
            "return_documents": [False],
            "truncate_prompt_tokens": [3, -1],
            "pooling": ["last"],
        },
    ),
    "score": (
        SCORE,
        {"text_1": ["a", ["a"]], "text_2": ["b", ["b", "c"]], "rerank_by": ["yes_no"]},
    ),
    "infill": (
        INFILL,
        {
            "input_prefix": ["a"],
            "input_suffix": ["b"],
            "input_extra": [[{"text": "t"}], []],
            "prompt": ["p"],
            "n_predict": [-1, 0, 3],
            "seed": [-1, 5],
            "stream": [True],
            "samplers": [["top_k"]],
            "stop": ["x"],
        },
    ),
    "embed": (OLLAMA_EMBED, {"input": ["a", ["a", "b"]], "truncate": [False], "dimensions": [2]}),
    "embeddings": (OLLAMA_EMBEDDINGS, {"prompt": ["a"], "keep_alive": ["5m"]}),
    "generate": (
        OLLAMA_GENERATE,
        {"prompt": ["a"], "suffix": ["b"], "system": ["s"], "raw": [True]},
    ),
    "completion": (
        COMPLETIONS,
        {"prompt": ["a", [5, 6], ["a", "b"]], "suffix": ["b"], "ignore_eos": [True]},
    ),
    "chat": (
        CHAT_COMPLETIONS,
        {
            "messages": [[HI], [HI, {"role": "assistant", "content": "a"}]],
            "chat_template": ["{{ messages }}", "{% x", "{{ messages[-1].content }}"],
            "continue_final_message": [True],
            "add_generation_prompt": [True, False],
            "suffix": ["s"],
        },
    ),
}
ODD = [
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    "",
    "a",
    "\ud83d",
    "x" * 300,
    [],
    [1],
    [[]],
    [None],
    {},
    {"text": 1},
]
LIMITS = RequestLimits(prompts=100, choices=100, context=100, vocabulary=266, values=65_536)
MODEL = replace(
    SERVED,
    tokenizer=BytesTokenizer(fills_gaps=True),
    request_templates=True,
    in_worker=True,
    limits=LIMITS,
)


@pytest.mark.parametrize("name", FIELDS)
def test_bodies_at_random(name: str) -> None:
    dialect, fields = FIELDS[name]
    dice, calls, statuses = random.Random(name), 0, set[int]()
    for _ in range(300):
        body = {
            field: dice.choice(ODD) if dice.random() < 0.1 else dice.choice(values)
            for field, values in fields.items()
            if dice.random() < 0.7
        }
        if dice.random() < 0.1:
            body[dice.choice(["n", "regex", "logprobs", "tools", "best_of"])] = dice.choice(ODD)
        raw = json.dumps(body).encode()
        try:
            call = dialect.read(dialect.decode(raw, LIMITS), MODEL)
        except ClientError as error:
            statuses.add(error.status)
            continue
        calls += 1
        again: Call = at_once(unpack_call(pack_call(call)))  # as a text worker would send it
        assert (again.prompts, again.params) == (call.prompts, call.params)
        assert again.body == call.body
    assert calls > 10
    assert statuses <= {400}
