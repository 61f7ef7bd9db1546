"""Keeps a service from importing what its libraries import for others. It is imported before these libraries.

nats-py imports aiohttp for WebSockets and structlog imports rich for terminals wherever they are installed: together a
third of the start of every service but the executor.
"""

import sys

UNUSED = ("aiohttp", "rich")
"""Packages that are optional for the libraries, which go on without them."""

sys.modules.update(dict.fromkeys(UNUSED))  # type: ignore[arg-type]  # None: the import fails, as if it were not installed
