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
from collections.abc import Iterator
from contextlib import contextmanager

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


class Reference:
    """Our server with the file that is claimed, and the bounds of honest servers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._bounds: dict[str, float] = {}

    def allow(self, target: Target) -> None:
        """Widen the bounds for an honest server."""
        for name, value in self.score(target).items():
            self._bounds[name] = max(self._bounds.get(name, 0.0), SLACK * value)

    def score(self, target: Target) -> dict[str, float]:
        """`margin` of a server's answers, and `drift` where it tells logprobs. Answers that the tokenizer does not
        divide as they were made are left out."""
        found: dict[str, list[float]] = {"margin": [], "drift": []}
        for prompt in PROMPTS:
            answer = ask(target, prompt, TOKENS)
            if answer.error:
                raise RuntimeError(answer.error)
            for name, value in self._compare(prompt, answer):
                found[name].append(value)
        if len(found["margin"]) < FEWEST:
            raise RuntimeError("too few tokens could be compared: another tokenizer")
        return {name: statistics.mean(values) for name, values in found.items() if values}

    def _compare(self, prompt: str, answer: Answer) -> Iterator[tuple[str, float]]:
        """What each token of an answer shows."""
        body = {"prompt": prompt + answer.text, "max_tokens": 0, "echo": True, "logprobs": 1}
        forced = json.loads(harness.fetch(self._url, "/v1/completions", body))
        logprobs = forced["choices"][0]["logprobs"]
        start = sum(offset < len(prompt) for offset in logprobs["text_offset"])
        expected = scored(logprobs)[start:]
        theirs = answer.tokens or expected
        if [token for token, _ in theirs] != [token for token, _ in expected]:
            return
        tops = logprobs["top_logprobs"][start:]
        for (_, told), (_, score), top in zip(theirs, expected, tops, strict=True):
            yield "margin", max(top.values()) - score
            if answer.tokens:
                yield "drift", abs(told - score)

    def judge(self, target: Target) -> Verdict:
        """Whether its answers are those of the file: by `drift`, which tells more, where there are logprobs."""
        scores = self.score(target)
        name = min(scores)  # drift, if it is there
        bound = self._bounds[name]
        return Verdict(f"{name} {scores[name]:.3f}, honest to {bound:.3f}", scores[name] <= bound)


@contextmanager
def reference(model: str) -> Iterator[Reference]:
    """Our server with this file, its bounds taken from honest ones."""
    with harness.server(model=model) as server:
        found = Reference(server.url)
        for flags in HONEST:
            with harness.server(*flags, model=model) as other:
                target = Target("honest", url=other.url)
                target.prepare()
                found.allow(target)
        yield found
