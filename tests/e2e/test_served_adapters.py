"""LoRA adapters on a real server: flags, names, loading and unloading while it answers, an engine killed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_killed_engine import children_of, is_server, kill

from pageturner import LLM, SamplingParams, cli
from pageturner.kernels.cpu import native_module
from pageturner.models.load import open_model
from support.adapters import ALL, TOP, write_adapter
from support.engines import GOLDENS
from support.servers import serving

pytestmark = pytest.mark.skipif(
    not native_module.available_isas(), reason="the kernels are not compiled"
)
TINY = GOLDENS / "tiny_llama.gguf"
SPEC = open_model(TINY)[1]
KEY = {"authorization": "Bearer secret"}
FIELDS = {"red": (*ALL, *TOP), "green": ("q", "v"), "blue": ALL}
PROMPT = "the old house"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        n: write_adapter(root / n, SPEC, f, seed=i, size=1.0)
        for i, (n, f) in enumerate(FIELDS.items())
    }


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[httpx.Client]:
    flags = [
        "--lora",
        f"red={folders['red']}",
        "--lora",
        f"green={folders['green']}",
        "--max-loras",
        "2",
    ]
    with serving(TINY, *flags, "--admin-key", "secret", "--kv-cache-dtype", "int8") as client:
        yield client


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> dict[str, str]:
    llm = LLM(str(TINY), lora=folders, kv_cache_dtype="int8", kv_cache_memory=1 << 22)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    made = llm.generate([PROMPT] * 4, params, lora=["", *folders], progress=False)
    return {name: one.outputs[0].text for name, one in zip(["", *folders], made, strict=True)}


def ask(client: httpx.Client, model: str, **more: Any) -> httpx.Response:
    body = {
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "model": model,
    }
    return client.post("/v1/completions", json=body | more)


def load(client: httpx.Client, name: str, path: Path, **more: Any) -> httpx.Response:
    return client.post(
        "/v1/load_lora_adapter",
        json={"lora_name": name, "lora_path": str(path), **more},
        headers=KEY,
    )


def unload(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=KEY)


def test_the_model_of_a_request_chooses(client: httpx.Client, truth: dict[str, str]) -> None:
    assert len(set(truth.values())) == 4
    with ThreadPoolExecutor(8) as pool:
        names = ["red", "tiny_llama", "green"] * 4
        for name, answer in zip(names, pool.map(lambda n: ask(client, n), names), strict=True):
            assert (
                answer.json()["choices"][0]["text"] == truth["" if name == "tiny_llama" else name]
            )
            assert answer.json()["model"] == name
    models = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
    assert models["red"]["parent"] == "tiny_llama"
    assert models["tiny_llama"]["parent"] is None
    assert client.get("/v1/models/green").json()["id"] == "green"
    assert ask(client, "blue").status_code == 404


def test_every_dialect_knows_them(client: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    calls: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
        "/api/chat": {"messages": chat["messages"], "options": {"num_predict": 3}, "stream": False},
        "/api/generate": {"prompt": "Hi", "options": {"num_predict": 3}, "stream": False},
        "/v1/embeddings": {"input": "Hi"},
    }
    for path, body in calls.items():
        found = {}
        for model in ("tiny_llama", "red"):
            answer = client.post(path, json={**body, "model": model})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == model, path
            found[model] = json.dumps(answer.json())
    assert found["red"] != found["tiny_llama"]  # of the rows
    long = client.post("/tokenize", json={"prompt": "x" * 300_000, "model": "red"})
    assert long.status_code == 200, "a text worker knows them too"


def test_loading_and_unloading(
    client: httpx.Client, folders: dict[str, Path], truth: dict[str, str]
) -> None:
    answer = load(client, "blue", folders["blue"])
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'blue' added successfully.",
    )
    assert ask(client, "blue").json()["choices"][0]["text"] == truth["blue"]
    again = load(client, "blue", folders["blue"])
    assert again.status_code == 400
    assert "already been loaded" in again.json()["error"]["message"]
    assert load(client, "blue", folders["red"], load_inplace=True).status_code == 200
    assert ask(client, "blue").json()["choices"][0]["text"] == truth["red"]
    streamed = []
    body = {
        "prompt": PROMPT,
        "max_tokens": 300,
        "temperature": 0,
        "ignore_eos": True,
        "model": "blue",
        "stream": True,
    }
    with client.stream("POST", "/v1/completions", json=body) as response:
        for number, line in enumerate(response.iter_lines()):
            if number == 4:
                gone = unload(client, "blue")
                assert gone.text == "Success: LoRA adapter 'blue' removed successfully."
                assert ask(client, "blue").status_code == 404
            if line.startswith("data: {"):
                streamed.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    assert "".join(streamed) == ask(client, "red", max_tokens=300).json()["choices"][0]["text"]
    assert unload(client, "blue").status_code == 404
    metrics = client.get("/metrics").text
    for name in (
        "pageturner:adapters_in_memory",
        "pageturner:adapter_requests_total",
        "vllm:lora_requests_info",
    ):
        assert name in metrics


def test_one_that_cannot_take_the_place_of_another_leaves_it_there(
    client: httpx.Client, folders: dict[str, Path], truth: dict[str, str], tmp_path: Path
) -> None:
    missing = load(client, "red", tmp_path / "nothing", load_inplace=True)
    assert missing.status_code == 404, missing.text
    assert ask(client, "red").json()["choices"][0]["text"] == truth["red"]
    with ThreadPoolExecutor(
        8
    ) as pool:  # nobody is refused while one takes the place of the other, and back
        asked = [pool.submit(ask, client, "red", max_tokens=40) for _ in range(12)]
        for name in ("blue", "red"):
            assert load(client, "red", folders[name], load_inplace=True).status_code == 200
            asked += [pool.submit(ask, client, "red") for _ in range(4)]
        assert {one.result().status_code for one in asked} == {200}
    assert ask(client, "red").json()["choices"][0]["text"] == truth["red"]
    assert "\n" not in "".join(one["id"] for one in client.get("/v1/models").json()["data"])


def test_a_prefix_is_kept_for_an_adapter(client: httpx.Client) -> None:
    text = "it was a dark and stormy night, and the old house stood on the hill " * 2
    made = client.post("/v1/prefixes", json={"id": "story", "prompt": text, "model": "green"})
    assert (made.status_code, made.json()["status"]) == (200, "ready"), made.text

    def cached(model: str) -> int:
        usage = ask(client, model, prompt=text + "and").json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("green") >= 16
    assert cached("tiny_llama") == 0
    assert client.delete("/v1/prefixes/story").status_code == 200


def test_an_answer_of_an_adapter_is_made_again(
    client: httpx.Client,
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = ask(client, "green", receipt=True)
    assert answer.status_code == 200
    path = tmp_path / "answer.json"
    path.write_text(answer.text)

    def verified(*more: str) -> tuple[int, str]:
        given = ["verify", str(path), "--model", str(TINY), "--prompt", PROMPT, *more]
        code = cli.main([*given, "--kv-cache-memory", str(1 << 22)])
        return code, capsys.readouterr().out

    code, said = verified("--lora", str(folders["green"]))
    assert code == 0, said
    assert "same: adapter" in said
    code, said = verified("--lora", str(folders["blue"]))
    assert code == 1
    assert "differs: adapter" in said
    code, said = verified()
    assert code == 2
    assert "--lora" in said


def test_only_who_has_the_admin_key(client: httpx.Client, folders: dict[str, Path]) -> None:
    body = {"lora_name": "x", "lora_path": str(folders["blue"])}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert client.post(path, json=body).status_code == 403
        assert client.post(path, json={"lora_name": 5}, headers=KEY).status_code == 400


def half_written(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])


def no_numbers(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\x00\x00\xc0\x7f")


def dora(folder: Path) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "half written": (half_written, "safetensors_truncated"),
    "no numbers": (no_numbers, "adapter_values"),
    "dora": (dora, "adapter_unsupported"),
    "rank": (lambda folder: write_adapter(folder, SPEC, ("q",), 300) and None, "adapter_rank"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_is_no_adapter_harms_nobody(
    client: httpx.Client, truth: dict[str, str], tmp_path: Path, case: str
) -> None:
    spoil, code = SPOILT[case]
    folder = write_adapter(tmp_path / "a", SPEC, ("q",))
    spoil(folder)
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask, client, "red") for _ in range(4)]
        answer = load(client, "bad", folder)
        assert all(o.result().json()["choices"][0]["text"] == truth["red"] for o in others)
    assert answer.status_code == 400
    assert code in answer.text
    assert ask(client, "bad").status_code == 404
    assert client.get("/health").status_code == 200


def test_a_killed_engine_takes_no_stream_with_it(
    client: httpx.Client, folders: dict[str, Path]
) -> None:
    """Not even of an adapter that was unloaded meanwhile."""
    load(client, "blue", folders["blue"])

    def text(model: str, then: Callable[[], None] = lambda: None) -> str:
        found = ""
        body = {
            "prompt": PROMPT,
            "max_tokens": 300,
            "temperature": 1.0,
            "seed": 3,
            "ignore_eos": True,
        }
        with client.stream(
            "POST", "/v1/completions", json={**body, "model": model, "stream": True}
        ) as response:
            for number, line in enumerate(response.iter_lines()):
                if number == 40:
                    then()
                if line.startswith("data: {"):
                    found += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return found

    names = ["red", "green", "tiny_llama", "blue"]
    whole = {name: text(name) for name in names}
    server = next(int(pid) for pid in children_of(os.getpid()) if is_server(pid))

    def strike() -> None:
        unload(client, "blue")
        kill(server)

    with ThreadPoolExecutor(4) as pool:
        others = {name: pool.submit(text, name) for name in names[:3]}
        assert text("blue", strike) == whole["blue"]
        assert {name: other.result(60) for name, other in others.items()} | {
            "blue": whole["blue"]
        } == whole
    assert ask(client, "green").status_code == 200


@pytest.mark.slow
def test_a_flag_that_names_no_adapter_ends_the_server(tmp_path: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "pageturner", "serve", str(TINY), "--port", "0", "--lora"]
    for value, told in ((f"x={tmp_path}", "adapter_config.json"), ("x", "NAME=PATH")):
        ended = subprocess.run([*command, value], capture_output=True, text=True, timeout=60)
        assert ended.returncode != 0
        assert told in ended.stderr
