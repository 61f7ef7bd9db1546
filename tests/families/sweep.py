"""Serves a tiny model of a family by the whole pipeline, and compares its tokens with those of `generate`."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagewire import SamplingParams
from pagewire.commands.models.supported_models import Family, Outcome
from pagewire.services.executor.models.registry import is_native, load_model
from pagewire.services.executor.models.transformers_backend.loading import examine, parse_config
from pagewire.shared.block_tables import LOOKAHEAD_STEPS, blocks_of
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from pagewire.shared.models.text_config import text_part
from pagewire.shared.settings.config import Settings
from tests.families.tiny import PUBLISHED, tiny_config, tiny_model
from tests.support.checkpoints import VOCABULARY, tokenizer
from tests.support.pipeline import running

LENGTHS = (3, 9, 17, 26, 33, 33, 40, 21)
SHARED = 24
"""Tokens that the prompts of 33 tokens begin with together."""
TOKENS = 40
GAP = 1e-3
"""Two best logits closer than this could change places by rounding: such a prompt is replaced by another."""
ATTEMPTS = 20
ROUNDS = 3
"""Most times that the requests are sent together."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "log_level": "error",
}


class Case(NamedTuple):
    """A prompt and its greedy continuation."""

    prompt: list[int]
    tokens: list[int]


def cases(model: PreTrainedModel, lengths: tuple[int, ...], tokens: int) -> list[Case]:
    """Random prompts with what transformers makes of them."""
    ids = random.Random(model.config.model_type)
    collected: list[Case] = []
    for i, length in enumerate(lengths):
        for _ in range(ATTEMPTS):
            shared = collected[-1].prompt[:SHARED] if i and lengths[i - 1] == length else []
            prompt = shared + [ids.randrange(2, VOCABULARY) for _ in range(length - len(shared))]
            generated, gap = _generate(model, prompt, tokens)
            if gap >= GAP:
                break
        collected.append(Case(prompt, generated))
    return collected


def _generate(model: PreTrainedModel, prompt: list[int], tokens: int) -> tuple[list[int], float]:
    with torch.inference_mode():
        generated = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=None,
            eos_token_id=-1,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.cat(generated.logits).topk(2).values
    return generated.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def architecture_of(family: str) -> str:
    """The class that config.json names."""
    return PUBLISHED.get(family) or str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])


def built(family: str) -> PretrainedConfig:
    """The tiny configuration of a family.

    Raises:
        ConfigurationError: there is none, and the default one is refused.
    """
    try:
        return tiny_config(family)
    except Exception as error:
        try:
            examine(AutoConfig.for_model(family))
        except ConfigurationError:
            raise
        except Exception as cause:
            raise ConfigurationError(f"transformers cannot build its default configuration ({cause})") from cause
        raise AssertionError(f"no tiny model: {error}") from error


def save(config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    """Writes a checkpoint of random weights and returns its model."""
    return save_model(tiny_model(config), folder)


def save_model(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Writes a checkpoint of a model and returns the model."""
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(folder)
    file = folder / "config.json"
    saved = json.loads(file.read_text()) | {"architectures": [architecture_of(model.config.model_type)]}
    file.write_text(json.dumps(saved))
    tokenizer().save_pretrained(folder)
    return model


def try_family(family: str, folder: Path) -> Family:
    """The outcome of a family, whose checkpoint is written to `folder`."""
    architecture = architecture_of(family)
    try:
        config = built(family)
        config.architectures = [architecture]
        text = text_part(config.to_dict())
        native = is_native(text)
        if not native:
            examine(parse_config(text))
        expected = cases(save(config, folder), LENGTHS, TOKENS)
        windows = load_model(folder, read_config(folder), "float32").spec.groups.windows
        grows = 0 in windows  # a sequence whose layers all have windows never needs more than at first
        tokens, preemptions, cached = asyncio.run(_serve(folder, expected, _small_pool(windows), grows=grows))
    except ConfigurationError as error:
        return Family(family, architecture, Outcome.REFUSED, _line(error, family))
    except Exception as error:  # noqa: BLE001  # a crash is a result
        return Family(family, architecture, Outcome.CRASHED, f"{type(error).__name__}: {_line(error, family)}")
    equal = sum(
        mine == theirs
        for case, generated in zip(expected, tokens, strict=True)
        for mine, theirs in zip(case.tokens, generated, strict=True)
    )
    total = len(expected) * TOKENS
    detail = f"{equal} of {total} tokens equal, {preemptions} preemptions, {cached} cached prompt tokens"
    if equal < total or not cached or (grows and not preemptions):
        return Family(family, architecture, Outcome.WRONG, detail)
    return Family(family, architecture, Outcome.NATIVE if native else Outcome.EXACT, detail)


def _small_pool(windows: tuple[int, ...]) -> int:
    """The number of blocks that are too few for all cases at once, though each of them fits."""
    size, ahead = SETTINGS["block_size"], LOOKAHEAD_STEPS * SETTINGS["max_num_batched_tokens"]
    return 6 + blocks_of(SETTINGS["max_model_len"] // size, windows, ahead, size) if any(windows) else 30


async def _serve(
    folder: Path, expected: list[Case], num_kv_blocks: int, *, grows: bool
) -> tuple[list[list[int]], int, int]:
    """The tokens of the pipeline, its preemptions and the prompt tokens that it did not compute.

    When the requests arrive decides what is preempted and what can be shared, so they are repeated until there was
    both, and at last sent one after the other, so that the second of two prompts finds the blocks of the first.
    Without `grows` nothing is ever preempted.
    """
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    preemptions = cached = 0
    try:
        async with running(Settings(model=str(folder), num_kv_blocks=num_kv_blocks, **SETTINGS)) as pipeline:
            for together in [True] * ROUNDS + [False]:
                answers = [pipeline.client.generate(case.prompt, sampling) for case in expected]
                results = await asyncio.gather(*answers) if together else [await answer for answer in answers]
                await pipeline.until_idle()
                tokens = [result.choices[0].token_ids for result in results]
                preemptions = int(pipeline.load("scheduler")["preemptions"])
                cached += sum(result.usage.cached_tokens for result in results)
                if (cached and (preemptions or not grows)) or tokens != [case.tokens for case in expected]:
                    break
    except BaseExceptionGroup as group:
        raise _leaf(group) from group
    return tokens, preemptions, cached


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _line(error: BaseException, family: str) -> str:
    text = str(error).removeprefix(f"model_type {family} is not supported: ").strip()
    return text.splitlines()[0] if text else type(error).__name__
