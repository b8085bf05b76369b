"""GGUF parsing: what a sound file holds, and that no unsound one does anything but an EngineFault."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from pageturner.errors import EngineFault
from pageturner.formats import hub
from pageturner.formats.gguf import Array, open_gguf
from pageturner.formats.model_hash import model_files, model_hash
from support import gguf_writer as w
from support.refusals import engine_fault

GOLDENS = Path(__file__).parents[1] / "goldens"
CODES = {
    "gguf_magic",
    "gguf_version",
    "gguf_truncated",
    "gguf_corrupt",
    "gguf_metadata",
    "gguf_kind",
}
METADATA: dict[str, w.Value] = {
    "general.architecture": "llama",
    "a.int": 7,
    "a.negative": -7,
    "a.float": 0.5,
    "a.bool": True,
    "a.names": ["", "é", "long" * 9],
    "a.numbers": [1, 2, 3],
    "a.floats": [0.25, -1.0],
}
TENSORS: dict[str, w.Tensor] = {
    "vector": w.float_tensor(5),
    "matrix": (8, (3, 64), bytes(range(204))),
    "cube": w.float_tensor(2, 3, 4),
}
SOUND = w.gguf_bytes(METADATA, TENSORS)


def faulty(path: Path, raw: bytes) -> EngineFault:
    path.write_bytes(raw)
    with engine_fault() as caught:
        open_gguf(path)
    assert len(caught.value.message) > 10
    return caught.value


def read_everything(path: Path) -> None:
    file = open_gguf(path)
    for value in file.metadata.values():
        if isinstance(value, Array):
            assert len(value.tolist()) == len(value)
    for name, info in file.tensors.items():
        kind, shape, data = file.tensor(name)
        assert (kind, shape, data.nbytes) == (info.kind, info.shape, info.nbytes)
        assert len(bytes(data)) == info.nbytes  # every byte can be read


def parses(path: Path) -> bool:
    """Whether the file can be read; if not, it must be by an EngineFault with a known code."""
    try:
        read_everything(path)
    except EngineFault as fault:
        if fault.code not in CODES:
            raise
        return False
    return True


@pytest.mark.parametrize("version", [2, 3])
def test_a_sound_file_gives_everything_back(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(w.gguf_bytes(METADATA, TENSORS, version))
    file = open_gguf(path)
    read = {
        key: value.tolist() if isinstance(value, Array) else value
        for key, value in file.metadata.items()
    }
    assert read == METADATA
    assert {name: info.shape for name, info in file.tensors.items()} == {
        "vector": (5,),
        "matrix": (3, 64),
        "cube": (2, 3, 4),
    }
    kind, shape, data = file.tensor("matrix")
    assert (kind, shape, bytes(data)) == ("Q8_0", (3, 64), TENSORS["matrix"][2])
    assert file.tensor("vector")[2].cast("f").tolist() == [1.0] * 5


def test_typed_access(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(SOUND)
    file = open_gguf(path)
    assert file.get("a.int", int) == 7
    assert file.get("a.int", float) == 7.0
    assert file.get("nothing", str, "default") == "default"
    assert file.array("a.names").strings() == METADATA["a.names"]
    for broken in (
        lambda: file.get("nothing", int),
        lambda: file.get("a.bool", int),
        lambda: file.get("a.int", str),
        lambda: file.get("a.names", str),
        lambda: file.array("a.int"),
        lambda: file.array("a.numbers").strings(),
    ):
        with engine_fault(code="gguf_metadata"):
            broken()
    with engine_fault("nowhere", code="tensor_missing"):
        file.tensor("nowhere")


def test_every_value_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    values = {
        0: 200,
        1: -3,
        2: 60_000,
        3: -300,
        4: 1 << 31,
        5: -5,
        6: 1.5,
        7: True,
        10: 1 << 63,
        11: -(1 << 62),
    }
    formats = ["B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d"]
    pairs = b"".join(
        w.string(f"k{number}") + struct.pack("<I" + formats[number], number, value)
        for number, value in (values | {12: 2.5}).items()
    )
    path.write_bytes(w.header(3, 0, len(values) + 1) + pairs)
    file = open_gguf(path)
    assert file.metadata == {f"k{number}": value for number, value in (values | {12: 2.5}).items()}


# -- unsound files -------------------------------------------------------------------------------------------


def test_every_truncation_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = len(SOUND) - (
        -len(TENSORS["cube"][2]) % w.ALIGNMENT
    )  # padding at the end may be missing
    for size in range(whole):
        assert faulty(path, SOUND[:size]).code in CODES


def test_random_damage_is_a_fault_or_a_parse(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    draw = random.Random(0)
    tracemalloc.start()
    faults = 0
    for _ in range(800):
        raw = bytearray(SOUND)
        for _ in range(draw.randint(1, 4)):
            raw[draw.randrange(len(raw) - 300)] = draw.choice(
                (0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256))
            )
        path.write_bytes(raw)
        faults += not parses(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert faults > 250
    assert peak < 5_000_000


def test_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert faulty(path, b"").code == "gguf_magic"
    assert faulty(path, b"PK\x03\x04" + bytes(100)).code == "gguf_magic"
    assert "version 1" in faulty(path, w.header(1, 0, 0)).message
    assert "big-endian" in faulty(path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0)).message
    with engine_fault("nowhere", code="model_unreadable"):
        open_gguf(tmp_path / "nowhere.gguf")
    with engine_fault(code="model_unreadable"):
        open_gguf(tmp_path)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the operating system says it; by permission bits it could not be tested as root."""
    path = tmp_path / "m.gguf"
    path.write_bytes(SOUND)

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    with engine_fault("Permission denied", code="model_unreadable"):
        open_gguf(path)


