"""Claims about a server with the OpenAI API, as its client sees them.

This module owns what is asked and how the answers are judged. It must not know which engine answers: where a
server lacks what a claim needs, the claim is not asked, and says why.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from typing import Any
from urllib.parse import urlsplit

import harness

import hostile_requests as hostile
from peers import launch

PATIENCE = 60.0  # seconds that a server may be silent
LIMIT = 120.0  # seconds that an answer may take
START_LIMIT = 240.0
SLOW_START = 30.0  # seconds; who needs longer is started once only
CROWD = 16
PROBES = 8
COLD_LIMIT = 5.0  # seconds to the first token of a new process
MORE_GAP = 0.5  # seconds by which a neighbour may lengthen a gap
KINDS = ("schemas", "texts", "sockets")  # of attacks, beside huge prompts
ATTACK_PATIENCE = 4.0  # seconds after which an attacker leaves
LONG = 1400  # words of a long prompt, some 1,500 tokens
CUT = 100  # words that are cut from its beginning
FOUND = 0.9  # share of a common beginning that must be found again
SHIFTED = 0.5  # and of what follows another beginning
TEXT = (
    "the a of and to in is was that for it with as on at by from they we say her she or an will my "
    "one all would there their what so up out if about who get which go me when make can like time "
    "no just him know take people into year your good some could them see other than then now look "
    "only come its over think also back after use two how our work first well way even new want "
    "because any these give day most us house water river stone light garden letter winter summer"
)
WORDS = TEXT.split()


@dataclass(frozen=True, slots=True)
class Verdict:
    """held None: the claim was not asked, and the figure says why."""

    figure: str
    held: bool | None


@dataclass(slots=True)
class Answer:
    """A streamed answer as its client saw it. tokens: each with its logprob, where the server tells them.
    arrivals: times of the chunks that carried text."""

    text: str = ""
    tokens: list[tuple[str, float]] = field(default_factory=list)
    begin: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached: int | None = None
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first chunk. RuntimeError where none came."""
        if not self.arrivals:
            raise RuntimeError(self.error or "an answer without a token")
        return self.arrivals[0] - self.begin

    def gaps(self) -> list[tuple[float, float]]:
        """The seconds between its chunks, and when each gap ended."""
        return [(b - a, b) for a, b in itertools.pairwise(self.arrivals)]

    def back_at(self, killed: float) -> float:
        """When it went on: the end of the longest gap that ends behind the kill."""
        return max(gap for gap in self.gaps() if gap[1] > killed)[1]

    def take(self, event: dict[str, Any]) -> None:
        """Add a chunk."""
        if event.get("error"):
            self.error = str(event["error"])
        usage = event.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", self.cached)
        for choice in event.get("choices") or ():
            self.text += choice.get("text") or ""
            self.tokens += scored(choice.get("logprobs") or {})
            if choice.get("text") or choice.get("finish_reason") is None:
                self.arrivals.append(time.monotonic())


def scored(logprobs: dict[str, Any]) -> list[tuple[str, float]]:
    """Tokens with their logprobs, from the form of completions or that of chats."""
    if "content" in logprobs:
        return [(each["token"], each["logprob"]) for each in logprobs["content"] or ()]
    return list(
        zip(logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), strict=True)
    )


