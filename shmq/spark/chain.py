"""The leases of a query on one channel of one instance, each of which names the one before it.

An offset of such a chain is {"c": consumer, "b": identity of the channel, "l": lease, "p": the
lease before}. `stream` reads one chain in shared memory, `fleet` one on each of many instances.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import shmq
from shmq.client import Lease, LeaseHolder
from shmq.errors import LeaseLost, MemoryLost
from shmq.spark.options import Settings

_log = logging.getLogger(__name__)

Offset = dict[str, Any]


class DataLoss(shmq.ShmqError):
    """The checkpoint names messages that the broker no longer holds."""


class Chain:
    """The chain of one channel. It is used by one thread at a time."""

    def __init__(
        self,
        settings: Settings,
        broker: Callable[[], Any],
        instance: str,
        grace: float | None,
    ) -> None:
        """broker: gives the broker, or what has its methods, as often as it is needed. instance:
        its name or address, for texts of errors. grace: of `Broker.lease_holder`."""
        self._settings, self._broker = settings, broker
        self._instance, self._grace = instance, grace
        self._holder: LeaseHolder | None = None
        self._finished = ("", 0)  # identity of the channel, and the last lease
        self.lost = 0
        """How often messages were processed and come again, or were left out."""

    @property
    def where(self) -> str:
        """The channel and instance, for texts of errors."""
        return self._settings.channel_of(self._instance)

    @property
    def identity(self) -> str:
        """The identity of the channel; see `Broker.channel_identity`."""
        found: str = self._broker().channel_identity(self._settings.topic, self._settings.channel)
        return found

    def waiting(self) -> int:
        """The number of messages that wait in the channel."""
        found: int = self._broker().channel_depth(self._settings.topic, self._settings.channel)
        return found

    # ---- the holder ----

    def adopt(self, consumer: str) -> LeaseHolder:
        """The holder of the name that the offset has, which is opened if it is not open."""
        if self._holder is None or self._holder.name != consumer:
            self.close()
            settings, broker = self._settings, self._broker()
            more: dict[str, Any] = {}
            if settings.many and isinstance(broker, shmq.Broker):  # tasks may read from elsewhere
                more["secret"] = settings.proof
            self._holder = broker.lease_holder(
                settings.topic,
                settings.channel,
                consumer,
                ttl=settings.leaseTtl,
                grace=self._grace,
                keepalive=True,
                **more,
            )
        return self._holder

    @property
    def is_open(self) -> bool:
        """Whether this process is the holder, unless it was fenced since."""
        return self._holder is not None

    def close(self) -> None:
        """Close the holder. Its leases wait for the next one of its name."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None

    # ---- from one offset to the next ----

    def finish(self, offset: Offset) -> None:
        """Finish the leases up to the offset, which are processed for good. If the channel has
        another identity now, they no longer exist."""
        through = (offset["b"], offset["l"])
        if not offset["l"] or through == self._finished or offset["b"] != self.identity:
            return
        try:
            self.adopt(offset["c"]).finish_lease(offset["l"])
            self._finished = through
        except MemoryLost:
            raise
        except LeaseLost as exc:
            self.lost += 1
            if self._settings.onLostLease == "fail":
                raise LeaseLost(
                    f"{exc}. These messages were processed, but they went back to "
                    f"{self.where} before that was known and come again: raise "
                    'leaseTtl, or go on with .option("onLostLease", "warn")'
                ) from None
            _log.warning("%s: processed, and come again: %s", self.where, exc)

    def follow(self, start: Offset) -> tuple[str, int, Lease | None]:
        """Finish the leases up to `start`, which Spark's commit log has. Returns the identity of
        the channel, the id that a next lease names as the one before it, and the open lease that
        follows already, because of a crash before Spark recorded it."""
        holder = self.adopt(start["c"])
        self.finish(start)
        identity = self.identity
        parent: int = start["l"] if start["b"] == identity else 0
        return identity, parent, self._open_after(holder, parent)

    def _open_after(self, holder: LeaseHolder, parent: int) -> Lease | None:
        """The open lease that follows `parent`; None if there is none. Every other open lease goes
        back to the channel, because no offset names it."""
        found = None
        for lease in reversed(holder.leases()):
            if lease.parent == parent and lease.id > parent and found is None:
                found = lease
            else:
                _log.warning(
                    "%s: lease %d (%d messages) follows no micro-batch of this query; its messages "
                    "go back to the channel",
                    self.where,
                    lease.id,
                    lease.count,
                )
                holder.return_lease(lease.id)
        return found

    def take_from_disk(
        self, consumer: str, rows: int, max_bytes: int, parts: Callable[[int], int], parent: int
    ) -> Lease | None:
        """Take a lease of messages that may all be on disk: wait until the supervisor has read some
        of them. parts: from the number of messages to that of the parts. Returns None if none is
        left."""
        while waiting := self.waiting():
            lease = self.adopt(consumer).lease(
                rows, max_bytes, parts(min(waiting, rows)), parent, timeout=0.05
            )
            if lease is not None:
                return lease
        return None

    # ---- planning ----

    def planned(self, start: Offset, end: Offset) -> tuple[str, list[Lease]]:
        """The identity of the channel, and the leases after `start` up to `end`, the oldest first.
        Each counts as replayed once more."""
        identity, leases = self.identity, list[Lease]()
        holder = self.adopt(end["c"])
        lease: int = end["l"] if end["b"] == identity else 0
        first: int = start["l"] if start["b"] == end["b"] else 0
        if not lease:
            self.missing(end, "the broker was restarted, or the channel created again, since")
        while lease > first:
            try:
                found = holder.look(lease, replay=True)
            except MemoryLost:
                raise
            except LeaseLost:
                self.missing(end, f"lease {lease} has ended")
                break
            self._check_replays(found)
            leases.insert(0, found)
            lease = found.parent
        return identity, leases

    def _check_replays(self, lease: Lease) -> None:
        settings = self._settings
        if settings.maxReplays and lease.replays > settings.maxReplays:
            raise shmq.ShmqError(
                f"lease {lease.id} of {self.where} was planned {lease.replays} times "
                f"(maxReplays): look at its messages; `shmq lease return` or `finish "
                f"--instance {self._instance} {settings.topic} {settings.channel} {lease.id}`"
                ' and .option("failOnDataLoss", "false") let the query pass'
            )

    def missing(self, end: Offset, why: str) -> None:
        """A micro-batch that is not there. Raises DataLoss, unless failOnDataLoss=false."""
        left_out(self._settings, self.where, end["l"], why)
        self.lost += 1


def left_out(settings: Settings, where: str, lease: int, why: str) -> None:
    """Go on without the messages of a lease that a checkpoint names. Raises DataLoss unless
    failOnDataLoss=false. where: the channel and its instance."""
    text = f"a micro-batch of {where} (lease {lease}) is not there any more: {why}"
    if settings.failOnDataLoss:
        raise DataLoss(
            f'{text}; to go on without it: .option("failOnDataLoss", "false"). Messages of a '
            "lease that ran out are in the channel again"
        )
    _log.warning("%s; going on without it", text)
