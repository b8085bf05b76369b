"""/v1/files, /v1/batches and `pageturner batch`: as clients see them, killed, and beside others."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from pageturner.request import BACKGROUND
from server.conftest import Server, _end
from support.refusals import refusal_of

TEXT = "/v1/completions"
Start = Callable[..., Server]
TINY = Path(__file__).parents[1] / "goldens" / "tiny_llama.gguf"


def line(id: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": {"max_tokens": 5} | body}


def as_file(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def upload(http: httpx.Client, content: bytes, **headers: str) -> dict[str, Any]:
    files = {"file": ("in.jsonl", content)}
    answer = http.post("/v1/files", files=files, data={"purpose": "batch"}, headers=headers)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def create(server: Server, lines: list[dict[str, Any]], url: str = TEXT) -> str:
    file = upload(server.http, as_file(lines))
    wanted = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
    return str(server.http.post("/v1/batches", json=wanted).json()["id"])


def batch(server: Server, id: str) -> dict[str, Any]:
    told: dict[str, Any] = server.http.get(f"/v1/batches/{id}").json()
    return told


def ended(server: Server, id: str) -> dict[str, Any]:
    server.until(
        lambda: batch(server, id)["status"] in ("completed", "failed", "cancelled", "expired")
    )
    return batch(server, id)


def results(server: Server, id: str | None) -> list[dict[str, Any]]:
    if id is None:
        return []
    return [
        json.loads(text) for text in server.http.get(f"/v1/files/{id}/content").text.splitlines()
    ]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with batches that tests share."""
    folder = tmp_path_factory.mktemp("batches")
    flags = ["--batch-dir", str(folder / "kept"), "--max-file-size", "200000", "--max-files", "60"]
    server = Server(folder, flags, {}, True)
    yield server
    _end(server)


def test_without_a_folder_they_say_how_to_have_them(server: Server) -> None:
    for path in ("/v1/files", "/v1/batches"):
        answer = server.http.get(path)
        assert refusal_of(answer) == (404, "batches_off")
        assert "--batch-dir" in answer.json()["error"]["message"]


def test_files_come_in_are_listed_and_go(kept: Server) -> None:
    content = os.urandom(150_000)
    file = upload(kept.http, content)
    assert (file["object"], file["bytes"], file["purpose"]) == ("file", 150_000, "batch")
    assert kept.http.get(f"/v1/files/{file['id']}").json() == file
    assert kept.http.get(f"/v1/files/{file['id']}/content").content == content
    assert file in kept.http.get("/v1/files?purpose=batch").json()["data"]
    assert kept.http.get("/v1/files?purpose=other").json()["data"] == []
    assert kept.http.delete(f"/v1/files/{file['id']}").json()["deleted"] is True
    assert kept.http.get(f"/v1/files/{file['id']}/content").status_code == 404
    assert kept.http.get("/v1/files/..%2Fjournal.sqlite/content").status_code == 404


def test_a_file_that_lost_its_content_can_be_deleted_and_hurts_no_batch(
    start: Start, tmp_path: Path
) -> None:
    server = start("--batch-dir", str(tmp_path))
    file = upload(server.http, as_file([line("a", prompt="x")]))["id"]
    (tmp_path / "files" / file).unlink()
    assert server.http.get(f"/v1/files/{file}/content").status_code == 404
    wanted = {"input_file_id": file, "endpoint": TEXT, "completion_window": "24h"}
    told = server.http.post("/v1/batches", json=wanted)
    assert refusal_of(told) == (400, "invalid_input_file")
    assert server.http.delete(f"/v1/files/{file}").json()["deleted"] is True
    assert create(server, [line("b", prompt="x")])


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        (
            {"files": {"file": ("a", b"x" * 400_000)}, "data": {"purpose": "batch"}},
            413,
            "body_too_large",
        ),
        (
            {"files": {"file": ("a", b"x" * 200_001)}, "data": {"purpose": "batch"}},
            413,
            "file_too_large",
        ),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "fine-tune"}}, 400, "invalid_value"),
        ({"files": {"other": ("a", b"x")}, "data": {"purpose": "batch"}}, 400, "missing_field"),
        ({"json": {"purpose": "batch"}}, 415, "unsupported_media_type"),
    ],
)
def test_uploads_that_are_refused_leave_nothing(
    kept: Server, how: dict[str, Any], status: int, reason: str, tmp_path: Path
) -> None:
    before = kept.http.get("/v1/files").json()["data"]
    answer = kept.http.post("/v1/files", **how)
    assert refusal_of(answer) == (status, reason)
    assert kept.http.get("/v1/files").json()["data"] == before


