from pathlib import Path

import numpy as np

from pagewire.services.executor.models.gguf.tensors import dequantize
from pagewire.shared.models.gguf.reader import GgufModel, StoredTensor
from pagewire.shared.models.model_folder import read_config
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tools.experiments.other_servers.packed_experts import SPREAD, WIDTH, write_model


def _spread(tensor: StoredTensor) -> float:
    size = 64 * tensor.row_bytes
    blocks = np.fromfile(tensor.file, np.uint8, size, offset=tensor.offset).reshape(64, -1)
    return float(dequantize(blocks, tensor.type).std())


def test_the_file_is_a_packed_mixture_whose_weights_have_one_spread(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_model(file, layers=2, experts=16)
    config = read_config(file)
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_experts"], config["num_experts_per_tok"], config["hidden_size"]) == (16, 8, WIDTH)
    tensors = GgufModel.open(file).tensors
    assert tensors["blk.1.ffn_down_exps.weight"].type.name == "Q6_K"
    assert tensors["blk.1.ffn_up_exps.weight"].type.name == "Q4_K"
    matrices = [tensor for tensor in tensors.values() if len(tensor.shape) > 1 and tensor.type.name != "F32"]
    assert all(0.8 * SPREAD < _spread(tensor) < 1.2 * SPREAD for tensor in matrices)
    backend = load_tokenizer(file).backend
    assert backend.decode(backend.encode("a b").ids) == "a b"
