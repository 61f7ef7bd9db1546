"""Which user and password a service or a client gives; `tests/shared/bus/test_tls.py` tries the certificates."""

from pathlib import Path

import pytest

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.security import credentials
from pagewire.shared.settings.config import Settings


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        (Settings(), ("", "")),
        (Settings(nats_password="p"), ("executor", "p")),
        (Settings(nats_user="all", nats_password="p"), ("all", "p")),
    ],
)
def test_a_service_is_the_user_of_its_name_by_default(settings: Settings, given: tuple[str, str]) -> None:
    assert credentials.of_service(settings, "executor") == given


def test_a_folder_has_a_password_per_service(tmp_path: Path) -> None:
    (tmp_path / "executor").write_text("1secret\n")
    settings = Settings(nats_secrets=str(tmp_path))
    assert credentials.of_service(settings, "executor") == ("executor", "1secret")
    with pytest.raises(ConfigurationError, match="password of scheduler"):
        credentials.of_service(settings, "scheduler")


def test_a_client_is_its_tenant_or_the_client() -> None:
    assert credentials.of_client("", "") == ("", "")
    assert credentials.of_client("", "key") == ("client", "key")
    assert credentials.of_client("alice", "key") == ("alice", "key")
    with pytest.raises(ConfigurationError, match="--api-key"):
        credentials.of_client("alice", "")


@pytest.mark.parametrize(
    ("settings", "login"),
    [
        (Settings(), ("", "")),
        (Settings(nats_user="all", nats_password="p"), ("all", "p")),
        (Settings(nats_user="all", nats_password="p", api_key="k"), ("all", "p")),
        (Settings(api_key="k", tenant="alice"), ("alice", "k")),
    ],
)
def test_a_command_is_the_nats_user_of_the_settings_or_a_client(settings: Settings, login: tuple[str, str]) -> None:
    assert credentials.of_command(settings) == login


def test_a_command_refuses_a_password_without_its_user() -> None:
    with pytest.raises(ConfigurationError, match="nats-password needs nats-user"):
        credentials.of_command(Settings(nats_password="p"))
    assert credentials.of_command(Settings(nats_password="p", api_key="k")) == ("client", "k")
    assert credentials.of_service(Settings(nats_password="p"), "scheduler") == ("scheduler", "p")
