"""`python -m pomona` is the same as `pomona`."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
