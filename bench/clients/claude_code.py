"""Anthropic's Claude Code at the terminal, on /v1/messages: edits a file through tool calls."""

from __future__ import annotations

import sys
from pathlib import Path

from command_line import AFTER, BEFORE, END, FILE, TASK, Seen, call, installed, main, seen_by

TOOLS = "Read,Edit,Write"  # that it may use without asking; it offers the model others too, if not scripted


def run(folder: Path, server: str, model: str, seconds: float, scripted: bool = False) -> Seen:
    """Install it into the folder, and have it do the task against a server, without any other network."""
    program = installed(folder, "@anthropic-ai/claude-code", "claude")

    def start(_: Path, url: str) -> tuple[list[str], dict[str, str]]:
        command = [str(program), "--print", "--output-format", "json", "--allowedTools", TOOLS]
        command += ["--tools", TOOLS] if scripted else []
        command += ["--", TASK]
        return command, {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_SMALL_FAST_MODEL": model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
            "API_TIMEOUT_MS": "1800000",  # on a CPU its first prompt takes minutes
        }

    path = str(folder / "work" / FILE)
    edit = call("Edit", file_path=path, old_string=BEFORE, new_string=AFTER)
    texts = [call("Read", file_path=path), edit, f"Done.{END}"]
    return seen_by(program, folder, server, start, seconds, texts if scripted else ())


if __name__ == "__main__":
    sys.exit(main(run))
