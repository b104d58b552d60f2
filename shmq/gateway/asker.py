"""The client of a request that a thread executes: whose it is, what it may take, and the lease
holders that live while one of its connections does."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

from shmq.users import Quota

#: A holder: topic, channel, entry and incarnation.
Key = tuple[str, str, int, int]


@dataclass
class Asker:
    """One connection, for the threads that execute its requests."""

    origin: str = "@"
    """See `Session.origin`, and `known`."""
    known: bool = False
    address: str = "@"
    """`ip:port`, for the log."""
    quota: Quota = field(default_factory=Quota)
    holders: dict[Key, Any] = field(default_factory=dict)
    """The holders that it has used, and that it has not closed."""
    gone: bool = False
    """The connection has ended."""
    ends: tuple[Any, Any] = (None, None)
    """The names of its two sockets, the client's first."""
    _near: str | None = None

    @property
    def whose(self) -> int:
        """A hash of `origin`, 64 bits and not 0, by which shared tables count what is a client's.

        An IPv6 network gives each host 2^64 addresses, so those of one network are one client. A
        client on this host may choose any address of the loopback interface, so the user of its
        process alone tells it apart."""
        name = self.origin
        if not self.known:
            if self._near is None:
                self._near = _near(self.ends)
            found = _address(name)
            if found is not None and found.version == 6 and found.ipv4_mapped is None:
                name = str(ipaddress.IPv6Network((found, 64), strict=False))
            if self._near:
                name = f"@{self._near}"
            elif found is not None and (getattr(found, "ipv4_mapped", None) or found).is_loopback:
                name = "loopback"
        data = f"{self.known:d}{name}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") | 1


def _address(text: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(str(text).partition("%")[0])
    except ValueError:
        return None


def _near(ends: tuple[Any, Any]) -> str:
    """` uid N` of a client on this host's loopback interface, as the kernel says; else nothing."""
    client, here = ends
    found = _address(client[0]) if isinstance(client, tuple) and client else None
    if found is None or not isinstance(here, tuple):
        return ""
    if found.version == 6 and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if not found.is_loopback:
        return ""
    table = "tcp" if found.version == 4 else "tcp6"
    wanted = f"{_words(client)} {_words(here)} "
    with contextlib.suppress(OSError), open(f"/proc/net/{table}") as file:
        for line in file:
            if wanted in line:
                return f" uid {int(line.split()[7])}"
    return ""


def _words(name: Any) -> str:
    """The name of a socket as /proc/net/tcp has it."""
    found = _address(name[0])
    assert found is not None
    if found.version == 6 and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    data = socket.inet_pton(socket.AF_INET if found.version == 4 else socket.AF_INET6, str(found))
    words = [int.from_bytes(data[at : at + 4], sys.byteorder) for at in range(0, len(data), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{name[1]:04X}"
