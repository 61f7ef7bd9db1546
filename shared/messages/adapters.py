"""Adapters: the record of a name, which the broker keeps, and the requests that change it."""

import msgspec

from pagewire.shared.messages.codec import Wire


class AdapterRecord(Wire, frozen=True):
    """The adapter that has a name."""

    name: str
    """Name in requests."""
    digest: str
    """Hash of its content; empty: it was removed."""
    configured: str = ""
    """Hash of the content that `--lora-modules` gave the name last; empty: it never did."""


class LoadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to `pagewire.v1.adapters.load.<model>`. The fields are vLLM's."""

    lora_name: str
    """Name of the adapter in requests."""
    lora_path: str
    """Folder or .gguf file on the machine of the executors."""
    load_inplace: bool = False
    """Whether it replaces an adapter of that name."""
    is_3d_lora_weight: bool = False
    """vLLM's field for the layout of experts, which adapters here do not change."""


class UnloadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to `pagewire.v1.adapters.unload.<model>`. The fields are vLLM's."""

    lora_name: str
    """Name of the adapter in requests."""
    lora_int_id: int | None = None
    """vLLM's number of the adapter, which is not needed."""


class AdapterReply(msgspec.Struct):
    """Reply to both requests."""

    lora_name: str
    digest: str
    """Hash of the content that was loaded or removed."""
