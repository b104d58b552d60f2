"""Addresses of targets and sources: `nats://...`, `kafka://...`, `nsq://...`."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final, Self

from shmq.forward.login import NatsLogin

_SCHEMES: Final = ("nats", "tls", "kafka", "nsq")
_HOST: Final = re.compile(r"(?:\[([^\[\]\s]+)\]|([^:\[\]\s]+))(?::([0-9]{1,5}))?")


@dataclass(frozen=True)
class Place:
    """An address in parts."""

    scheme: str
    netloc: str
    """Hosts with their ports, commas between."""
    name: str
    """Of the stream or topic."""
    wishes: Mapping[str, str]
    """The settings behind the question mark."""
    shown: str
    """The address without its secrets."""
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parsed(cls, url: str, what: str, forms: str) -> Self:
        """The parts of an address. what, forms: for the text of ValueError."""
        if "#" in url:  # what follows would be lost: the end of an ephemeral topic's name
            raise ValueError(f"the {what} has a #, which an address has as %23: {_shown(url)!r}")
        try:
            parts = urllib.parse.urlsplit(url)
        except ValueError as exc:
            raise ValueError(f"the {what} {_shown(url)!r} is no address: {exc}") from None
        secret, _, netloc = parts.netloc.rpartition("@")
        shown = parts._replace(netloc=netloc).geturl() if secret else _shown(url)
        name = urllib.parse.unquote(parts.path.strip("/"))
        if parts.scheme not in _SCHEMES or not netloc or not name or "/" in name:
            raise ValueError(f"the {what} must be {forms}, not {shown!r}")
        pairs = urllib.parse.parse_qsl(parts.query, keep_blank_values=True)
        wishes = dict(pairs)
        if len(wishes) < len(pairs):
            raise ValueError(f"the {what} {shown!r} has a setting twice")
        user, colon, password = secret.partition(":")
        return cls(
            parts.scheme,
            netloc,
            name,
            wishes,
            shown,
            urllib.parse.unquote(user) if secret else None,
            urllib.parse.unquote(password) if colon else None,
        )

    def check(self, known: Set[str]) -> None:
        """Raise ValueError for a wish that is not known."""
        if unknown := sorted(self.wishes.keys() - known):
            raise ValueError(f"{self.shown!r} has no setting {', '.join(unknown)}")

    def hosts(self, port: int) -> list[tuple[str, int]]:
        """The hosts and ports. port: where none is named. Raises ValueError."""
        found = []
        for each in self.netloc.split(","):
            match = _HOST.fullmatch(each)
            if match is None or int(match[3] or port) > 65535:
                raise ValueError(f"{each!r} in {self.shown!r} is no host, or no host:port")
            found.append((match[1] or match[2], int(match[3] or port)))
        return found

    def servers(self) -> str:
        """The hosts for Kafka, which has the user and the password in its settings. Raises
        ValueError."""
        if self.user is not None:
            raise ValueError(
                f"{self.shown!r} may not have a user name: give sasl.username and sasl.password "
                "with --login"
            )
        return ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            for host, port in self.hosts(9092)
        )


def _shown(url: str) -> str:
    """An address without what stands before its last @, which may be a password with a / or ? that
    should be written with a percent sign."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def nats_login(place: Place, login: Mapping[str, str] | None) -> NatsLogin:
    """The login of an address, `user:password@` or `token@`, or else `login`. Raises
    ValueError."""
    values = dict(login or {})
    if place.user is not None:
        if values.keys() & {"user", "password", "token", "nkey", "jwt"}:
            raise ValueError(f"{place.shown!r} has a user name, and --login has one too")
        if place.password is None:
            values["token"] = place.user
        else:
            values |= {"user": place.user, "password": place.password}
    return NatsLogin(values, place.scheme == "tls")