HUGE = (1 << 64) - 1


@pytest.mark.parametrize(
    "raw",
    [
        w.header(3, HUGE, 0),
        w.header(3, 0, HUGE),
        w.header(3, 0, 1) + struct.pack("<Q", HUGE) + bytes(64),
        w.header(3, 0, 1) + w.string("k") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(64),
        w.header(3, 0, 1) + w.string("k") + struct.pack("<IIQ", 9, 12, HUGE) + bytes(64),
        w.header(3, 0, 1) + w.string("k") + struct.pack("<IIQQ", 9, 8, 1, HUGE) + bytes(64),
        w.header(3, 0, 1) + w.string("k") + struct.pack("<IIQQ", 9, 8, 2, 1 << 63) + bytes(64),
    ],
)
def test_absurd_counts_take_no_memory(tmp_path: Path, raw: bytes) -> None:
    assert faulty(tmp_path / "m.gguf", raw).code == "gguf_truncated"


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([w.pair("k", 1), w.pair("k", 1)], "twice"),
        ([w.string("k") + struct.pack("<I", 13)], "type 13"),
        ([w.string("k") + struct.pack("<IIQ", 9, 9, 0)], "array"),
        ([struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 1)], "UTF-8"),
        ([w.string("k") + struct.pack("<IQ", 8, 1) + b"\xff"], "UTF-8"),
        ([w.pair("general.alignment", 24)], "alignment 24"),
        ([w.pair("general.alignment", 0)], "alignment 0"),
    ],
)
def test_corrupt_metadata_is_named(tmp_path: Path, pairs: list[bytes], message: str) -> None:
    fault = faulty(tmp_path / "m.gguf", w.header(3, 0, len(pairs)) + b"".join(pairs) + bytes(64))
    assert (fault.code, message in fault.message) == ("gguf_corrupt", True), fault.message


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([w.tensor_row("t", 0, (4,), 0), w.tensor_row("t", 0, (4,), 32)], "twice"),
        ([w.tensor_row("t", 0, (16,), 0), w.tensor_row("u", 0, (4,), 32)], "overlaps"),
        ([w.tensor_row("t", 0, (4,), 0), w.tensor_row("u", 0, (4,), 0)], "overlaps"),
        ([w.tensor_row("t", 0, (4,), 8)], "aligned"),
        ([w.tensor_row("t", 99, (4,), 0)], "type 99"),
        ([w.tensor_row("t", 0, (0,), 0)], "shape"),
        ([w.tensor_row("t", 8, (2, 33), 0)], "shape"),
        ([w.tensor_row("t", 0, (), 0)], "0 dimensions"),
        ([w.tensor_row("t", 0, (1, 1, 1, 1, 1), 0)], "5 dimensions"),
        ([w.tensor_row("t", 0, (4,), 1 << 40)], "inside tensor 't'"),
        ([w.tensor_row("t", 0, (1 << 62, 1 << 62), 0)], "inside tensor 't'"),
    ],
)
def test_corrupt_tensor_tables_are_named(tmp_path: Path, rows: list[bytes], message: str) -> None:
    fault = faulty(
        tmp_path / "m.gguf", w.padded(w.header(3, len(rows), 0) + b"".join(rows)) + bytes(96)
    )
    assert message in fault.message
    assert fault.code in ("gguf_corrupt", "gguf_truncated", "gguf_kind")


