"""Patterns of adapter_config.json: what they match, and how often that is looked for."""

import json
from typing import Any

import pytest
import regex

from pagewire.services.executor.adapters import patterns
from pagewire.services.executor.adapters.peft_config import PeftConfig, read_config
from pagewire.shared.errors import ConfigurationError

MODULES = [f"model.layers.{layer}.self_attn.{name}" for layer in range(12) for name in ("q_proj", "k_proj")]


def config(**fields: Any) -> PeftConfig:
    return read_config(json.dumps({"peft_type": "LORA", "r": 2} | fields).encode(), ())


@pytest.mark.parametrize(
    ("pattern", "ranks"),
    [
        ({"q_proj": 4}, {"0.self_attn.q_proj": 4, "0.self_attn.k_proj": 2}),
        ({"self_attn.q_proj": 4, "proj": 8}, {"0.self_attn.q_proj": 4, "0.self_attn.k_proj": 2}),
        ({"model.layers.1.self_attn.q_proj": 4}, {"1.self_attn.q_proj": 4, "11.self_attn.q_proj": 2}),
        ({"[qk]_proj": 4, "q_proj": 8}, {"0.self_attn.q_proj": 4, "0.self_attn.k_proj": 4}),
        ({"q_proj": 8, "[qk]_proj": 4}, {"0.self_attn.q_proj": 8, "0.self_attn.k_proj": 4}),
        (
            {r"layers\.1.*": 4, "q_proj": 8},
            {"1.self_attn.q_proj": 4, "11.self_attn.k_proj": 4, "2.self_attn.q_proj": 8},
        ),
        ({r"^model\.layers\.1\..*": 4}, {"1.self_attn.q_proj": 4, "11.self_attn.q_proj": 2}),
    ],
)
def test_the_first_key_that_matches_the_end_of_a_name_counts(pattern: dict[str, int], ranks: dict[str, int]) -> None:
    read = config(rank_pattern=pattern)
    assert {end: read.rank(f"model.layers.{end}") for end in ranks} == ranks


@pytest.mark.parametrize("layers", [0, [0, 3]])
def test_layers_are_named_by_number_or_list(layers: int | list[int]) -> None:
    read = config(target_modules=["q_proj"], layers_to_transform=layers)
    named = [0] if layers == 0 else [0, 3]
    assert [module for module in MODULES if read.adapts(module)] == [
        f"model.layers.{layer}.self_attn.q_proj" for layer in named
    ]


def test_each_expression_is_compiled_once_and_no_name_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def recorded(name: str) -> Any:
        function = getattr(regex, name)

        def call(expression: str, *arguments: Any, **options: Any) -> Any:
            compiled.append(expression)
            return function(expression, *arguments, **options)

        return call

    for name in ("compile", "match", "fullmatch"):
        monkeypatch.setattr(regex, name, recorded(name))
    names = {f"layers.{layer}.mlp.up_proj": 4 for layer in range(20_000)}
    expressions = {f"x{number}|y": 4 for number in range(600)}
    fields: dict[str, Any] = {"rank_pattern": names | expressions, "alpha_pattern": names}
    read = config(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern=["a", "layers"], **fields)
    for module in MODULES:
        assert read.scale(module) == 4.0
        assert read.adapts(module) == module.endswith("layers.1.self_attn.q_proj")
    assert len(compiled) == len(set(compiled)) == len(expressions) + 2


def test_expressions_that_together_take_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "TOTAL_SECONDS", 0.0)
    with pytest.raises(ConfigurationError, match="patterns that together take too long: simplify them"):
        config(rank_pattern={"[qk]_proj": 4}).rank(MODULES[0])
    assert config(rank_pattern={"q_proj": 4}).rank(MODULES[0]) == 4
