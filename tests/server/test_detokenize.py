"""/detokenize gives back the text that /tokenize was given, also where SentencePiece adds a space."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.http.request_info import RequestInfo
from pageturner.server.admission.quota import Quota
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.pages import ServerPages
from pageturner.server.text_workers.reading import TextReader

GOLDENS = Path(__file__).parent.parent / "goldens"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> ServerPages:
    folder = tmp_path_factory.mktemp("spm")
    (folder / "tokenizer.model").write_bytes((GOLDENS / "tiny_spm.model").read_bytes())
    tokenizer = load_tokenizer(folder)
    served = ServedModel("m", tokenizer, None, 100, 80, tokenizer.vocab_size)
    config = SimpleNamespace(max_body_size=1 << 20)
    reader = TextReader(None, 1 << 20)  # type: ignore[arg-type]  # nothing here is large enough for a pool
    quota = Quota(8, 2)
    service = SimpleNamespace(reader=reader, config=config, served=lambda: served, quota=quota)
    return ServerPages(service)  # type: ignore[arg-type]


def ask(method: Any, **fields: Any) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}

    scope = {"type": "http", "pageturner": RequestInfo("id")}
    return json.loads(asyncio.run(method(Request(scope, receive))).body)


@pytest.mark.parametrize("text", ["hello world", " hello", "  two", "", "naïve 東京\n😀"])
def test_there_and_back(pages: ServerPages, text: str) -> None:
    tokens = ask(pages.tokenize, prompt=text, add_special_tokens=False)["tokens"]
    assert ask(pages.detokenize, tokens=tokens) == {"prompt": text, "content": text}


def test_control_tokens_stay(pages: ServerPages) -> None:
    tokens = ask(pages.tokenize, prompt="hello")["tokens"]
    assert ask(pages.detokenize, tokens=tokens)["prompt"].startswith("<s>")
