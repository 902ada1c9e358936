"""``python -m autoptd``: the command line."""

import sys

from autoptd.cli.main import main

sys.exit(main())
