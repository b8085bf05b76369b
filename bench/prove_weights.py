"""Whether a server runs the weights that it says it runs: our engine with the same file judges its greedy answers.

The idea is Token-DiFR's: each token of an answer is looked up in the reference's distribution at that place, behind
the answer's own tokens, so that a near-tie that falls otherwise spoils nothing behind it. `margin` is by how many
nats a token lies below the reference's best token, `drift` how far the server's logprob of it is from the
reference's; both are means over all tokens. An honest server differs in rounding alone: the bounds are SLACK times
the worst score of our engine with the file itself and each rounding in HONEST.
"""

from __future__ import annotations

import json
import statistics
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import harness

from prove_claims import Answer, Target, Verdict, ask, scored

PROMPTS = (
    "The history of Rome begins",
    "A good recipe for bread",
    "To train a dog, one must",
    "Photosynthesis is the process",
    "The law of gravity says",
    "My favourite holiday was when",
    "In computer science, a hash table",
    "The ship sailed at dawn, and the captain",
    "Once upon a time there was",
    "Electric cars are",
    "The heart pumps blood",
    "A poem about the sea:",
)
TOKENS = 40  # of each answer
HONEST = (["--activation-bits", "8"], ["--kv-cache-dtype", "int8"])
SLACK = 5.0
FEWEST = 100  # tokens that a verdict needs


@dataclass(frozen=True, slots=True)
class Score:
    """drift: None where the server tells no logprobs. tokens: how many were compared."""

    margin: float
    drift: float | None
    tokens: int


class Reference:
    """Our server with the file that is claimed, and the bounds of honest servers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.margin = 0.0
        self.drift = 0.0

    def allow(self, honest: Score) -> None:
        """Widen the bounds for an honest server."""
        self.margin = max(self.margin, SLACK * honest.margin)
        self.drift = max(self.drift, SLACK * (honest.drift or 0.0))

    def score(self, target: Target) -> Score:
        """The score of a server's answers. Those that the tokenizer does not divide as they were made are left
        out."""
        margins: list[float] = []
        drifts: list[float] = []
        for prompt in PROMPTS:
            answer = ask(target, prompt, TOKENS)
            if answer.error:
                raise RuntimeError(answer.error)
            self._compare(prompt, answer, margins, drifts)
        if len(margins) < FEWEST:
            raise RuntimeError(f"{len(margins)} tokens are too few: another tokenizer")
        drift = None
        if drifts:
            drift = statistics.mean(drifts)
        return Score(statistics.mean(margins), drift, len(margins))

    def _compare(
        self, prompt: str, answer: Answer, margins: list[float], drifts: list[float]
    ) -> None:
        """Add what each token of an answer shows."""
        found = self._forced(prompt + answer.text)
        start = sum(offset < len(prompt) for offset in found["text_offset"])
        expected = scored(found)[start:]
        if answer.tokens and [token for token, _ in answer.tokens] != [one for one, _ in expected]:
            return
        tops = found["top_logprobs"][start:]
        margins += [
            max(top.values()) - score for top, (_, score) in zip(tops, expected, strict=True)
        ]
        if answer.tokens:
            both = zip(answer.tokens, expected, strict=True)
            drifts += [abs(theirs - score) for (_, theirs), (_, score) in both]

    def _forced(self, text: str) -> dict[str, Any]:
        """The logprobs of a text's tokens, none of which is chosen."""
        body = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1}
        request = urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)["choices"][0]["logprobs"]
        return found

    def judge(self, target: Target) -> Verdict:
        """Whether its answers are those of the file: by `drift`, which tells more, where there are logprobs."""
        score = self.score(target)
        name = "margin"
        value = score.margin
        bound = self.margin
        if score.drift is not None:
            name = "drift"
            value = score.drift
            bound = self.drift
        figure = f"{name} {value:.3f}, honest to {bound:.3f} ({score.tokens} tokens)"
        return Verdict(figure, value <= bound)


@contextmanager
def reference(model: str) -> Iterator[Reference]:
    """Our server with this file, its bounds taken from honest ones."""
    with harness.server(model=model) as server:
        found = Reference(server.url)
        for flags in HONEST:
            with harness.server(*flags, model=model) as other:
                target = Target("honest", url=other.url)
                target.prepare()
                found.allow(found.score(target))
        yield found
