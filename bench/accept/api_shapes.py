"""Quality of scores and of filled gaps on real models: SmolLM2, and Qwen2.5-Coder 0.5B from the cache.

Cosines are held against those of rows that numpy computes in fp32. What the endpoints refuse, templates and
continued messages are held by tests/server (test_rerank, test_gaps, test_real_templates, test_parts).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import harness
from harness import Line, NotRun, Server

from pageturner.formats import hub
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.text.chat_template import ChatTemplate

CODER = "qwen2.5-coder-0.5b-instruct-q4_k_m"
QUERY = "How do I read the contents of a text file in Python?"
DOCUMENTS = [
    "Bananas are yellow and grow in bunches on tall plants.",
    "In Python, open(path).read() gives you the contents of a text file.",
    "The Eiffel Tower stands in Paris and is 330 metres tall.",
    "To read a text file, use Path(path).read_text() from pathlib.",
    "The cat slept on the warm stones all afternoon.",
    "A file is closed when the with statement ends.",
    "Water boils at a lower temperature on high mountains.",
    "Lists in Python are written with square brackets.",
]
# what stands before a gap, behind it, and what is true when the first line that fills it is taken
GAPS = (
    ("def add(a, b):\n    return ", "\n\nassert add(1, 2) == 3\n"),
    ("def square(x):\n    return ", "\n\nassert square(7) == 49\n"),
    ("def is_even(n):\n    return ", "\n\nassert is_even(4) and not is_even(5)\n"),
    ("def largest(numbers):\n    return ", "\n\nassert largest([3, 9, 2]) == 9\n"),
    ("def greet(name):\n    return ", '\n\nassert "Ada" in greet("Ada")\n'),
    ("def last(items):\n    return ", "\n\nassert last([1, 2, 3]) == 3\n"),
    ("total = 0\nfor i in range(5):\n    total += ", "\nassert total == 10\n"),
    ("def length(text):\n    return ", '\n\nassert length("four") == 4\n'),
)
APART = (
    0.01  # cosines that differ by more must be in order: quantised weights move them by half of it
)


def ask(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    """The answer, or the error with its `status`."""
    body = json.dumps(fields).encode()
    request = urllib.request.Request(server.url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            told: dict[str, Any] = json.load(answer)
            return told
    except urllib.error.HTTPError as error:
        with error:
            refused: dict[str, Any] = json.load(error)
        return refused | {"status": error.code}


def coder() -> str:
    path = hub.cache_folder() / f"{CODER}.gguf"
    if not path.is_file():
        raise NotRun(f"{path} is absent: python tests/tools/fetch_models.py")
    return str(path)


# -- rows and scores -----------------------------------------------------------------------------------------
def cosine(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def rows(server: Server, texts: list[str]) -> list[list[float]]:
    return [
        one["embedding"]
        for one in ask(server, "/v1/embeddings", input=texts, normalize=False)["data"]
    ]


def scores() -> Iterator[Line]:
    """Cosine, on SmolLM2: beside rows in fp32, by numpy, and beside the server's own rows."""
    with harness.server("--backend", "reference", "--dtype", "float32", wait=120) as reference:
        query, *documents = rows(reference, [QUERY, *DOCUMENTS])
    exact = [cosine(query, row) for row in documents]
    with harness.server() as server:
        told = ask(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS)["results"]
        query, *documents = rows(server, [QUERY, *DOCUMENTS])
    order = [one["index"] for one in told]
    wanted = sorted(range(8), key=lambda i: -exact[i])
    found = {one["index"]: one["relevance_score"] for one in told}
    off = max(abs(found[i] - exact[i]) for i in range(8))
    apart = [(i, k) for i in range(8) for k in range(8) if exact[i] > exact[k] + APART]
    right = sum(found[i] > found[k] for i, k in apart)
    figure = f"{right} of {len(apart)} pairs in order; all: {order}, of fp32 rows {wanted}; differ by {off:.4f}"
    good = right == len(apart) and order[0] == wanted[0]
    yield Line(f"rerank of 8 documents: as cosines of fp32 rows, where {APART} apart", figure, good)
    off = max(abs(found[i] - cosine(query, documents[i])) for i in range(8))
    yield Line("rerank beside cosines of /v1/embeddings, under 1e-6", f"{off:.1e}", off < 1e-6)


