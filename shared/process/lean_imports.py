"""Keeps a service from importing what its libraries import for others.

nats-py imports aiohttp for WebSockets and structlog imports rich for terminals wherever they are installed: together a
third of the start of every service but the executor.
"""

import sys

UNUSED = ("aiohttp", "rich")
"""Packages that are optional for the libraries, which go on without them."""


def leave_out_unused() -> None:
    """Lets imports of the unused packages fail in this process, as if they were not installed. To be called first."""
    sys.modules.update(dict.fromkeys(UNUSED))  # type: ignore[arg-type]  # None is what Python has for such a package
