"""Runs a tiny GGUF file of an architecture on the device, and compares its tokens with those of transformers."""

from pathlib import Path

from pagewire.commands.models.supported_models import Family, Outcome
from pagewire.services.executor.models.registry import is_native
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.architectures import ARCHITECTURES, reason
from pagewire.shared.models.model_folder import read_config
from tests.families.gguf_files import TINY, write_tiny
from tests.families.sweep import cases
from tests.support.device import Driver

LENGTHS, TOKENS = (17, 30), 24


def equal_tokens(path: Path, architecture: str) -> int:
    """The number of greedy tokens, of 48, of a new file that equal those of `generate`."""
    expected = cases(write_tiny(path, architecture), LENGTHS, TOKENS)
    driver, equal = Driver(path), 0
    for slot, case in enumerate(expected):
        driver.add(slot, len(case.prompt) + TOKENS)
        tokens = driver.generate(slot, case.prompt, TOKENS, chunk=11)
        equal += sum(mine == theirs for mine, theirs in zip(tokens, case.tokens, strict=True))
    return equal


def try_architecture(architecture: str, folder: Path) -> Family:
    """The outcome of an architecture, whose file is written to `folder`."""
    if architecture not in ARCHITECTURES:
        return Family(architecture, "", Outcome.REFUSED, reason(architecture))
    path, name, total = folder / "model.gguf", ARCHITECTURES[architecture].name, len(LENGTHS) * TOKENS
    if architecture not in TINY:
        return Family(architecture, name, Outcome.CRASHED, "there is no tiny file of it")
    try:
        equal = equal_tokens(path, architecture)
        native = is_native(read_config(path))
    except ConfigurationError as error:
        return Family(architecture, name, Outcome.REFUSED, str(error))
    except Exception as error:  # noqa: BLE001  # a crash is a result
        return Family(architecture, name, Outcome.CRASHED, f"{type(error).__name__}: {error}".splitlines()[0])
    outcome = Outcome.WRONG if equal < total else Outcome.NATIVE if native else Outcome.EXACT
    return Family(architecture, name, outcome, f"{equal} of {total} tokens equal")
