"""``python -m autoptd``: the command line."""

from __future__ import annotations

import sys

from autoptd.cli.main import main

sys.exit(main())
