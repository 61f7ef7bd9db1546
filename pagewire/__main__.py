"""`python -m pagewire`: the same as the command `pagewire`."""

import sys

from pagewire.cli import main

sys.exit(main())
