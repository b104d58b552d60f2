"""Certificates for tests of TLS."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.external_programs import peer

#: Name -> (certificate, key).
Pki = dict[str, tuple[str, str]]

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


def of_two_clients(directory: Path) -> Pki:
    """An authority, and what it has signed: the server 127.0.0.1, and the clients `scanner` and
    `other`. `forged` has the scanner's name, and is signed by itself."""

    def make(name: str, subject: str, *words: str) -> tuple[str, str]:
        cert, key = directory / f"{name}.pem", directory / f"{name}.key"
        write_certificate(cert, key, subject, words)
        return str(cert), str(key)

    made = {"authority": make("authority", "authority")}
    sign = ("-CA", made["authority"][0], "-CAkey", made["authority"][1])
    plain = (*sign, "-addext", "basicConstraints=critical,CA:FALSE")
    made["server"] = make("server", "server", *plain, *THIS_HOST)
    made["scanner"] = make("scanner", "scanner/O=Acme", *plain)
    made["other"] = make("other", "other/O=Acme", *plain)
    made["forged"] = make("forged", "scanner/O=Acme")
    return made


def context_of(pki: Pki, name: str) -> ssl.SSLContext:
    """The settings of a client that shows the certificate of this name; empty: it shows none."""
    context = ssl.create_default_context(cafile=pki["authority"][0])
    if name:
        context.load_cert_chain(*pki[name])
    return context
