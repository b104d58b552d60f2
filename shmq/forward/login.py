"""Logins that targets and sources ask for: passwords, keys and certificates, from a file.

A word of the command line can be read by everybody on the host, a file cannot. It has lines
`NAME = VALUE`; empty lines and those that begin with `#` do not count. For Kafka the names are
librdkafka's (`security.protocol`, `sasl.password`, ...). For NATS they are those of `NATS`; a
credentials file of NATS, as `nsc` writes it, is taken as it is.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shmq import ownership
from shmq.errors import ShmqError

#: The names in a login for NATS.
NATS: Final = frozenset({"user", "password", "token", "nkey", "jwt", "ca", "cert", "key"})
#: The names in a login whose values are paths of files with keys.
_KEY_FILES: Final = frozenset(
    {"key", "ssl.key.location", "ssl.keystore.location", "sasl.kerberos.keytab"}
)
#: The same of files that everybody may read and nobody may forge, or of directories with such.
_TRUSTED_FILES: Final = frozenset(
    {"ca", "cert", "ssl.ca.location", "ssl.certificate.location", "ssl.crl.location"}
)
#: librdkafka's word for the place of the system's authorities.
_PROBE: Final = "probe"
#: The first byte of a user's public key, which makes its text begin with U.
_USER: Final = 20 << 3
_PART: Final = re.compile(r"-----BEGIN ([A-Z ]+)-----\s+(\S+)\s+-+END [A-Z ]+-+")


def read_login(path: str) -> dict[str, str]:
    """The names and values of a file, which only its owner, this user or root, may change and read.
    Raises ShmqError."""
    try:
        text = ownership.read_secret(path, "the login").decode()
    except OSError as exc:
        raise ShmqError(f"read the login {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ShmqError(f"read the login {path}: {exc}") from exc
    parts = dict(_PART.findall(text))
    if parts:
        if parts.keys() < {"NATS USER JWT", "USER NKEY SEED"}:
            raise ShmqError(f"read the login {path}: it lacks the JWT or the seed of a user")
        return {"jwt": parts["NATS USER JWT"], "nkey": parts["USER NKEY SEED"]}
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, value = (word.strip() for word in line.partition("="))
        if not name or name.startswith("#"):
            continue
        if not equals:
            raise ShmqError(f"read the login {path}: line {number} is not NAME = VALUE")
        found[name] = value
    for name in (_KEY_FILES | _TRUSTED_FILES) & found.keys():  # libraries open these by themselves
        try:
            if name in _KEY_FILES:
                os.close(ownership.open_secret(found[name], name))
            elif name != "ssl.ca.location" or found[name] != _PROBE:
                _check_trusted(found[name], name)
        except OSError as exc:
            raise ShmqError(
                f"read {name} of the login {path}: {found[name]}: {exc.strerror}"
            ) from exc
    return found


def _check_trusted(path: str, name: str) -> None:
    """As `ownership.check_trusted`, also for a directory and all files in it. Raises OSError."""
    if not os.path.isdir(path):
        ownership.check_trusted(path, name)
        return
    ownership.check_trusted_directory(path, name)
    for entry in sorted(os.listdir(path)):
        if os.path.isfile(file := os.path.join(path, entry)):
            ownership.check_trusted(file, name)


@dataclass(frozen=True)
class NatsLogin:
    """How to connect to a NATS server."""

    values: Mapping[str, str]
    secure: bool = False
    """TLS whatever the server says: without, somebody between could say that it has none."""

    @property
    def is_secure(self) -> bool:
        """Whether TLS was asked for, by the address or by certificates of the login: somebody
        between could say that the server has none."""
        return self.secure or bool(self.values.keys() & {"ca", "cert", "key"})

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if unknown := sorted(self.values.keys() - NATS):
            raise ValueError(
                f"a login for NATS has no {', '.join(unknown)}; it has {', '.join(sorted(NATS))}"
            )

    def context(self) -> ssl.SSLContext:
        """The settings of TLS. Raises ShmqError."""
        try:
            if "ca" in self.values:
                ownership.check_trusted(self.values["ca"], "the file of ca")
            context = ssl.create_default_context(cafile=self.values.get("ca"))
            if "cert" in self.values:
                # without a key of its own, the file of the certificate holds it
                key = self.values.get("key", self.values["cert"])
                with ownership.secret_path(key, "the key of the login") as secret:
                    context.load_cert_chain(self.values["cert"], secret)
        except (OSError, ssl.SSLError) as exc:
            raise ShmqError(f"read the certificates of the login: {exc}") from exc
        return context

    def fields(self, info: Mapping[str, Any]) -> dict[str, str]:
        """Of CONNECT. info: what the server has said. Raises ShmqError."""
        names = {"user": "user", "password": "pass", "token": "auth_token", "jwt": "jwt"}
        found = {names[key]: value for key, value in self.values.items() if key in names}
        if "nkey" in self.values:
            public, signature = _signed(self.values["nkey"], str(info.get("nonce", "")).encode())
            found["sig"] = signature
            if "jwt" not in found:
                found["nkey"] = public
        return found


def _signed(seed: str, nonce: bytes) -> tuple[str, str]:
    """The public key of a seed, and its signature of the server's nonce."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as exc:
        raise ShmqError(
            f"log in with an nkey: it needs the extra `nats` (pip install 'shmq[nats]'): {exc}"
        ) from exc
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
        if len(raw) != 36 or binascii.crc_hqx(raw[:-2], 0) != int.from_bytes(raw[-2:], "little"):
            raise ValueError("its sum is wrong")
        key = Ed25519PrivateKey.from_private_bytes(raw[2:34])
    except ValueError as exc:
        raise ShmqError(f"log in with an nkey: the seed is none of a user: {exc}") from None
    kind = serialization.Encoding.Raw, serialization.PublicFormat.Raw
    public = bytes([_USER]) + key.public_key().public_bytes(*kind)
    public += binascii.crc_hqx(public, 0).to_bytes(2, "little")
    signature = base64.urlsafe_b64encode(key.sign(nonce)).rstrip(b"=")
    return base64.b32encode(public).rstrip(b"=").decode(), signature.decode()
