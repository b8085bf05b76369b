"""OpenAI's Codex at the terminal, on /v1/responses: edits a file through tool calls."""

from __future__ import annotations

import sys
from pathlib import Path

from command_line import END, FILE, TASK, Seen, call, installed, main, seen_by

CONFIG = """
model = "{model}"
model_provider = "pageturner"
model_context_window = 32768
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.pageturner]
name = "Pageturner"
base_url = "{url}/v1"
wire_api = "responses"
"""


def run(folder: Path, server: str, model: str, seconds: float, scripted: bool = False) -> Seen:
    """Install it into the folder, and have it do the task against a server, without any other network."""
    program = installed(folder, "@openai/codex", "codex")

    def start(home: Path, url: str) -> tuple[list[str], dict[str, str]]:
        own = home / ".codex"
        own.mkdir()
        (own / "config.toml").write_text(CONFIG.format(model=model, url=url))
        command = [
            str(program),
            "exec",
            "--skip-git-repo-check",
            "--sandbox",
            "workspace-write",
            TASK,
        ]
        return command, {"CODEX_HOME": str(own)}

    texts = [call("exec_command", cmd=f"sed -i s/hello/goodbye/ {FILE}"), f"Done.{END}"]
    return seen_by(program, folder, server, start, seconds, texts if scripted else ())


if __name__ == "__main__":
    sys.exit(main(run))