def split(folder: Path, count: int, holds: list[list[str]]) -> list[Path]:
    """A model in so many files, of which each holds the tensors of these names."""
    paths = [folder / f"m-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        about: dict[str, w.Value] = {"split.no": i, "split.count": count}
        tensors = {name: TENSORS[name] for name in holds[i]}
        path.write_bytes(w.gguf_bytes((METADATA | about) if i == 0 else about, tensors))
    return paths


@pytest.mark.parametrize("holds", [[["vector"], ["matrix", "cube"]], [[], ["vector"], ["cube"]]])
def test_a_split_model_is_one_whichever_part_is_named(
    tmp_path: Path, holds: list[list[str]]
) -> None:
    paths = split(tmp_path, len(holds), holds)
    names = [name for part in holds for name in part]
    for path in paths:
        file = open_gguf(path)
        assert (file.path, list(file.tensors)) == (str(paths[0]), names)
        assert file.get("general.architecture", str) == "llama"
        for name in names:
            assert bytes(file.tensor(name)[2]) == TENSORS[name][2]
        file.advise(names, needed=True)
        assert hub.resolve(str(path)) == hub.ModelFile(paths[0], "m")
        assert model_files(path) == paths
    assert model_hash(paths[0]) == model_hash(paths[1])


def test_the_parts_are_told_by_what_they_say(tmp_path: Path) -> None:
    """Their names may be in another order, and a link to one may have any name."""
    first, second = split(tmp_path, 2, [["vector"], ["matrix"]])
    link = tmp_path / "link.gguf"
    link.symlink_to(second)
    whole = list(open_gguf(first).tensors)
    assert list(open_gguf(link).tensors) == whole
    first.rename(tmp_path / "moved")
    second.rename(first)
    (tmp_path / "moved").rename(second)
    for path in (first, second, link):
        file = open_gguf(path)
        assert list(file.tensors) == whole
        assert file.get("general.architecture", str) == "llama"


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_missing_part_is_said(tmp_path: Path, gone: int) -> None:
    paths = split(tmp_path, 3, [["vector"], ["matrix"], ["cube"]])
    paths[gone].unlink()
    for path in paths:
        if path.exists():
            with engine_fault(paths[gone].name, code="shard_missing"):
                open_gguf(hub.resolve(str(path)).path)


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    first, second = split(tmp_path, 2, [["vector"], ["vector"]])
    with engine_fault("'vector' lies in"):
        open_gguf(first)
    second.write_bytes(first.read_bytes())
    with engine_fault("not the part"):
        open_gguf(first)
    moved = first.rename(tmp_path / "other.gguf")
    with engine_fault("one of 2 files"):
        open_gguf(moved)


def test_the_tiny_goldens_parse() -> None:
    for path in GOLDENS.glob("*.gguf"):
        read_everything(path)


def test_opening_a_file_does_without_numpy() -> None:
    """The API process opens files and is waited for; numpy would cost it a tenth of a second."""
    modules = "pageturner.formats.load_tokenizer, pageturner.formats.hub"
    code = f"import sys, {modules}; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
