"""API keys: how they are written down, and what a tenant sees of the others."""

from __future__ import annotations

import hashlib
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pageturner import cli
from pageturner.http.api_keys import ANYBODY, ApiKeys, cache_salt_of, read_api_keys
from support.refusals import engine_fault

from .conftest import Server
from .test_prefixes import listed


def tenant(keys: ApiKeys, key: str, scheme: str = "Bearer") -> str | None:
    found = keys.find(f"{scheme} {key}".encode())
    return None if found is None else found.tenant


def test_without_keys_everybody_is_let_in() -> None:
    assert read_api_keys("", "").find(b"") == ANYBODY


def test_all_keys_of_one_tenant_are_no_tenants_apart() -> None:
    for written in ("sesame", "acme:sesame,acme:old"):
        keys = read_api_keys(written, "")
        assert tenant(keys, "sesame") == tenant(keys, "sesame", "bearer") == ""
        assert (
            tenant(keys, "sesame", "Basic") is tenant(keys, "sesame2") is tenant(keys, "") is None
        )


def test_a_key_tells_the_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nacme:one\n\n  two  \nacme:three:3\n")
    keys = read_api_keys("zero", str(file))
    tenants = [tenant(keys, key) for key in ("zero", "one", "two", "three:3", "acme:one")]
    assert tenants == ["key-1", "acme", "key-3", "acme", None]


@pytest.mark.parametrize(
    "written", ["sesame,", "a b:sesame", "sesame,sesame", "x:sesame,y:sesame", ":sesame?ä"]
)
def test_what_is_no_key_is_refused_and_not_shown(written: str) -> None:
    with engine_fault(r"api_key: key \d") as caught:
        read_api_keys(written, "")
    assert "sesame" not in caught.value.message


def test_files_that_hold_no_keys(tmp_path: Path) -> None:
    with engine_fault("cannot read"):
        read_api_keys("", str(tmp_path / "absent"))
    (tmp_path / "empty").write_text("# nothing\n")
    with engine_fault("no key"):
        read_api_keys("", str(tmp_path / "empty"))


def test_a_client_cannot_take_another_tenants_salt() -> None:
    tenants, own = ("", "a", "b", "a.b"), (None, "", "a", "b", "a/", "/", "b/x")
    salts = {
        (tenant, salt or ""): cache_salt_of(tenant, salt) for tenant in tenants[1:] for salt in own
    }
    assert len(set(salts.values())) == len(salts)
    assert cache_salt_of("", None) == "", "one tenant, no salt"
    assert cache_salt_of("", "x") == "x"


def ask(server: Server, key: str, path: str = "/v1/completions", **fields: Any) -> Any:
    return server.http.post(
        path, json={"prompt": "hello", **fields}, headers={"authorization": f"Bearer {key}"}
    )


def test_tenants_are_kept_apart(start: Callable[..., Server], tmp_path: Path) -> None:
    preloaded = tmp_path / "manual.txt"
    preloaded.write_text("for all")
    server = start("--api-key", "a:sesame-1,b:sesame-2,sesame-3", "--preload", str(preloaded))
    server.until(lambda: "1 of 1 prefixes are kept" in server.log)
    for key, fields in (("1", {}), ("2", {"cache_salt": "x"}), ("3", {"user": "b"})):
        assert ask(server, f"sesame-{key}", **fields).status_code == 200
    assert ask(server, "sesame-4").status_code == 401
    for key in "12":
        assert ask(server, f"sesame-{key}", "/v1/prefixes", id="mine").status_code == 200
    notes = server.notes("submit")
    assert [(note["salt"], note["tenant"]) for note in notes[1:4]] == [
        ("a/", "a"),
        ("b/x", "b"),
        ("key-3/", "key-3"),
    ]
    assert [note["salt"] for note in notes if note["pin"]] == ["", "a/", "b/"]
    everybodys = ("manual", 7, "ready")
    for key, seen in (("1", ["mine"]), ("2", ["mine"]), ("3", [])):
        server.http.headers["authorization"] = f"Bearer sesame-{key}"
        assert listed(server) == [everybodys, *((id, 5, "ready") for id in seen)]
    assert server.http.delete("/v1/prefixes/manual").status_code == 404
    server.http.headers["authorization"] = "Bearer sesame-1"
    assert server.http.delete("/v1/prefixes/mine").status_code == 200
    server.http.headers["authorization"] = "Bearer sesame-2"
    assert listed(server) == [everybodys, ("mine", 5, "ready")]
    assert "sesame" not in server.log


