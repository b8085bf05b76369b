"""Every file that a server leaves behind is its owner's alone, whatever was there before."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from pageturner import private_files
from pageturner.private_files import NotPrivate, open_private, own_folder, write_private
from pageturner.server.api.batches.batch_journal import Journal
from support.hf_folder import make_folder
from support.servers import serving


def wide(path: Path) -> dict[str, str]:
    """What below a folder is not its owner's alone, by its path."""
    found = {}
    for one in (path, *path.rglob("*")):
        about = one.stat()
        allowed = 0o700 if one.is_dir() else 0o600
        mode = stat.S_IMODE(about.st_mode)
        if about.st_uid != os.geteuid() or mode & ~allowed:
            found[one.name] = f"{mode:04o} of {about.st_uid}"
    return found


def begin_open_to_all(folder: Path) -> None:
    """Leave what an older version left: folders and files that everybody may read, or write."""
    (folder / "batches" / "files").mkdir(parents=True)
    (folder / "packed").mkdir()
    Journal(folder / "batches" / "journal.sqlite").close()
    for name in ("steps", "kv"):
        (folder / name).touch()
    for one in folder.rglob("*"):
        one.chmod(0o777 if one.is_dir() else 0o666)


@pytest.mark.parametrize("before", ["nothing", "open to all"])
def test_all_files_of_a_server_with_all_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    folder = tmp_path / "left"
    folder.mkdir(mode=0o700)
    if before == "open to all":
        begin_open_to_all(folder)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(folder))
    flags = f"--batch-dir {folder}/batches --step-log {folder}/steps --step-log-tokens"
    flags += f" --packed-cache {folder}/packed --kv-file {folder}/kv --kv-file-size 4M --kv-cache-memory 1M"
    model = make_folder(tmp_path / "model")
    umask = os.umask(0)  # nothing may hang on it
    try:
        with serving(model, *flags.split()) as client:
            body = {"prompt": "the old house", "max_tokens": 4}
            asked = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
            files = {"file": ("in.jsonl", json.dumps(asked).encode())}
            file = client.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
            wanted = {"input_file_id": file, "endpoint": "/v1/completions"}
            batch = client.post("/v1/batches", json=wanted).json()["id"]
            until = time.monotonic() + 60
            while (told := client.get(f"/v1/batches/{batch}").json())["status"] != "completed":
                assert time.monotonic() < until, told
                time.sleep(0.05)
            running = {one.name for one in folder.rglob("*")}
            assert wide(folder) == {}
    finally:
        os.umask(umask)
    assert wide(folder) == {}
    expected = {
        "journal.sqlite",
        "journal.sqlite-wal",
        "journal.sqlite.lock",
        "files",
        "steps",
        "kv",
    }
    assert running >= expected | {file, told["output_file_id"]}


def test_what_is_another_users_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(private_files.os, "geteuid", lambda: 12345)
    with pytest.raises(NotPrivate, match="belongs to another user"):
        open_private(tmp_path / "file")
    with pytest.raises(NotPrivate):
        own_folder(tmp_path)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_written_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    assert write_private(path, [b"a", b"bc"], durable=True) == 3
    assert wide(tmp_path) == {}

    def broken() -> object:
        yield b"x"
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        write_private(path, broken())  # type: ignore[arg-type]
    assert [one.read_bytes() for one in path.parent.iterdir()] == [b"abc"]
    (tmp_path / "link").symlink_to(path)
    write_private(tmp_path / "link", [b"new"])
    assert (path.read_bytes(), (tmp_path / "link").is_symlink()) == (b"new", True)
    assert write_private("/dev/null", [b"anything"]) == 8
