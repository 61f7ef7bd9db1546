"""A certificate authority for one test, with the files that programs want."""

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Identity:
    """A certificate and its private key, as files."""

    certificate: Path
    key: Path


class Authority:
    """An authority that nobody else trusts."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = name
        self._ca = trustme.CA()
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._ca.cert_pem.bytes())
        self._issued = 0

    def issue(self, host: str) -> Identity:
        """A certificate for a host name or an address."""
        issued = self._ca.issue_cert(host)
        self._issued += 1
        stem = f"{self._name}-{self._issued}"
        certificate, key = self._folder / f"{stem}.crt", self._folder / f"{stem}.key"
        certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return Identity(certificate, key)
