"""Masks against brute force, places as functions of the tokens, and an engine that waits for no grammar."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine import worker
from pageturner.engine.engine import Engine, EngineParts
from pageturner.engine.fake import FakeExecutor
from pageturner.executor import grammar as grammars
from pageturner.executor.grammar import Grammars
from pageturner.formats.tokenizer import Marks, Tokenizer
from pageturner.ipc.ledger import Ledger
from pageturner.params import SamplingParams
from pageturner.request import Event, Refused, Request, Resume
from pageturner.scheduler.types import Output, Plan, Result, Sequence
from pageturner.text.grammar import compiler as grammar_compiler
from pageturner.text.grammar.check import OPTIONS
from pageturner.text.grammar.compiler import Compiler, GrammarError, Matcher
from pageturner.text.structured_outputs import StructuredOutputsParams
from support.schedulers import make_stack

END, TURN, CONTROL = 0, 1, 2
SPACE = 4  # of a vocabulary of printable bytes
SPELLED = [b"<end>", b"<turn>", b"a<|x|>", b""]  # the last is no text at all
WORDS = [bytes([byte]) for byte in b'ab1,{}[]":tru /<end>|x\xc3\xa9'] + [b"\xe6\x9d", b"\xb1"]
MERGED = b'ab aa {" ": "a 1," tr ue ":1 true} \xc3\xa9 b\xe6 <end>'.split()


class Words:
    """The codec of a vocabulary that is given."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._tokens = tokens
        self.vocab_size = len(tokens)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        return self._tokens[token]


def vocabulary(tokens: Iterable[bytes] = (*WORDS, *MERGED)) -> Tokenizer:
    marks = Marks(eos_ids=(END, TURN), special_ids=frozenset({END, TURN, CONTROL}))
    return Tokenizer(Words([*SPELLED, *tokens]), marks)


TOKENIZER = vocabulary()


def sequence(tokens: list[int], grammar: str, id: int = 1, index: int = 0) -> Sequence:
    params = SamplingParams(structured_outputs=grammar, stop_ids=(END, TURN))
    return Sequence(Request(id, (5, 6), params), index=index, tokens=[5, 6, *tokens])


def possible(known: Grammars, *sequences: Sequence) -> list[set[int]]:
    """The tokens that may come next in each."""
    late: Any = True
    while late:
        masks, late = known.begin(list(sequences))()
    return [
        set(np.flatnonzero(np.unpackbits(masks[s], bitorder="little")).tolist()) for s in sequences
    ]


def text_of(tokens: list[int]) -> bytes:
    return b"".join(map(TOKENIZER.token_bytes, tokens))


def by_definition(language: set[bytes], tokens: list[int]) -> set[int]:
    """A token may come next exactly if some text of the language goes on with it; the end, if it is one."""
    text = text_of(tokens)
    words = (
        (token, TOKENIZER.token_bytes(token)) for token in range(len(SPELLED), TOKENIZER.vocab_size)
    )
    allowed = {
        token for token, word in words if any(one.startswith(text + word) for one in language)
    }
    return allowed | ({END, TURN} if text in language else set())


def matching(pattern: str, alphabet: str, longest: int) -> set[bytes]:
    texts = (
        "".join(letters) for n in range(longest + 1) for letters in product(alphabet, repeat=n)
    )
    return {text.encode() for text in texts if re.fullmatch(pattern, text)}


def tight(*values: Any) -> set[bytes]:
    return {json.dumps(value, separators=(",", ":")).encode() for value in values}


