"""The marker: says in the target which lease was stored last, and is stored together with it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, Final, Self

from shmq.errors import ShmqError
from shmq.peers.documents import number, parsed, table, text
from shmq.printing import printable

_VERSION: Final = 1


@dataclass(frozen=True)
class Marker:
    """One line of JSON, then the ids of messages (u64, little-endian): those of the lease, then
    those in doubt."""

    source: str
    """Whose marker it is: host, instance, topic and channel."""
    identity: str
    """The identity of the channel, in which the number of the lease counts."""
    lease: int
    ids: tuple[int, ...]
    """The messages of the lease. If the lease ended before it was finished, they come again."""
    doubt: tuple[int, ...] = ()
    """Messages of earlier leases that were stored and may come again."""

    def encoded(self) -> bytes:
        """The body of the message that is the marker."""
        head: dict[str, Any] = {
            "v": _VERSION,
            "source": self.source,
            "identity": self.identity,
            "lease": self.lease,
            "messages": len(self.ids),
        }
        ids = struct.pack(f"<{len(self.ids) + len(self.doubt)}Q", *self.ids, *self.doubt)
        return json.dumps(head, separators=(",", ":")).encode() + b"\n" + ids

    @classmethod
    def decoded(cls, body: bytes, where: str) -> Self:
        """The marker in a body. where: for the text of ShmqError, if it is none."""
        line, _, packed = body.partition(b"\n")
        try:
            head = table(parsed(line))
            if head["v"] != _VERSION:
                raise ValueError(f"version {printable(str(head['v']), 40)}")
            ids = struct.unpack(f"<{len(packed) // 8}Q", packed)
            count = number(head, "messages")
            names = text(head, "source"), text(head, "identity")
            return cls(*names, number(head, "lease"), ids[:count], ids[count:])
        except (ValueError, KeyError, TypeError, struct.error) as exc:
            raise ShmqError(
                f"read the last marker of {where}: the message there is no marker of this version "
                f"({exc}); give ?marker=SUBJECT, a subject that nobody else publishes to"
            ) from None
