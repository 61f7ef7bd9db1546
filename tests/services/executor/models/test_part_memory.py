"""A rank reads and keeps its part of the weights alone."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagewire.services.executor.models.quantized.cut_files import CutFiles
from pagewire.services.executor.models.registry import build_model
from pagewire.services.executor.models.shard import Shard
from pagewire.services.executor.models.weights import places_of
from pagewire.shared.models.model_folder import read_config
from tests.support.checkpoints import checkpoint
from tests.support.ranks import load_rank, without_collectives

RANKS = 4
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 4,
}

_LOAD = """
import sys, threading
from pathlib import Path
import torch
from pagewire.services.executor.models.registry import load_model
from pagewire.services.executor.models.shard import Shard
from pagewire.shared.models.model_folder import read_config
from tests.support.checkpoints import checkpoint
from tests.support.ranks import without_collectives

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def load(folder):
    shard, none = Shard(1, int(sys.argv[2])), without_collectives()
    return load_model(folder, read_config(folder), "bfloat16", None, None, shard, none)

load(checkpoint("llama"))
before = most = anonymous()
done = threading.Event()
def watch():
    global most
    while not done.is_set():
        most = max(most, anonymous())
        done.wait(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
model = load(Path(sys.argv[1]))
done.set()
watcher.join()
weights = sum(value.nbytes for value in model.parameters())
print(weights, max(most, anonymous()) - before)
"""


def test_a_rank_takes_its_share_of_the_memory_while_it_loads(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    (folder / "config.json").write_text(json.dumps(read_config(folder) | SIZES))
    tensors = {
        name: torch.full(place.stored.shape, 0.5, dtype=torch.bfloat16)
        for name, place in places_of(build_model(read_config(folder)))
    }
    whole = sum(tensor.nbytes for tensor in tensors.values())
    save_file(tensors, folder / "model.safetensors")
    arguments = [sys.executable, "-c", _LOAD, str(folder), str(RANKS)]
    output = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    weights, taken = map(int, output.split()[-2:])
    assert weights <= whole * (1 / RANKS + 0.001)
    assert taken <= whole * (1 / RANKS + 0.05), f"{taken / whole:.3f} of the weights"


def test_a_rank_reads_its_own_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    plain = CutFiles.tensor

    def counted(files: CutFiles, name: str) -> Tensor:
        tensor = plain(files, name)
        taken.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(CutFiles, "tensor", counted)
    part = load_rank(checkpoint("qwen2-moe"), Shard(1, 2), without_collectives())
    assert sum(taken) == sum(value.nbytes for value in part.parameters())
