"""The leases of a query on one channel of one instance, each of which names the one before it.

An offset of such a chain is {"c": consumer, "b": identity of the channel, "l": lease, "p": the
lease before, "t": topic and channel, "q": the query, "d": 1 if a part of the lease is on disk,
"i": the instance, unless it is one of many}. `stream` reads one chain in shared memory, `fleet` one
on each of many instances.

"q" is a random word that a query's first run makes and its checkpoint keeps. The holder's secret is
made of it, so a process that finds an owner of its name in shared memory knows whether that is an
earlier run of its own query, which it fences, or another query, which it must not touch.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import shmq
from shmq.client import Lease, LeaseHolder
from shmq.errors import Gone, LeaseFenced, LeaseLost, MemoryLost
from shmq.leased import proof_of
from shmq.spark.options import Settings

_log = logging.getLogger(__name__)

Offset = dict[str, Any]

#: Seconds for which the first run of a query waits until an owner of its name has ended: the
#: process of a driver that was killed a moment ago.
_ENDING: Final = 3.0


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
        self._query = ""  # of the holder
        self._planned: set[int] = set()  # leases that count as replayed in this run
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

    # ---- offsets ----

    def offset(self, start: Offset, identity: str, lease: Lease) -> Offset:
        """The offset of a lease that follows `start`."""
        more = {"d": 1} if lease.on_disk else {}
        if "q" in start:
            more["q"] = start["q"]
        at = {"c": start["c"], "b": identity, "l": lease.id, "p": lease.parent}
        return {**at, **self.here, **more}

    @property
    def here(self) -> Offset:
        """The entries that all offsets of a checkpoint share: "t" and "i"."""
        settings = self._settings
        instance = {} if settings.many else {"i": settings.instance}
        return {"t": f"{settings.topic}/{settings.channel}", **instance}

    def check(self, offset: Offset) -> None:
        """Raises ValueError for an offset of another topic or channel; also of another instance,
        unless failOnDataLoss=false."""
        settings, here = self._settings, self.here["t"]
        if offset.get("t", here) != here:
            raise ValueError(
                f"the checkpoint is of a query that reads {offset['t']}, and this query reads "
                f"{here}: give the options topic and channel that it had, or a new checkpoint"
            )
        instance = self.here.get("i")
        if offset.get("i", instance) != instance and settings.failOnDataLoss:
            raise ValueError(
                f"the checkpoint is of a query that reads instance {offset['i']!r}, and this query "
                f"reads {instance!r}: what that query processed last may come again on the first "
                "one. Give the option instance that it had, or a new checkpoint; or, if the "
                'instance has another name now, .option("failOnDataLoss", "false") for one run'
            )

    # ---- the holder ----

    def begin(self, consumer: str) -> None:
        """Have the channel for a query's first run. Raises LeaseFenced if another query that lives
        leases under this name."""
        if self._holder is None:
            self._broker().create_channel(self._settings.topic, self._settings.channel)
            until = time.monotonic() + _ENDING
            while True:
                try:
                    return self._begin(consumer)
                except LeaseFenced:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.05)

    def _begin(self, consumer: str) -> None:
        settings = self._settings
        if not settings.many:
            return self._check_owner(consumer, "")
        # over a network nothing can be looked at without being the holder
        try:
            holder = self._broker().lease_holder_if_free(
                settings.topic,
                settings.channel,
                consumer,
                settings.leaseTtl,
                keepalive=True,
                **self._proof(),
            )
        except LeaseFenced as exc:
            raise self._another(consumer, str(exc)) from None
        self._holder, self._query = holder, ""
        return None

    def _proof(self) -> dict[str, Any]:
        """With what a holder on this host is opened that tasks may read over a network."""
        is_here = isinstance(self._broker(), shmq.Broker)
        return {"secret": self._settings.proof} if is_here else {}

    def _another(self, consumer: str, who: str) -> LeaseFenced:
        return LeaseFenced(
            f"read {self.where} under {consumer!r}: {who}: it is another query's. Give each query "
            "a consumer of its own, also each sink of one DataFrame, and a channel of its own if "
            "each shall have all messages. A lease whose checkpoint is gone is ended by `shmq "
            "lease finish`, if its messages were processed, or `shmq lease return`"
        )

    def _planned_by_another(self, consumer: str, lease: int) -> LeaseFenced:
        settings = self._settings
        where = f"--instance {self._instance} {settings.topic} {settings.channel} {lease}"
        return LeaseFenced(
            f"read {self.where} under {consumer!r}: lease {lease} is in the checkpoint of another "
            "query. Give this query a consumer of its own; or, if that checkpoint is gone: `shmq "
            f"lease finish {where}` if its messages were processed, else `shmq lease return "
            f"{where}`"
        )

    def _check_owner(self, consumer: str, query: str) -> None:
        """Raises LeaseFenced if the name's owner is another query than `query`, and lives; or, with
        `query`, if the name has a lease that another query's checkpoint names."""
        settings, broker = self._settings, self._broker()
        if settings.many or not isinstance(broker, shmq.Broker):
            return
        try:
            owner = broker.lease_owner(settings.topic, settings.channel, consumer)
        except Gone:  # there is no such channel yet
            return
        if owner is None or (query and owner.proof == proof_of(_secret(query))):
            return
        if owner.process is not None:
            pid = owner.process.split("-")[0]
            raise self._another(consumer, f"process {pid} leases under this name, and lives")
        planned = [lease.id for lease in owner.leases if query and lease.replays]
        if planned:
            raise self._planned_by_another(consumer, planned[-1])

    def adopt(self, consumer: str, query: str = "") -> LeaseHolder:
        """The holder of the name that the offset has, which is opened if it is not open. query: of
        the offset. Raises LeaseFenced if the name is another query's."""
        if self._holder is None or (self._holder.name, self._query) != (consumer, query):
            self.close()
            settings, broker = self._settings, self._broker()
            more: dict[str, Any] = self._proof() if settings.many else {}
            if query and not settings.many:
                self._check_owner(consumer, query)
                more["secret"] = _secret(query)
            self._query = query
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

    def __del__(self) -> None:
        """A reader that nobody has any more is an ended one. Over a network it is not told here."""
        if isinstance(self._holder, LeaseHolder):
            with contextlib.suppress(shmq.ShmqError):
                self.close()

    # ---- from one offset to the next ----

    def finish(self, offset: Offset) -> None:
        """Finish the leases up to the offset, which are processed for good. If the channel has
        another identity now, they no longer exist."""
        through = (offset["b"], offset["l"])
        if not offset["l"] or through == self._finished:
            return
        try:
            if offset["b"] != self.identity:
                self._check_returned(offset)
            else:
                self.adopt(offset["c"], offset.get("q", "")).finish_lease(offset["l"])
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
        self._finished = through

    def _check_returned(self, offset: Offset) -> None:
        """Look at what became of leases in memory that is gone. Raises LeaseLost if one up to the
        offset was returned when the broker stopped, or may have been read back from disk."""
        broker = self._broker()
        if not isinstance(broker, shmq.Broker):
            return
        found = broker.leases_returned(offset["b"], offset["c"])
        if found is None and not offset.get("d"):
            return  # the channel was deleted, or the memory was lost with its messages
        if found is None or any(lease <= offset["l"] for lease in found):
            raise LeaseLost(
                f"finish lease {offset['l']}: the broker was stopped since, and the messages of "
                "its open leases went to disk; with --on-stop=keep it keeps them"
            )

    def follow(self, start: Offset) -> tuple[str, int, Lease | None]:
        """Finish the leases up to `start`, which Spark's commit log has. Returns the identity of
        the channel, the id that a next lease names as the one before it, and the open lease that
        follows already, because of a crash before Spark recorded it."""
        self.check(start)
        holder = self.adopt(start["c"], start.get("q", ""))
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
            lease = self.adopt(consumer, self._query).lease(
                rows, max_bytes, parts(min(waiting, rows)), parent, timeout=0.05
            )
            if lease is not None:
                return lease
        return None

    # ---- planning ----

    def planned(self, start: Offset, end: Offset) -> tuple[str, list[Lease]]:
        """The identity of the channel, and the leases after `start` up to `end`, the oldest first.
        Each counts as replayed once more."""
        self.check(end)
        identity, leases = self.identity, list[Lease]()
        holder = self.adopt(end["c"], end.get("q", ""))
        lease: int = end["l"] if end["b"] == identity else 0
        first: int = start["l"] if start["b"] == end["b"] else 0
        if not lease:
            self.missing(end, "the broker was restarted, or the channel created again, since")
        while lease > first:
            try:
                # both sides of a join are planned, in one attempt
                found = holder.look(lease, replay=lease not in self._planned)
                self._planned.add(lease)
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


def _secret(query: str) -> str:
    return f"shmq spark query {query}"


def left_out(settings: Settings, where: str, lease: int, why: str) -> None:
    """Go on without the messages of a lease that a checkpoint names. Raises DataLoss unless
    failOnDataLoss=false. where: the channel and its instance."""
    text = f"a micro-batch of {where} (lease {lease}) is not there any more: {why}"
    if settings.failOnDataLoss:
        raise DataLoss(
            f'{text}; to go on without it: .option("failOnDataLoss", "false"). Messages of a '
            "lease that ran out (leaseTtl) are in the channel again"
        )
    _log.warning("%s; going on without it", text)
