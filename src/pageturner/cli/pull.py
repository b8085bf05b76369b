"""`pageturner pull MODEL`: fetch a model, check it, and say where it is."""

from __future__ import annotations

import argparse

from pageturner.cli import models
from pageturner.formats import hub


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The models."""
    parser.add_argument(
        "model", nargs="+", help="an alias, or the id of a model on the hub (org/name)"
    )
    width = max(map(len, hub.HUB_ALIASES))
    listed = "\n".join(
        f"  {alias:{width}}  {reference}" for alias, reference in hub.HUB_ALIASES.items()
    )
    parser.epilog = (
        f"aliases:\n  {'smollm2':{width}}  SmolLM2-135M-Instruct, 98 MB, a package\n{listed}\n\n"
        "Ids are fetched from https://huggingface.co, or from the hub of HF_ENDPOINT, into the cache\n"
        "of huggingface_hub (HF_HOME). HF_TOKEN opens models behind a licence."
    )


def main(arguments: argparse.Namespace) -> int:
    """Fetch each; stops at the first that cannot be had."""
    for reference in arguments.model:
        if hub.is_hub_id(reference):
            models.room(hub.HUB_ALIASES.get(reference, reference))
        model = hub.resolve(reference)
        checked = models.check(model.path) if hub.is_hub_id(reference) else 0
        held = f" ({checked} large files have the hash that the hub gives)" if checked else ""
        print(f"{reference} is at {model.path}{held}; serve it: pageturner serve {reference}")
    return 0
