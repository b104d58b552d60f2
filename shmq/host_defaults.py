"""Defaults of options that depend on the host."""

from __future__ import annotations

import os
import zlib

try:  # hashlib loads OpenSSL: 4 MiB in a process that needs it for nothing else
    from _md5 import md5  # type: ignore[import-not-found]
except ImportError:  # a Python that was built without it
    from hashlib import md5


def host_name() -> str:
    """The name of this host, as `socket.gethostname` has it, but without that module."""
    return os.uname().nodename


def default_node_id() -> int:
    """nsqd's default: CRC-32 of the 16 bytes of MD5(host name), modulo 1024."""
    digest = md5(host_name().encode(), usedforsecurity=False).digest()
    return zlib.crc32(digest) % 1024


def default_gateway_workers() -> int:
    """One per 2 cores that this process may use, at least 1."""
    return max(len(os.sched_getaffinity(0)) // 2, 1)


def instance_of(data_path: str) -> str:
    """The name of an instance that replaces an nsqd and was given none. It is derived from the data
    path, which tells two nsqd apart, so it is the same after a restart."""
    import hashlib  # slow to import

    real = os.path.realpath(data_path or ".")
    return f"nsqd-{hashlib.sha256(os.fsencode(real)).hexdigest()[:8]}"
