"""Opens the speculator that the settings ask for."""

import structlog

from pagewire.services.executor.devices.protocol import Device
from pagewire.services.executor.speculation.draft_model import DraftModel
from pagewire.services.executor.speculation.drafter import Drafter
from pagewire.services.executor.speculation.earlier_outputs import EarlierOutputs
from pagewire.services.executor.speculation.speculator import Speculator
from pagewire.services.executor.speculation.text_drafters import NgramDrafter, SuffixDrafter
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process import device_choice
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.speculation import SpeculativeConfig, speculation

_log = structlog.get_logger()


def open_speculator(settings: Settings, device: Device) -> Speculator | None:
    """Returns the speculator for a device; None: no tokens are drafted.

    Raises:
        ConfigurationError: a setting is malformed, or the device does not verify drafts.
    """
    config = speculation(device_choice.resolve(settings))
    if config is None:
        return None
    capacity = device.capacity
    if not capacity.max_drafts:
        if settings.spec_type == "auto" and not settings.speculative_config:
            return None
        raise ConfigurationError(
            f"device {settings.device} does not verify drafted tokens with this model: set spec-type to none"
        )
    most = min(config.tokens, capacity.max_drafts)
    _log.info("speculation", method=config.method, tokens=most)
    return Speculator(_drafter(config, device), most, capacity, ahead=device.depth > 1)


def _drafter(config: SpeculativeConfig, device: Device) -> Drafter:
    if device.draft_model is not None:
        return DraftModel(device.draft_model, device.capacity.vocab_size)
    if config.method == "ngram":
        return NgramDrafter(*config.lookup)
    outputs = config.suffix_decoding_max_cached_requests
    return SuffixDrafter(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
        EarlierOutputs(outputs) if outputs else None,
    )
