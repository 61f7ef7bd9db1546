"""Writes a checkpoint as a Hugging Face folder."""

import argparse
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.bundled_model.llama import Llama, Shape
from tools.bundled_model.measure import load_exported
from tools.bundled_model.vocabulary import EOS, end_of_text


def export(args: argparse.Namespace) -> None:
    """Writes the checkpoint as a Hugging Face folder and checks it against the trained model."""
    run, out = Path(args.run_dir), Path(args.out)
    saved = torch.load(run / "checkpoint.pt", weights_only=True, map_location="cpu")
    shape = Shape(**saved["shape"])
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in saved["model"].items()}
    tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    eos = end_of_text(tokenizer)

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
        "initializer_range": 0.02,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder)
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        write_json(target / "config.json", config)
        write_json(target / "generation_config.json", {"eos_token_id": eos, "do_sample": False})
        tokenizer.save(str(target / "tokenizer.json"))
        write_json(
            target / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "add_bos_token": False,
                "bos_token": None,
                "eos_token": EOS,
                "unk_token": None,
                "pad_token": None,
                "clean_up_tokenization_spaces": False,
                "model_max_length": shape.max_position_embeddings,
            },
        )

        mine = Llama(shape).eval()
        mine.load_state_dict({name: weight.float() for name, weight in weights.items()})
        theirs, _ = load_exported(target)
        ids = torch.randint(0, shape.vocab_size, (2, shape.max_position_embeddings))
        with torch.no_grad():
            difference = float((mine(ids) - theirs(ids).logits).abs().max())
        print(f"largest difference to the logits of transformers: {difference:.2e}")
        if difference > 1e-4:
            raise SystemExit("the exported model differs from the trained one")

        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(target.iterdir()):
            temporary = out / f".{path.name}.tmp"
            shutil.copyfile(path, temporary)
            os.replace(temporary, out / path.name)
    print(f"step {saved['step']} ({saved['seconds']:.0f} s of training) written to {out}")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
