"""Opens the speculator that the settings ask for."""

import structlog

from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.speculation.drafters import Drafter, NgramDrafter, SuffixDrafter
from pagewire.services.executor.speculation.speculator import Speculator
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process import device_choice
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.speculation import SpeculativeConfig, speculation

_log = structlog.get_logger()


def open_speculator(settings: Settings, capacity: Capacity) -> Speculator | None:
    """Returns the speculator for a device; None: no tokens are drafted.

    Raises:
        ConfigurationError: a setting is malformed, or the device does not verify drafts.
    """
    config = speculation(device_choice.resolve(settings))
    if config is None:
        return None
    if not capacity.max_drafts:
        if settings.spec_type == "auto" and not settings.speculative_config:
            return None
        raise ConfigurationError(
            f"device {settings.device} does not verify drafted tokens with this model: set spec-type to none"
        )
    most = min(config.tokens, capacity.max_drafts)
    _log.info("speculation", method=config.method, tokens=most)
    return Speculator(_drafter(config), most, capacity.max_num_seqs)


def _drafter(config: SpeculativeConfig) -> Drafter:
    if config.method == "ngram":
        return NgramDrafter(*config.lookup)
    return SuffixDrafter(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
    )
