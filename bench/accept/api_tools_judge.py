"""What others say of calls: jsonschema of their arguments, Transformers of the text they stand in.

    PYTHON bench/accept/api_tools_judge.py < rows.jsonl

Runs in an environment of its own, which has both packages and nothing of ours. A row is
{"schema": ..., "value": ...}, answered with "" or what is wrong; or {"text": ..., "prompt": ...,
"tools": ...}, answered with the message that Transformers' server reads from it for Qwen 2, or {"error":
...}.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def valid(schema: Any, value: Any) -> str:
    """What the draft's own rules find wrong."""
    import jsonschema

    errors = jsonschema.Draft202012Validator(schema).iter_errors(value)
    return next((f"{error.json_path}: {error.message}"[:300] for error in errors), "")


def parsed(text: str, prompt: str, tools: Any) -> Any:
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
    from transformers.utils.chat_parsing import parse_response

    template = next(one for names, one in _RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen2" in names)
    try:
        return parse_response(text, template, prefix=prompt, tools=tools)
    except Exception as error:  # of whatever kind: that it cannot read it is its answer
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    for line in sys.stdin:
        row = json.loads(line)
        said = valid(**row) if "schema" in row else parsed(**row)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
