"""Adapters for the class `LLM`, under vLLM's names."""

import msgspec


class LoRARequest(msgspec.Struct, frozen=True):
    """`llm.generate(prompts, params, lora_request=LoRARequest("sql", 1, "adapters/sql"))`. The fields are vLLM's."""

    lora_name: str
    """Name of the adapter."""
    lora_int_id: int
    """Number of the adapter, at least 1, which is not needed."""
    lora_path: str = ""
    """Folder that PEFT has saved, or .gguf file."""
    base_model_name: str | None = None
    """Without effect: `LLM` serves one model."""
    load_inplace: bool = False
    """Whether it is read again, and may take the name of another adapter."""

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, not {self.lora_int_id}")
        if not self.lora_path:
            raise ValueError("lora_path must be given")
