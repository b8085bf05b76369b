"""Faults on request, so that what contains them can be tested: `SamplingParams.inject_fault`.

Owns what each fault does. Must not know who contains it. A server takes the field with --developer
only.
"""

from __future__ import annotations

import os
import signal
import time

from pageturner.scheduler.types import Sequence


class InjectedFault(Exception):
    """The exception that the fault `exception` raises."""


def inject(sequence: Sequence) -> bool:
    """Bring about the fault of this sequence if its token is the next one: "KIND@N", N from 1. True
    if its logits are to be NaN. A fault comes again whenever that token is computed again, in a new
    engine too."""
    kind, _, place = (sequence.request.params.inject_fault or "").partition("@")
    if not kind or sequence.generated + 1 != int(place):
        return False
    match kind:
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            while True:
                time.sleep(60.0)
        case "exception":
            raise InjectedFault
    return kind == "nan"
