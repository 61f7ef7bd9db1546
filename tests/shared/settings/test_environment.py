import logging

import pytest

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process import linux_process
from pagewire.shared.settings import config, environment

LINKS = {
    "PAGEWIRE_PORT": "tcp://10.96.0.12:80",
    "PAGEWIRE_NATS_PORT": "tcp://10.96.0.13:4222",
    "PAGEWIRE_SERVICE_HOST": "10.96.0.12",
    "PAGEWIRE_SERVICE_PORT": "80",
    "PAGEWIRE_SERVICE_PORT_HTTP": "80",
    "PAGEWIRE_PORT_80_TCP": "tcp://10.96.0.12:80",
    "PAGEWIRE_PORT_80_TCP_PROTO": "tcp",
    "PAGEWIRE_GATEWAY_PORT_80_TCP_ADDR": "10.96.0.12",
    "PAGEWIRE_NATS_SERVICE_PORT_CLIENT": "4222",
}
"""Variables that Kubernetes adds for the Services `pagewire`, `pagewire-gateway` and `pagewire-nats`."""


def test_service_links_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        settings = config.load({}, LINKS)
    assert settings == config.Settings()
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [
        "PAGEWIRE_PORT",
        "PAGEWIRE_NATS_PORT",
    ]


def test_a_port_of_ours_counts() -> None:
    assert config.load({}, LINKS | {"PAGEWIRE_PORT": "81"}).port == 81


@pytest.mark.parametrize(
    ("name", "meant"),
    [("PAGEWIRE_MAX_NUM_SEQ", "PAGEWIRE_MAX_NUM_SEQS"), ("PAGEWIRE_XYZZY", ""), ("PAGEWIRE_MODEL_NAME", "")],
)
def test_an_unknown_variable_is_refused(name: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}.*{meant}"):
        config.load({}, {name: "1"})


def test_variables_of_processes_and_of_brokers_are_no_settings() -> None:
    names = [value for value in vars(linux_process).values() if str(value).startswith(environment.PREFIX)]
    assert len(names) == 7
    environ = dict.fromkeys([*names, "PAGEWIRE_NATS_TOKENIZER_PASSWORD", "PAGEWIRE_NATS_CONFIG"], "1")
    assert config.load({}, environ) == config.Settings()


def test_a_misspelt_key_is_refused_with_the_right_one() -> None:
    with pytest.raises(ConfigurationError, match=r"'max-num-seq': did you mean max-num-seqs\?"):
        config.load({"max-num-seq": 1}, {})
