"""The bytes of nsqd's TCP protocol, version 2 (nsqio/nsq nsqd/protocol_v2.go, internal/protocol).

Nothing here has state. The extension handles the bytes that come in large numbers (message frames,
consecutive FINs, bodies of MPUB): `_native.Window`, `_native.scan_bodies`.
"""

from __future__ import annotations

import re
import struct
from typing import Final

from shmq.door.telling import told

MAGIC: Final = b"  V2"

#: Longest command line, its newline included: nsqd's read buffer.
MAX_LINE: Final = 16384

#: Length of a message id; nothing else about an id is checked.
ID_BYTES: Final = 16

RESPONSE: Final = 0
ERROR: Final = 1

_FRAME = struct.Struct(">ii")


def frame(kind: int, data: bytes) -> bytes:
    """Return a frame from the server to the client."""
    return _FRAME.pack(len(data) + 4, kind) + data


OK: Final = frame(RESPONSE, b"OK")
HEARTBEAT: Final = frame(RESPONSE, b"_heartbeat_")
CLOSE_WAIT: Final = frame(RESPONSE, b"CLOSE_WAIT")
BAD_PROTOCOL: Final = frame(ERROR, b"E_BAD_PROTOCOL")


class ProtocolError(Exception):
    """An error of the client: sent to it as `CODE text`, then the connection is closed."""

    def __init__(self, code: str, text: bytes | str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text.encode() if isinstance(text, str) else text

    @property
    def frame(self) -> bytes:
        """The error frame for the client."""
        return frame(ERROR, self.code.encode() + b" " + self.text)


def failed(command: bytes, message_id: bytes, reason: bytes) -> bytes:
    """Return the error frame after which the connection stays open: a FIN, REQ or TOUCH of a
    message that is not in flight."""
    return frame(ERROR, b"E_%b_FAILED %b %b failed %b" % (command, command, message_id, reason))


_DIGITS = frozenset(b"0123456789")


def number(text: bytes) -> int | None:
    """Parse an unsigned decimal as nsqd does: only digits, no digits are 0, modulo 2^64.

    Returns None if it is not one."""
    if not _DIGITS.issuperset(text):
        return None
    # int() refuses more than 4300 digits, and a line may have 16 KiB of them
    value = 0
    for start in range(0, len(text), 4000):
        part = text[start : start + 4000]
        value = (value * 10 ** len(part) + int(part)) % 2**64
    return value


def signed(value: int) -> int:
    """Interpret 64 bits as Go's int64."""
    return value - 2**64 if value >= 2**63 else value


_ESCAPES: Final = {
    0x07: "\\a",
    0x08: "\\b",
    0x09: "\\t",
    0x0A: "\\n",
    0x0B: "\\v",
    0x0C: "\\f",
    0x0D: "\\r",
    0x22: '\\"',
    0x5C: "\\\\",
}


def quoted(raw: bytes) -> str:
    """Quote bytes as Go's %q does."""
    out = []
    for char in raw.decode("utf-8", "surrogateescape"):
        code = ord(char)
        if code in _ESCAPES:
            out.append(_ESCAPES[code])
        elif 0xDC80 <= code <= 0xDCFF:  # a byte that is not valid UTF-8
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


#: Characters of a client's name that are kept; it appears in /stats and in the log only.
_SHOWN: Final = 512
_LONE_SURROGATES: Final = re.compile("[\ud800-\udfff]")


def shown(text: str) -> str:
    """Return a name from a client without invalid characters, and cut to a reasonable length."""
    return without_surrogates(text[:_SHOWN])


def without_surrogates(text: str) -> str:
    """Replace lone surrogates in the text of a JSON document, as Go's decoder does: UTF-8 cannot
    encode them."""
    return _LONE_SURROGATES.sub("\ufffd", text)


def no_means(error: BaseException) -> ProtocolError:
    """Return the error for a lack of descriptors or memory in this process."""
    return ProtocolError("E_INVALID", f"cannot go on: {told(error)}")
