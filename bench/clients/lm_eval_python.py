"""lm-eval: local-completions with the server's own tokenizer (/tokenizer_info, /tokenize), by its command too
on a task of this file; and what it computes beside what the server says of the same text.

    python bench/clients/lm_eval_python.py URL MODEL SHORT_URL SHORT_MODEL   (it asks the second)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from seen import Seen, expect, expect_equal

URL, MODEL = sys.argv[3:5]
ROWS = [
    ("The capital of France is", ["Paris", "Rome", "Oslo"], 0),
    ("The opposite of hot is", ["green", "cold", "seven"], 1),
    ("Two plus two is", ["window", "nine", "four"], 2),
    ("The sun rises in the", ["east", "spoon", "cellar"], 0),
]
TASK = """
task: choices_of_four
dataset_path: json
dataset_kwargs: {{data_files: {{validation: "{file}"}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
seen = Seen("lm-eval", "lm-eval")


def post(path: str, **fields: Any) -> Any:
    request = urllib.request.Request(
        URL + path, json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def told(context: str, continuation: str) -> float:
    """Log-probability of a continuation, by the server's own prompt_logprobs."""
    before = post("/tokenize", model=MODEL, prompt=context, add_special_tokens=False)["count"]
    fields = {
        "prompt": context + continuation,
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "add_special_tokens": False,
    }
    choice = post("/v1/completions", model=MODEL, **fields)["choices"][0]
    ids = post("/tokenize", model=MODEL, prompt=context + continuation, add_special_tokens=False)[
        "tokens"
    ]
    rows = choice["prompt_logprobs"]
    return sum(rows[k][str(ids[k])]["logprob"] for k in range(before, len(ids)))


@seen.check
def loglikelihoods() -> None:
    model = LocalCompletionsAPI(base_url=f"{URL}/v1/completions", model=MODEL, num_concurrent=4)
    expect_equal(model.tokenizer_backend, "remote", "the tokenizer that it found")
    pairs = [(question, " " + choice) for question, choices, _ in ROWS for choice in choices]
    asked = [Instance("loglikelihood", {}, pair, k) for k, pair in enumerate(pairs)]
    for pair, (sum_of_logs, _) in zip(pairs, model.loglikelihood(asked), strict=True):
        expect(abs(sum_of_logs - told(*pair)) < 1e-3, f"{pair}: {sum_of_logs} is not {told(*pair)}")


@seen.check
def generate_until() -> None:
    model = LocalCompletionsAPI(base_url=f"{URL}/v1/completions", model=MODEL, num_concurrent=1)
    how = {"until": ["\n"], "max_gen_toks": 16, "temperature": 0}
    answer = model.generate_until(
        [Instance("generate_until", {}, ("The capital of France is", how), 0)]
    )[0]
    same = post(
        "/v1/completions",
        model=MODEL,
        prompt="The capital of France is",
        stop="\n",
        max_tokens=16,
        temperature=0,
    )
    expect_equal(answer, same["choices"][0]["text"], "text")


@seen.check
def command_with_a_task() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"question": question, "choices": choices, "answer": k} for question, choices, k in ROWS
        ]
        file = Path(folder) / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        (Path(folder) / "task.yaml").write_text(TASK.format(file=file))
        arguments = (
            f"model={MODEL},base_url={URL}/v1/completions,num_concurrent=2,tokenizer_backend=remote"
        )
        command = [
            sys.executable,
            "-m",
            "lm_eval",
            "--model",
            "local-completions",
            "--model_args",
            arguments,
        ]
        command += [
            "--tasks",
            "choices_of_four",
            "--include_path",
            folder,
            "--output_path",
            f"{folder}/out",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        expect_equal(done.returncode, 0, f"status ({done.stderr[-250:]})")
        (results,) = Path(folder, "out").rglob("results_*.json")
        accuracy = json.loads(results.read_text())["results"]["choices_of_four"]["acc,none"]
    best = [
        max(range(3), key=lambda k: told(question, " " + choices[k]))
        for question, choices, _ in ROWS
    ]
    ours = sum(mine == right for mine, (_, _, right) in zip(best, ROWS, strict=True)) / len(ROWS)
    expect_equal(accuracy, ours, "accuracy beside the server's logprobs")
    seen.figure = f"accuracy {accuracy} on {len(ROWS)} questions, as by the server's own logprobs"


seen.tell()
