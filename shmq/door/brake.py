"""The brake on guessing: whoever shows wrong tokens, passwords or secrets waits longer each time.

The delay belongs to an address and to a user's name. The first failure costs nothing, because
everybody mistypes. From the second on the next attempt waits 0.1 s, then twice as long each time,
up to 30 s. An address or a name without a failure for 10 minutes begins anew.

* The attempts of one address wait in one line, so that many connections are no faster than one. An
  attempt that would wait longer than 30 s is refused at once and is not looked at.
* A user's delay holds for addresses that have failed themselves. A right proof from an address
  without failures is let in at once, so nobody can lock a user out. A wrong one from there is
  answered after the user's delay.
* A wrong proof that an address repeats is no further guess: a misconfigured client has a line of
  its own, and does not slow down the others that share its address.
* The hosts of an IPv6 network /64 count as one address, because a client may have all of them. A
  peer on a Unix socket counts by its uid.
* Memory is bounded. An address that has no room any more leaves its number of failures in one of a
  few thousand places, which a secret of this process chooses. So
  many addresses make no delay forgotten; a stranger may then meet the small delay of another's
  place.

Each process has its own. A delay holds an answer, no thread and no event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from shmq.door.peer import group_of
from shmq.door.seldom import Seldom

#: Seconds of the second failure's delay, and of the longest.
FIRST: Final = 0.1
LONGEST: Final = 30.0
#: Seconds without a failure after which failures are forgotten.
QUIET: Final = 600.0
#: Attempts that wait in one line.
_LINE: Final = 16
#: Entries of each table, and the places for those that have no entry any more.
_ENTRIES: Final = 8192
_PLACES: Final = 4096
#: The failure of an address or a name from which on they are logged.
_LOGGED: Final = 3

_log = logging.getLogger(__name__)


def delay_of(failures: int) -> float:
    """Seconds that the attempt after so many failures waits."""
    return min(FIRST * 2.0 ** min(failures - 2, 32), LONGEST) if failures > 1 else 0.0


class _Entry:
    """The failures of one address, name or repeated proof."""

    __slots__ = ("at", "failures", "free_at", "waiting")

    def __init__(self, failures: int, at: float) -> None:
        self.failures = failures
        self.at = at
        """When the last one was."""
        self.free_at = 0.0
        """When the last attempt in the line has its turn."""
        self.waiting = 0


class _Table:
    """Entries by key. The one that failed least recently goes when there is no room, and leaves its
    number of failures behind, or nothing (`exact`)."""

    def __init__(self, secret: bytes, exact: bool = False) -> None:
        self._secret = secret
        self._exact = exact
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._places: dict[int, tuple[int, float]] = {}

    def find(self, key: str, now: float) -> _Entry | None:
        """The entry of a key; None: it has not failed."""
        entry = self._entries.get(key)
        if entry is not None:
            if now - entry.at < QUIET or entry.waiting:
                return entry
            del self._entries[key]
        failures, at = self._places.get(self._place(key), (0, 0.0))
        if not failures or now - at >= QUIET:
            return None
        return self._put(key, _Entry(failures, at))

    def failed(self, key: str, now: float) -> int:
        """Count a failure. Returns how many there are."""
        entry = self.find(key, now) or self._put(key, _Entry(0, now))
        entry.failures += 1
        entry.at = now
        self._entries.move_to_end(key)
        return entry.failures

    def forget(self, key: str) -> None:
        """Forget the failures of a key."""
        self._entries.pop(key, None)

    def _put(self, key: str, entry: _Entry) -> _Entry:
        self._entries[key] = entry
        if len(self._entries) > _ENTRIES:
            old, gone = self._entries.popitem(last=False)
            if self._exact:
                return entry
            place = self._place(old)
            failures, at = self._places.get(place, (0, 0.0))
            if gone.at - at >= QUIET:
                failures = 0
            self._places[place] = max(failures, gone.failures), max(at, gone.at)
        return entry

    def _place(self, key: str) -> int:
        digest = hashlib.blake2b(key.encode("utf-8", "replace"), key=self._secret, digest_size=8)
        return int.from_bytes(digest.digest(), "big") % _PLACES


class Attempt:
    """One proof that a client shows. Call `turn`, check the proof, and call `passed` or
    `failed`."""

    __slots__ = ("_brake", "_group", "_known", "_repeat", "_user")

    def __init__(self, brake: Brake, group: str, user: str, repeat: str) -> None:
        self._brake = brake
        self._group = group
        self._user = user
        self._repeat = repeat
        self._known = False  # the address had failed before

    async def turn(self) -> bool:
        """Wait until it may be checked. Returns false if too many wait already: then it is refused
        without being looked at, and nothing more is called."""
        brake = self._brake
        entry, delay = brake.line(self._group, self._user, self._repeat)
        if entry is None:
            return True
        self._known = True
        if not delay:
            return True
        now = brake.clock()
        slot = max(now, entry.free_at) + delay
        if entry.waiting >= _LINE or slot - now > LONGEST + 0.001:
            brake.refuse(self._group)
            return False
        brake.delayed += 1
        entry.free_at = slot
        entry.waiting += 1
        try:
            await brake.sleep(slot - now)
        finally:
            entry.waiting -= 1
        return True

    def passed(self) -> None:
        """The proof was right."""
        self._brake.repeats.forget(self._repeat)

    async def failed(self) -> None:
        """The proof was wrong: count it. From an address without failures this waits for the user's
        delay before the client is answered."""
        hold = self._brake.fail(self._group, self._user, self._repeat)
        if not self._known and hold:
            await self._brake.sleep(hold)


class Brake:
    """The failed proofs of one process; used in the event loop's thread only."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self.clock = clock
        self.sleep = sleep
        self._secret = secrets.token_bytes(32)
        self._addresses = _Table(self._secret)
        self._users = _Table(self._secret)
        # A guess in another's place would pass for a repeated one, and have that one's delay.
        self.repeats = _Table(self._secret, exact=True)
        """Wrong proofs by address."""
        self.failures = 0
        """Proofs that were wrong."""
        self.delayed = 0
        """Attempts that had to wait."""
        self.refused = 0
        """Attempts that were refused without being looked at."""
        self._failed = Seldom(_log, "wrong proofs")
        self._unseen = Seldom(_log, "refused proofs")

    def attempt(self, address: str, proof: bytes, user: str = "") -> Attempt:
        """An attempt to prove something.

        address: the peer, as `peer_of` says. proof: what is shown; only a
        digest of it is kept. user: the name that it is shown for, if there is one."""
        group = group_of(address)
        digest = hashlib.blake2b(proof, key=self._secret, digest_size=16).hexdigest()
        return Attempt(self, group, user, f"{group} {user} {digest}")

    def counts(self) -> dict[str, int]:
        """The figures for `/metrics`, by name."""
        return {
            "proofs_failed": self.failures,
            "proofs_delayed": self.delayed,
            "proofs_refused": self.refused,
        }

    # ---- called by `Attempt` ----

    def line(self, group: str, user: str, repeat: str) -> tuple[_Entry | None, float]:
        """The line in which an attempt waits, and how long its turn takes."""
        now = self.clock()
        entry = self.repeats.find(repeat, now)
        if entry is not None:
            return entry, delay_of(entry.failures)
        entry = self._addresses.find(group, now)
        if entry is None:
            return None, 0.0
        return entry, max(delay_of(entry.failures), self._of_user(user, now))

    def fail(self, group: str, user: str, repeat: str) -> float:
        """Count a wrong proof. Returns the user's delay before it."""
        now = self.clock()
        self.failures += 1
        again = self.repeats.find(repeat, now) is not None
        hold = self._of_user(user, now)
        failures = self.repeats.failed(repeat, now)
        if not again:
            failures = self._addresses.failed(group, now)
            if user:
                self._users.failed(user, now)
        if failures >= _LOGGED:
            text = "%d wrong proofs of %s: the next one waits %.1f s"
            self._failed(logging.WARNING, text, failures, group, delay_of(failures))
        return hold

    def refuse(self, group: str) -> None:
        """Count an attempt for which there is no place in the line."""
        self.refused += 1
        text = "proofs of %s are refused unseen: too many wait already"
        self._unseen(logging.WARNING, text, group)

    def _of_user(self, user: str, now: float) -> float:
        entry = self._users.find(user, now) if user else None
        return delay_of(entry.failures) if entry is not None else 0.0
