"""The clients of a running stack, which send requests over NATS."""

from pagewire.shared.telemetry import logs

logs.quiet()
