"""The other end of a connection, as one text that limits and delays are counted by."""

from __future__ import annotations

import ipaddress
from typing import Any

from shmq import audit


def peer_of(transport: Any) -> str:
    """The peer of an asyncio transport: its IP address, or `uid:N` on a Unix socket; empty if the
    kernel does not say."""
    peer = transport.get_extra_info("peername")
    if isinstance(peer, tuple) and peer:
        return plain(str(peer[0]))
    found = audit.credentials(transport)
    return "" if found is None else f"uid:{found[1]}"


def uid_of(transport: Any) -> int | None:
    """The uid of the process at the other end of a Unix socket, as it was when that connected; None
    for a socket of another family."""
    peer = transport.get_extra_info("peername")
    found = None if isinstance(peer, tuple) and peer else audit.credentials(transport)
    return None if found is None else found[1]


def plain(address: str) -> str:
    """An address as IPv4 if it is one that IPv6 wraps (`::ffff:192.0.2.7`)."""
    return address[7:] if address.startswith("::ffff:") and "." in address else address


def group_of(peer: str) -> str:
    """All peers that one client may be, as one text: an IPv4 address, an IPv6 network /64, or a
    uid."""
    try:
        found = ipaddress.ip_address(plain(peer).partition("%")[0])
    except ValueError:
        return peer
    if found.version == 4:
        return str(found)
    return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
