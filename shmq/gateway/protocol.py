"""The bytes of nsqd's TCP protocol, version 2 (nsqio/nsq nsqd/protocol_v2.go, internal/protocol).

Nothing here has a state. What comes many at a time (message frames, FIN runs, bodies of MPUB) is
the extension's: `_native.Window`, `_native.scan_bodies`.
"""

from __future__ import annotations

import struct
from typing import Final

MAGIC: Final = b"  V2"

#: Longest command line, its newline included: nsqd's read buffer.
MAX_LINE: Final = 16384

#: An id is so many bytes; nothing else about it is checked.
ID_BYTES: Final = 16

RESPONSE: Final = 0
ERROR: Final = 1

_FRAME = struct.Struct(">ii")


def frame(kind: int, data: bytes) -> bytes:
    """A frame of the server."""
    return _FRAME.pack(len(data) + 4, kind) + data


OK: Final = frame(RESPONSE, b"OK")
HEARTBEAT: Final = frame(RESPONSE, b"_heartbeat_")
CLOSE_WAIT: Final = frame(RESPONSE, b"CLOSE_WAIT")
BAD_PROTOCOL: Final = frame(ERROR, b"E_BAD_PROTOCOL")


class ProtocolError(Exception):
    """What a client did wrong: sent to it as `CODE text`, then its connection is closed."""

    def __init__(self, code: str, text: bytes | str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text.encode() if isinstance(text, str) else text

    @property
    def frame(self) -> bytes:
        """As the client gets it."""
        return frame(ERROR, self.code.encode() + b" " + self.text)


def failed(command: bytes, message_id: bytes, reason: bytes) -> bytes:
    """The error frame that leaves the connection open: FIN, REQ or TOUCH of what is not there."""
    return frame(ERROR, b"E_%b_FAILED %b %b failed %b" % (command, command, message_id, reason))


_DIGITS = frozenset(b"0123456789")


def number(text: bytes) -> int | None:
    """nsqd's unsigned decimal: digits only, none is 0, modulo 2^64; None if it is not one."""
    if not _DIGITS.issuperset(text):
        return None
    # at most 16 KiB of digits, and only the last 20 or so matter; int() has a limit of its own
    value = 0
    for start in range(0, len(text), 4000):
        part = text[start : start + 4000]
        value = (value * 10 ** len(part) + int(part)) % 2**64
    return value


def signed(value: int) -> int:
    """The 64 bits as Go's int64."""
    return value - 2**64 if value >= 2**63 else value


_ESCAPES: Final = {
    0x07: "\\a", 0x08: "\\b", 0x0C: "\\f", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t", 0x0B: "\\v",
    0x22: '\\"', 0x5C: "\\\\",
}  # fmt: skip


def quoted(raw: bytes) -> str:
    """As Go's %q prints bytes."""
    out = []
    for char in raw.decode("utf-8", "surrogateescape"):
        code = ord(char)
        if code in _ESCAPES:
            out.append(_ESCAPES[code])
        elif 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8
            out.append(f"\\x{code - 0xDC00:02x}")
        elif code == 0x20 or char.isprintable():
            out.append(char)
        elif code < 0x80:
            out.append(f"\\x{code:02x}")
        elif code < 0x10000:
            out.append(f"\\u{code:04x}")
        else:
            out.append(f"\\U{code:08x}")
    return f'"{"".join(out)}"'


#: Fields of IDENTIFY that are looked at, and what they must be.
IDENTIFY_FIELDS: Final[dict[str, type]] = {
    "client_id": str, "hostname": str, "user_agent": str, "feature_negotiation": bool,
    "heartbeat_interval": int, "output_buffer_size": int, "output_buffer_timeout": int,
    "tls_v1": bool, "snappy": bool, "deflate": bool, "deflate_level": int, "sample_rate": int,
    "msg_timeout": int, "topology_region": str, "topology_zone": str,
}  # fmt: skip
