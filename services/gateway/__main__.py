"""`python -m services.gateway`."""

from services.gateway.service import Gateway
from shared.runtime import main

main("gateway", Gateway)