def judged(server: Server) -> Iterator[Line]:
    """Yes and no, by Qwen2.5-Coder, beside the probabilities of the two tokens, each asked for alone."""
    fields = {"query": QUERY, "documents": DOCUMENTS, "rerank_by": "yes_no"}
    begin = time.monotonic()
    told = ask(server, "/v1/rerank", **fields)
    seconds = time.monotonic() - begin
    off = 0.0
    for one in told["results"]:
        likely = [math.exp(_alone(server, one["document"]["text"], word)) for word in ("yes", "no")]
        off = max(off, abs(one["relevance_score"] - likely[0] / sum(likely)))
    what = "rerank by yes_no: p(yes) / (p(yes) + p(no)) of the two tokens, under 1e-6"
    yield Line(
        what,
        f"{off:.1e} over {len(told['results'])} documents, {seconds:.1f} s for all",
        off < 1e-6,
    )
    best = [one["index"] for one in told["results"]]
    figure = f"order {best}, of which 1 and 3 answer it ({told['results'][0]['relevance_score']:.3f} the first)"
    yield Line("its order, by a model that is no reranker", figure, None)


def _alone(server: Server, document: str, word: str) -> float:
    """The logprob of the word behind the prompt, which is rendered here as the server does it."""
    from pageturner.text.judging import Judge

    tokenizer = load_tokenizer(coder())
    chat = ChatTemplate(tokenizer.chat_template or "", tokenizer.bos_token, tokenizer.eos_token)
    prompt = Judge(tokenizer, chat).prompt(QUERY, document, "")
    (token,) = tokenizer.encode_inside(word)
    asked = {"prompt": prompt, "add_special_tokens": False, "max_tokens": 1, "logprobs": 0}
    answer = ask(server, "/v1/completions", **asked, allowed_token_ids=[token])
    return float(answer["choices"][0]["logprobs"]["token_logprobs"][0])


# -- gaps ----------------------------------------------------------------------------------------------------
def gaps(server: Server) -> Iterator[Line]:
    """Qwen2.5-Coder fills gaps of Python; the program is run with the first line of what fills them."""
    right, same = 0, 0
    for before, behind in GAPS:
        asked = {"temperature": 0, "stop": ["\n"]}
        filled = ask(
            server, "/v1/completions", prompt=before, suffix=behind, max_tokens=40, **asked
        )
        text = filled["choices"][0]["text"]
        right += _runs(before + text + behind)
        infill = ask(
            server, "/infill", input_prefix=before, input_suffix=behind, n_predict=40, **asked
        )
        options = {"num_predict": 40, **asked}
        ollama = ask(
            server, "/api/generate", prompt=before, suffix=behind, stream=False, options=options
        )
        same += infill["content"] == ollama["response"] == text
    what = "Qwen2.5-Coder 0.5B fills 8 gaps so that the program runs (6 at least)"
    yield Line(what, f"{right} of {len(GAPS)}", right >= 6)
    what = "the same gap of /v1/completions, /infill and Ollama has the same text"
    yield Line(what, f"{same} of {len(GAPS)}", same == len(GAPS))


def _runs(program: str) -> bool:
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], check=False, capture_output=True, timeout=10, cwd="/"
    )
    return done.returncode == 0


# -- what it costs -------------------------------------------------------------------------------------------


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Scores by SmolLM2; judgements and gaps by Qwen2.5-Coder."""
    yield from scores()
    with harness.server(model=coder(), wait=120) as server:
        yield from judged(server)
        yield from gaps(server)
