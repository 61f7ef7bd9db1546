"""The results of a sweep over every family of `transformers` that generates text, by `tests/families`."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import msgspec

FILE = Path(__file__).with_suffix(".json")


class Outcome(Enum):
    """The result of a family in the sweep."""

    NATIVE = "native"
    """Exact, by a file of its own."""
    EXACT = "exact"
    """Exact, built by transformers."""
    REFUSED = "refused"
    """Refused with a line that says why."""
    WRONG = "wrong"
    """Served, with other tokens than those of transformers."""
    CRASHED = "crashed"
    """Ended by an error that is no refusal."""


class Family(msgspec.Struct, frozen=True):
    """The result of one family."""

    model_type: str
    """Name of the family in config.json, or of the architecture in GGUF files."""
    architecture: str
    """Name of its class in transformers; empty if it has none."""
    outcome: Outcome
    detail: str
    """The outputs that were compared, or the reason of a refusal."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The result of one vocabulary of llama.cpp's sources."""

    name: str
    kind: str
    """`tokenizer.ggml.model` and `tokenizer.ggml.pre` of its file."""
    outcome: Outcome
    detail: str
    """The number of texts whose ids were compared, or the reason of a refusal."""


class Sweep(msgspec.Struct, frozen=True):
    """The results of all families."""

    transformers: str
    """Version of transformers."""
    families: tuple[Family, ...]
    gguf: str = ""
    """Version of the package `gguf`."""
    architectures: tuple[Family, ...] = ()
    """The results of all architectures of GGUF files that the package knows."""
    vocabularies: tuple[Vocabulary, ...] = ()
    """The results of the vocabularies of llama.cpp's sources."""

    def count(self, *outcomes: Outcome) -> int:
        """Returns the number of families with one of these outcomes."""
        return _count(self.families, *outcomes)

    def count_architectures(self, *outcomes: Outcome) -> int:
        """Returns the number of architectures of GGUF files with one of these outcomes."""
        return _count(self.architectures, *outcomes)


def _count(results: tuple[Family, ...], *outcomes: Outcome) -> int:
    return sum(family.outcome in outcomes for family in results)


def read() -> Sweep:
    """Returns the last sweep."""
    return msgspec.json.decode(FILE.read_bytes(), type=Sweep)


def write(sweep: Sweep) -> None:
    """Replaces the last sweep."""
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(sweep), indent=1) + b"\n")


def summary(sweep: Sweep) -> str:
    """Returns one line with the numbers of outcomes."""
    return f"{len(sweep.families)} families of transformers {sweep.transformers}: {_outcomes(sweep.families)}"


def summary_of_architectures(sweep: Sweep) -> str:
    """Returns one line with the numbers of outcomes of GGUF files."""
    return f"{len(sweep.architectures)} architectures of gguf {sweep.gguf}: {_outcomes(sweep.architectures)}"


def _outcomes(results: tuple[Family, ...]) -> str:
    exact = _count(results, Outcome.NATIVE, Outcome.EXACT)
    others = (f"{_count(results, kind)} {kind.value}" for kind in (Outcome.REFUSED, Outcome.WRONG, Outcome.CRASHED))
    return ", ".join((f"{exact} exact", *others))


def page(sweep: Sweep) -> str:
    """Returns `docs/models.md`."""
    return "\n".join(
        (
            _HEAD.format(summary=summary(sweep)),
            _QUANTIZED,
            *_tables(sweep.families, "model_type", "Served", "Refused"),
            _GGUF.format(summary=summary_of_architectures(sweep)),
            *_tables(sweep.architectures, "architecture", "Served as GGUF", "Refused as GGUF"),
            _VOCABULARIES,
            *(f"| {each.name} | {each.kind} | {each.detail} |" for each in sweep.vocabularies),
            "",
        )
    )


def _tables(results: tuple[Family, ...], kind: str, served: str, refused: str) -> Iterator[str]:
    """Yields the lines of a table of what is served, and of one of what is refused."""
    yield from (f"## {served}\n", f"| {kind} | class | by | what was compared |", "|---|---|---|---|")
    for family in results:
        if family.outcome in {Outcome.NATIVE, Outcome.EXACT}:
            by = "Pagewire" if family.outcome is Outcome.NATIVE else "transformers"
            yield f"| {family.model_type} | {family.architecture} | {by} | {_cell(family)} |"
    yield from ("", f"## {refused}\n", f"| {kind} | why |", "|---|---|")
    for family in results:
        if family.outcome is Outcome.REFUSED:
            yield f"| {family.model_type} | {_cell(family)} |"
    yield ""


def _cell(family: Family) -> str:
    return family.detail.replace("|", "\\|")


