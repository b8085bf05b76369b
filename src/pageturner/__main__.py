"""`python -m pageturner`: the command line, where the program itself is not on PATH."""

import sys

from pageturner.cli import main

sys.exit(main())