def test_only_files_take_forms(kept: Server) -> None:
    answer = kept.http.post(TEXT, files={"file": ("a", b"{}")})
    assert answer.status_code == 415


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/nothing"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {"x": "y" * 600}}, "metadata"),
        ({"metadata": 3}, "metadata"),
    ],
)
def test_batches_that_are_refused(kept: Server, body: dict[str, Any], param: str) -> None:
    wanted = {"input_file_id": "file-none", "endpoint": TEXT, "completion_window": "24h"} | body
    answer = kept.http.post("/v1/batches", json=wanted)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_batch_from_its_file_to_its_answers(kept: Server) -> None:
    lines = [line(f"c{i}", prompt=f"hello {i}") for i in range(40)]
    lines[7] = line("refused", prompt="x", temperature=-1)
    lines[9]["custom_id"] = "c3"
    content = as_file(lines).replace(b'{"custom_id": "c20"', b'{"custom_id": ')
    file = upload(kept.http, content)
    wanted = {
        "input_file_id": file["id"],
        "endpoint": TEXT,
        "completion_window": "24h",
        "metadata": {"a": "b"},
    }
    told = kept.http.post("/v1/batches", json=wanted).json()
    assert (told["object"], told["metadata"], told["input_file_id"]) == (
        "batch",
        {"a": "b"},
        file["id"],
    )
    told = ended(kept, told["id"])
    assert told["status"] == "completed"
    assert told["request_counts"] == {"total": 40, "completed": 37, "failed": 3}
    assert [(one["line"], one["code"]) for one in told["errors"]["data"]] == [
        (10, "duplicate_custom_id"),
        (21, "invalid_json_line"),
    ]
    answers = results(kept, told["output_file_id"])
    assert [one["custom_id"] for one in answers] == [
        f"c{i}" for i in range(40) if i not in (7, 9, 20)
    ]
    alone = kept.http.post(TEXT, json={"prompt": "hello 0", "max_tokens": 5}).json()
    assert answers[0]["response"]["status_code"] == 200
    assert answers[0]["response"]["body"]["choices"] == alone["choices"]
    assert set(answers[0]) == {"id", "custom_id", "response", "error"}
    refused = kept.http.post(TEXT, json={"prompt": "x", "temperature": -1})
    errors = {one["custom_id"]: one for one in results(kept, told["error_file_id"])}
    assert errors["refused"]["response"]["status_code"] == 400
    assert errors["refused"]["response"]["body"] == refused.json()
    assert errors["c3"]["error"]["code"] == "duplicate_custom_id"
    assert told["usage"]["output_tokens"] == 37 * 5


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}]},
            "chat.completion",
        ),
        ("/v1/responses", {"input": "hi", "max_tokens": None, "max_output_tokens": 5}, "response"),
    ],
)
def test_other_endpoints(kept: Server, url: str, body: dict[str, Any], kind: str) -> None:
    told = ended(
        kept, create(kept, [line("a", url, **body), line("b", url, **body, stream=True)], url)
    )
    assert [one["response"]["body"]["object"] for one in results(kept, told["output_file_id"])] == [
        kind
    ]
    assert told["request_counts"] == {"total": 2, "completed": 1, "failed": 1}


