"""Certificates made for a test: an authority, and directories as `--tls-dir` wants them."""

import os
from pathlib import Path

import trustme

from kvlease.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE


class Authority:
    """Signs certificates for loopback and for names of services."""

    def __init__(self) -> None:
        self._authority = trustme.CA()

    def issue(self, directory: Path, *names: str) -> Path:
        """Writes `ca.crt`, `tls.crt` and `tls.key` for a process with these names; replaces older ones."""
        directory.mkdir(parents=True, exist_ok=True)
        certificate = self._authority.issue_cert("127.0.0.1", "localhost", *names)
        chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
        for name, content in (
            (CA_FILE, self._authority.cert_pem.bytes()),
            (CERTIFICATE_FILE, chain),
            (KEY_FILE, certificate.private_key_pem.bytes()),
        ):
            written = directory / f"{name}.written"
            written.write_bytes(content)
            os.replace(written, directory / name)
        return directory
