"""Pagewire serves large language models as a pipeline of asyncio services over NATS."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagewire.async_llm import AsyncLLM
    from pagewire.client.async_client import AsyncClient
    from pagewire.client.sync import Client
    from pagewire.llm import LLM
    from pagewire.lora_request import LoRARequest
    from pagewire.shared import errors
    from pagewire.shared.chat.parser import read_message
    from pagewire.shared.messages.client import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncLLM",
    "Client",
    "LoRARequest",
    "SamplingParams",
    "StructuredOutputsParams",
    "errors",
    "read_message",
]

_MODULES = {
    "AsyncClient": "pagewire.client.async_client",
    "AsyncLLM": "pagewire.async_llm",
    "Client": "pagewire.client.sync",
    "LLM": "pagewire.llm",
    "LoRARequest": "pagewire.lora_request",
    "SamplingParams": "pagewire.shared.messages.client",
    "StructuredOutputsParams": "pagewire.shared.messages.client",
    "errors": "pagewire.shared",
    "read_message": "pagewire.shared.chat.parser",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, because every service imports this package and needs none of the names."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
