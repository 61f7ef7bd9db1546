"""`python -m pagewire.services.gateway`."""

from pagewire.services.gateway.service import Gateway
from pagewire.shared.process.runtime import main

main("gateway", Gateway)
