"""An engine process without an engine: speaks the channel, computes `token_at`, obeys the control tokens of
its prompts. Appends what it is told to the file in FAKE_LOG, one JSON object a line. While a file FAKE_LOG.hold
is there, no answer gets more tokens than it says."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pageturner.ipc.channel import (
    Abort,
    Aborted,
    Configure,
    Configured,
    Events,
    Failed,
    ForgetPrefixes,
    MessageDecoder,
    Ready,
    Stats,
    Submit,
    ToEngine,
    Unpin,
    encode,
)
from pageturner.ipc.ledger import OUT_OF_MEMORY_EXIT, Ledger
from pageturner.ipc.submit_repeats import restored
from pageturner.request import Event, Failure, Request
from pageturner.telemetry.work import MachineLimits, WorkTotals
from server.bytes_tokenizer import SPECIALS, VOCAB, prompt_logprob, token_at

LIMITS = {"max_model_len": 2048, "num_blocks": 256, "block_size": 16}
MAX_RUNNING = 64
SCORED_AT_ONCE = 3


def crash() -> None:
    """Not by SIGKILL, which would look as if somebody else had done it."""
    if os.environ.get("FAKE_END") == "memory":  # as an engine ends that finds none
        os._exit(OUT_OF_MEMORY_EXIT)
    os.kill(os.getpid(), signal.SIGSEGV)


class Fake:
    def __init__(self, sock: socket.socket, ledger: Ledger) -> None:
        self.sock, self.ledger = sock, ledger
        self.decoder, self.before = MessageDecoder(ToEngine), None
        self.requests: dict[int, Request] = {}
        self.done: dict[int, list[int]] = {}
        self.scored: dict[
            int, int
        ] = {}  # prompt positions whose logprobs were sent, the first included
        self.step_seconds = float(os.environ.get("FAKE_STEP_SECONDS", "0.001"))
        self.steps = self.generated = 0
        self.state = Path(os.environ["FAKE_LOG"] + ".once")
        self.hold = Path(os.environ["FAKE_LOG"] + ".hold")
        self.most = sys.maxsize  # tokens of an answer
        self.held: tuple[int, int] | None = None

    def note(self, **what: object) -> None:
        line = json.dumps({"pid": os.getpid(), **what}) + "\n"
        with open(
            os.environ["FAKE_LOG"], "ab", buffering=0
        ) as file:  # whole, whenever it is killed
            file.write(line.encode())

    def once(self, request: Request) -> bool:
        """True the first time in the life of the server, for the first answer to a prompt."""
        if request.index:
            return False
        mark = self.state.with_suffix(f".once{request.id}")
        if mark.exists():
            return False
        mark.touch()
        return True

    def run(self) -> None:
        while self.receive():
            if self.requests:
                self.step()

    def receive(self) -> bool:
        readable, _, _ = select.select([self.sock], [], [], 0 if self.requests else None)
        if not readable:
            return True
        data = self.sock.recv(1 << 20)
        for message in self.decoder.feed(data):
            match message:
                case Submit():
                    self.before = restored(message, self.before)
                    self.take(self.before)
                case Unpin(id=id):
                    self.note(unpin=id)
                case ForgetPrefixes():
                    self.note(forget=True)
                case Configure():
                    self.note(configure=msgspec.to_builtins(message))
                    self.sock.sendall(encode(Configured(message)))
                case Abort(id=id):
                    self.requests.pop(id, None)
                    self.note(abort=id, left=len(self.requests))
                    self.sock.sendall(encode(Aborted(id, None)))
                    self.stats()
        return bool(data)

    def take(self, request: Request) -> None:
        resumed = list(request.resume[0].tokens) if request.resume else []
        params = {
            name: value for name, value in asdict(request.params).items() if name != "logit_bias"
        }
        self.note(
            submit=request.id,
            resume=len(resumed),
            seed=request.params.seed,
            salt=request.salt,
            tenant=request.tenant,
            priority=request.priority,
            ttft=request.ttft_target,
            tpot=request.tpot_target,
            left=None if request.deadline is None else request.deadline - request.arrival,
            params=params,
            pin=request.pin,
        )
        if SPECIALS["<|untakable|>"] in request.prompt:
            crash()
        self.requests[request.id] = request
        self.done[request.id] = resumed
        last = len(request.prompt) - 1
        self.scored[request.id] = (
            last if request.logits_from is None else min(request.logits_from, last)
        )

    def step(self) -> None:
        batch = list(self.requests.values())[:MAX_RUNNING]
        self.look_at_hold(batch)
        self.ledger.begin(time.monotonic(), [request.id for request in batch])
        if self.ledger.watched:
            self.ledger.note([(request.id, 1, not self.done[request.id]) for request in batch])
        has = {name for name, id in SPECIALS.items() for request in batch if id in request.prompt}
        if "<|poison|>" in has:
            crash()
        time.sleep(0.02 if "<|slow|>" in has else self.step_seconds)
        for request in batch:
            if len(self.done[request.id]) >= 5:
                if SPECIALS["<|crash|>"] in request.prompt and self.once(request):
                    crash()
                if SPECIALS["<|hang|>"] in request.prompt and self.once(request):
                    time.sleep(3600)
                if SPECIALS["<|noise|>"] in request.prompt and self.once(request):
                    self.sock.sendall(b"\x05\x00\x00\x00noise")
        if any(self.fails(request) for request in batch):
            time.sleep(0.3)  # for what came before it to be sent, on a busy machine too
        events = [event for request in batch if (event := self.advance(request)) is not None]
        self.ledger.finish(time.monotonic())
        self.steps += 1
        self.sock.sendall(encode(Events(events)))
        self.stats()

    def look_at_hold(self, batch: list[Request]) -> None:
        try:
            self.most = int(self.hold.read_text())
        except (FileNotFoundError, ValueError):  # absent, or just being written
            self.most = sys.maxsize
        held = (self.most, len(batch))
        if held != self.held and all(len(self.done[one.id]) >= self.most for one in batch):
            self.held = held
            self.note(held=self.most, requests=len(batch))

    def advance(self, request: Request) -> Event | None:
        tokens, params = self.done[request.id], request.params
        if SPECIALS["<|stall|>"] in request.prompt or len(tokens) >= self.most:
            return None
        position = len(request.prompt) + len(tokens)
        if self.scored[request.id] < len(request.prompt) - 1:
            return self.score(request)
        if self.fails(request):
            del self.requests[request.id]
            failure = Failure("sequence_failed", "the fake engine was told to fail here")
            return Event(request.id, 0, position, finish="error", failure=failure)
        if SPECIALS["<|gap|>"] in request.prompt and len(tokens) >= 5 and self.once(request):
            position += 1
        new: list[int] = []
        finish = None
        for _ in range(3 if SPECIALS["<|leap|>"] in request.prompt else 1):
            forced = params.force_ids or ()
            at = len(tokens)
            said = forced[at] if at < len(forced) else token_at(request.prompt, at, request.index)
            new.append(said)
            tokens.append(new[-1])
            if new[-1] in params.stop_ids:
                finish = "stop"
            elif len(tokens) == params.max_tokens:
                finish = "length"
            if finish:
                del self.requests[request.id]
                break
        self.generated += len(new)
        k = params.logprobs
        top = tuple(((new[0] + j) % 256, -0.5 - j) for j in range(k or 0))
        logprobs = () if k is None else tuple((-0.5, top) for _ in new)
        return Event(
            request.id,
            0,
            position,
            tuple(new),
            logprobs,
            finish,
            cached=min(16, len(request.prompt) - 1),
        )

    def fails(self, request: Request) -> bool:
        return SPECIALS["<|fail|>"] in request.prompt and len(self.done[request.id]) >= 3

    def score(self, request: Request) -> Event:
        """Logprobs of a few tokens of the prompt, as a chunked prefill brings them."""
        start = self.scored[request.id]
        if start and SPECIALS["<|crash|>"] in request.prompt and self.once(request):
            crash()
        end = min(start + SCORED_AT_ONCE, len(request.prompt) - 1)
        self.scored[request.id] = end
        k = request.params.prompt_logprobs or 0
        told = tuple(prompt_logprob(request.prompt[i], k) for i in range(start + 1, end + 1))
        position = len(request.prompt)
        return Event(request.id, 0, position, prompt_logprobs=told, prompt_position=start + 1)

    def stats(self) -> None:
        running = min(len(self.requests), MAX_RUNNING)
        values = {"running": running, "waiting": len(self.requests) - running, "steps": self.steps}
        values |= {"blocks_used": running, "blocks_total": 256, "generated_tokens": self.generated}
        values |= WorkTotals(
            0.1 * self.steps, 0.05 * self.steps, weight_bytes=1e9 * self.steps
        ).as_dict()
        self.sock.sendall(encode(Stats({name: float(value) for name, value in values.items()})))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int)
    parser.add_argument("--ledger-fd", type=int)
    parser.add_argument("--kv-fd", type=int)
    parser.add_argument("--device", default="")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=arguments.channel_fd)
    how = os.environ.get("FAKE_START", "")
    time.sleep(float(os.environ.get("FAKE_START_SECONDS", "0")))
    if how == "failed":
        sock.sendall(
            encode(Failed("kv_memory", "no memory for the KV cache: lower --kv-cache-memory"))
        )
        sys.exit(1)
    if how == "dies":
        sys.exit(9)
    fake = Fake(sock, Ledger(arguments.ledger_fd))
    fake.note(start=True, device=arguments.device, kv=os.fstat(arguments.kv_fd).st_size)
    starts = Path(os.environ["FAKE_LOG"]).read_text().count('"start"')
    if str(starts) in os.environ.get("FAKE_DYING_STARTS", "").split(","):
        sys.exit(9)
    if str(starts) in os.environ.get("FAKE_HANGING_STARTS", "").split(","):
        time.sleep(3600)
    os.ftruncate(arguments.kv_fd, os.fstat(arguments.kv_fd).st_size + 1)
    if how == "once" and not fake.state.exists():
        fake.state.touch()
    elif how == "once":
        sys.exit(9)
    device = os.environ.get("FAKE_DEVICE", "")
    if device and arguments.device and fake.state.exists():
        sock.sendall(encode(Failed("gpu_absent", "the GPU has fallen off the bus")))
        sys.exit(1)
    about: dict[str, Any] = {
        "device": device and f"{device} (the fake one)",
        "fingerprint": "fake",
        "phases": {"load": 0.01},
        "limits": MachineLimits(20.0, 100.0, 50.0),
    }
    ready = Ready(**LIMITS, vocab_size=VOCAB, kv_bytes=1 << 20, **about)
    sock.sendall(encode(ready))
    fake.run()


if __name__ == "__main__":
    main()
