"""NaN in a model's weights ends the requests that meet it with an error, and no other request."""

import asyncio
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pagewire import SamplingParams
from pagewire.shared.errors import Internal
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.pipeline import running

pytestmark = pytest.mark.anyio

BROKEN = 300
"""The token whose embedding is NaN."""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def test_only_requests_with_logits_that_are_not_finite_fail(broken: Path) -> None:
    settings = Settings(model=str(broken), dtype="float32", num_kv_blocks=24, log_level="error")
    prompts = [[5 + i] * (4 + 3 * i) for i in range(3)]
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    async with running(settings) as pipeline:
        client = pipeline.client
        expected = [(await client.generate(prompt, greedy)).choices[0].token_ids for prompt in prompts]
        assert not any(BROKEN in tokens for tokens in expected), "the model picks the broken token: mark another"
        others = [asyncio.create_task(client.generate(prompt, greedy)) for prompt in prompts]
        for fields in (
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 1.0, "top_p": 0.9, "n": 2},
            {"beam_width": 2},
        ):
            with pytest.raises(Internal, match="NaN"):
                await client.generate([7, BROKEN, *[7] * 30], max_tokens=5, **fields)
        assert [(await other).choices[0].token_ids for other in others] == expected
        assert [(await client.generate(prompt, greedy)).choices[0].token_ids for prompt in prompts] == expected
        await pipeline.until_idle()
