"""The hash that names a model's files for good: with other weights, configuration or tokenizer it
is another.

Owns which files count and how they are hashed. Must not know who asks. Every byte is read, which
nobody should wait for at a start.

    a file    sha256:HEX        as `sha256sum FILE` prints it
    a folder  sha256-files:HEX  of what `sha256sum` prints for its files, sorted by name; so for
                                the parts of a split GGUF file
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pageturner.errors import EngineFault
from pageturner.formats.gguf import parts_of

SUFFIXES = (".safetensors", ".json", ".model", ".tiktoken", ".jinja")
NAMES = ("merges.txt", "vocab.txt")

Marks = tuple[tuple[str, int, int, int], ...]


def model_files(path: Path) -> list[Path]:
    """The files of a model: its one file, the parts of a split one, or the files of its folder from
    which anything is read."""
    if not path.is_dir():
        return [part for part in parts_of(path) if part == path or part.is_file()]
    files = (*path.iterdir(), *path.glob("additional_chat_templates/*.jinja"))
    found = (file for file in files if file.suffix in SUFFIXES or file.name in NAMES)
    return sorted((file for file in found if file.is_file()), key=lambda file: file.name.encode())


def model_marks(path: Path) -> Marks:
    """Marks that change when the files do, found without reading them: name, inode, size in bytes,
    time of the last change in ns. Empty where there is no model."""
    try:
        stats = [(file.name, file.stat()) for file in model_files(path)]
    except OSError:
        return ()
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def model_hash(path: Path) -> str:
    """The hash of all its files. EngineFault('model_unreadable') where they cannot be read."""
    try:
        files = model_files(path)
        if files == [path]:
            return f"sha256:{_sha256(path)}"
        lines = "".join(f"{_sha256(file)}  {file.name}\n" for file in files)
    except OSError as error:
        raise EngineFault(
            "model_unreadable", f"cannot read the model at {path} to name it by its hash: {error}"
        ) from error
    return f"sha256-files:{hashlib.sha256(lines.encode()).hexdigest()}"


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