def test_files_of_editors_that_write_byte_order_marks(kept: Server) -> None:
    """Two of them, one behind the other."""
    bom = b"\xef\xbb\xbf"
    content = b"".join(bom + as_file([line(id, prompt="hi")]) for id in "ab") + bom + b"\n"
    file = upload(kept.http, content)
    wanted = {"input_file_id": file["id"], "endpoint": TEXT, "completion_window": "24h"}
    told = ended(kept, str(kept.http.post("/v1/batches", json=wanted).json()["id"]))
    assert told["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


def test_lists_come_in_pages(kept: Server) -> None:
    ids = [create(kept, [line("a", prompt="x")]) for _ in range(3)]
    page = kept.http.get("/v1/batches?limit=2").json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (ids[:0:-1], True)
    rest = kept.http.get(f"/v1/batches?limit=100&after={page['last_id']}").json()
    assert (rest["first_id"], rest["has_more"]) == (ids[0], False)
    assert kept.http.get("/v1/batches?limit=101").status_code == 400
    assert kept.http.get("/v1/batches?after=batch_none").status_code == 404


def test_cancelled_it_gives_what_there_is(kept: Server) -> None:
    lines = [line("done", prompt="x"), *(line(f"c{i}", prompt="<|stall|>") for i in range(3))]
    id = create(kept, lines)
    kept.until(lambda: batch(kept, id)["request_counts"]["completed"] == 1)
    file = batch(kept, id)["input_file_id"]
    assert kept.http.delete(f"/v1/files/{file}").json()["error"]["reason"] == "file_in_use"
    assert kept.http.post(f"/v1/batches/{id}/cancel").json()["status"] in (
        "cancelling",
        "cancelled",
    )
    told = ended(kept, id)
    assert (told["status"], told["request_counts"]["completed"]) == ("cancelled", 1)
    assert {one["error"]["code"] for one in results(kept, told["error_file_id"])} == {
        "batch_cancelled"
    }
    assert kept.http.post(f"/v1/batches/{id}/cancel").status_code == 409
    assert kept.http.delete(f"/v1/files/{file}").status_code == 200


def test_tenants_see_their_own(start: Start, tmp_path: Path) -> None:
    server = start("--batch-dir", str(tmp_path / "b"), "--api-key", "one:k1,two:k2")
    mine, theirs = {"Authorization": "Bearer k1"}, {"Authorization": "Bearer k2"}
    file = upload(server.http, as_file([line("a", prompt="x")]), **mine)
    wanted = {"input_file_id": file["id"], "endpoint": TEXT, "completion_window": "24h"}
    assert server.http.post("/v1/batches", json=wanted, headers=theirs).status_code == 400
    id = server.http.post("/v1/batches", json=wanted, headers=mine).json()["id"]
    server.until(
        lambda: server.http.get(f"/v1/batches/{id}", headers=mine).json()["status"] == "completed"
    )
    output = server.http.get(f"/v1/batches/{id}", headers=mine).json()["output_file_id"]
    for path in (f"/v1/files/{output}", f"/v1/files/{output}/content", f"/v1/batches/{id}"):
        assert server.http.get(path, headers=mine).status_code == 200
        assert server.http.get(path, headers=theirs).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert server.http.get(path, headers=theirs).json()["data"] == []
    assert server.http.delete(f"/v1/files/{output}", headers=theirs).status_code == 404
    assert {note["tenant"] for note in server.notes("submit")} == {"one"}


def test_slow_uploads_of_one_tenant_do_not_keep_others_from_theirs(
    start: Start, tmp_path: Path
) -> None:
    flags = ("--batch-dir", str(tmp_path / "b"), "--api-key", "one:k1,two:k2", "--max-files", "1")
    server = start(*flags)
    where = urlsplit(server.url)
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k1\r\ncontent-length: 9999\r\n"
        "content-type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
    )
    with socket.create_connection((where.hostname or "", where.port or 0)) as slow:
        slow.sendall(head.encode())
        files = {"file": ("in.jsonl", b"{}")}

        def post(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            form = {"purpose": "other"}  # refused, once it may come
            return server.http.post(
                "/v1/files", files=files, data=form, headers=headers
            ).status_code

        server.until(lambda: post("k1") == 429)
        assert post("k2") == 400
        upload(server.http, b"{}", authorization="Bearer k2")


@pytest.mark.slow
def test_killed_it_goes_on_with_what_has_no_answer(start: Start, tmp_path: Path) -> None:
    flags, slow = (
        ("--batch-dir", str(tmp_path / "b"), "--max-num-seqs", "4"),
        {"FAKE_STEP_SECONDS": "0.02"},
    )
    first = start(*flags, **slow)
    id = create(first, [line(f"c{i}", prompt=f"hello {i}") for i in range(60)])
    first.until(lambda: batch(first, id)["request_counts"]["completed"] >= 10)
    (tmp_path / "b" / "files" / "file-of_an_upload_that_never_ended").write_bytes(b"x")
    first.stop(signal.SIGKILL)
    seeds = {note["seed"] for note in first.notes("submit")}
    second = start(*flags)
    told = ended(second, id)
    assert told["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
    assert [one["custom_id"] for one in results(second, told["output_file_id"])] == [
        f"c{i}" for i in range(60)
    ]
    again = {note["seed"] for note in second.notes("submit")}
    assert len(seeds | again) == 60
    assert len(again) <= 50
    assert "never_ended" not in second.http.get("/v1/files").text
    assert not list((tmp_path / "b" / "files").glob("*never_ended"))


@pytest.mark.slow
def test_another_server_may_not_have_the_folder(start: Start, tmp_path: Path) -> None:
    start("--batch-dir", str(tmp_path / "b"))
    second = start("--batch-dir", str(tmp_path / "b"), wait=False)
    assert "in use" in second.finished()
    assert second.process.returncode != 0


@pytest.mark.slow
def test_told_to_stop_a_server_does_not_wait_for_its_batches(start: Start, tmp_path: Path) -> None:
    server = start("--batch-dir", str(tmp_path / "b"))
    create(server, [line("a", prompt="<|stall|>")])
    server.until(lambda: server.notes("submit"))
    assert server.stop() == 0


@pytest.mark.slow
def test_the_background_leaves_slots_to_others_and_comes_back_behind_its_tokens(
    start: Start, tmp_path: Path
) -> None:
    server = start(
        "--batch-dir", str(tmp_path / "b"), "--max-num-seqs", "4", FAKE_STEP_SECONDS="0.02"
    )
    lines = [line(f"c{i}", prompt=f"{i}", max_tokens=30) for i in range(6)]
    together = {"prompt": [one["body"]["prompt"] for one in lines], "max_tokens": 30}
    alone = [one["text"] for one in server.http.post(TEXT, json=together).json()["choices"]]
    id = create(server, lines)
    server.until(
        lambda: sum(note["priority"] == BACKGROUND for note in server.notes("submit")) >= 4
    )
    time.sleep(0.1)
    before = len(server.notes("abort"))
    bodies = {"prompt": ["a", "b", "c"], "max_tokens": 3}
    assert server.http.post(TEXT, json=bodies).status_code == 200
    notes = server.notes("submit")
    others = [note["submit"] for note in notes if note["priority"] != BACKGROUND][-3:]
    aborted = [note["abort"] for note in server.notes("abort")[before:]]
    assert len(aborted) >= 3
    assert min(others) > max(aborted[:3])
    told = ended(server, id)
    texts = [
        one["response"]["body"]["choices"][0]["text"]
        for one in results(server, told["output_file_id"])
    ]
    assert texts == alone
    assert any(note["resume"] > 0 for note in server.notes("submit"))


@pytest.mark.slow
def test_the_background_leaves_kv_memory_to_others(start: Start, tmp_path: Path) -> None:
    """The fake engine has room for 4,096 tokens."""
    server = start("--batch-dir", str(tmp_path / "b"))
    create(server, [line(f"c{i}", prompt="<|stall|>" + "x" * 500) for i in range(30)])
    server.until(lambda: len(server.notes("submit")) >= 6)
    time.sleep(0.2)
    assert len(server.notes("submit")) <= 11  # seven fill it, and four were being read
    assert server.http.post(TEXT, json={"prompt": "y" * 1500, "max_tokens": 3}).status_code == 200
    notes = [note for note in server.notes("submit") if note["priority"] != BACKGROUND]
    assert len(notes) == 1
    assert len(server.notes("abort")) >= 2


@pytest.mark.slow
def test_somebody_alone_in_the_background_may_fill_the_memory(start: Start) -> None:
    server = start("--max-num-seqs", "4")
    body = {"prompt": "x" * 2000, "max_tokens": 40, "priority": BACKGROUND}
    assert (
        server.http.post(TEXT, json=body | {"prompt": ["x" * 2000, "y" * 2000]}).status_code == 200
    )


def test_a_full_queue_of_others_has_no_place_for_a_batch(start: Start, tmp_path: Path) -> None:
    server = start("--batch-dir", str(tmp_path / "b"), "--max-num-seqs", "2", "--max-queue", "2")
    create(server, [line(f"c{i}", prompt="<|stall|>") for i in range(30)])
    server.until(lambda: len(server.notes("submit")) >= 2)
    assert server.http.post(TEXT, json={"prompt": ["a"] * 4, "max_tokens": 3}).status_code == 200


# -- the command ---------------------------------------------------------------------------------------------
def command(*words: object, **more: Any) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "pageturner", "batch", *map(str, words)]
    return subprocess.Popen(
        program, stderr=subprocess.PIPE, text=True, start_new_session=True, **more
    )


def said(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, text = process.communicate(timeout=60)
    return process.returncode, text


@pytest.mark.slow
def test_the_command_stops_and_goes_on(start: Start, tmp_path: Path) -> None:
    server = start("--max-num-seqs", "4", FAKE_STEP_SECONDS="0.02")
    source, out, errors = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "err.jsonl"))
    source.write_bytes(
        as_file([line(f"c{i}", prompt=f"{i}") for i in range(80)] + [line("bad")]) + b"{\n"
    )
    words = (source, out, "--url", server.url, "--errors", errors)
    process = command(*words)
    server.until(lambda: len(server.notes("submit")) >= 20)
    process.send_signal(signal.SIGINT)
    code, text = said(process)
    assert (code, "goes on" in text, out.exists()) == (130, True, False)
    process = command(*words)
    server.until(lambda: len(server.notes("submit")) >= 50)
    os.killpg(process.pid, signal.SIGKILL)
    said(process)
    code, text = said(command(*words))
    assert code == 0
    assert "82 of 82 lines answered, 2 of them by an error" in text
    assert [json.loads(one)["custom_id"] for one in out.read_bytes().splitlines()] == [
        f"c{i}" for i in range(80)
    ]
    assert len(errors.read_bytes().splitlines()) == 2
    assert sorted(path.name for path in tmp_path.glob("*.jsonl*")) == [
        "err.jsonl",
        "in.jsonl",
        "out.jsonl",
    ]
    seeds = {note["seed"] for note in server.notes("submit")}
    assert len(seeds) == 80
    assert {note["priority"] for note in server.notes("submit")} == {BACKGROUND}
    before, asked = out.read_bytes(), len(server.notes("submit"))
    code, text = said(command(*words))
    assert (code, "has the answers already" in text) == (0, True)
    source.write_bytes(source.read_bytes() + as_file([line("one more")]))
    code, text = said(command(*words))
    assert (code, "is there already" in text) == (2, True)
    assert (out.read_bytes(), len(server.notes("submit"))) == (before, asked)