_HEAD = """# Models

{summary}. `make models` repeats the sweep and writes this page; `pagewire models --supported` prints it.

A family with a file in `services/executor/models` runs on Pagewire's own layers. Any other decoder is built by
transformers, with Pagewire's paged attention in its layers: chunked prompts, the prefix cache, preemption, forks and
beam search work the same. What keeps other state than keys and values, or attends otherwise than once per layer, is
refused before its weights are read. What passes is compared at start with the model's own attention on a short random
text, and refused if the two differ by more than rounding. Models with code of their own (`trust_remote_code`) are not
run, and longrope is exact up to the length that the model was first trained for. Layers with a sliding window or with
chunks give back the KV blocks that they have left behind, where all layers have keys and values of one shape
([architecture](architecture.md#blocks-of-layers-with-windows)).

A model that transformers has built is then looked at: what its norms, activations and rotations compute, by trying
them on numbers. If its layers are those of `services/executor/models/decoder.py`, and that decoder with the same
weights passes the same comparison, also at the last positions of the context, the model runs on Pagewire's own layers
too, at their speed. `self_test` in the log says `own_layers=True` then. Weights are shared meanwhile, not copied.
`pagewire bench cpu_step --against transformers --families …` compares native families with themselves by transformers.

A model that also takes images or sound (`text_config` in config.json, such as Gemma 3, Mistral Small 3.1, Llava,
Idefics 3, InternVL, Qwen 2.5 VL and Qwen 3 VL) serves text by its decoder, natively where the decoder is; the other
weights are not read. Images are refused. A decoder that reads prompts in both directions (PaliGemma) is refused.

`--load-format dummy` serves a `config.json` with random weights. `--tokenizer` takes the tokenizer of another folder.

## A native family

Its file turns config.json into a `DecoderSpec` (`spec.py`): sizes, what is normalised and how, rotations and windows
per layer, experts, and how the checkpoint stores and names the matrices. From that come the layers in PyTorch, the
fused C++ decoder on a CPU and the Triton kernels on a GPU.

1. Compare the family's file in transformers with the fields of `DecoderSpec`. Most files of `families/` differ from
   `llama.py`, `sliding.py` or `mistral.py` in a few values: derive from these, as `olmo.py` does. If a field is
   missing, the family needs code in `decoder.py`, `kernels/cpu/cpp/decoder.cpp` and `devices/cuda/fused_layers.py`;
   consider leaving it to transformers.
2. Give config.json's fields the defaults of transformers: published files leave them out.
3. Add its architecture to `FAMILIES` in `registry.py` and to `NATIVE` in `native_families.py`, and a tiny checkpoint
   with unusual values to `tests/support/checkpoints.py`: `pytest tests/services/executor/models/test_families.py`
   compares logits and tokens.
4. `python -m tests.families MODEL_TYPE` serves it by the whole pipeline and writes its row of this page.

In the sweep each family is a tiny model with random float32 weights. 8 prompts of mixed lengths, two of which share a
beginning, are served at once by the whole pipeline with steps of 16 tokens and a KV pool that is too small for them, so
that prompts are chunked and sequences preempted. All 40 greedy tokens of each must be those of `generate`.
"""

_QUANTIZED = """## Quantized checkpoints

The `quantization_config` of config.json names the format; GGUF files name theirs themselves. Every format gives the
weights that its own tool gives, to the bit, in every family. A checkpoint with a missing tensor, another shape or an
unknown setting is refused before its weights are read.

| `quant_method` | what is read |
|---|---|
| `gptq` | 2, 3, 4 and 8 bits, any group size, `desc_act`, the formats `gptq` and `gptq_v2`, `dynamic` |
| `awq` | 4 bits, any group size, version `gemm` |
| `compressed-tensors` | `int-quantized` and `naive-quantized` (int8), `pack-quantized` (2 to 8 bits) |
| | `float-quantized` (fp8), `nvfp4-pack-quantized`, `mxfp4-pack-quantized`, and mixtures of all of these |
| `fp8`, `fbgemm_fp8` | a scale per tensor, per output or per block (`weight_scale_inv`) |
| `mxfp4` | experts as gpt-oss stores them |
| `modelopt` | `NVFP4` and `FP8`, also with the settings in `hf_quant_config.json` |

In native families, integers stay packed on a CPU ([cpu.md](cpu.md)), integers and fp8 on a GPU ([gpu.md](gpu.md)).
Otherwise weights are dequantized to the model's dtype when they are loaded, and the log says so. The scales of
activations and of KV caches in such files are not used. Sparse weights, transforms of weights and bitsandbytes are
refused: use the unquantized model, or a format of the table.
"""

_GGUF = """## GGUF

{summary}. `python -m tests.families --gguf` repeats this sweep.

A file's architecture becomes a family of transformers and its config.json (`shared/models/gguf/architectures.py`), and
the package `gguf` names its tensors. So it runs as that family does, natively or by transformers. Each was compared in
float32: a tiny random model of transformers is written by the package's writer as llama.cpp's converter would write it,
and all greedy tokens must be those of `generate`. A file with a tensor that its family has no use for is refused.

Tensors of any type that the package can unpack are read. `Q2_K` to `Q8_0`, `IQ3_S`, `IQ4_NL`, `IQ4_XS`, `MXFP4`,
`NVFP4`, `TQ1_0` and `TQ2_0` stay integers of 4 to 8 bits in native families on a CPU, without loss. The other `IQ`
types are unpacked to the model's dtype when they are loaded, and the log says so.
"""

_VOCABULARIES = """## Vocabularies of GGUF files

llama.cpp's sources hold vocabularies, each with texts (`.inp`) and the ids that llama.cpp gives them (`.out`).
`python -m tests.families.gguf_vocabularies FOLDER` compares all ids of all texts and writes this table.

| vocabulary | kind | ids |
|---|---|---|"""
