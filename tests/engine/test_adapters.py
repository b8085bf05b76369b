"""LoRA adapters in an engine: which are in memory, who waits, and that prefixes never cross."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pageturner import LLM, SamplingParams
from pageturner.engine.engine import Engine
from pageturner.executor import adapters as module
from pageturner.ipc.adapter_messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from pageturner.models.load import open_model
from pageturner.request import Event, Request
from pageturner.text.structured_outputs import StructuredOutputsParams
from support.adapters import ALL, TOP, write_adapter
from support.refusals import client_error, engine_fault

TINY = Path(__file__).parents[1] / "goldens" / "tiny_llama.gguf"
SPEC = open_model(TINY)[1]
NAMES = "abcd"
P = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
FIELDS = {"a": (*ALL, *TOP), "b": ("q", "v"), "c": ALL, "d": ("down",)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        n: write_adapter(root / n, SPEC, FIELDS[n], seed=i, size=1.0) for i, n in enumerate(NAMES)
    }


def llm(folders: dict[str, Path], most: int = 2, **settings: object) -> LLM:
    return LLM(str(TINY), lora=folders, max_loras=most, kv_cache_memory=1 << 22, **settings)


def tokens(made: LLM, name: str, prompt: str = "Hello there, how are you") -> list[int]:
    return made.generate(prompt, P, lora=name, progress=False)[0].outputs[0].token_ids


def drive(engine: Engine, ends: int, events: list[Event] | None = None) -> list[Event]:
    """Until so many requests have ended. events: that came before."""
    events = events or []
    until = time.monotonic() + 20
    while sum(event.finish is not None for event in events) < ends:
        assert time.monotonic() < until
        events += engine.step()
    return events


def test_more_adapters_than_there_is_room_for(folders: dict[str, Path]) -> None:
    made = llm(folders)
    alone = {name: tokens(made, name) for name in ("", *NAMES)}
    assert len({tuple(each) for each in alone.values()}) == 5
    order = ["a", "", "b", "c", "d", "a", "b", "c", ""] * 2
    outputs = made.generate(
        ["Hello there, how are you"] * len(order), P, lora=order, progress=False
    )
    for name, output in zip(order, outputs, strict=True):
        assert output.outputs[0].token_ids == alone[name]
    stats = made.built.engine.stats()
    assert stats["adapters"] == 4
    assert stats["adapters_in_memory"] == 2
    assert stats["adapter_evictions"] > 4
    assert stats["adapters_waiting"] == 0


def test_the_one_used_longest_ago_goes(folders: dict[str, Path]) -> None:
    made = llm(folders)
    store = made.built.engine.adapters
    for name in "abacb":
        tokens(made, name)
    before = store.stats()["adapter_loads"]
    tokens(made, "c")
    assert store.stats()["adapter_loads"] == before
    tokens(made, "a")
    assert store.stats()["adapter_loads"] == before + 1


def test_prefixes_never_cross_and_content_names_them(folders: dict[str, Path]) -> None:
    made = llm(folders | {"again": folders["a"]}, most=8)
    prompt = list(range(5, 69))
    cached = {}
    for name in ("", "a", "b", "a", "again", ""):
        cached.setdefault(name, []).append(
            made.generate(prompt, P, lora=name, progress=False)[0].cached_tokens
        )
    assert cached == {"": [0, 48], "a": [0, 48], "b": [0], "again": [48]}


def request(id: int, digest: str, count: int = 6) -> Request:
    return Request(
        id, tuple(range(10, 30)), SamplingParams(max_tokens=count, seed=1), adapter=digest
    )


def test_who_waits_delays_nobody_and_unloading_finishes_first(folders: dict[str, Path]) -> None:
    made = llm(folders, most=1)
    engine, digest = made.built.engine, made.adapters.digest
    assert engine.submit(request(1, digest("a"), 40)) == []
    assert engine.submit(request(2, digest("b"))) == []
    assert engine.submit(request(3, "")) == []
    first = drive(engine, 1)
    assert [event.id for event in first if event.finish] == [3]
    a = digest("a")
    made.adapters.unload("a")
    with client_error("no adapter 'a'"):
        made.generate("x", P, lora="a", progress=False)
    ends = [event.id for event in drive(engine, 2) if event.finish == "length"]
    assert ends == [1, 2]
    assert engine.submit(request(4, a))[0].failure.code == "adapter_not_found"


def test_an_aborted_one_gives_its_place_up(folders: dict[str, Path]) -> None:
    made = llm(folders, most=1)
    engine, digest = made.built.engine, made.adapters.digest
    for id, name in enumerate("abc", 1):
        engine.submit(request(id, digest(name), 500))
    engine.step()
    engine.abort(2)  # waits
    engine.abort(1)  # runs
    until = time.monotonic() + 20
    while not any(event.id == 3 for event in engine.step()):
        assert time.monotonic() < until
        time.sleep(0.001)
    engine.abort(3)
    assert engine.adapters.stats()["adapters_waiting"] == 0
    assert not engine.has_work


def test_a_crowd_of_others_passes_only_so_often(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of requests for the adapter in memory cannot keep another one out for ever."""
    monkeypatch.setattr(module, "PASSES", 5)
    made = llm(folders, most=1)
    engine, digest = made.built.engine, made.adapters.digest
    engine.submit(request(1, digest("a"), 3))
    engine.submit(request(2, digest("b"), 3))
    ended: list[int] = []
    for id in range(3, 200):
        engine.submit(request(id, digest("a"), 3))
        ended += [event.id for event in engine.step() if event.finish]
        if 2 in ended:
            break
        time.sleep(0.001)
    assert 2 in ended
    assert len(ended) < 60


