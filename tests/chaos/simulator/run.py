"""What the programs on PATH start: `run.py PROGRAM ARGUMENTS...`; small, since it alone is compiled at every call."""

import sys

from programs import main

main(sys.argv[1], sys.argv[2:])
