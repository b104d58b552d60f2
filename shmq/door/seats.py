"""The places of one process for connections, whatever they speak, and who has to give one back.

A connection that waits for its client (its first request, the rest of one, the next one, the end of
an answer that the client does not read) *rests*. When all places are taken, the one that has rested
longest goes, so silent connections keep nobody out. A few places more are a reserve for requests
that an operator needs when all others are taken.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from shmq.door.seldom import Seldom

#: Places of the reserve. While more than half of them are taken, they are for administration only.
RESERVE: Final = 16
#: Places of the reserve that one address may have.
_RESERVE_EACH: Final = 8
#: Seconds in which the request of a connection in the reserve comes.
RESERVE_SECONDS: Final = 5.0
#: Seconds for which a connection rests before it may be ended: its request may be on its way.
_LEAST_SECONDS: Final = 1.0
#: Seconds for which a connection that speaks nsqd's protocol may be silent before it counts as one
#: that rests.
_SILENT_SECONDS: Final = 15.0

_log = logging.getLogger(__name__)


class Seat:
    """The place of one connection."""

    __slots__ = ("_seats", "address", "close", "kind", "peer", "reserved", "rested_at", "silent")

    def __init__(self, seats: Seats, kind: str, peer: str, address: str, reserved: bool) -> None:
        self._seats = seats
        self.kind = kind
        """TCP, HTTP or HTTPS, for the log."""
        self.peer = peer
        """Whose it is, as `peer_of` says."""
        self.address = address
        """The same with the port, for the log."""
        self.reserved = reserved
        """Whether it is one of the reserve, for one request."""
        self.close: Callable[[], None] = _nothing
        """Ends the connection; set by who has the seat."""
        self.silent: Callable[[], bool] | None = _yes if kind == "TCP" else None
        """Of a connection that does not say when it rests: whether its client has asked for
        nothing yet."""
        self.rested_at = time.monotonic()

    def rests(self) -> None:
        """The connection waits for its client."""
        self._seats.resting.pop(self, None)
        self._seats.resting[self] = None
        self.rested_at = time.monotonic()

    def works(self) -> None:
        """The client waits for the connection."""
        self._seats.resting.pop(self, None)

    def leave(self) -> None:
        """Give the place back."""
        self._seats.left(self)


class Seats:
    """The places of one process; used in the event loop's thread only."""

    def __init__(self, most: Callable[[], int], each: Callable[[], int]) -> None:
        """most: how many there are now. each: how many of them one peer may have; 0: all."""
        self._most = most
        self._each = each
        self.taken: dict[Seat, None] = {}
        """All but the reserve."""
        self.reserve: dict[Seat, None] = {}
        self.resting: dict[Seat, None] = {}
        """The one that has rested longest comes first."""
        self._peers: Counter[str] = Counter()
        self._uid = f"uid:{os.getuid()}"
        self.refused = 0
        """Connections for which there was no place."""
        self.ending: set[Seat] = set()
        """Those that had to go and still have their descriptors."""
        self.ended = 0
        """Connections that rested and had to give their place to another one."""
        self._refusals = Seldom(_log, "refused connections")
        self._endings = Seldom(_log, "connections that rested and were ended")

    def take(self, kind: str, peer: str, address: str) -> tuple[Seat | None, str]:
        """A place for a new connection. Returns None and the reason if there is none."""
        reason = self._obstacle(peer)
        if reason and self._make_room(kind, peer):
            reason = self._obstacle(peer)
        if not reason:
            seat = Seat(self, kind, peer, address, False)
            self.taken[seat] = None
            self._peers[peer] += 1
            self.resting[seat] = None
            return seat, ""
        if kind != "TCP" and self._has_reserve(peer):
            seat = Seat(self, kind, peer, address, True)
            self.reserve[seat] = None
            self.resting[seat] = None
            loop = asyncio.get_running_loop()
            loop.call_later(RESERVE_SECONDS, self._expire, seat)
            self._note(f"{kind}: client({address}) got a place of the reserve", reason)
            return seat, ""
        self.refused += 1
        self._note(f"{kind}: client({address}) refused ({self.refused} so far)", reason)
        return None, reason

    def _note(self, what: str, reason: str) -> None:
        most = self._peers.most_common(1)
        who, count = most[0] if most else ("nobody", 0)
        text = "%s: %s; %s has most of them: %d"
        self._refusals(logging.WARNING, text, what, reason, who or "@", count)

    def left(self, seat: Seat) -> None:
        """A connection has ended."""
        self.ending.discard(seat)
        self.resting.pop(seat, None)
        self.reserve.pop(seat, None)
        if seat in self.taken:
            del self.taken[seat]
            self._peers[seat.peer] -= 1
            if not self._peers[seat.peer]:
                del self._peers[seat.peer]

    def is_crowded(self) -> bool:
        """Whether the reserve is for administration only."""
        return len(self.reserve) > RESERVE // 2

    def free(self, count: int) -> int:
        """End up to so many connections that rest: the process has no descriptors left. Returns
        how many were ended."""
        done = 0
        while done < count and self._end_one(None, "descriptors"):
            done += 1
        return done

    def counts(self) -> dict[str, int]:
        """The figures for `/metrics`, by name."""
        return {
            "connections": len(self.taken) + len(self.reserve),
            "connections_refused": self.refused,
            "connections_ended": self.ended,
        }

    # ---- who goes ----

    def _obstacle(self, peer: str) -> str:
        most, each = self._most(), self._each()
        if len(self.taken) >= most:
            return f"connections exceed limit of {most}"
        if each and peer and peer != self._uid and self._peers[peer] >= each:
            return f"connections of {peer} exceed limit of {each}"
        return ""

    def _make_room(self, kind: str, peer: str) -> bool:
        """End the connection that has rested longest: one of the same peer if that has too many."""
        each = self._each()
        full = len(self.taken) >= self._most()
        of_peer = None if full or not each else peer
        return self._end_one(of_peer, f"connections of {peer}" if of_peer else "connections")

    def _end_one(self, peer: str | None, what: str) -> bool:
        now = time.monotonic()
        for seat in list(self.resting):
            if seat.silent is not None:
                if not seat.silent():  # it has asked for something since
                    del self.resting[seat]
                    continue
                if now - seat.rested_at < _SILENT_SECONDS:
                    continue
            if now - seat.rested_at < _LEAST_SECONDS:
                continue
            if seat.reserved or (peer is not None and seat.peer != peer):
                continue
            self.ended += 1
            text = "%s: client(%s) ended after it rested: no %s are left (%d so far)"
            self._endings(logging.WARNING, text, seat.kind, seat.address, what, self.ended)
            self._end(seat)
            return True
        return False

    def _end(self, seat: Seat) -> None:
        self.left(seat)
        self.ending.add(seat)
        seat.close()

    # ---- the reserve ----

    def _has_reserve(self, peer: str) -> bool:
        mine = [seat for seat in self.reserve if seat.peer == peer]
        if len(mine) >= _RESERVE_EACH:
            return self._drop(mine)
        return len(self.reserve) < RESERVE or self._drop(list(self.reserve))

    def _drop(self, seats: list[Seat]) -> bool:
        """End the oldest of these that rests."""
        for seat in seats:
            if seat in self.resting:
                self._end(seat)
                return True
        return False

    def _expire(self, seat: Seat) -> None:
        if seat in self.reserve and seat in self.resting:
            self._end(seat)


def _nothing() -> None:
    pass


def _yes() -> bool:
    return True