def test_nobody_waits_for_one_that_got_its_place_by_another(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of the one that waited the longest was asked for by a later one: it stayed the one for whom all
    have to wait, and no later request for that adapter ever ran."""
    monkeypatch.setattr(module, "PASSES", 2)
    made = llm(folders, most=1)
    engine, digest = made.built.engine, made.adapters.digest
    engine.submit(request(1, digest("a"), 1))
    engine.submit(request(2, digest("b"), 1))
    until = time.monotonic() + 20
    while not any(event.id == 1 and event.finish for event in engine.step()):
        assert time.monotonic() < until
    engine.submit(request(3, digest("b"), 1))
    drive(engine, 2)
    for id in range(4, 12):
        engine.submit(request(id, digest("b"), 1))
        drive(engine, 1)


def told(engine: Engine) -> AdapterLoaded:
    until = time.monotonic() + 20
    while not (found := engine.adapters.news()):
        assert time.monotonic() < until
        time.sleep(0.002)
    (one,) = found
    return one


def test_what_the_api_process_is_told(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = llm({}).built.engine
    engine.adapters.change(LoadAdapter("x", str(folders["a"])))
    assert engine.has_work
    news = told(engine)
    assert (news.name, news.code, news.rank) == ("x", "", 8)
    assert news.nbytes > 10_000
    assert not engine.has_work
    engine.adapters.change(LoadAdapter("y", str(tmp_path / "none")))
    news = told(engine)
    assert (news.name, news.digest, news.code) == ("y", "", "adapter_missing")
    engine.adapters.change(UnloadAdapter("x"))
    assert engine.adapters.stats() == {}


def test_a_name_that_is_given_again_while_it_is_read(folders: dict[str, Path]) -> None:
    """Nobody hears of the first one any more."""
    engine = llm({}).built.engine
    engine.adapters.change(LoadAdapter("x", str(folders["a"]), number=1))
    engine.adapters.change(UnloadAdapter("x"))
    engine.adapters.change(LoadAdapter("x", str(folders["b"]), number=2))
    assert told(engine).number == 2
    assert not engine.has_work
    assert engine.adapters.stats()["adapters"] == 1


def test_a_new_engine_is_told_what_is_known(folders: dict[str, Path], tmp_path: Path) -> None:
    """By digest, without reading; one that has changed since then is refused, and nobody else suffers."""
    before = llm({"a": folders["a"]})
    digest, truth = before.adapters.digest("a"), tokens(before, "a")
    folder = tmp_path / "a"
    folder.mkdir()
    for file in folders["a"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    engine = llm({}).built.engine
    engine.adapters.change(LoadAdapter("", str(folder), digest))
    prompt = tuple(
        before.tokenizer.encode("Hello there, how are you", add_special=True, parse_special=True)
    )
    engine.submit(Request(1, prompt, P, adapter=digest))
    assert [t for event in drive(engine, 1) for t in event.tokens] == truth
    other = llm({}).built.engine
    write_adapter(folder, SPEC, ("q",), seed=9)
    other.adapters.change(LoadAdapter("a", str(folder), digest))
    events = other.submit(Request(1, prompt, P, adapter=digest)) + other.submit(
        Request(2, prompt, P)
    )
    events = drive(other, 2, events)
    failures = {event.id: event.failure and event.failure.code for event in events if event.finish}
    assert failures == {1: "adapter_changed", 2: None}


def test_a_grammar_and_an_adapter(folders: dict[str, Path]) -> None:
    made = llm(folders, most=1)
    params = SamplingParams(
        max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    outputs = made.generate(["Is it?"] * 4, params, lora=list("abca"), progress=False)
    assert {output.outputs[0].text for output in outputs} <= {"yes", "no"}


def test_sessions_keep_their_adapter(folders: dict[str, Path]) -> None:
    made = llm(folders)
    with made.session("Hello there, how are you", lora="a") as session, session.fork()[0] as fork:
        answer = session.generate(P)
        assert answer.token_ids == tokens(made, "a")
        assert fork.generate(P).token_ids == answer.token_ids


def test_names_that_are_not_there(folders: dict[str, Path]) -> None:
    made = llm({"a": folders["a"]})
    with client_error("no adapter 'z': there are 'a'"):
        made.generate("x", P, lora="z", progress=False)
    with client_error("2 prompts but 1 adapters"):
        made.generate(["x", "y"], P, lora=["a"], progress=False)
    with engine_fault("is no folder"):
        made.adapters.load("b", "/nowhere/at/all")
    assert tokens(made, "a")