A = [1, 11, "b", True]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": A},
        "ab": {"type": "array", "items": {"const": 1}, "maxItems": 2},
    },
    "required": ["a"],
    "additionalProperties": False,
}
CHOICES = ["a", "ab", "ab1", "aé", "東", '"{', "/", "<end>", "<|x|>", "a<|x|>"]
LANGUAGES: dict[str, tuple[dict[str, Any], set[bytes]]] = {
    "choice": ({"choice": CHOICES}, {choice.encode() for choice in CHOICES}),
    "regex": ({"regex": "(ab|a){1,3}1?|b/b"}, matching("(ab|a){1,3}1?|b/b", "ab1/", 7)),
    "digits": ({"regex": r"\d{1,3}"}, matching("[0-9]{1,3}", "1", 3)),
    "unicode": ({"regex": "[é東]{1,2}a?"}, matching("[é東]{1,2}a?", "é東a", 3)),
    "schema": (
        {"json": SCHEMA, "disable_any_whitespace": True},
        tight(
            *({"a": a, **more} for a in A for more in ({}, {"ab": []}, {"ab": [1]}, {"ab": [1, 1]}))
        ),
    ),
    "gbnf": (
        {"grammar": 'root ::= "a" mid? "b"\nmid ::= "1" | "," root "," '},
        set(),
    ),  # no end of them
    "lark": ({"grammar": 'start: "(" start ")" | /a+/ "b"?\n'}, set()),
}
FINITE = [name for name, (_, language) in LANGUAGES.items() if language]


@pytest.fixture(scope="module")
def known() -> Grammars:
    return Grammars(Compiler(lambda: TOKENIZER))


@pytest.mark.parametrize("name", FINITE)
def test_a_token_is_possible_exactly_if_some_text_goes_on_with_it(
    known: Grammars, name: str
) -> None:
    asked, language = LANGUAGES[name]
    grammar, dice = StructuredOutputsParams(**asked), random.Random(name)
    ends = set()
    for walk in range(40):
        tokens: list[int] = []
        while True:
            (found,) = possible(known, sequence(tokens, grammar, walk))
            assert found == by_definition(language, tokens), tokens
            if found <= {END, TURN} or (END in found and dice.random() < 0.3):
                break
            tokens.append(dice.choice(sorted(found - {END, TURN})))
        ends.add(text_of(tokens))
    assert ends <= language
    assert len(ends) > 1 or len(language) == 1


@pytest.mark.parametrize("name", LANGUAGES)
def test_where_a_sequence_is_depends_on_its_tokens_only(name: str) -> None:
    """Tokens taken back, other tokens in their place, forks, places forgotten: what a fresh one finds."""
    grammar, dice = StructuredOutputsParams(**LANGUAGES[name][0]), random.Random(3)
    few = Grammars(Compiler(lambda: TOKENIZER), most_places=2)
    fresh = Grammars(Compiler(lambda: TOKENIZER), most_places=1)
    answers: dict[tuple[int, int], list[int]] = {
        (id, index): [] for id in (1, 2) for index in (0, 1)
    }
    for turn in range(150):
        chosen = dice.sample(sorted(answers), dice.randint(1, 4))
        rows = [sequence(answers[key], grammar, *key) for key in chosen]
        for key, row, found in zip(chosen, rows, possible(few, *rows), strict=True):
            tokens = answers[key]
            assert found == possible(fresh, sequence(tokens, grammar, 10 + turn))[0], tokens
            match dice.choice(["go", "go", "go", "back", "fork", "nonsense"]):
                case "go" if found - {END, TURN}:
                    answers[key] = [*tokens, dice.choice(sorted(found - {END, TURN}))]
                case "back":
                    answers[key] = tokens[: dice.randint(0, len(tokens))]
                case "fork":
                    answers[key] = list(answers[dice.choice(sorted(answers))])
                case "nonsense":
                    answers[key] = [
                        *tokens[: dice.randint(0, 3)],
                        dice.randrange(TOKENIZER.vocab_size),
                    ]
            assert row.tokens[2:] == tokens, "looking changes nothing"


