"""`python -m pagewire.services.gateway`."""

from pagewire.shared.process.lean_imports import leave_out_unused

leave_out_unused()

from pagewire.services.gateway.service import Gateway  # noqa: E402
from pagewire.shared.process.runtime import main  # noqa: E402

main("gateway", Gateway)
