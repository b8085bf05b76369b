"""opencode at the terminal, on /v1/chat/completions: edits a file through tool calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from command_line import AFTER, BEFORE, END, FILE, TASK, Seen, call, installed, main, seen_by


def config(url: str, model: str) -> dict[str, Any]:
    """Its settings: a provider of OpenAI's chats, which is part of the program."""
    limits = {"context": 32768, "output": 4096}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Pageturner",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {model: {"name": model, "tool_call": True, "limit": limits}},
    }
    return {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"pageturner": provider},
        "model": f"pageturner/{model}",
        "small_model": f"pageturner/{model}",
        "autoupdate": False,
        "share": "disabled",
        "permission": {"bash": "deny", "edit": "allow", "webfetch": "deny"},
    }


def run(folder: Path, server: str, model: str, seconds: float, scripted: bool = False) -> Seen:
    """Install it into the folder, and have it do the task against a server, without any other network."""
    program = installed(folder, "opencode-ai", "opencode")

    def start(home: Path, url: str) -> tuple[list[str], dict[str, str]]:
        file = home / "opencode.json"
        file.write_text(json.dumps(config(url, model)))
        command = [str(program), "run", "--model", f"pageturner/{model}", TASK]
        return command, {
            "OPENCODE_CONFIG": str(file),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        }

    path = str(folder / "work" / FILE)
    edit = call("edit", filePath=path, oldString=BEFORE, newString=AFTER)
    texts = [call("read", filePath=path), edit, f"Done.{END}"]
    return seen_by(program, folder, server, start, seconds, texts if scripted else ())


if __name__ == "__main__":
    sys.exit(main(run))