# -- tables --------------------------------------------------------------------------------------------------
def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_tables_hold_hashes_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        f'# ours\n[[keys]]\ntenant = "a"\nsha256 = "{digest("one")}"\nmax_concurrent = 3\nqueue_share = 1\n'
        f'[[keys]]\ntenant = "b"\nsha256 = "{digest("two").upper()}"\nadmin = true\n'
    )
    keys = read_api_keys("c:three", str(file))
    assert [tenant(keys, key) for key in ("one", "two", "three", "four", digest("one"))] == [
        *"abc",
        None,
        None,
    ]
    found = keys.find(b"Bearer one")
    assert found is not None
    assert (found.max_concurrent, found.queue_share, found.admin, found.tokens_per_minute) == (
        3,
        1,
        False,
        0,
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("max_conc = 1", "unknown field 'max_conc'"),
        ("max_concurrent = -1", "0 or more"),
        ("max_concurrent = true", "max_concurrent"),
        ("queue_share = 1.5", "at most 1"),
        ("admin = 1", "admin"),
        ("tenant = 5", "tenant"),
        ('sha256 = "sesame"', "sha256"),
        ("sha256 = 5", "sha256"),
        ("[other]", "tables"),
        ("= 5", "TOML"),
    ],
)
def test_a_wrong_table_is_told_by_its_place(line: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    given = {"tenant": 'tenant = "a"', "sha256": f'sha256 = "{digest("x")}"'}
    given.pop(line.split()[0], None)
    file.write_text("\n".join(["[[keys]]", *given.values(), line]))
    with engine_fault(told) as caught:
        read_api_keys("", str(file))
    assert "sesame" not in caught.value.message


def test_a_new_key_is_told_once_and_written_down_as_its_hash(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["key", "new", "--tenant", "acme", "--max-concurrent", "4", "--admin"]) == 0
    out, err = capsys.readouterr()
    key = re.findall(r"pt-[\w-]{43}", err)[0]
    assert key not in out
    file = tmp_path / "keys.toml"
    file.write_text(out)
    found = read_api_keys("", str(file)).find(f"Bearer {key}".encode())
    assert found is not None
    assert (found.max_concurrent, found.admin) == (4, True)
    assert cli.main(["key", "new", "--tenant", "a b"]) == 2


def test_keys_are_read_again_on_sighup_and_bad_ones_are_not_taken(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("a:one")
    server = start("--api-key-file", str(file))

    def reload(text: str, told: str) -> list[int]:
        file.write_text(text)
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: told in server.log)
        return [ask(server, key, max_tokens=1).status_code for key in ("one", "two")]

    assert reload("b:two\nc:three\n", "read again: 2") == [401, 200]
    assert reload("b b:two", "the keys stay") == [401, 200]


def test_an_admin_key_of_the_file_opens_the_admin_pages(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    tables = [
        f'[[keys]]\ntenant = "{name}"\nsha256 = "{digest(name)}"\nadmin = {flag}\n'
        for name, flag in (("a", "true"), ("b", "false"))
    ]
    file.write_text("".join(tables))
    server = start("--api-key-file", str(file))
    for key, status in (("a", 200), ("b", 403), ("c", 403)):
        answer = server.http.get("/v1/admin/config", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status


def test_the_log_has_no_prompts_and_no_secrets(start: Callable[..., Server]) -> None:
    """At its most talkative, of requests that are answered, refused and broken."""
    server = start(
        "--api-key", "a:marker-key,b:other", "--admin-key", "marker-admin", "--log-level", "debug"
    )
    header = {"x-marker": "marker-header", "cookie": "marker-cookie"}
    for key in ("marker-key", "marker-wrong", "marker-admin"):
        for fields in (
            {},
            {"stream": True},
            {"max_tokens": "marker-field"},
        ):
            body = {"prompt": "marker-prompt", "max_tokens": 2, **fields}
            auth = {"authorization": f"Bearer {key}"}
            server.http.post("/v1/completions", json=body, headers=auth | header)
            server.http.post(
                "/v1/chat/completions?q=marker-query",
                json={"messages": [body]},
                headers=auth | header,
            )
            server.http.post("/v1/completions", content=b'{"prompt": "marker-broken', headers=auth)
            server.http.get("/v1/admin/config", headers=auth)
    server.stop()
    assert "POST" in server.finished()
    assert "marker" not in server.log
