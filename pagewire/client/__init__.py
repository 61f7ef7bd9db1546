"""The clients of a running stack: requests over NATS, streams of frames back."""

from pagewire.shared import logs

logs.quiet()
