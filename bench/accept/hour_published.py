"""Judges what is published: workflows, chart, image, wheels, snippets, each by its tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path += [str(Path(__file__).parent)]

import harness
from harness import Line, pytest_line

MANIFESTS, WHEELS = "tests/arch/test_manifests.py", "tests/arch/test_wheels.py"


def lines(options: object) -> Iterator[Line]:
    """Ray's own schema is another acceptance's: its test is left out."""
    chart = "helm or chart or values"
    yield pytest_line(
        "the chart: linted and rendered by Helm, equal to the manifest", MANIFESTS, "-k", chart
    )
    yield pytest_line("the image passes hadolint", MANIFESTS, "-k", "linter")
    yield pytest_line("workflows run what is there", MANIFESTS, "-k", "workflow")
    yield pytest_line("wheels, and one of the GPU kernels", WHEELS)
    yield pytest_line("snippets and recipes parse", "tests/cli/test_docs.py")


if __name__ == "__main__":
    sys.exit(harness.main("hour_published", __doc__, {"published": harness.part("hour_published")}))
