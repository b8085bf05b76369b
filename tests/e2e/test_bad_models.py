"""Models that cannot run, as people have them: one line that names the file and says what to do.

Each is put before `pageturner generate`, which goes through LLM, in this process; before `pageturner serve`
as a real process (all of them in test-full, some always).
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pageturner import LLM, SamplingParams, cli
from pageturner.formats.ggml_types import KINDS
from pageturner.kernels.cpu import native_module
from support.gguf_writer import float_tensor, gguf_bytes, taken_apart
from support.hf_folder import GOLDENS, make_folder, tokenizer_json, write_json
from support.refusals import client_error, engine_fault, refusal_of
from support.safetensors_writer import tensors_of, write_safetensors

SERVE = [sys.executable, "-m", "pageturner", "serve"]
Q = "model.layers.1.self_attn.q_proj.weight"
Build = Callable[[Path], object]
BACKENDS = ["reference", *(["native"] if native_module.available_isas() else [])]


# -- ways to spoil a folder ----------------------------------------------------------------------------------
def config(**changes: object) -> Build:
    """Keys of config.json changed; ... takes one away."""

    def build(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text()) | changes
        write_json(folder / "config.json", {k: v for k, v in values.items() if v is not ...})

    return build


def text(name: str, content: str) -> Build:
    return lambda folder: (folder / name).write_text(content)


def without(pattern: str) -> Build:
    def build(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return build


def joined(folder: Path) -> dict[str, Any]:
    """The shards as a dictionary; they leave the folder."""
    tensors = tensors_of(folder)
    without("*.safetensors*")(folder)
    return tensors


def tensor(name: str, kind: str, shape: tuple[int, ...], nbytes: int) -> Build:
    return lambda folder: write_safetensors(
        folder / "model.safetensors", joined(folder) | {name: (kind, shape, bytes(nbytes))}
    )


def cut(size: int) -> Build:
    """One file, and only its first bytes."""

    def build(folder: Path) -> None:
        path = folder / "model.safetensors"
        write_safetensors(path, joined(folder))
        path.write_bytes(path.read_bytes()[:size])

    return build


def only(name: str) -> Build:
    def build(folder: Path) -> None:
        joined(folder)
        (folder / name).write_bytes(b"x")

    return build


def in_the_wrong_shard(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = sorted(set(index["weight_map"].values()) - {index["weight_map"][Q]})
    index["weight_map"][Q] = names[0]
    write_json(path, index)


def elsewhere(file: str) -> Build:
    """All shards at another place."""

    def build(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        write_json(
            path, {"weight_map": dict.fromkeys(json.loads(path.read_text())["weight_map"], file)}
        )

    return build


def pattern(regex: str) -> Build:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return lambda folder: write_json(
        folder / "tokenizer.json", tokenizer_json() | {"pre_tokenizer": split}
    )


def huge(folder: Path) -> None:
    """82 GB, all of it a hole."""
    joined(folder)
    nbytes = 10_000_000 * 2048 * 4
    row = {"dtype": "F32", "shape": [10_000_000, 2048], "data_offsets": [0, nbytes]}
    header = json.dumps({"model.embed_tokens.weight": row}).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + nbytes)


def nothing(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def a_gguf_within(folder: Path) -> None:
    nothing(folder)
    shutil.copy(GOLDENS / "tiny_llama.gguf", folder / "tiny.gguf")


def an_adapter(folder: Path) -> None:
    nothing(folder)
    write_json(folder / "adapter_config.json", {"base_model_name_or_path": "org/base"})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FOLDERS: dict[str, tuple[Build, list[str]]] = {
    "shard missing": (
        without("*-00002-of-*"),
        ["lacks 1 of 3 shards", "model-00002-of-00003.safetensors", "again"],
    ),
    "in the wrong shard": (in_the_wrong_shard, [Q, ".safetensors lacks", "again"]),
    "index no JSON": (text("model.safetensors.index.json", "{"), ["model.safetensors.index.json"]),
    "wrong shape": (tensor(Q, "F32", (32, 16), 2048), [Q, "(32, 16)", "(32, 32) was expected"]),
    "unexpected tensor": (
        tensor("model.extra", "F32", (4,), 16),
        ["'model.extra'", "should not have"],
    ),
    "type F8": (tensor(Q, "F8_E4M3", (32, 32), 1024), [Q, "F8_E4M3", "F32, F16, BF16"]),
    "type unknown": (
        tensor(Q, "F4", (32, 32), 512),
        [Q, "'F4'", "F32, F16 or BF16", "model.safetensors"],
    ),
    "truncated": (cut(60_000), ["model.safetensors is truncated", "tensor 'model.", "again"]),
    "truncated early": (cut(100), ["model.safetensors", "truncated", "again"]),
    "truncated to nothing": (cut(0), ["model.safetensors is empty", "again"]),
    "PyTorch's own format": (only("pytorch_model.bin"), ["pytorch_model.bin", "save_pretrained"]),
    "no weights": (without("*.safetensors*"), ["no model.safetensors", "again"]),
    "too large": (huge, ["take 81.9 GB", "GB are free", "smaller or a more quantised"]),
    "no tokenizer": (without("tokenizer.json"), ["no tokenizer", "tokenizer.json", "copy it"]),
    "tokenizer no JSON": (text("tokenizer.json", '{"a"'), ["tokenizer.json", "cannot read"]),
    "tokenizer_config no JSON": (
        text("tokenizer_config.json", "{"),
        ["tokenizer_config.json", "cannot read"],
    ),
    "architecture": (config(model_type="mamba"), ["'mamba' is not supported", "known: "]),
    "no architecture": (config(model_type=...), ["config.json", "'model_type'"]),
    "rotary scaling": (
        config(rope_parameters={"rope_type": "resonance", "rope_theta": 1e4}),
        ["'resonance' is not supported", "yarn"],
    ),
    "GPTQ in name only": (
        config(quantization_config=GPTQ),
        ["no weights are as gptq has", "config.json"],
    ),
    "another quantisation": (
        config(quantization_config={"quant_method": "aqlm"}),
        ["quantised by aqlm", "config.json", "gptq, awq", "--quantization int8"],
    ),
    "config no JSON": (text("config.json", '{"a": 1,'), ["config.json", "cannot read"]),
    "no layers": (config(num_hidden_layers=...), ["config.json", "'num_hidden_layers'"]),
    "too many layers": (config(num_hidden_layers=3), ["lacks the tensor 'model.layers.2."]),
    "a million layers": (config(num_hidden_layers=1_000_000), ["num_hidden_layers is 1000000"]),
    "thousands of layers": (config(num_hidden_layers=4000), ["4,000 layers", "holds 20 tensors"]),
    "context of one token": (
        config(max_position_embeddings=1),
        ["makes no sense: context of 1 tokens"],
    ),
    "half a character": (config(model_type="\ud800"), ["config.json", "surrogates not allowed"]),
    "a pattern without end": (
        pattern("(a+)+$"),
        ["tokenizer.json", "'(a+)+$'", "single characters"],
    ),
    "a shard elsewhere": (
        elsewhere("../../../../etc/passwd"),
        ["index.json", "in the same folder"],
    ),
    "generation_config": (
        text("generation_config.json", '{"top_p": 7}'),
        ["generation_config.json", "top_p"],
    ),
    "empty folder": (nothing, ["is an empty folder", "config.json"]),
    "a GGUF file in a folder": (a_gguf_within, ["say which file in it", "tiny.gguf"]),
    "an adapter": (an_adapter, ["is a LoRA adapter", "--lora NAME="]),
}


# -- ways to spoil a GGUF file -------------------------------------------------------------------------------
def kind(number: int) -> bytes:
    metadata, tensors = taken_apart(GOLDENS / "tiny_llama.gguf")
    one = KINDS.get(number)
    size = 256 if one is None else 256 // one.values * one.nbytes
    return gguf_bytes(
        metadata, tensors | {"blk.0.ffn_down.weight": (number, (64, 256), bytes(64 * size))}
    )


def keys(**changes: Any) -> bytes:
    """Metadata changed; __ stands for a dot, ... takes a key away."""
    metadata, tensors = taken_apart(GOLDENS / "tiny_llama.gguf")
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    return gguf_bytes({k: v for k, v in metadata.items() if v is not ...}, tensors)


def more(name: str, rows: int) -> bytes:
    metadata, tensors = taken_apart(GOLDENS / "tiny_llama.gguf")
    return gguf_bytes(metadata, tensors | {name: float_tensor(rows, 32)})


WHOLE = (GOLDENS / "tiny_llama.gguf").read_bytes()
KNOWN = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4"
FILES: dict[str, tuple[Callable[[], bytes], list[str]]] = {
    "Q8_1": (lambda: kind(9), ["blk.0.ffn_down.weight", "Q8_1", KNOWN]),
    "Q8_K": (lambda: kind(15), ["blk.0.ffn_down.weight", "Q8_K", KNOWN]),
    "a type of the future": (
        lambda: kind(77),
        ["blk.0.ffn_down.weight", "unknown type 77", "Q8_0"],
    ),
    "truncated": (lambda: WHOLE[:-5000], ["is truncated", "again", "inside tensor"]),
    "truncated early": (lambda: WHOLE[:1000], ["is truncated", "again"]),
    "empty": (lambda: b"", ["is not a GGUF file"]),
    "junk": (lambda: b"PK\3\4" * 99, ["is not a GGUF file"]),
    "wrong shape": (
        lambda: more("blk.0.ffn_down.weight", 32),
        ["blk.0.ffn_down.weight", "was expected"],
    ),
    "unexpected tensor": (
        lambda: more("blk.0.zzz.weight", 32),
        ["blk.0.zzz.weight", "should not have"],
    ),
    "architecture": (
        lambda: keys(general__architecture="mamba"),
        ["'mamba' is not supported", "known: "],
    ),
    "no layers": (
        lambda: keys(llama__block_count=...),
        ["lacks the metadata key 'llama.block_count'"],
    ),
    "a million layers": (
        lambda: keys(llama__block_count=1_000_000),
        ["llama.block_count is 1000000"],
    ),
    "context of one token": (
        lambda: keys(llama__context_length=1),
        ["makes no sense: context of 1 tokens"],
    ),
    "rotary scaling": (
        lambda: keys(llama__rope__scaling__type="mrope"),
        ["'mrope' is not supported"],
    ),
    "no tokenizer": (
        lambda: keys(tokenizer__ggml__model=...),
        ["lacks the metadata key 'tokenizer.ggml.model'"],
    ),
}


@pytest.fixture(params=[*FOLDERS, *(f"{name}.gguf" for name in FILES)])
def bad(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[str]]:
    """A model that cannot run, and what has to be said of it."""
    name: str = request.param
    if name in FOLDERS:
        build, says = FOLDERS[name]
        build(make_folder(tmp_path / "model"))
        return tmp_path / "model", says
    content, says = FILES[name.removesuffix(".gguf")]
    path = tmp_path / "model.gguf"
    path.write_bytes(content())
    return path, says


def check(said: str, path: Path, says: list[str]) -> None:
    """One line, which names the model."""
    (line,) = said.splitlines()
    assert line.startswith("pageturner: ")
    for part in (str(path), *says):
        assert part in line


def test_bad_models_through_llm(
    bad: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, says = bad
    assert cli.main(["generate", str(path), "--backend", "reference", "-p", "x"]) == 1
    check(capsys.readouterr().err, path, says)
    with engine_fault():
        LLM(str(path), backend="reference")


def serve(path: str, **env: str) -> tuple[int, str]:
    command = [*SERVE, path, "--port", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )
    assert done.stdout == ""
    lines = [  # without its first words, and what a slow start says of itself
        line
        for line in done.stderr.splitlines()
        if " INFO loading " not in line and not line.startswith("pageturner: starting: ")
    ]
    return done.returncode, "\n".join(lines)


@pytest.mark.slow
def test_bad_models_through_serve(bad: tuple[Path, list[str]]) -> None:
    path, says = bad
    code, said = serve(str(path))
    assert code == 1
    check(said, path, says)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad", ["shard missing", "too large", "no tokenizer", "Q8_K.gguf"], indirect=True
)
def test_some_bad_models_through_serve(bad: tuple[Path, list[str]]) -> None:
    """Those that the engine process meets, and those that the API process meets."""
    test_bad_models_through_serve(bad)


# -- templates and vocabularies ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}{{ m.content", "cannot be read, line 1"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ messages[0] | nothing }}", "nothing"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ 10**5000 }}", "integer string conversion"),
        ("{% for i in a %}" * 25 + "{% endfor %}" * 25, "statically nested"),
        ("x" * 300_000, "300,000 characters"),
    ],
)
def test_a_bad_template_refuses_chats_and_nothing_else(
    template: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "model")
    write_json(folder / "tokenizer_config.json", {"eos_token": "</s>", "chat_template": template})
    llm = LLM(str(folder), backend="reference")
    with client_error("the model's chat template", status=400, code="template_error") as caught:
        llm.chat([{"role": "user", "content": "hi"}])
    assert says in caught.value.message
    assert llm.generate("hi", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    words = ["generate", str(folder), "--backend", "reference", "-p", "x", "--chat"]
    assert cli.main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tokenizer_smaller_than_the_model(tmp_path: Path, backend: str) -> None:
    """Outputs are often padded: what pads them may be chosen, has no text, and breaks nothing."""
    folder = make_folder(tmp_path / "model")
    write_json(folder / "tokenizer.json", tokenizer_json(262))
    llm = LLM(str(folder), backend=backend)
    params = SamplingParams(temperature=3.0, max_tokens=60, seed=1, logprobs=3, prompt_logprobs=2)
    answer = llm.generate("hi", params)[0].outputs[0]
    assert max(answer.token_ids) >= 262
    assert answer.text == llm.tokenizer.decode(answer.token_ids)
    assert "".join(llm.stream("hi", params)) == answer.text


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tokenizer_larger_than_the_model(tmp_path: Path, backend: str) -> None:
    folder = make_folder(tmp_path / "model")
    names = tokenizer_json(400)
    names["added_tokens"].append({**names["added_tokens"][0], "id": 399, "content": "<extra140>"})
    write_json(folder / "tokenizer.json", names)
    llm = LLM(str(folder), backend=backend)
    assert llm.generate("hi", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    for prompt in ("a<extra140>", [5, 320], [5, -1]):
        with client_error("token ids are 0 to 319"):
            llm.generate([prompt], SamplingParams(max_tokens=2))


@pytest.mark.slow
def test_what_is_odd_about_a_model_is_in_the_servers_log(tmp_path: Path) -> None:
    """A broken template and a tokenizer too large leave completions alone; defaults are said."""
    folder = make_folder(tmp_path / "model", do_sample=False, max_new_tokens=3)
    write_json(folder / "tokenizer_config.json", {"eos_token": "</s>", "chat_template": "{% if"})
    write_json(folder / "tokenizer.json", tokenizer_json(400))
    command = [*SERVE, str(folder), "--port", "0", "--backend", "reference"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = ""
        while "listening on" not in log and (line := process.stderr.readline()):
            log += line
        url = log.split("listening on ")[1].split(";")[0]
        for part in (
            "template cannot be read, line 1",
            "has 400 tokens, the model 320",
            "temperature 0",
        ):
            assert part in log
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60)
        assert refusal_of(answer) == (400, "template_error")
        asked = [
            httpx.post(f"{url}/v1/completions", json={"prompt": "hi"}, timeout=60) for _ in range(2)
        ]
        assert asked[0].json()["choices"] == asked[1].json()["choices"], (
            "greedy, as the model's file says"
        )
        asked = httpx.post(f"{url}/v1/completions", json={"prompt": [350]}, timeout=60)
        assert asked.status_code == 400
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


# -- the hub -------------------------------------------------------------------------------------------------
class Hub(http.server.BaseHTTPRequestHandler):
    """Refuses everything, in the way that the name of the repository asks for."""

    def do_GET(self) -> None:
        gated = "gated" in self.path
        self.send_response(403 if gated else 401)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("X-Error-Message", "no")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Any:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("model", "env", "says"),
    [
        (
            "org/absent",
            {"HF_HUB_OFFLINE": "1"},
            ["HF_HUB_OFFLINE is set", "not in the cache", "path"],
        ),
        (
            "org/absent",
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            ["cannot be reached", "check the network"],
        ),
        ("org/gated", {}, ["behind its licence", "HF_TOKEN"]),
        ("org/private", {}, ["has no model 'org/private'", "HF_TOKEN"]),
    ],
)
def test_a_hub_that_does_not_give(
    model: str, env: dict[str, str], says: list[str], hub: str, tmp_path: Path
) -> None:
    """The real library against a hub on this machine."""
    code, said = serve(model, **{"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub, **env})
    assert code == 1
    (line,) = said.splitlines()
    for part in (model, *says):
        assert part in line
