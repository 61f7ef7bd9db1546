"""Pagewire serves large language models as a pipeline of small services over NATS."""

from pagewire.client import AsyncClient
from pagewire.llm import LLM
from pagewire.sync import Client
from shared import errors, logs
from shared.messages.client import SamplingParams

logs.quiet()

__all__ = ["LLM", "AsyncClient", "Client", "SamplingParams", "errors"]