def test_the_rows_of_a_draft_are_places_of_one_sequence(known: Grammars) -> None:
    """Several rows of one sequence at once, each a token further; then what was accepted of them."""
    grammar = StructuredOutputsParams(choice=["ab1", "ab,", "ab,1", "aa"])
    a, b, one, comma = (WORDS.index(word) + len(SPELLED) for word in (b"a", b"b", b"1", b","))
    drafted = [sequence([a, b, comma, one][:n], grammar, 60) for n in range(5)]
    found = possible(known, *drafted)
    assert found == [
        by_definition({b"ab1", b"ab,", b"ab,1", b"aa"}, row.tokens[2:]) for row in drafted
    ]
    rejected = [sequence([a, b, *more], grammar, 60) for more in ([], [a], [a, a], [one])]
    assert possible(known, *rejected) == [found[2], set(), set(), {END, TURN}]


def test_tokens_that_the_grammar_does_not_have_leave_nothing(known: Grammars) -> None:
    grammar = StructuredOutputsParams(regex="a+")
    a, b = WORDS.index(b"a") + len(SPELLED), WORDS.index(b"b") + len(SPELLED)
    assert possible(known, sequence([a, b, a], grammar, 50)) == [set()]
    assert END in possible(known, sequence([a, a], grammar, 50))[0]


def test_a_vocabulary_that_cannot_write_the_rest_leaves_nothing() -> None:
    known = Grammars(Compiler(lambda: vocabulary([b"a", b"b"])))
    grammar = StructuredOutputsParams(choice=["ac", "b"])
    assert possible(known, sequence([], grammar)) == [{len(SPELLED), len(SPELLED) + 1}]
    assert possible(known, sequence([len(SPELLED)], grammar)) == [set()]
    assert possible(known, sequence([len(SPELLED) + 1], grammar)) == [{END, TURN}], (
        "and is not stuck there"
    )
    assert possible(known, sequence([len(SPELLED)], grammar)) == [set()]


def test_a_token_longer_than_the_matcher_takes_is_never_chosen() -> None:
    """It would end the engine, at every request with a grammar."""
    known = Grammars(Compiler(lambda: vocabulary([b"a", b"a" * 1025, b"a" * 1024])))
    found = possible(known, sequence([], StructuredOutputsParams(regex="a+")))
    assert found == [{len(SPELLED), len(SPELLED) + 2}]


def test_a_vocabulary_that_the_matcher_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "LONGEST_TOKEN", 2000)
    with pytest.raises(GrammarError, match="vocabulary takes no grammar"):
        Compiler(lambda: vocabulary([b"a" * 1025]))("start: /a/")


