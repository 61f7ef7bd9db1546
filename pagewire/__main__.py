"""`python -m pagewire` runs the command `pagewire`."""

import sys

from pagewire.cli import main

sys.exit(main())
