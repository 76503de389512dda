"""Certificates for TLS tests, and options for servers that use them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.servers import HOST

#: The password of the client's encrypted key.
PASSWORD = "key-password-4711"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def create_certificates(folder: Path) -> None:
    """Create two CAs, a server certificate for 127.0.0.1, a client certificate, and their keys."""

    def openssl(*args: str) -> None:
        try:
            subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("openssl is not on PATH.")

    for name in ("ca", "other"):
        openssl(
            *("req", "-x509", *_NEW_KEY, "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.pem"),
        )
    (folder / "names").write_text(f"subjectAltName=IP:{HOST}")
    for name in ("server", "client"):
        openssl(
            *("req", *_NEW_KEY, "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-extfile", "names", "-out", f"{name}.pem"),
        )
    openssl("ec", "-in", "client.key", "-aes256", "-passout", f"pass:{PASSWORD}", "-out", "locked")
    together = (folder / "client.pem").read_text() + (folder / "client.key").read_text()
    (folder / "together.pem").write_text(together)
    (folder / "authorities").mkdir()
    (folder / "authorities" / "ca.pem").write_text((folder / "ca.pem").read_text())
    openssl("rehash", "authorities")


def tls_options(folder: Path, port: int) -> tuple[str, ...]:
    """Return command-line options for a server that also listens with TLS on ``port``."""
    return (
        *("--tls-port", str(port), "--tls-cert-file", f"{folder}/server.pem"),
        *("--tls-key-file", f"{folder}/server.key", "--tls-ca-cert-file", f"{folder}/ca.pem"),
    )
