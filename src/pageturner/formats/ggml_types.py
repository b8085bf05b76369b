"""The GGML types by number and name, and how many bytes they take.

Standard library only, like all that the API process needs to open a file: importing numpy there would cost a
tenth of a second of every start.
"""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """One GGML type: its name and how many `values` one block of `nbytes` holds."""

    name: str
    values: int
    nbytes: int


# Type number in the file -> kind. Those nobody computes with are here to be measured and refused by name.
KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    9: Kind("Q8_1", 32, 40),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    15: Kind("Q8_K", 256, 292),
    16: Kind("IQ2_XXS", 256, 66),
    17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98),
    19: Kind("IQ1_S", 256, 50),
    20: Kind("IQ4_NL", 32, 18),
    21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82),
    23: Kind("IQ4_XS", 256, 136),
    24: Kind("I8", 1, 1),
    25: Kind("I16", 1, 2),
    26: Kind("I32", 1, 4),
    27: Kind("I64", 1, 8),
    28: Kind("F64", 1, 8),
    29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2),
    34: Kind("TQ1_0", 256, 54),
    35: Kind("TQ2_0", 256, 66),
    39: Kind("MXFP4", 32, 17),
}

# Kinds of ours, which no GGUF file has: what checkpoints of other formats are read as (see formats/ggml.py).
WIDE = (Kind("Q4_W", 32, 24), Kind("Q8_W", 32, 40), Kind("T4_W", 32, 36), Kind("F8_W", 32, 36))

BY_NAME = {kind.name: kind for kind in (*KINDS.values(), *WIDE)}