def test_what_others_write_uses_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar with more states than a lexer may have; no single text needs so many. What is compiled anew then is
    not within a step, which goes on without that sequence."""
    monkeypatch.setattr("pageturner.text.grammar.check.MAX_STATES", 300)
    made: list[str] = []

    def compile(grammar: str) -> Matcher:
        made.append(threading.current_thread().name)
        return compiler(grammar)

    compiler = Compiler(lambda: TOKENIZER)
    known, dice = Grammars(compile), random.Random(5)
    grammar = StructuredOutputsParams(regex="(a|b)*a(a|b){11}")
    letters = [
        token
        for token in range(len(SPELLED), TOKENIZER.vocab_size)
        if set(text_of([token])) <= set(b"ab")
    ]
    rows = [sequence([], grammar, id) for id in range(8)]
    for _ in range(25):
        for row, found in zip(rows, possible(known, *rows), strict=True):
            ends = re.fullmatch(b"[ab]*a[ab]{11}", text_of(row.tokens[2:]))
            assert found == {*letters} | ({END, TURN} if ends else set())
            row.tokens.append(dice.choice(letters))
    assert 1 < len(made) < 8, "the bound was reached, and not by each row for itself"
    assert all(name.startswith("grammar") for name in made)


def test_more_grammars_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_COMPILED_BYTES", 2 * grammars.GRAMMAR_BYTES)
    known = Grammars(Compiler(lambda: TOKENIZER), most_places=1)
    rows = [
        sequence([], StructuredOutputsParams(choice=[text]), i) for i, text in enumerate(CHOICES)
    ]
    for found, text in zip(possible(known, *rows), CHOICES, strict=True):
        assert found == by_definition({text.encode()}, [])


def test_the_tokens_of_a_long_text_are_counted_up_to_a_bound() -> None:
    """It happens in the engine, beside everybody's steps."""
    compiler = Compiler(lambda: vocabulary([b"a", b"aaa"]))
    compiler('start: "a"')
    found = [compiler.least(StructuredOutputsParams(choice=["a" * n])) for n in (7, 200_000)]
    # the last one may say more
    assert found == [2, grammar_compiler.COUNTED // 3]
    assert compiler.least('start: "aaaaaaa" ("b" | "c")?') == 2
    assert compiler.least('start: <[97]> "aaaaaaaaaa" | "ab"') == 0


def test_a_grammar_that_cannot_be_compiled() -> None:
    with pytest.raises(GrammarError, match="foo"):
        Compiler(lambda: TOKENIZER)("start: foo")


# -- what a step waits for -----------------------------------------------------------------------------------
class Held:
    """A matcher whose masks come when the test lets them."""

    def __init__(self, inner: Matcher, may_go: threading.Event) -> None:
        self._inner, self._may_go = inner, may_go

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def deep_copy(self) -> Held:
        return Held(self._inner.deep_copy(), self._may_go)

    def compute_bitmask(self) -> bytes:
        assert self._may_go.wait(60)
        return self._inner.compute_bitmask()


def test_a_step_does_not_wait_for_a_slow_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence gains nothing in that step, the others do; its mask is computed once."""
    monkeypatch.setattr(grammars, "MASK_SECONDS", 0.01)
    compiler, may_go = Compiler(lambda: TOKENIZER), threading.Event()
    slow, quick = (StructuredOutputsParams(choice=[text]) for text in ("ab", "b"))

    def compile(grammar: str) -> Matcher:
        made = compiler(grammar)
        return Held(made, may_go) if grammar == slow else made

    known = Grammars(compile)
    rows = [sequence([], slow, 1), sequence([], quick, 2)]
    for row in rows:
        known.compiled(str(row.request.params.structured_outputs)).result(60)
    for _ in range(3):
        masks, instead = known.begin(rows)()
        assert instead[rows[0]].late
        assert not masks[rows[0]].any()
        if rows[1] not in instead:
            break
    assert rows[1] not in instead
    may_go.set()
    assert possible(known, rows[0]) == [by_definition({b"ab"}, [])]


def test_a_place_that_takes_too_much_work_ends_its_sequence_with_the_reason() -> None:
    """What the check at the door did not see; compiled once, and nobody else ends."""
    made: list[str] = []
    compiler = Compiler(lambda: vocabulary([bytes([byte]) for byte in range(32, 127)]))

    def compile(grammar: str) -> Matcher:
        made.append(grammar)
        return compiler(grammar)

    wide = " ".join(f'("a{i}")?' for i in range(6000))
    rows = [
        sequence([SPACE], f'{OPTIONS}start: " " wide\nwide: {wide}\n', 1),
        sequence([], f"{OPTIONS}start: /a/", 2),
    ]
    known = Grammars(compile)
    late = True
    while late:
        masks, instead = known.begin(rows)()
        late = any(output.late for output in instead.values())
    assert masks[rows[1]].any()
    assert list(instead) == [rows[0]]
    failure = instead[rows[0]].failure
    assert failure is not None
    assert failure.code == "grammar_too_expensive"
    assert "max is" in failure.message
    assert len(made) == 2


def test_what_compiled_grammars_may_hold_is_bounded_in_bytes() -> None:
    slow = Slow()
    known, text = Grammars(slow), "x" * 200_000
    size = grammars.GRAMMAR_BYTES + grammars.BYTES_PER_CHARACTER * len(text)
    kept = grammars.MAX_COMPILED_BYTES // size
    for i in range(2 * kept):
        known.compiled(f"{i:07}{text[7:]}").result(60)
    for i in reversed(range(2 * kept)):
        known.compiled(f"{i:07}{text[7:]}").result(60)
    assert len(slow.begun) == 3 * kept, "the newest ones were there still"


# -- the engine ----------------------------------------------------------------------------------------------
class Slow:
    """A compiler that takes as long as the test wants."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_end: dict[str, threading.Event] = {}

    def __call__(self, grammar: str) -> Matcher:
        self.begun.append(grammar)
        if grammar in self.may_end:
            assert self.may_end[grammar].wait(60)
        if grammar == "bad":
            raise GrammarError("it is bad")
        return Compiler(lambda: TOKENIZER)('start: "a"')


@pytest.fixture
def slow() -> Iterator[Slow]:
    slow = Slow()
    slow.may_end["slow"] = threading.Event()
    yield slow
    for event in slow.may_end.values():
        event.set()


def engine_of(slow: Callable[[str], Matcher], most_waiting: int = 8) -> Engine:
    plans = make_stack(num_blocks=64, block_size=16)
    return Engine(
        plans, FakeExecutor(40), parts=EngineParts(Grammars(slow, most_waiting=most_waiting))
    )


def request(id: int, grammar: str | None = None, **more: Any) -> Request:
    return Request(id, (1, 2, 3), SamplingParams(max_tokens=4, structured_outputs=grammar), **more)


def run(engine: Engine, ids: set[int]) -> list[Event]:
    """Step until all of these have ended."""
    events: list[Event] = []
    while not ids <= {event.id for event in events if event.finish is not None}:
        assert engine.has_work
        events += engine.step()
    return events


def test_a_slow_grammar_holds_up_nobody(slow: Slow) -> None:
    engine = engine_of(slow)
    assert engine.submit(request(1, "slow")) == []
    assert engine.submit(request(2)) == []
    assert engine.submit(request(3, "other")) == []
    assert {event.id for event in run(engine, {2, 3})} == {2, 3}
    assert engine.stats()["waiting"] == 1
    assert engine.step() == []
    assert engine.wake is not None, "nobody turns in circles meanwhile"
    assert engine.submit(request(4)) == []
    assert {event.id for event in run(engine, {4})} == {4}
    slow.may_end["slow"].set()
    (*_, last) = run(engine, {1})
    assert (last.id, last.finish) == (1, "length")
    assert engine.stats()["waiting"] == 0
    assert not engine.has_work


def test_a_bad_grammar_is_an_event_with_a_code(slow: Slow) -> None:
    engine = engine_of(slow)
    events = engine.submit(request(1, "bad"))
    (event,) = events or run(engine, {1})
    assert event.failure is not None
    assert (event.finish, event.failure.code, event.failure.message) == (
        "error",
        "invalid_grammar",
        "it is bad",
    )
    assert not engine.has_work


def test_grammars_whose_answers_are_too_long_leave_nothing_open(slow: Slow) -> None:
    engine = Engine(
        make_stack(num_blocks=64, block_size=16),
        FakeExecutor(40),
        parts=EngineParts(Grammars(slow, least=lambda _: 5)),
    )
    gc.collect()  # refusals of other tests
    for id in range(1, 6):
        (event,) = engine.submit(request(id, "any")) or run(engine, {id})
        assert event.failure is not None
        assert event.failure.code == "grammar_too_long"
    assert not any(isinstance(one, Refused) for one in gc.get_objects())
    assert not engine.has_work
    assert engine.latency.open_ids == []


def test_who_leaves_while_the_grammar_is_compiled_is_forgotten(slow: Slow) -> None:
    engine = engine_of(slow)
    engine.submit(request(1, "slow"))
    engine.submit(request(2, "slow"))
    engine.abort(1)
    assert engine.stats()["waiting"] == 1
    slow.may_end["slow"].set()
    assert {event.id for event in run(engine, {2})} == {2}
    assert slow.begun == ["slow"], "compiled once, for both"


def test_a_grammar_that_nobody_waits_for_is_not_compiled(slow: Slow) -> None:
    engine = engine_of(slow)
    busy = [f"slow {n}" for n in range(grammars.COMPILERS)]
    slow.may_end |= {grammar: threading.Event() for grammar in busy}
    for id, grammar in enumerate([*busy, "left"]):
        engine.submit(request(id, grammar))
    engine.abort(len(busy))
    for event in slow.may_end.values():
        event.set()
    run(engine, set(range(len(busy))))
    assert sorted(slow.begun) == busy
    engine.submit(request(9, "left"))
    assert run(engine, {9})[-1].finish == "length", "and can be had later"


def test_those_who_wait_for_a_grammar_are_bounded(slow: Slow) -> None:
    engine = engine_of(slow, most_waiting=2)
    assert engine.submit(request(1, "slow")) == engine.submit(request(2, "slow")) == []
    (event,) = engine.submit(request(3, "slow"))
    assert event.failure is not None
    assert (event.finish, event.failure.code) == ("error", "queue_full")
    assert engine.submit(request(4, "slow", resume=(Resume(0, (7,)),))) == [], (
        "it had its place already"
    )
    slow.may_end["slow"].set()
    run(engine, {1, 2, 4})


class Sometimes(FakeExecutor):
    """A fake that is late with every token twice, in turns."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.asked = 0

    def run(self, plan: Plan) -> Result:
        result = super().run(plan)
        for i, item in enumerate(plan.items):
            self.asked += item.wants_logits
            if item.wants_logits and self.asked % 4:
                result.outputs[i] = Output(late=True)
        return result


def test_what_is_late_comes_with_a_later_step_and_is_the_same() -> None:
    answers = []
    for executor in (FakeExecutor(40), Sometimes(40)):
        engine = Engine(make_stack(num_blocks=64, block_size=16), executor)
        for id in (1, 2, 3):
            engine.submit(request(id))
        events = run(engine, {1, 2, 3})
        answers.append(
            {id: [e.tokens for e in events if e.id == id and e.tokens] for id in (1, 2, 3)}
        )
    assert answers[0] == answers[1]


def test_an_engine_without_a_vocabulary_says_so() -> None:
    engine = Engine(make_stack(num_blocks=8, block_size=16), FakeExecutor(40))
    (event,) = engine.submit(request(1, "any"))
    assert event.failure is not None
    assert event.failure.code == "structured_outputs_unsupported"


def test_a_grammar_that_finds_no_memory_is_the_machines_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No thread can be started under `ulimit -v`: that request may come again, and nobody else is told anything."""

    def no_stack(self: threading.Thread) -> None:
        if self.name.startswith("compile"):
            raise RuntimeError("can't start new thread")
        start(self)

    start = threading.Thread.start
    engine = engine_of(Compiler(lambda: TOKENIZER))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_stack)
        events = engine.submit(request(1, 'start: "a"')) + engine.submit(request(2))
        events += run(engine, {1, 2} - {event.id for event in events})
        told = {event.id: event for event in events if event.finish}
    assert told[1].failure is not None
    assert (told[1].failure.code, told[1].failure.retry_after) == ("out_of_memory", 1.0)
    assert told[2].finish == "length"
    events = engine.submit(request(3, 'start: "a"')) or run(engine, {3})
    assert events[-1].failure is None, "it is compiled anew"


def test_an_engine_that_rests_loads_the_vocabulary_once(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading it holds the interpreter: the first grammar must not bring that upon others."""
    monkeypatch.setattr(worker, "PREPARE_AFTER", 0.01)
    ours, theirs = socket.socketpair()
    ledger, fd = Ledger.create()
    loop = worker.ChannelLoop(engine_of(slow), theirs, ledger, EngineConfig(backend="fake"))
    thread = threading.Thread(target=loop.run)
    thread.start()
    until = time.monotonic() + 60
    while not slow.begun and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    ours.shutdown(socket.SHUT_WR)
    thread.join(60)
    ours.close()
    theirs.close()
    os.close(fd)
    assert len(slow.begun) == 1
