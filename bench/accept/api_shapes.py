"""The API's smaller shapes on real models: scores, rows, gaps, chat templates, messages that go on.

Owns these lines of `make accept NAME=api`. Models: SmolLM2 135M, and Qwen2.5-Coder 0.5B from the cache of
models. Cosines are held against those of rows that numpy computes in fp32.

    python bench/accept/api_shapes.py [--base COMMIT]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import harness
from harness import Line, NotRun, Server

import chat_path
from pageturner.formats import hub
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.text.chat_template import ChatTemplate
from pageturner.text.family_templates import BY_NAME, recognised

BEFORE_TOOLS = "4e86474"
CODER = "qwen2.5-coder-0.5b-instruct-q4_k_m"
TEMPLATES = Path(os.environ.get("PAGETURNER_TEMPLATES") or hub.cache_folder().parent / "templates")
VOCABS = hub.cache_folder().parent / "vocabs"
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
ASKED = (
    "Write one sentence about the sea.",
    "What is the capital of France?",
    "Name three colours.",
    "Explain what a variable is.",
)
SYSTEM, HELLO = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}
TURNS = [HELLO, {"role": "assistant", "content": "Hi there."}, {"role": "user", "content": "Bye?"}]
# real template -> family, and conversations that it takes. Many write a system message of their
# own where there is none
REAL = {
    "google-gemma-2-2b-it": ("gemma", [[HELLO], TURNS]),
    "google-gemma-4-31B-it": ("gemma-4", [[HELLO], TURNS, [SYSTEM, *TURNS]]),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral-tekken", [[HELLO], TURNS, [SYSTEM, *TURNS]]),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral-v7", [[SYSTEM, HELLO], [SYSTEM, *TURNS]]),
    "Qwen-Qwen3-0.6B": ("chatml", [[HELLO], TURNS, [SYSTEM, *TURNS]]),
    "Qwen-Qwen2.5-7B-Instruct": ("chatml", [[SYSTEM, HELLO], [SYSTEM, *TURNS]]),
}
IN_VOCABS = {
    "qwen2": [[SYSTEM, HELLO], [SYSTEM, *TURNS]],
    "phi-3": [[HELLO], TURNS],
    "command-r": [[HELLO], TURNS],
    "gemma-4": [[HELLO], [SYSTEM, *TURNS]],
}
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
        pairs = ask(server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
        ones = ask(server, "/score", queries=[QUERY] * 8, documents=DOCUMENTS)["data"]
        top = ask(
            server, "/v2/rerank", query=QUERY, documents=DOCUMENTS, top_n=3, return_documents=False
        )
        ollama = ask(server, "/api/embed", input=DOCUMENTS)["embeddings"]
        plain = ask(server, "/v1/embeddings", input=DOCUMENTS)["data"]
        old = ask(server, "/api/embeddings", prompt=DOCUMENTS[0])["embedding"]
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
    same = (
        [one["score"] for one in pairs]
        == [one["score"] for one in ones]
        == [found[i] for i in range(8)]
    )
    cut = [one["index"] for one in top["results"]] == order[:3] and "document" not in top[
        "results"
    ][0]
    yield Line(
        "score, one to many and one to one, equals rerank; top_n cuts",
        f"{same}, {cut}",
        same and cut,
    )
    off = max(
        abs(x - y)
        for a, b in zip(ollama, plain, strict=True)
        for x, y in zip(a, b["embedding"], strict=True)
    )
    whole = len(old) == len(ollama[0]) and cosine(old, ollama[0]) > 1 - 1e-9
    figure = f"differ by {off:.1e}; the older API's row points the same way: {whole}"
    yield Line(
        "Ollama's /api/embed beside /v1/embeddings, under 1e-6", figure, off < 1e-6 and whole
    )


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


def refusals() -> Iterator[Line]:
    """SmolLM2 has no tokens for gaps; and no request brings a template unless the server trusts it."""
    with harness.server() as server:
        told = [
            ask(server, "/v1/completions", prompt="a", suffix="b"),
            ask(server, "/infill", input_prefix="a", input_suffix="b"),
            ask(server, "/api/generate", prompt="a", suffix="b"),
        ]
        untrusted = ask(server, "/v1/chat/completions", messages=[HELLO], chat_template="x")
    named = sum(one.get("status") == 400 and "FIM" in str(one["error"]) for one in told)
    yield Line(
        "a model without tokens for gaps: a 400 that says so, in each shape",
        f"{named} of 3",
        named == 3,
    )
    said = str(untrusted.get("error"))
    good = untrusted.get("status") == 400 and "--trust-request-chat-template" in said
    yield Line(
        "a chat_template of a request without trust: a 400 that names the flag", said[:90], good
    )


# -- conversations -------------------------------------------------------------------------------------------
def continued(server: Server) -> Iterator[Line]:
    """Answers at temperature 0, cut behind every token and continued: the rest is as it was, wherever the
    text that was kept has the tokens that it was made of."""
    cuts, told, equal = 0, 0, 0
    for question in ASKED:
        asked = {
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 24,
        }
        whole = ask(server, "/v1/chat/completions", **asked, return_token_ids=True)["choices"][0]
        tokens, prompt = whole["token_ids"], whole["prompt_token_ids"]
        for count in range(1, len(tokens) - 1):
            kept = ask(server, "/detokenize", tokens=tokens[:count])["prompt"]
            messages = [*asked["messages"], {"role": "assistant", "content": kept}]
            cuts += 1
            fields = {
                "messages": messages,
                "continue_final_message": True,
                "return_token_ids": True,
            }
            rest = ask(
                server, "/v1/chat/completions", **fields, temperature=0, max_tokens=24 - count
            )["choices"][0]
            if rest["prompt_token_ids"] != prompt + tokens[:count]:
                continue
            told += 1
            equal += rest["token_ids"] == tokens[count:]
    figure = f"{equal} of {told} equal token by token ({cuts - told} of {cuts} cuts have other tokens as text)"
    yield Line(
        "continue_final_message: as the unbroken answer at temperature 0", figure, equal == told > 0
    )
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused = ask(server, "/v1/chat/completions", messages=[*TURNS[:2]], **both)
    yield Line(
        "with add_generation_prompt: refused",
        str(refused.get("status")),
        refused.get("status") == 400,
    )


def given(server: Server) -> Iterator[Line]:
    """A template of a request: the same answer where it is the model's own; and one that never ends."""
    source = load_tokenizer(coder()).chat_template
    asked = {"messages": [HELLO], "temperature": 0, "max_tokens": 16}
    own = ask(server, "/v1/chat/completions", **asked)["choices"][0]["message"]
    same = ask(server, "/v1/chat/completions", **asked, chat_template=source)["choices"][0][
        "message"
    ]
    yield Line(
        "the model's own template sent as chat_template: the same answer",
        f"{own == same}",
        own == same,
    )
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    begin = time.monotonic()
    refused = ask(server, "/v1/chat/completions", **asked, chat_template=endless)
    seconds = time.monotonic() - begin
    figure = (
        f"{refused.get('status')} after {seconds:.2f} s: {str(refused['error']['message'])[:60]}"
    )
    yield Line("a chat_template that never ends: a 400", figure, refused.get("status") == 400)


