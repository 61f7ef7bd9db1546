"""`LLM` with adapters, as vLLM's documentation uses them."""

from pathlib import Path

import pytest

from pagewire import LLM, LoRARequest, SamplingParams
from pagewire.shared.errors import InvalidRequest
from tests.support.adapters import write_adapter
from tests.support.checkpoints import checkpoint


def test_each_prompt_has_the_adapter_that_is_asked_for(tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / name, checkpoint("llama"), seed=i) for i, name in enumerate("ab")]
    sampling_params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = ["The morning train", "Two children"]
    requests = [LoRARequest(folder.name, i + 1, str(folder)) for i, folder in enumerate(folders)]
    with LLM(model=str(checkpoint("llama")), enable_lora=True, max_loras=2, dtype="float32") as llm:
        plain = llm.generate(prompts, sampling_params)
        first, second = (llm.generate(prompts, sampling_params, lora_request=request) for request in requests)
        mixed = llm.generate(prompts * 2, sampling_params, lora_request=[requests[0], None, None, requests[1]])
        assert [output.prompt for output in first] == prompts
        texts = [[output.outputs[0].text for output in outputs] for outputs in (plain, first, second)]
        assert len({each for text in texts for each in text}) == 6
        expected = [texts[1][0], texts[0][1], texts[0][0], texts[2][1]]
        assert [output.outputs[0].text for output in mixed] == expected
        with pytest.raises(InvalidRequest, match="adapter c: there is no such folder"):
            llm.generate(prompts, sampling_params, lora_request=LoRARequest("c", 3, str(tmp_path / "missing")))
        with pytest.raises(InvalidRequest, match="2 prompts and 1 adapters"):
            llm.generate(prompts, sampling_params, lora_request=requests[:1])


def test_a_lora_request_needs_a_path_and_a_number() -> None:
    with pytest.raises(ValueError, match="lora_int_id must be at least 1"):
        LoRARequest("a", 0, "folder")
    with pytest.raises(ValueError, match="lora_path"):
        LoRARequest("a", 1)
