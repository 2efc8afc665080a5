"""Runs the command line as `python -m treeshard`."""

import sys

from treeshard._cli import main

if __name__ == "__main__":
    sys.exit(main())
