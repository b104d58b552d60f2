"""TLS handshakes that failed: counted, written to the log once for each address, and bounded.

Nobody guesses a certificate, so a refused one has no growing delay: that would only slow down
others of its address. But a handshake costs the server a signature, which is more than it costs the
client. So an address whose handshakes fail may begin `BURST` more, and then `RATE` a second. Those
beyond are refused before any computation. An address whose handshakes succeed is never limited.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from shmq.door.peer import group_of
from shmq.door.seldom import Seldom

#: Handshakes that an address may begin after one has failed: at once, and in each second.
BURST: Final = 16
RATE: Final = 4.0
#: Seconds without a failure after which an address is forgotten.
QUIET: Final = 600.0
_ENTRIES: Final = 8192

_log = logging.getLogger(__name__)


class _Entry:
    """The failures of one address."""

    __slots__ = ("at", "balance", "earned_at", "unknown")

    def __init__(self, now: float) -> None:
        self.at = now
        """When it failed last."""
        self.balance = float(BURST)
        """Handshakes that it may begin now."""
        self.earned_at = now
        self.unknown = False
        """Whether the log has said that it is no user."""

    def spend(self, now: float) -> bool:
        self.balance = min(self.balance + (now - self.earned_at) * RATE, float(BURST))
        self.earned_at = now
        if self.balance < 1.0:
            return False
        self.balance -= 1.0
        return True


class Handshakes:
    """The failed handshakes of one process; used in the event loop's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._unknown: OrderedDict[str, _Entry] = OrderedDict()
        self.failures = 0
        """Handshakes that failed."""
        self.refused = 0
        """Handshakes that were refused before they began."""
        self.unknown = 0
        """Requests of clients whose certificate or uid is no user's."""
        self._failed = Seldom(_log, "addresses whose TLS handshakes failed")
        self._unseen = Seldom(_log, "refused TLS handshakes")
        self._nobody = Seldom(_log, "clients that are no user")

    def begin(self, peer: str) -> bool:
        """A handshake of a peer is about to begin. Returns false if it must not.

        peer: as `peer_of` says."""
        now = self._clock()
        entry = self._find(self._entries, group_of(peer), now)
        if entry is None or entry.spend(now):
            return True
        self.refused += 1
        text = "TLS: a handshake of %s is refused: too many of this address have failed"
        self._unseen(logging.WARNING, text, group_of(peer))
        return False

    def passed(self, peer: str) -> None:
        """A handshake that had begun has succeeded: it costs its address nothing."""
        entry = self._entries.get(group_of(peer))
        if entry is not None:
            entry.balance = min(entry.balance + 1.0, float(BURST))

    def failed(self, peer: str, shown: str, reason: str) -> None:
        """A handshake that had begun has failed. shown: the client, as the log names it."""
        self.failures += 1
        if self._note(self._entries, group_of(peer)):
            text = "TLS: no handshake with %s: %s (further ones of this address are only counted)"
            self._failed(logging.WARNING, text, shown, reason)

    def is_nobody(self, peer: str, shown: str, identity: str) -> None:
        """A client was refused, although it was shown who it is: no rule names it. identity: what
        was shown, as the log may have it."""
        self.unknown += 1
        if self._note(self._unknown, f"{group_of(peer)} {identity}"):
            self._nobody(logging.WARNING, "%s was not let in: %s is no user", shown, identity)

    def counts(self) -> dict[str, int]:
        """The figures for `/metrics`, by name."""
        return {
            "handshakes_failed": self.failures,
            "handshakes_refused": self.refused,
            "identities_unknown": self.unknown,
        }

    def _find(self, table: OrderedDict[str, _Entry], key: str, now: float) -> _Entry | None:
        entry = table.get(key)
        if entry is not None and now - entry.at >= QUIET:
            del table[key]
            return None
        return entry

    def _note(self, table: OrderedDict[str, _Entry], key: str) -> bool:
        """Remember a failure. Returns true if it is the first."""
        now = self._clock()
        entry = self._find(table, key, now)
        first = entry is None
        if entry is None:
            entry = table[key] = _Entry(now)
            while len(table) > _ENTRIES:
                table.popitem(last=False)
        entry.at = now
        table.move_to_end(key)
        return first


#: OpenSSL's reason -> the message of Go's TLS, which operators of nsqd know.
_REASONS: Final = {
    "WRONG_VERSION_NUMBER": "tls: first record does not look like a TLS handshake",
    "HTTP_REQUEST": "tls: first record does not look like a TLS handshake",
    "UNSUPPORTED_PROTOCOL": "tls: client offered only unsupported versions",
    "NO_SHARED_CIPHER": "tls: no cipher suite supported by both client and server",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "tls: client didn't provide a certificate",
    "CERTIFICATE_VERIFY_FAILED": "tls: failed to verify certificate",
}


def tls_reason(exc: BaseException) -> str:
    """Why a handshake failed, in the words of Go's TLS where it has some."""
    reason = getattr(exc, "reason", None) or ""
    return _REASONS.get(reason, f"tls: {reason.lower().replace('_', ' ') or exc}")
