"""Counters of Dramatiq's rate limiters and barriers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from dramatiq.rate_limits import RateLimiterBackend as Base

import shmq
from shmq.integrations.link import Link

_SHORTEST_TTL: Final = 0.001


def _seconds(ttl: int) -> float:
    return max(ttl / 1e3, _SHORTEST_TTL)


class RateLimiterBackend(Base):
    """Counters in a results store of shmq, for Dramatiq's rate limiters, barriers and groups.

    instance, owner, timeout: as in `Broker`. store: the name of the results store.

    No process that dies leaves a lock. One that dies inside `incr_and_sum` may leave a count until
    the key's time to live is over: that call adds, sums, and takes back if the sum is too large.
    The time to live of a key begins anew with each step that changes its number, in the same atomic
    call. Raises shmq's NotRunning if no instance runs, and Full if the store has no room.
    """

    def __init__(
        self,
        instance: str | shmq.Broker | None = None,
        *,
        store: str = "dramatiq-limits",
        owner: str | int | None = None,
        timeout: float = 10.0,
    ) -> None:
        self._link = Link(instance, owner, timeout)
        self._name = store

    @property
    def store(self) -> shmq.Results:
        """The results store."""
        return self._link.store(self._name)

    def add(self, key: str, value: int, ttl: int) -> bool:
        """Store a number under a key that is absent, for `ttl` milliseconds. Returns whether it was
        absent."""
        number = b"%d" % value
        return self._link.retried(lambda: self.store.add(key, number, _seconds(ttl)))

    def incr(self, key: str, amount: int, maximum: int, ttl: int) -> bool:
        """Add to a number, unless it would be above `maximum`. Returns whether it was added."""
        return self._step(key, amount, ttl, most=maximum) is not None

    def decr(self, key: str, amount: int, minimum: int, ttl: int) -> bool:
        """Subtract from a number, unless it would be below `minimum`. Returns whether it was
        subtracted. A number that is 0 then is deleted, which counts as 0 and takes no room."""
        left = self._step(key, -amount, ttl, least=minimum)
        if left == 0:
            self._link.retried(lambda: self.store.delete(key, b"0"))
        return left is not None

    def _step(self, key: str, by: int, ttl: int, **bounds: int) -> int | None:
        seconds = _seconds(ttl)
        return self._link.retried(
            lambda: self.store.incr(key, by, ttl=seconds, renew=True, **bounds)
        )

    def incr_and_sum(
        self,
        key: str,
        keys: Callable[[], Iterable[str]],
        amount: int,
        maximum: int,
        ttl: int,
    ) -> bool:
        """Add to a number, unless the sum of all `keys` would be above `maximum`. Returns whether
        it was added.

        The number is added first and taken back if the sum is too high. So the sum is never above
        the maximum, but callers at the same instant may refuse each other.
        """
        if not self.incr(key, amount, maximum, ttl):
            return False
        total = self._link.retried(lambda: sum(self._number(each) for each in {key, *keys()}))
        if total <= maximum:
            return True
        self._step(key, -amount, ttl, least=0)
        return False

    def _number(self, key: str) -> int:
        return int(self.store.get(key, b"0"))

    def wait(self, key: str, timeout: int | None) -> bool:
        """Wait for `wait_notify` of a key, for `timeout` milliseconds; None: no limit. Returns
        whether it came."""
        seconds = None if timeout is None else timeout / 1e3
        return self._link.retried(lambda: self.store.wait(key, seconds)) is not None

    def wait_notify(self, key: str, ttl: int) -> None:
        """Wake all that wait for a key, and those that begin to within `ttl` milliseconds."""
        self._link.retried(lambda: self.store.set(key, b"x", _seconds(ttl)))

    def close(self) -> None:
        """Detach from the instance. The next use attaches again."""
        self._link.close()
