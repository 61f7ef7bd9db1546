"""The user, password and certificates with which a service or a command connects to the NATS server."""

import ssl
from pathlib import Path

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.security.permissions import CLIENT
from pagewire.shared.settings.config import Settings


def of_service(settings: Settings, name: str) -> tuple[str, str]:
    """Returns the user and the password of a service, or of the supervisor.

    Raises:
        ConfigurationError: its file in the folder `nats-secrets` cannot be read.
    """
    if not settings.nats_secrets:
        return settings.nats_user or (name if settings.nats_password else ""), settings.nats_password
    path = Path(settings.nats_secrets, name)
    try:
        password = path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"cannot read the NATS password of {name} from {path}: {error.strerror}") from error
    return settings.nats_user or name, password


def of_client(tenant: str, api_key: str) -> tuple[str, str]:
    """Returns the user and the password of a client."""
    if tenant and not api_key:
        raise ConfigurationError(f"the tenant {tenant} needs its key: give --api-key")
    return (tenant or CLIENT, api_key) if api_key else ("", "")


def of_command(settings: Settings) -> tuple[str, str]:
    """Returns the user and the password of a command: `nats-user`, or else a client with the settings' key.

    Raises:
        ConfigurationError: there is a password whose user is unknown. A service would be the user of its name.
    """
    if settings.nats_user:
        return settings.nats_user, settings.nats_password
    if settings.nats_password and not settings.api_key:
        raise ConfigurationError("nats-password needs nats-user, unless a service is started: give both, or --api-key")
    return of_client(settings.tenant, settings.api_key)


def tls(settings: Settings) -> ssl.SSLContext | None:
    """Returns the TLS context of the settings; None if no setting is about TLS.

    Raises:
        ConfigurationError: a file cannot be used.
    """
    ca, certificate, key = settings.nats_tls_ca, settings.nats_tls_cert, settings.nats_tls_key
    if not (ca or certificate or key):
        return None
    if bool(certificate) != bool(key):
        raise ConfigurationError("nats-tls-cert and nats-tls-key belong together: give both")
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise ConfigurationError(f"nats-tls-ca {ca} cannot be used: {error.strerror or error}") from error
    if certificate:
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:
            raise ConfigurationError(
                f"nats-tls-cert {certificate} and nats-tls-key {key} cannot be used: {error.strerror or error}"
            ) from error
    return context
