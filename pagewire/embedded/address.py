"""Where a stack is reached."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """The URLs of a running stack."""

    nats: str
    """URL of the broker; several are separated by commas."""
    http: str
    """URL of the gateway; empty without one."""
