"""The metadata of one architecture in a GGUF file, as checked numbers."""

from collections.abc import Collection
from typing import Any, NoReturn

import numpy as np

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.reader import GgufModel, StoredTensor

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"


class Keys:
    """The metadata of one architecture. Keys leave out its name.

    Attributes:
        model: the file.
        architecture: its `general.architecture`.
    """

    def __init__(self, model: GgufModel, architecture: str, varying: Collection[str] = ()) -> None:
        """`varying` are keys that may have another number in each layer: `number` returns that of the first."""
        self.model, self.architecture = model, architecture
        self._varying = varying
        self._read: set[str] = set()

    def number(self, key: str, default: int | None = None) -> int:
        """Returns an integer. If the value is a list with one entry per layer, all entries must be equal."""
        value = self.find(key, default)
        if isinstance(value, np.ndarray) and value.size and (key in self._varying or (value == value[0]).all()):
            value = value[0].item()
        if isinstance(value, np.ndarray):
            raise ConfigurationError(f"{self.model.path} has layers that differ in {self._full(key)}: not supported")
        if type(value) is not int or value < 0:
            self._refuse(f"has no number {self._full(key)}")
        return value

    def real(self, key: str, default: float) -> float:
        """Returns a float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
        value = self.find(key, default)
        if type(value) not in {int, float}:
            self._refuse(f"has a {self._full(key)} that is no number")
        return float(str(np.float32(value)))

    def reals(self, key: str) -> list[float]:
        """Returns a list with one number per layer, or a number that all layers have."""
        value = self.find(key)
        numbers = value.tolist() if isinstance(value, np.ndarray) else [value] * self.layers
        if len(numbers) < self.layers or not all(type(number) in {int, float} for number in numbers):
            self._refuse(f"has no list {self._full(key)} with a number per layer")
        return [float(str(np.float32(number))) for number in numbers[: self.layers]]

    def flag(self, key: str, *, default: bool) -> bool:
        """Returns a boolean; `default` if there is none."""
        value = self.find(key, default)
        return value if isinstance(value, bool) else default

    def find(self, key: str, default: Any = None) -> Any:
        """Returns the value, which may be of any type."""
        self._read.add(key)
        return self.model.metadata.get(self._full(key), default)

    def unread(self) -> list[str]:
        """Returns the architecture's keys in the file that nobody has asked for."""
        prefix = self.architecture + "."
        keys = (key.removeprefix(prefix) for key in self.model.metadata if key.startswith(prefix))
        return sorted(key for key in keys if key not in self._read)

    @property
    def layers(self) -> int:
        """Number of layers, without those that predict further tokens."""
        count = self.number("block_count")
        if count > len(self.model.tensors):
            self._refuse(f"has {count} as {self._full('block_count')}, more layers than tensors")
        return count - self.number("nextn_predict_layers", 0)

    @property
    def head_size(self) -> int:
        """Features of a head of queries and keys."""
        heads = self.number("attention.head_count")
        if not heads:
            self._refuse(f"has 0 as {self._full('attention.head_count')}")
        return self.number("attention.key_length", self.number("embedding_length") // heads)

    def tensor(self, name: str, suffix: str = "weight") -> StoredTensor | None:
        """Returns the tensor of the first layer that has it, by its name in a layer; None if no layer has it."""
        names = (f"blk.{layer}.{name}.{suffix}" for layer in range(self.layers))
        return next((self.model.tensors[each] for each in names if each in self.model.tensors), None)

    @property
    def inner(self) -> int:
        """Inner features of the feed-forward layers, by their matrices, because some files have another number."""
        down = self.tensor("ffn_down")
        return self.number("feed_forward_length", 0) if down is None else down.shape[-1]

    def rows(self, name: str) -> int:
        """Returns the number of outputs of a layer's matrix, or of each expert's; 0 if there is none."""
        tensor = self.tensor(name)
        return 0 if tensor is None or len(tensor.shape) < 2 else tensor.shape[-2]

    def sliding(self, pattern: int = 0, window: int = 0) -> dict[str, Any]:
        """Returns the fields of config.json that say which layers have a window; without windows, none.

        Args:
            pattern: without a pattern in the file, each layer has a window but every `pattern`th; 0: the file must say.
            window: positions that such a layer sees, if the file does not say.
        """
        window = self.number("attention.sliding_window", window)
        stated = self.find("attention.sliding_window_pattern", pattern)
        if not window:
            return {"sliding_window": None}
        kinds: list[bool] = []
        if isinstance(stated, np.ndarray):
            kinds = [bool(kind) for kind in stated.tolist()][: self.layers]
        elif type(stated) is int and stated > 0:
            kinds = [layer % stated < stated - 1 for layer in range(self.layers)]
        if len(kinds) != self.layers:
            self._refuse(f"does not say which layers have a window of {window}")
        names = {True: "sliding_attention", False: "full_attention"}
        return {"sliding_window": window, "layer_types": [names[kind] for kind in kinds]}

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _refuse(self, reason: str) -> NoReturn:
        raise ConfigurationError(f"{self.model.path} {reason}: fetch the model again")
