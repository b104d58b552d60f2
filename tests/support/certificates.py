"""Certificates for tests of TLS."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.external_programs import peer

#: Words of `openssl req` for a certificate of 127.0.0.1.
THIS_HOST = ("-addext", "subjectAltName=IP:127.0.0.1")


def write_certificate(cert: Path, key: Path, name: str, words: Sequence[str] = THIS_HOST) -> None:
    """Write a certificate that is signed by itself, unless the words say by whom, and its key.
    name: its common name."""
    line = f"-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name}".split()
    line += ["-keyout", str(key), "-out", str(cert), *words]
    subprocess.run([peer("openssl"), "req", *line], check=True, capture_output=True)


def of_this_host(directory: Path) -> tuple[str, str]:
    """The files of a certificate of 127.0.0.1 that is signed by itself, and of its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    write_certificate(cert, key, "wire")
    return str(cert), str(key)
