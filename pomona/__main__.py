"""`python -m pomona` is the same as `pomona`."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.argv[0] = "pomona"  # the command that a run writes down
    sys.exit(main())
