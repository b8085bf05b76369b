"""Logprobs of forced answers by other engines, to stand beside ours (quality_prompts.py).

llama-server is asked once for each token: the tokens before it as a prompt, of which all but the last are in
its cache, for one token with the likeliest of its place. It tells none where it would end, so it may not, nor
where its own choice is part of a character: these places have no figure. OpenVINO GenAI echoes a prompt with
logprobs.
"""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from peers import launch
from quality_prompts import Forced

LIKELIEST = 100  # tokens of each place that llama-server tells
LIMIT_S = 900.0
HERE = Path(__file__).parent


def by_llama(model: Path, forced: Sequence[Forced]) -> NDArray[np.float64]:
    """Logprobs of all forced tokens, in their order; NaN where it tells nothing of a token."""
    peer = launch.start("llama", model=model)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(peer.url).port, timeout=60.0)
        found = [_asked(connection, each.tokens, i) for each in forced for i in _places(each)]
        connection.close()
    finally:
        peer.stop()
    return np.array(found)


def _places(each: Forced) -> range:
    return range(each.start, len(each.tokens))


def _asked(connection: http.client.HTTPConnection, tokens: Sequence[int], place: int) -> float:
    body = {
        "prompt": list(tokens[:place]),
        "n_predict": 1,
        "n_probs": LIKELIEST,
        "temperature": 0.0,
        "cache_prompt": True,
        "id_slot": 0,
        "ignore_eos": True,
    }
    connection.request(
        "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    read: dict[str, Any] = json.loads(response.read())
    if response.status != 200:
        raise RuntimeError(f"llama-server: {read}")
    told = read.get("completion_probabilities", [])
    likeliest = told[0]["top_logprobs"] if told else []
    return next(
        (each["logprob"] for each in likeliest if each["id"] == tokens[place]), float("nan")
    )


def by_openvino(model: Path, forced: Sequence[Forced]) -> NDArray[np.float64]:
    """Logprobs of all forced tokens, in their order."""
    python = launch.peers_dir() / "openvino" / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError("openvino is not installed: bench/peers/setup.sh openvino")
    command = [str(python), str(HERE / "peers" / "forced_openvino.py"), str(model)]
    asked = json.dumps([each.tokens for each in forced])
    done = subprocess.run(
        command, input=asked, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(
            done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no word"
        )
    read = json.loads(done.stdout[done.stdout.index("[") :])
    return np.array(
        [
            logprobs[i - 1]
            for each, logprobs in zip(forced, read, strict=True)
            for i in _places(each)
        ]
    )


ENGINES = {"llama-server": by_llama, "OpenVINO GenAI": by_openvino}
