"""Records the token ids of SmolLM2's tokenizer on a folder of texts; compares the two references for them.

Run by hand in the `transformers` peer, with the `llama` peer installed (see bench/peers/setup.sh):

    python tests/tools/record_tokens.py --model FILE.gguf --text FOLDER

llama.cpp decides, since it defines the pre-tokenizer that the file names (`smollm`: each digit alone, then
GPT-2's split). Transformers does not know that name and falls back on GPT-2's split alone; how often this
matters is printed. Owns tests/goldens/smollm2_tokens.json and smollm2_texts.json.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "peers"))
import launch

Encode = Callable[[str], list[int]]

TEXTS = [
    "",
    " ",
    "\n",
    " \n \n\n  x",
    "Hello, world!",
    "In  2021,   5 cats",
    "it's 3.14159 in 2021, or  42?  7",
    "\t1\t 2\n3 \n 4",
    "I'll we've he'd DON'T 'tis o'clock's",
    "a  b   c    d     e",
    "trailing   ",
    "ends with newline\n",
    "\r\nwindows\r\n\r\nlines",
    "zażółć gęślą jaźń, Ünïcödé",
    "第一章 白兔洞。二〇二一年，３个",
    "½ Ⅷ ① ٣ ² 一 ৪",
    "👩‍👩‍👧 emoji and \u200b zero \u00a0 width \u3000 spaces \u2028 line",
    "e\u0301 combining n\u0303",
    "def f(x):\n    return x**2  # 10_000\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|> <|im_end|>  <repo_name>x<file_sep>",
    "a<|im_end|>b <|im_e nd|>",
    "[Wilson, 1913]",
    "\x00\x01\x7f control",
]


class LlamaServer:
    """llama-server's /tokenize over one connection."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        body = {"content": text, "add_special": False, "parse_special": parse_special}
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/tokenize", json.dumps(body), headers)
        answer = self._connection.getresponse()
        data = json.loads(answer.read())
        if answer.status != 200:
            raise RuntimeError(f"/tokenize: {answer.status} {data}")
        return [int(i) for i in data["tokens"]]


def transformers_tokenizers(model: Path) -> tuple[Tokenizer, Tokenizer]:
    """Transformers' conversion as it comes, and with the pre-tokenizer of the file; no special tokens."""
    loaded = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).backend_tokenizer
    data = json.loads(loaded.to_str())
    data["added_tokens"], data["post_processor"] = [], None
    as_it_comes, smollm = (Tokenizer.from_str(json.dumps(data)) for _ in range(2))
    smollm.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return as_it_comes, smollm


def pieces(path: Path) -> list[str]:
    """The texts of a file: lines of a .txt without their ends; of a .jsonl the strings of its text fields."""
    lines = path.read_text(encoding="utf-8").split("\n")
    if path.suffix == ".txt":
        return lines
    out: list[str] = []
    for row in (json.loads(line) for line in lines if line):
        for key in ("turns", "prompt", "reference"):
            value = row.get(key, [])
            out += [value] if isinstance(value, str) else value
    return out


def digest(rows: list[list[int]]) -> str:
    """sha256 over int32 little-endian ids, each row closed by -1."""
    return hashlib.sha256(
        np.array([i for row in rows for i in [*row, -1]], "<i4").tobytes()
    ).hexdigest()


def where_they_differ(a: list[int], b: list[int], text_of: Callable[[int], str]) -> str:
    at = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    return f"{[text_of(i) for i in a[at : at + 5]]} against {[text_of(i) for i in b[at : at + 5]]}"


def compare(
    name: str, texts: list[str], truth: list[list[int]], other: Tokenizer, label: str
) -> None:
    """Print how many texts another tokenizer encodes differently, and the commonest ways."""
    kinds: Counter[str] = Counter()
    for text, want in zip(texts, truth, strict=True):
        got = other.encode(text, add_special_tokens=False).ids
        if got != want:
            kinds[where_they_differ(want, got, lambda i: other.id_to_token(i) or "?")] += 1
    print(f"{name}: {label}: {kinds.total()} of {len(texts)} texts differ")
    for kind, count in kinds.most_common(3):
        print(f"    {count} x {kind}")


def record_file(path: Path, encode: Encode, others: dict[str, Tokenizer]) -> dict[str, object]:
    raw = path.read_bytes()
    texts = pieces(path)
    rows = [encode(text) for text in texts]
    for label, other in others.items():
        compare(path.name, texts, rows, other, label)
    entry: dict[str, object] = {
        "file_sha256": hashlib.sha256(raw).hexdigest(),
        "pieces": {"count": len(rows), "tokens": sum(map(len, rows)), "sha256": digest(rows)},
    }
    if path.suffix == ".txt":
        whole = encode(raw.decode("utf-8"))
        for label, other in others.items():
            compare(f"{path.name} (whole)", [raw.decode("utf-8")], [whole], other, label)
        entry["whole"] = {"count": 1, "tokens": len(whole), "sha256": digest([whole])}
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "goldens")
    args = parser.parse_args()
    as_it_comes, smollm = transformers_tokenizers(args.model)
    others = {"transformers as it comes": as_it_comes, "transformers with pre smollm": smollm}
    with launch.running("llama", model=args.model) as peer:
        server = LlamaServer(peer.url)
        tricky = [
            {"text": t, "plain": server.encode(t), "parsed": server.encode(t, parse_special=True)}
            for t in TEXTS
        ]
        for label, other in others.items():
            compare("tricky texts", TEXTS, [row["plain"] for row in tricky], other, label)
        files = sorted(path for path in args.text.iterdir() if path.suffix in (".txt", ".jsonl"))
        golden = {path.name: record_file(path, server.encode, others) for path in files}
    (args.out / "smollm2_texts.json").write_text(json.dumps(tricky, indent=1) + "\n")
    (args.out / "smollm2_tokens.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
