"""The manifests for Kubernetes: their form (the keys that Kubernetes and KubeRay know, and where), and
that they name flags, routes, pods and settings that exist."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pageturner.router import route
from pageturner.router.ray import settings
from pageturner.server import server

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).parents[2]
FREE: dict[str, Any] = {"*": str}
PROBE = {
    "httpGet": {"path": str, "port": (str, int)},
    "periodSeconds": int,
    "failureThreshold": int,
}
RESOURCES = {"requests": FREE, "limits": FREE}
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "args": [str],
    "envFrom": [{"secretRef": {"name": str}}],
    "ports": [{"name": str, "containerPort": int}],
    "resources": RESOURCES,
    "startupProbe": PROBE,
    "readinessProbe": PROBE,
    "livenessProbe": PROBE,
    "securityContext": {"allowPrivilegeEscalation": bool, "capabilities": {"drop": [str]}},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
POD = {
    "metadata": {"labels": FREE, "annotations": FREE},
    "spec": {
        "terminationGracePeriodSeconds": int,
        "containers": [CONTAINER],
        "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int},
    },
}
SETS = {"replicas": int, "selector": {"matchLabels": FREE}, "template": POD}
CLAIM = {"accessModes": [str], "resources": {"requests": FREE}}
GROUP = {"rayStartParams": FREE, "template": POD}
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "Service": (
        "v1",
        {
            "clusterIP": str,
            "publishNotReadyAddresses": bool,
            "selector": FREE,
            "ports": [{"name": str, "port": int, "targetPort": (str, int)}],
        },
    ),
    "Deployment": ("apps/v1", SETS),
    "StatefulSet": (
        "apps/v1",
        SETS
        | {
            "serviceName": str,
            "podManagementPolicy": str,
            "volumeClaimTemplates": [{"metadata": {"name": str}, "spec": CLAIM}],
        },
    ),
    "RayService": (
        "ray.io/v1",
        {
            "serveConfigV2": str,
            "rayClusterConfig": {
                "rayVersion": str,
                "enableInTreeAutoscaling": bool,
                "headGroupSpec": GROUP,
                "workerGroupSpecs": [
                    GROUP
                    | {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int}
                ],
            },
        },
    ),
}
FILES = ("deploy/kubernetes.yaml", "deploy/rayservice.yaml")
CHART = ROOT / "deploy" / "chart"


def read(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / file).read_text()))


def wrong(found: Any, shape: Any, where: str) -> Iterator[str]:
    """What is not as its shape wants it."""
    if isinstance(shape, dict):
        if not isinstance(found, dict):
            yield f"{where} is a map"
            return
        for key, value in found.items():
            if key not in shape and "*" not in shape:
                yield f"{where}.{key} is unknown"
            else:
                yield from wrong(value, shape.get(key, shape.get("*")), f"{where}.{key}")
    elif isinstance(shape, list):
        if not isinstance(found, list):
            yield f"{where} is a list"
            return
        for i, one in enumerate(found):
            yield from wrong(one, shape[0], f"{where}[{i}]")
    elif not isinstance(found, shape) or (isinstance(found, bool) and shape is not bool):
        yield f"{where} is {shape}, not {found!r}"


@pytest.mark.parametrize("file", FILES)
def test_the_form(file: str) -> None:
    for document in read(file):
        version, spec = SPECS[document["kind"]]
        whole = {
            "apiVersion": str,
            "kind": str,
            "metadata": {"name": str, "labels": FREE},
            "spec": spec,
        }
        assert list(wrong(document, whole, document["kind"])) == []
        assert document["apiVersion"] == version


def test_the_form_is_looked_at() -> None:
    shape = {"a": [{"b": int}], "c": FREE}
    assert list(wrong({"a": [{"b": 1}], "c": {"x": "y"}}, shape, "it")) == []
    assert list(wrong({"a": [{"d": 1}]}, shape, "it")) == ["it.a[0].d is unknown"]
    assert list(wrong({"c": {"x": 1}}, shape, "it")) == [f"it.c.x is {str}, not 1"]
    assert list(wrong({"a": {}, "c": []}, shape, "it")) == ["it.a is a list", "it.c is a map"]


def test_selectors_find_the_pods() -> None:
    documents = read(FILES[0])
    sets = [one for one in documents if "template" in one["spec"]]
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in sets]
    for one in sets:
        assert (
            one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
        )
    for service in (one for one in documents if one["kind"] == "Service"):
        assert service["spec"]["selector"] in pods


def test_the_containers_are_started_with_flags_that_exist() -> None:
    documents = {one["metadata"]["name"]: one["spec"] for one in read(FILES[0])}
    pods = documents["pageturner-server"]
    [container] = pods["template"]["spec"]["containers"]
    parser = argparse.ArgumentParser()
    server.add_arguments(parser)
    parser.parse_args(container["args"])
    [container] = documents["pageturner-router"]["template"]["spec"]["containers"]
    parser = argparse.ArgumentParser()
    route.add_arguments(parser)
    asked = parser.parse_args(container["args"])
    names = [f"pageturner-server-{i}.{pods['serviceName']}" for i in range(pods["replicas"])]
    assert asked.replicas == [f"http://{name}:8000" for name in names], "each pod, and no other"
    assert pods["serviceName"] in documents
    assert container["command"] == ["pageturner", "route"]


def test_the_serve_configuration_is_one_of_ours() -> None:
    [document] = read(FILES[1])
    config = yaml.safe_load(document["spec"]["serveConfigV2"])
    [application] = config["applications"]
    assert application["import_path"] == "pageturner.ray:app"
    found = settings.settings_of(application["args"])
    [workers] = document["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    [model] = found.models.values()
    assert model.cpus <= float(container["resources"]["requests"]["cpu"]), (
        "a replica fits on a worker"
    )
    assert found.router_config.allowed_hosts == "*", "it is asked by the name of a service"


def test_the_serve_configuration_is_one_of_serve_itself() -> None:
    schema = pytest.importorskip(
        "ray.serve.schema", reason="Ray is not installed", exc_type=ImportError
    )
    config = yaml.safe_load(read(FILES[1])[0]["spec"]["serveConfigV2"])
    assert schema.ServeDeploySchema(**config).applications[0].name == "pageturner"


# -- the chart -----------------------------------------------------------------------------------------------
OTHERS = {
    "replicas": 3,
    "gpus": 2,
    "apiKeySecret": "keys",
    "hubTokenSecret": "hub",
    "model": "Qwen/Qwen3-8B",
    "extraArgs": ["--kv-cache-memory=8G"],
}


def rendered(values: dict[str, Any], name: str = "pageturner") -> list[dict[str, Any]]:
    """The documents of the chart, by Helm's own library."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make audit")
    found = helm.Chart.load(str(CHART)).render(values, name=name)
    texts = [text for file, text in found.items() if file.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def by_name(documents: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def test_helm_finds_nothing_to_complain_about() -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make audit")
    said = helm.lint(str(CHART))
    assert said["errors"] == []
    assert {one["error"] for one in said["messages"]} <= {"icon is recommended"}


def test_the_chart_is_the_manifest() -> None:
    assert by_name(rendered({})) == by_name(read(FILES[0]))


def test_the_chart_with_other_values_has_the_form_and_flags_that_exist() -> None:
    documents = rendered(OTHERS, "mine")
    for document in documents:
        version, spec = SPECS[document["kind"]]
        whole = {"apiVersion": str, "kind": str, "metadata": {"name": str, "labels": FREE}}
        assert list(wrong(document, whole | {"spec": spec}, document["kind"])) == []
        assert document["apiVersion"] == version
    pods = by_name(documents)["StatefulSet", "mine-server"]["spec"]["template"]["spec"]
    [container] = pods["containers"]
    parser = argparse.ArgumentParser()
    server.add_arguments(parser)
    asked = parser.parse_args(container["args"])
    assert asked.model == "Qwen/Qwen3-8B"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert [one["secretRef"]["name"] for one in container["envFrom"]] == ["keys", "hub"]
    [container] = by_name(documents)["Deployment", "mine-router"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert [word for word in container["args"] if word.startswith("http")] == [
        f"http://mine-server-{i}.mine-servers:8000" for i in range(3)
    ]


def test_values_are_all_used() -> None:
    text = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    for name in yaml.safe_load((CHART / "values.yaml").read_text()):
        assert f".Values.{name}" in text, name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == project["version"]


# -- what a forge runs ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("file", sorted((ROOT / ".github" / "workflows").iterdir()), ids=str)
def test_a_workflow_runs_what_is_there(file: Path) -> None:
    found = yaml.safe_load(file.read_text())
    assert found[True].keys() == {"push", "workflow_dispatch"}, "`on`, which YAML takes for true"
    makefile = (ROOT / "Makefile").read_text()
    for job in found["jobs"].values():
        assert {"runs-on", "steps"} <= job.keys() <= {"runs-on", "steps", "needs", "strategy"}
        assert job.get("needs", "cpu") in found["jobs"] or "needs" not in job
        for step in job["steps"]:
            assert step.keys() <= {"uses", "run", "with", "env"}
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))
            for target in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
                assert f"\n{target}:" in makefile, target
            for path in re.findall(r"python (\S+\.py)|(?:lint|package) (\S+)", step.get("run", "")):
                assert (ROOT / "".join(path)).exists(), path


def test_the_image_passes_the_linter() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed: make audit")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
