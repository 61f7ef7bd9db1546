"""The environment variables that begin with PAGEWIRE_: settings, and a few others that are none."""

import logging
import re
from collections.abc import Collection, Mapping

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.spelling import did_you_mean

PREFIX = "PAGEWIRE_"
"""Beginning of the name of each variable."""
_OTHERS = re.compile(
    PREFIX
    + r"(PARENT|INSTANCE|PREDECESSORS|LISTENER|BROKER_FOLDER|AWAITED_MODELS|REFUSAL|NATS_[A-Z]+_PASSWORD|NATS_CONFIG)"
)
"""Variables that a supervisor gives to its services (`shared/process/linux_process.py`), and those of NATS servers."""
_SERVICE_LINK = re.compile(PREFIX + r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""Variables that Kubernetes adds to all containers beside a Service called `pagewire` or `pagewire-...`."""
_LINK_ADDRESS = re.compile(r"(tcp|udp|sctp)://")

_log = logging.getLogger(__name__)


def variable(name: str) -> str:
    """Returns the name of a setting's environment variable.

    >>> variable("max-num-seqs")
    'PAGEWIRE_MAX_NUM_SEQS'
    """
    return PREFIX + name.upper().replace("-", "_")


def settings_in(environ: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Returns the texts of the settings in an environment, by the setting's name. `names`: all settings.

    >>> settings_in({"PAGEWIRE_PORT": "80", "HOME": "/root"}, ["port"])
    {'port': '80'}

    Raises:
        ConfigurationError: a variable with our prefix is no setting.
    """
    settings = {variable(name): name for name in names}
    texts = {}
    for key, text in environ.items():
        if not key.startswith(PREFIX):
            continue
        if _is_service_link(key, text, settings):
            if key in settings:
                _log.warning("%s=%s is ignored: Kubernetes made it (set enableServiceLinks: false)", key, text)
        elif key in settings:
            texts[settings[key]] = text
        elif not _OTHERS.fullmatch(key):
            raise ConfigurationError(f"the variable {key!r} is no setting{did_you_mean(key, settings)}")
    return texts


def _is_service_link(key: str, text: str, settings: Collection[str]) -> bool:
    """Returns whether Kubernetes made a variable: such a name is none of ours, or its value is an address."""
    return bool(_SERVICE_LINK.fullmatch(key) and (key not in settings or _LINK_ADDRESS.match(text)))
