"""The GGML types by number and name, and how many bytes they take.

Standard library only, like all that the API process needs to open a file: importing numpy there
would cost a tenth of a second of every start.
"""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """One GGML type: its name and how many `values` one block of `nbytes` holds."""

    name: str
    values: int
    nbytes: int


# Number in GGUF files, name, values in a block, bytes of a block. Kinds without a kernel are here
# to be measured and refused by name.
_IN_FILES = """
     0  F32        1    4
     1  F16        1    2
     2  Q4_0      32   18
     3  Q4_1      32   20
     6  Q5_0      32   22
     7  Q5_1      32   24
     8  Q8_0      32   34
     9  Q8_1      32   40
    10  Q2_K     256   84
    11  Q3_K     256  110
    12  Q4_K     256  144
    13  Q5_K     256  176
    14  Q6_K     256  210
    15  Q8_K     256  292
    16  IQ2_XXS  256   66
    17  IQ2_XS   256   74
    18  IQ3_XXS  256   98
    19  IQ1_S    256   50
    20  IQ4_NL    32   18
    21  IQ3_S    256  110
    22  IQ2_S    256   82
    23  IQ4_XS   256  136
    24  I8         1    1
    25  I16        1    2
    26  I32        1    4
    27  I64        1    8
    28  F64        1    8
    29  IQ1_M    256   56
    30  BF16       1    2
    34  TQ1_0    256   54
    35  TQ2_0    256   66
    39  MXFP4     32   17
    40  NVFP4     64   36
    41  Q1_0     128   18
    42  Q2_0      64   18
"""
KINDS = {
    int(number): Kind(name, int(values), int(nbytes))
    for number, name, values, nbytes in map(str.split, _IN_FILES.strip().splitlines())
}

# Kinds of ours, which no GGUF file has: what checkpoints of other formats are read as (see
# formats/ggml.py).
WIDE = (Kind("Q4_W", 32, 24), Kind("Q8_W", 32, 40), Kind("T4_W", 32, 36), Kind("F8_W", 32, 36))

BY_NAME = {kind.name: kind for kind in (*KINDS.values(), *WIDE)}
