"""`python -m pagewire.services.gateway`."""

from pagewire.shared.process import lean_imports  # noqa: F401, I001  # first
from pagewire.services.gateway.service import Gateway
from pagewire.shared.process.runtime import main

main("gateway", Gateway)
