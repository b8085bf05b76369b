"""`pageturner replay`: a step log once more, offline: the same plans from the scheduler, the same
tokens from the engine.

Owns the flags and what is printed; what is compared is in lab/simulation/log_replay.py.
"""

from __future__ import annotations

import argparse

from pageturner.config.flag_table import add_flags
from pageturner.errors import bad_setting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add_flags(parser, "replay")


def main(arguments: argparse.Namespace) -> int:
    """Exit code 0 where all that could be compared is the same, 1 where something differs."""
    from pageturner.lab.simulation import log_replay, recorded_runs

    found = recorded_runs.read_runs(arguments.log)
    if not 0 <= arguments.run <= len(found):
        raise bad_setting(f"the log holds {len(found)} runs: --run is 1 to {len(found)}")
    run = found[arguments.run - 1] if arguments.run else recorded_runs.last_run(arguments.log)
    plans = log_replay.replay_plans(run)
    print(f"plans: {plans.compared:,} of {plans.tokens:,} tokens; {_verdict(plans.differences)}")
    differences = plans.differences
    if run.header.content != "tokens":
        print(
            "answers: not compared, as the log holds no tokens (serve --step-log-tokens writes them)"
        )
    elif not arguments.plans:
        tokens = log_replay.replay_tokens(run, model=arguments.model)
        print(
            f"answers: {tokens.compared:,}, {tokens.tokens:,} tokens; {_verdict(tokens.differences)}"
        )
        differences = differences + tokens.differences
    print("the replay differs from the log" if differences else "the replay is the same as the log")
    return 1 if differences else 0


def _verdict(differences: list[str]) -> str:
    if not differences:
        return "all the same"
    more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
    return f"DIFFERENT: {differences[0]}{more}"
