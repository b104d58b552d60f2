"""Certificates for tests of TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.external_programs import peer


def of_this_host(directory: Path) -> tuple[str, str]:
    """The files of a certificate of 127.0.0.1 that is signed by itself, and of its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        [
            peer("openssl"),
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=wire",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            str(key),
            "-out",
            str(cert),
        ],
        check=True,
        capture_output=True,
    )
    return str(cert), str(key)
