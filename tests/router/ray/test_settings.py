"""The file of `pageturner deploy`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pageturner import cli
from pageturner.router.ray import settings
from pageturner.router.ray.deploy import serve_config
from pageturner.router.ray.settings import ModelSettings
from support.refusals import engine_fault

EXAMPLE = """
port = 8100
[router]
retries = 1
[models.story]
model = "story.gguf"
replicas = [1, 4]
cpus = 2
[models.story.adapters]
pirate = "/adapters/pirate"
[models.story.engine]
max_num_seqs = 8
[models.code]
model = "code.gguf"
"""


def test_a_file_is_read_and_says_the_same_in_a_configuration_of_serve(tmp_path: Path) -> None:
    path = tmp_path / "app.toml"
    path.write_text(EXAMPLE)
    read = settings.read(path)
    assert read.port == 8100
    assert read.router_config.retries == 1
    assert read.models["story"].replicas == (1, 4)
    assert read.models["code"].replicas == (1, 1)
    tables = read.models["story"].tables("story")
    assert tables["engine"] == {"model": "story.gguf", "max_num_seqs": 8, "threads": 2}
    assert tables["server"] == {"served_model_name": "story", "lora": "pirate=/adapters/pirate"}
    written = json.loads(serve_config(read))
    [application] = written["applications"]
    assert application["import_path"] == "pageturner.ray:app"
    assert settings.settings_of(application["args"]) == read
    assert written["http_options"] == {"host": "127.0.0.1", "port": 8100}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "[models.NAME]"),
        ("models = 3", "[models.NAME]"),
        ("[models.a]", "model is missing"),
        ("[models]\na = 1", "is a table"),
        ('[models.a]\nmodel = "m"\nreplicas = 0', "from 1 on"),
        ('[models.a]\nmodel = "m"\nreplicas = [3, 2]', "from 1 on"),
        ('[models.a]\nmodel = "m"\nreplica = 2', "unknown key 'replica'"),
        ('[models.a]\nmodel = "m"\ncpus = "2"', "cpus is float"),
        ('[models.a]\nmodel = "m"\ncpus = -1', "too small"),
        ('[models.a]\nmodel = "m"\nengine = 2', "engine is a table"),
        ('[models.a]\nmodel = "m"\n[models.a.server]\nlog_format = "json"', "not done under Ray"),
        (
            'router = {otlp_traces_endpoint = "http://a:1"}\n[models.a]\nmodel = "m"',
            "not done under Ray",
        ),
        ('[models.a]\nmodel = "m"\n[models.a.engine]\nmax_num_seq = 2', "max_num_seq"),
        ('[models.a]\nmodel = "m"\n[models.a.server]\nport = 2', "Serve listens"),
        ('[router]\nretry = 1\n[models.a]\nmodel = "m"', "retry"),
        ('doors = 0\n[models.a]\nmodel = "m"', "too small"),
        ('[models.a]\nmodel = "m"\n[models.a.adapters]\na = "x"', "the name 'a'"),
        ('[models."a,b"]\nmodel = "m"', "no name of a model"),
        ("[models.a", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "app.toml"
    path.write_text(text)
    with engine_fault(code="bad_setting") as caught:
        settings.read(path)
    assert said in str(caught.value)


def test_the_command_writes_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "app.toml", tmp_path / "serve.yaml"
    path.write_text(EXAMPLE)
    assert cli.main(["deploy", str(path), "--write", str(out)]) == 0
    assert "serve deploy" in capsys.readouterr().out
    assert json.loads(out.read_text())["applications"][0]["name"] == "pageturner"


def test_a_file_that_is_not_there() -> None:
    with engine_fault("cannot read"):
        settings.read("/nowhere/app.toml")


def test_without_ray_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    path = tmp_path / "app.toml"
    path.write_text(EXAMPLE)
    absent: Any = None
    monkeypatch.setitem(sys.modules, "ray", absent)
    assert cli.main(["deploy", str(path)]) == 1
    assert "pip install 'pageturner[ray]'" in capsys.readouterr().err


def test_the_example_and_what_the_page_shows_are_read(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    assert settings.read(root / "examples" / "ray.toml").models["smollm2"].replicas == (1, 2)
    [shown] = re.findall(r"```toml\n(.*?)```", (root / "docs" / "cluster.md").read_text(), re.S)
    path = tmp_path / "shown.toml"
    path.write_text(shown)
    [model] = settings.read(path).models.values()
    assert model == replace(
        ModelSettings("smollm2", (1, 4), cpus=2),
        adapters=model.adapters,
        engine=model.engine,
        server=model.server,
    ), "defaults are what they are said to be"
