"""Give each prompt an adapter (LoRA), without a running stack: python examples/adapters_offline.py MODEL ADAPTER ...

MODEL and each ADAPTER are folders. With `vllm` in place of `pagewire`, and `LoRARequest` from `vllm.lora.request`, the
script runs there.
"""

import sys

from pagewire import LLM, LoRARequest, SamplingParams

PROMPTS = ["Once upon a time", "The house by the sea"]


def main() -> None:
    """Prints the text of the model alone for each prompt, then that of each adapter."""
    model, *folders = sys.argv[1:]
    llm = LLM(model=model, enable_lora=True, max_loras=len(folders), max_lora_rank=16)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=16)
    adapters = [LoRARequest(f"adapter-{i}", i, folder) for i, folder in enumerate(folders, 1)]
    for adapter in [None, *adapters]:
        outputs = llm.generate(PROMPTS, sampling_params, lora_request=adapter)
        for output in outputs:
            print(f"{adapter.lora_name if adapter else 'alone'}: {output.prompt!r} goes on: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