@dataclass(slots=True)
class Target:
    """A server that is asked. command: the words that start it, with {port} in them; none for a server that
    is there already. logprobs: whether it tells them."""

    name: str
    command: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    url: str = ""
    model: str = ""
    logprobs: bool = False
    peer: launch.Peer | None = None

    def start(self) -> float:
        """Start a new process. Returns the seconds from its start to the first token of an answer."""
        self.stop()
        port = str(harness.free_port())
        self.url = f"http://127.0.0.1:{port}"
        begin = time.monotonic()
        process = subprocess.Popen(
            [word.replace("{port}", port) for word in self.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | self.environment,
            start_new_session=True,
        )
        self.peer = launch.Peer(self.name, self.url, self.model, process, 0.0)
        return self.answers(START_LIMIT) - begin

    def answers(self, limit: float) -> float:
        """Wait until a token of an answer comes, and return when it came."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            if self.peer is not None and self.peer.process.poll() is not None:
                raise RuntimeError(f"its process ended with {self.peer.process.returncode}")
            self.model = self.model or self.first_model()
            if self.model:
                answer = ask(self, "Once upon a time", 1)
                if answer.arrivals:
                    return answer.arrivals[0]
            time.sleep(0.01)
        raise RuntimeError(f"it does not answer within {limit:.0f} s")

    def first_model(self) -> str:
        """The first model that it lists; empty while it lists none."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError):
            return ""

    def prepare(self) -> None:
        """Have it run and answer, and learn whether it tells logprobs."""
        if self.command and (self.peer is None or self.peer.process.poll() is not None):
            self.start()
        self.answers(PATIENCE)
        self.logprobs = True
        self.logprobs = bool(ask(self, "Once upon a time", 2).tokens)

    def stop(self) -> None:
        if self.peer is not None:
            self.peer.stop()


def ask(
    target: Target,
    prompt: str | list[int],
    count: int,
    leave: Callable[[Answer], bool] = lambda answer: False,
    **fields: Any,
) -> Answer:
    """Stream one completion; what goes wrong is in its `error`. leave: asked after each chunk whether the client
    goes away."""
    body = {"model": target.model, "prompt": prompt, "max_tokens": count, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    if target.logprobs:
        body["logprobs"] = 1
    answer = Answer(begin=time.monotonic())
    try:
        asked = harness.request(target.url, "/v1/completions", body | fields)
        with urllib.request.urlopen(asked, timeout=PATIENCE) as lines:
            for line in lines:
                if line.startswith(b"data: [DONE]"):
                    return answer
                if line.startswith(b"data: {"):
                    answer.take(json.loads(line[6:]))
                    if leave(answer):
                        return answer
                if time.monotonic() > answer.begin + LIMIT:
                    answer.error = f"no end within {LIMIT:.0f} s"
                    return answer
        answer.error = answer.error or "the stream broke off"
    except urllib.error.HTTPError as error:
        answer.error = f"HTTP {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def some_words(dice: random.Random, count: int) -> list[str]:
    return dice.choices(WORDS, k=count)


def some_text(dice: random.Random, count: int) -> str:
    return " ".join(some_words(dice, count))


# -- an answer does not depend on its batch ----------------------------------------------------------


@contextlib.contextmanager
def crowd(target: Target, dice: random.Random) -> Iterator[None]:
    """CROWD clients with prompts and answers of many lengths, all the time."""
    seeds = [dice.random() for _ in range(CROWD)]
    ended = threading.Event()
    begun = threading.Semaphore(0)

    def client(seed: float) -> None:
        own = random.Random(seed)
        while not ended.is_set():
            prompt = some_text(own, own.randrange(5, 200))
            ask(target, prompt, own.randrange(8, 48), lambda answer: ended.is_set())
            begun.release()

    with ThreadPoolExecutor(CROWD) as pool:
        for seed in seeds:
            pool.submit(client, seed)
        begun.acquire(timeout=PATIENCE)
        try:
            yield
        finally:
            ended.set()


def batch(target: Target, dice: random.Random) -> Verdict:
    """Requests alone and beside a crowd, with prompts that are new and that are cached: half of them are new in
    the crowd. Greedy and drawn with a seed in turn."""
    prompts = [some_text(dice, 150) for _ in range(PROBES)]

    def answer_of(number: int) -> Answer:
        drawn = {"temperature": 0.8 * (number % 2), "seed": number}
        return ask(target, prompts[number], 32, **drawn)

    everybody = range(PROBES)
    runs = [[answer_of(number)] for number in everybody[: PROBES // 2]]
    with ThreadPoolExecutor(PROBES) as pool:
        with crowd(target, dice):
            runs += [[one] for one in pool.map(answer_of, everybody[PROBES // 2 :])]
        for number in everybody:
            runs[number].append(answer_of(number))
        with crowd(target, dice):
            for run, one in zip(runs, pool.map(answer_of, everybody), strict=True):
                run.append(one)
    broken = [one.error for run in runs for one in run if one.error or not one.text]
    if broken:
        return Verdict(f"{len(broken)} of {3 * PROBES} answers broke: {broken[0]}", False)
    texts = sum(len({one.text for one in run}) > 1 for run in runs)
    figure = f"{texts} of {PROBES} requests differ in text"
    if not target.logprobs:
        return Verdict(f"{figure} (no logprobs)", texts == 0)
    bits = sum(any(one.tokens != run[0].tokens for one in run) for run in runs)
    return Verdict(f"{figure}, {bits} in logprobs", texts + bits == 0)


# -- start and crash ---------------------------------------------------------------------------------


def cold(target: Target, dice: random.Random) -> Verdict:
    """Time from the start of a process to the first token, with the model's file in the page cache."""
    if not target.command:
        return Verdict("not started here", None)
    times = [target.start()]
    while len(times) < 3 and times[0] < SLOW_START:
        times.append(target.start())
    took = statistics.median(times)
    return Verdict(f"{took:.1f} s (starts: {len(times)})", took <= COLD_LIMIT)


def kill(target: Target, dice: random.Random) -> Verdict:
    """The process of the server that took most processor time since the request came dies by SIGKILL."""
    if target.peer is None:
        return Verdict("not started here", None)
    prompt = some_text(dice, 60)
    fields = {"temperature": 0.8, "seed": 7}
    whole = ask(target, prompt, 128, **fields)
    if whole.error:
        raise RuntimeError(whole.error)
    spent = {pid: harness.processor_seconds(pid) for pid in harness.family(target.peer.process.pid)}
    killed: list[float] = []

    def strike(answer: Answer) -> bool:
        if len(answer.arrivals) >= 16 and not killed:
            busy = max(spent, key=lambda pid: harness.processor_seconds(pid) - spent[pid])
            killed.append(time.monotonic())
            os.kill(busy, signal.SIGKILL)
        return False

    cut = ask(target, prompt, 128, strike, **fields)
    if not killed:
        raise RuntimeError(cut.error or "the answer came before anything could be killed")
    if not cut.error:
        back = cut.back_at(killed[0]) - killed[0]
        same = (cut.text, cut.tokens) == (whole.text, whole.tokens)
        return Verdict(f"goes on after {back:.1f} s, {'un' * same}changed", same)
    figure = f"broke at chunk {len(cut.arrivals)} of {len(whole.arrivals)}"
    try:
        back = target.answers(30.0) - killed[0]
    except RuntimeError as error:
        return Verdict(f"{figure}; then {error}", False)
    return Verdict(f"{figure}; answers again after {back:.1f} s", False)


# -- a hostile neighbour -----------------------------------------------------------------------------


def attack(target: tuple[str, str], seed: int, seconds: float, begun: Event) -> None:
    """Four clients, one of each kind: costly schemas, long texts, slow or broken uploads, huge prompts."""
    url, model = target
    address = urlsplit(url)
    dice = random.Random(seed)
    catalogue = hostile.catalogue(seed)
    kinds = [[one.act for one in catalogue if one.kind == kind] for kind in KINDS]
    prompts = [some_text(dice, LONG) for _ in range(32)]
    huge = [{"model": model, "max_tokens": 1, "prompt": prompt} for prompt in prompts]
    kinds.append([hostile.as_json("/v1/completions", body) for body in huge])
    begun.set()
    until = time.monotonic() + seconds

    def client(number: int) -> None:
        own = random.Random(seed + number)
        while (left := until - time.monotonic()) > 0:
            act = own.choice(kinds[number])
            with contextlib.suppress(OSError):
                act(str(address.hostname), address.port or 80, min(ATTACK_PATIENCE, left))

    harness.in_threads(len(kinds), client)


def polite(target: Target, dice: random.Random, seconds: float) -> list[float]:
    """The gaps of a client that streams one answer after the other."""
    found: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        answer = ask(target, some_text(dice, 20), 200, lambda _: time.monotonic() > until)
        if answer.error:
            raise RuntimeError(f"the polite stream failed: {answer.error}")
        found += [seconds for seconds, _ in answer.gaps()]
    return sorted(found)


def neighbour(target: Target, dice: random.Random, seconds: float = 12.0) -> Verdict:
    """The gaps of a polite stream beside the attackers, and without them before."""
    seed = dice.randrange(1000)  # before others draw, as often as time lets them
    calm = polite(target, dice, seconds / 2)
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    arguments = ((target.url, target.model), seed, seconds, begun)
    attacker = context.Process(target=attack, args=arguments)
    attacker.start()
    try:
        if not begun.wait(PATIENCE):
            raise RuntimeError("the attackers did not begin")
        beside = polite(target, dice, seconds)
    finally:
        attacker.join(ATTACK_PATIENCE + 10)
        attacker.kill()

    rows = [
        f"p99 {gaps[len(gaps) * 99 // 100]:.2f}, longest {gaps[-1]:.2f} s"
        for gaps in (calm, beside)
    ]
    figure = f"{rows[0]} -> {rows[1]}"
    return Verdict(figure, beside[-1] <= calm[-1] + MORE_GAP)


# -- prefixes ----------------------------------------------------------------------------------------


def found_again(first: Answer, again: Answer, part: float) -> float:
    """How much of this part of a prompt was not computed again: by `cached_tokens`, else by the times to the
    first token."""
    saved = 1 - again.ttft / first.ttft
    if again.cached is not None:
        saved = again.cached / again.prompt_tokens
    return max(0.0, min(1.0, saved / part))


def prefix(target: Target, dice: random.Random) -> Verdict:
    """Prompts that begin as an earlier one does, for a random number of words."""
    words = some_words(dice, LONG)
    first = ask(target, " ".join(words), 1)
    shares = []
    for length in dice.sample(range(LONG // 10, LONG), 4):
        other = " ".join([*words[:length], *some_words(dice, LONG - length)])
        shares.append(found_again(first, ask(target, other, 1), length / LONG))
    worst = min(shares)
    mean = statistics.mean(shares)
    return Verdict(
        f"{mean:.0%}, worst {worst:.0%}{' (by time)' * (first.cached is None)}", mean >= FOUND
    )


def shift(target: Target, dice: random.Random) -> Verdict:
    """A prompt without its first words, and with others in their place."""
    words = some_words(dice, LONG)
    first = ask(target, " ".join(words), 1)
    cut = found_again(first, ask(target, " ".join(words[CUT:]), 1), 1.0)
    words[:CUT] = some_words(dice, CUT)
    changed = found_again(first, ask(target, " ".join(words), 1), 1 - CUT / LONG)
    figure = f"cut {cut:.0%}, changed {changed:.0%}{' (by time)' * (first.cached is None)}"
    return Verdict(figure, min(cut, changed) >= SHIFTED)
