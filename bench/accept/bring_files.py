"""Model files as people bring them: every case of cases/models.md, "Files", each with variants of its kind.

Files are made here, tiny and random. Values are held to those of the `gguf` package (or its recorded ones) and
to those from which folders were packed; logits to Transformers where torch is there.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parents[1] / "tests")]

from harness import Line, main_of_parts  # noqa: E402

from pageturner.errors import EngineFault  # noqa: E402
from pageturner.formats import hub  # noqa: E402
from pageturner.formats.ggml import WIDENED, dequantise  # noqa: E402
from pageturner.formats.load_tokenizer import load_tokenizer  # noqa: E402
from pageturner.formats.safetensors import open_safetensors  # noqa: E402
from pageturner.kernels.base import Tensor  # noqa: E402
from pageturner.kernels.cpu.native import NativeOps  # noqa: E402
from pageturner.kernels.reference import ReferenceOps  # noqa: E402
from pageturner.models.gguf_spec import read_gguf_spec  # noqa: E402
from pageturner.models.hf_spec import read_hf_spec  # noqa: E402
from pageturner.models.load import load_model, open_model, what_becomes  # noqa: E402
from pageturner.models.quantise import widened  # noqa: E402
from support import gguf_writer as w  # noqa: E402
from support import vocabs  # noqa: E402
from support.decoding import Decoding  # noqa: E402
from support.grid_models import make_models  # noqa: E402
from support.hf_folder import GOLDENS  # noqa: E402
from support.quantised_folders import FORMATS, make_folders  # noqa: E402
from support.safetensors_writer import write_safetensors  # noqa: E402

PROMPT = [7 * i % 64 for i in range(24)]
BOUND = 1e-4  # of the largest logit
Json = dict[str, Any]
OPS = ReferenceOps()


def logits(path: Path, ops: Any = OPS, **options: str) -> np.ndarray:
    return Decoding(load_model(path, ops, **options), ops).step([("p", PROMPT)])[0]


def apart(one: np.ndarray, two: np.ndarray) -> float:
    """The largest difference, by the largest value."""
    return float(np.abs(one - two).max() / np.abs(two).max())


def refused(call: Callable[[], object], word: str) -> bool:
    """Return whether it is refused with this word in what is said."""
    try:
        call()
    except EngineFault as fault:
        return word in fault.message
    return False


def counted(what: str, found: dict[str, bool]) -> Line:
    wrong = [name for name, right in found.items() if not right]
    figure = f"{len(found) - len(wrong)} of {len(found)} right"
    return Line(what, figure + (f"; wrong: {', '.join(wrong)}" if wrong else ""), not wrong)


# -- GGUF ----------------------------------------------------------------------------------------------------
def split_lines(folder: Path) -> Iterator[Line]:
    whole = GOLDENS / "tiny_llama.gguf"
    metadata, tensors = w.taken_apart(whole)
    expected, found = logits(whole), {}
    for count in (2, 3, 5):
        base = folder / f"split{count}"
        base.mkdir()
        paths = [base / f"m-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
        for i, path in enumerate(paths):
            about: dict[str, Any] = {"split.no": i, "split.count": count}
            part = dict(list(tensors.items())[i::count]) if i or count < 5 else {}
            if i == 1 and count == 5:  # the first file holds no tensors
                part |= dict(list(tensors.items())[0::count])
            path.write_bytes(w.gguf_bytes(metadata | about if i == 0 else about, part))
        for path in paths:
            found[f"{count} files by {path.name}"] = np.array_equal(logits(path), expected)
            found[f"the name of {path.name}"] = hub.resolve(str(path)).name == "m"
        gone = paths[-1]
        gone.unlink()
        found[f"{gone.name} is missing"] = refused(lambda p=paths[0]: open_model(p), gone.name)
    yield counted("1 split GGUF: whichever part is named, and a missing part is said", found)


def grid_lines(folder: Path) -> Iterator[Line]:
    recorded = np.load(GOLDENS / "dequant.npz")
    found, worst = {}, 0.0
    for kind in WIDENED:
        raw, values = recorded[f"{kind}_raw"], recorded[f"{kind}_values"]
        if importlib.util.find_spec("gguf"):
            import gguf

            number = gguf.GGMLQuantizationType[kind]
            values = gguf.quants.dequantize(raw.reshape(len(values), -1), number)
        wide = widened(Tensor("w", kind, values.shape, raw))
        got = dequantise(wide.kind, wide.shape, wide.data)
        found[kind] = np.array_equal(got, values)
        quantised, floats = make_models(folder, kind)
        worst = max(worst, apart(logits(quantised, dtype="float32"), logits(floats)))
        found[f"{kind}, said"] = "exact" in what_becomes(open_model(quantised).file)[0]
        served = apart(logits(quantised, NativeOps(1)), logits(floats))
        found[f"{kind}, served"] = served < 0.05
    yield counted("9 IQ1, IQ2, IQ3: values bit for bit, said at load, served", found)
    yield Line(
        "9 logits of these in fp32 beside those of the same values", f"{worst:.1e}", worst < BOUND
    )


def pre_lines(folder: Path) -> Iterator[Line]:
    found = {}
    for name in vocabs.SHA256:
        path = vocabs.vocab_folder() / f"ggml-vocab-{name}.gguf"
        if not path.is_file() or name in ("llama-spm", "phi-3", "gemma-4"):
            continue
        metadata, _ = w.taken_apart(path)
        del metadata["tokenizer.ggml.pre"]
        bare = folder / "vocab.gguf"
        bare.write_bytes(w.gguf_bytes(metadata, {}))
        tokenizer = load_tokenizer(bare)
        rows = [
            (tokenizer.encode(t, add_special=False, parse_special=False), ids)
            for t, ids in vocabs.vectors(name)
        ]
        found[name] = all(got == ids for got, ids in rows)
    what = "7 vocabularies without a pre-tokenizer: llama.cpp's own vectors"
    if not found:
        yield Line(what, "no vocabularies (tests/tools/record_vocabs.py --fetch)", None, run=False)
    else:
        yield counted(what, found)


# -- keys ----------------------------------------------------------------------------------------------------
SILENT: list[tuple[str, Json]] = [
    ("qwen3_moe", {"shared_expert_intermediate_size": 0, "use_qk_norm": True}),
    ("qwen3_moe", {"n_shared_experts": 0, "qk_norm": True, "router_z_loss_coef": 0.001}),
    ("qwen3_moe", {"qkv_bias": False, "moe_router_jitter": None}),
    ("llama3", {"loss_type": "ForCausalLMLoss", "model_max_length": 4096, "tokenizer_name": "x"}),
    ("llama3", {"residual_multiplier": 1.0, "logits_scaling": 1.0, "clip_qkv": None}),
    ("llama3", {"use_flash_attn": True, "num_experts": 0, "rope_interleaved": False}),
    ("starcoder2", {"layer_norm_epsilon": 1e-5, "scale_attn_weights": True}),
    ("starcoder2", {"scale_attention_softmax_in_fp32": True, "attention_softmax_in_fp32": True}),
]
SILENT += [
    (f, {"sliding_window": 4}) for f in ("llama3", "granite", "glm4", "olmo2", "deepseek_v2")
]
TELLING: list[tuple[str, Json]] = [
    ("qwen3_moe", {"shared_expert_intermediate_size": 512}),
    ("llama3", {"use_qk_norm": True}),
    ("llama3", {"residual_multiplier": 0.5}),
    ("llama3", {"is_causal": False}),
    ("gpt2", {"scale_attn_weights": False}),
]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
R1 = YARN | {"attn_factor": 0.8782488562869419}


def key_lines(folder: Path) -> Iterator[Line]:
    def config(family: str) -> Json:
        found: Json = json.loads((GOLDENS / "families" / family / "config.json").read_text())
        return found

    def read(values: Json) -> Any:
        return read_hf_spec(values, "config.json", "x", has_head=True)

    found = {}
    for family, added in SILENT:
        found[f"{family} {added}"] = read(config(family) | added) == read(config(family))
    for family, added in TELLING:
        values = config(family) | added
        found[f"{family} {added} refused"] = refused(lambda v=values: read(v), next(iter(added)))
    yield counted("2, 7, 8 keys that say nothing, and those that say something", found)
    found = {}
    plain = {k: v for k, v in config("qwen3").items() if k != "rope_parameters"}
    for said, amplitude in (
        (R1, 1.0),
        (R1 | {"attn_factor": 1.0}, 1.1386294361119891),
        (YARN | {"finetuned": True}, 1.1386294361119891),
        ({"rope_type": "default", "factor": 1.0}, 1.0),
        ({"type": "default", "factor": 1}, 1.0),
    ):
        got = read(plain | {"rope_scaling": said}).rope.amplitude
        found[str(said)] = abs(got - amplitude) < 1e-9
    yield counted("3, 7 rope_scaling", found)
    metadata, tensors = w.taken_apart(GOLDENS / "tiny_llama.gguf")
    found = {}
    rows = tensors["blk.0.attn_q.weight"][1][0]
    for value, same in ((0.0, True), (-0.0, True), (0.25, False)):
        bias = (0, (rows,), np.full(rows, value, np.float32).tobytes())
        path = folder / "bias.gguf"
        path.write_bytes(w.gguf_bytes(metadata, tensors | {"blk.0.attn_q.bias": bias}))
        equal = np.array_equal(logits(path), logits(GOLDENS / "tiny_llama.gguf"))
        found[f"attn_q.bias of {value}"] = equal == same
    for key, value in (("pooling_type", 0), ("pooling_type", 3), ("residual_scale", 1.0)):
        path = folder / "key.gguf"
        path.write_bytes(w.gguf_bytes(metadata | {f"llama.{key}": value}, tensors))
        read_gguf_spec(open_model(path).file)  # type: ignore[arg-type]
        found[f"{key} {value}"] = True
    yield counted("7 GGUF llama with biases and keys", found)


# -- folders -------------------------------------------------------------------------------------------------
def head_lines(folder: Path) -> Iterator[Line]:
    torch = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
    found, worst = {}, 0.0
    for family in ("llama3", "qwen2", "qwen3"):
        source, path = GOLDENS / "families" / family, folder / f"head_{family}"
        shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors*", "*.npz"))
        file = open_safetensors(source)
        tensors = {n: (*file.tensor(n)[:2], bytes(file.tensor(n)[2])) for n in file.tensors}
        kind, shape, raw = tensors["model.embed_tokens.weight"]
        table = np.frombuffer(raw, np.uint8).reshape(shape[0], -1)[::-1]
        for head, tied in ((table[::-1], True), (table, False)):
            tensors["lm_head.weight"] = (kind, shape, np.ascontiguousarray(head).tobytes())
            write_safetensors(path / "model.safetensors", tensors)
            said = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
            (path / "config.json").write_text(json.dumps(said))
            found[f"{family}, {'the same' if tied else 'another'} head"] = (
                open_model(path).spec.tied == tied
            )
        if torch:
            worst = max(worst, apart(logits(path, dtype="float32"), transformers_logits(path)))
    yield counted("5 tied by its flag, with a head in the file", found)
    figure = f"{worst:.1e}" if torch else "torch and transformers are not installed"
    yield Line(
        "5 logits beside Transformers", figure, worst < BOUND if torch else None, run=bool(torch)
    )


def transformers_logits(path: Path) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        found: np.ndarray = model(torch.tensor([PROMPT])).logits[0].numpy()
    return found


def layout_lines(folder: Path) -> Iterator[Line]:
    for name in FORMATS:
        errors, lines = [], []
        for seed in (1, 2, 3):
            quantised, floats = make_folders(folder / f"{name}{seed}", name, seed)
            expected = logits(floats)
            errors.append(apart(logits(quantised, dtype="float32"), expected))
            lines = what_becomes(open_model(quantised).file)
        figure = f"logits within {max(errors):.1e} of the largest, three seeds"
        yield Line(
            f"6, 9 {name}", figure + "".join(f"; {line}" for line in lines), max(errors) < BOUND
        )


def template_lines(folder: Path) -> Iterator[Line]:
    found = {}
    metadata, tensors = w.taken_apart(GOLDENS / "tiny_llama.gguf")
    key = "tokenizer.chat_template.tool_use"
    (folder / "named.gguf").write_bytes(w.gguf_bytes(metadata | {key: "T"}, tensors))
    found["GGUF"] = load_tokenizer(folder / "named.gguf").named_templates == {"tool_use": "T"}
    shutil.copy(GOLDENS / "tiny_spm.model", folder / "tokenizer.model")
    listed = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    tokenizer = load_tokenizer(folder)
    found["list"] = (tokenizer.chat_template, tokenizer.named_templates) == ("D", {"tool_use": "T"})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("F")
    found["folder"] = load_tokenizer(folder).named_templates == {"tool_use": "F"}
    yield counted("4 named templates are read", found)


def lines(options: Any) -> Iterator[Line]:
    parts = (
        split_lines,
        grid_lines,
        pre_lines,
        key_lines,
        head_lines,
        layout_lines,
        template_lines,
    )
    for part in parts:
        with TemporaryDirectory() as folder:
            yield from part(Path(folder))


if __name__ == "__main__":
    sys.exit(main_of_parts("bring", __doc__, ["files"]))
