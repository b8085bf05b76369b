"""API keys: how they are written down, and what a tenant sees of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pageturner.errors import EngineFault
from pageturner.serve.api_keys import ANYBODY, ApiKeys, cache_salt_of, read_api_keys

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
        assert tenant(keys, "sesame", "Basic") is tenant(keys, "sesame2") is tenant(keys, "") is None


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
    with pytest.raises(EngineFault, match=r"api_key: key \d") as caught:
        read_api_keys(written, "")
    assert "sesame" not in caught.value.message


def test_files_that_hold_no_keys(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="cannot read"):
        read_api_keys("", str(tmp_path / "absent"))
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(EngineFault, match="no key"):
        read_api_keys("", str(tmp_path / "empty"))


def test_a_client_cannot_take_another_tenants_salt() -> None:
    tenants, own = ("", "a", "b", "a.b"), (None, "", "a", "b", "a/", "/", "b/x")
    salts = {(tenant, salt or ""): cache_salt_of(tenant, salt) for tenant in tenants[1:] for salt in own}
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