@pytest.mark.slow
def test_the_command_goes_on_with_the_same_file_only(server: Server, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(as_file([line(f"c{i}", prompt="<|stall|>") for i in range(3)]))
    process = command(source, out, "--url", server.url)
    server.until(lambda: Path(f"{out}.journal").exists())
    time.sleep(0.3)
    code, text = said(command(source, out, "--url", server.url))
    assert (code, "in use" in text) == (1, True)
    process.send_signal(signal.SIGTERM)
    assert said(process)[0] == 130
    source.write_bytes(as_file([line("other", prompt="x")]))
    code, text = said(command(source, out, "--url", server.url))
    assert (code, "another input" in text) == (2, True)


@pytest.mark.slow
def test_the_command_with_an_engine_of_its_own(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    source.write_bytes(
        as_file(
            [
                line("a", prompt="hello"),
                line("b", "/v1/embeddings", input="hello", max_tokens=None),
                line("c", prompt="hello", temperature=-1),
                line("d", "/v1/chat/completions", **chat),
            ]
        )
    )
    code, text = said(command(source, out, "--model", TINY))
    assert code == 0, text
    found = {
        one["custom_id"]: one["response"]["status_code"]
        for one in map(json.loads, out.read_bytes().splitlines())
    }
    assert (found["a"], found["b"], found["c"]) == (200, 200, 400)
    assert list(found) == ["a", "b", "c", "d"]


@pytest.mark.slow
def test_the_command_stops_at_a_full_disk_and_loses_nothing(server: Server, tmp_path: Path) -> None:
    """As full as a limit of the size of a file makes it."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(as_file([line(f"c{i}", prompt=f"{i}") for i in range(200)]))
    words, most = (source, out, "--url", server.url, "--window", 4), 150_000
    process = command(
        *words, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    )
    code, text = said(process)
    assert (code, "the same command goes on" in text) == (1, True), text
    assert not out.exists()
    code, text = said(command(*words))
    assert (code, "200 of 200 lines answered" in text) == (0, True), text
    assert len(out.read_bytes().splitlines()) == 200


@pytest.mark.slow
@pytest.mark.parametrize(("good", "status"), [(0, 1), (1, 0)])
def test_scripts_are_told_where_no_line_was_answered(
    good: int, status: int, start: Start, tmp_path: Path
) -> None:
    server, source = start(), tmp_path / "in.jsonl"
    source.write_bytes(b"not json\n" + as_file([line("a", prompt="x")] * good))
    code, text = said(command(source, tmp_path / "out", "--url", server.url))
    assert (code, f"{good + 1} of {good + 1} lines answered, 1 of them by an error" in text) == (
        status,
        True,
    )


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n")
    code, text = said(command(source, tmp_path / "out", "--url", "http://127.0.0.1:9"))
    assert (code, "127.0.0.1:9" in text) == (1, True)
    code, text = said(command(tmp_path / "none", tmp_path / "out", "--url", "http://127.0.0.1:9"))
    assert (code, "cannot read" in text) == (2, True)


def test_a_file_has_a_bound_of_lines(start: Start, tmp_path: Path) -> None:
    server = start("--batch-dir", str(tmp_path / "kept"), "--max-batch-lines", "50")
    body = {"files": {"file": ("a", b"{}\n" * 51)}, "data": {"purpose": "batch"}}
    refused = server.http.post("/v1/files", **body)
    assert refusal_of(refused) == (413, "too_many_lines")
    assert list((tmp_path / "kept" / "files").iterdir()) == []
    upload(server.http, b"{}\n" * 50)
    listed = server.http.get("/v1/files", params={"limit": "0" * 8 + "1" + "0" * 5000})
    assert listed.status_code == 400


def test_bad_lines_take_little_of_the_disk(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    server = start("--batch-dir", str(folder))
    file = upload(server.http, b"{}\n" * 40_000)
    wanted = {"input_file_id": file["id"], "endpoint": TEXT}
    told = ended(server, server.http.post("/v1/batches", json=wanted).json()["id"])
    assert told["status"] == "failed"
    assert "too_many_errors" in {one["code"] for one in told["errors"]["data"]}
    assert server.stop() == 0
    assert sum(one.stat().st_size for one in folder.rglob("*") if one.is_file()) < 4 << 20
    second = tmp_path / "second"  # a few bad ones among many good ones are no matter
    server = start("--batch-dir", str(second))
    file = upload(
        server.http, as_file([line(f"c{i}", prompt="a") for i in range(20)]) + b"{}\n" * 9
    )
    wanted["input_file_id"] = file["id"]
    told = ended(server, server.http.post("/v1/batches", json=wanted).json()["id"])
    assert (told["status"], told["request_counts"]["failed"]) == ("completed", 9)