def families() -> Iterator[Line]:
    """Our templates beside the real ones, on conversations that these take."""
    equal, compared, wrong = 0, 0, list[str]()
    for name, (family, conversations) in REAL.items():
        path = TEMPLATES / f"{name}.jinja"
        if path.is_file():
            pairs = _written(path.read_text(), family, conversations, "<s>", "</s>")
            compared, equal = compared + len(pairs), equal + sum(a == b for a, b in pairs)
            wrong += [name] if any(a != b for a, b in pairs) else []
    for name, conversations in IN_VOCABS.items():
        path = VOCABS / f"ggml-vocab-{name}.gguf"
        if path.is_file():
            tokenizer = load_tokenizer(path)
            found, source = recognised(tokenizer), tokenizer.chat_template or ""
            family = found.name if found else "chatml"
            pairs = _written(
                source, family, conversations, tokenizer.bos_token, tokenizer.eos_token
            )
            compared, equal = compared + len(pairs), equal + sum(a == b for a, b in pairs)
            wrong += [name] if found is None or any(a != b for a, b in pairs) else []
    if not compared:
        raise NotRun(f"no real templates in {TEMPLATES} or {VOCABS}")
    figure = f"{equal} of {compared} conversations equal{', not those of ' + ', '.join(wrong) if wrong else ''}"
    yield Line("templates by family, beside the real ones", figure, equal == compared and not wrong)


def _written(
    real: str, family: str, conversations: list[Any], bos: str, eos: str
) -> list[tuple[str, str]]:
    ours = ChatTemplate(BY_NAME[family].template, bos, eos)
    theirs = ChatTemplate(real, bos, eos)
    return [(theirs.render(messages), ours.render(messages)) for messages in conversations]


# -- what it costs -------------------------------------------------------------------------------------------
def cost(base: str) -> Iterator[Line]:
    """Reading an ordinary chat, here and before there were tools and thoughts."""
    try:
        found = chat_path.compared(base)
    except subprocess.CalledProcessError as error:
        raise NotRun(f"{base} cannot be measured: {error}") from None
    for case, (before, now, ratio) in found.items():
        figure = f"{before:.1f} us at {base}, {now:.1f} us now, x{ratio:.3f}"
        yield Line(f"reading a chat of {case}", figure, None)


def by_the_coder() -> Iterator[Line]:
    """What Qwen2.5-Coder is asked, by one server."""
    with harness.server("--trust-request-chat-template", model=coder(), wait=120) as server:
        yield from judged(server)
        yield from gaps(server)
        yield from continued(server)
        yield from given(server)


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """All lines of this part. NotRun at the end says what could not be had."""
    missing = []
    for part in (scores(), refusals(), families(), by_the_coder(), cost(arguments.base)):
        try:
            yield from part
        except NotRun as reason:
            missing.append(str(reason))
    if missing:
        raise NotRun("; ".join(missing))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument(
        "--base", default=BEFORE_TOOLS, help="the commit whose reading of chats is compared"
    )


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
