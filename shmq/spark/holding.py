"""The leases of a batch read: one on one instance, or one on each of many.

Both are the same here. The process that plans a read finds the leases that its application has by
what it wrote down when it took them (`reads`), with the holder that took them, and goes on as that
holder: so it fences nobody of its own application. It opens the name only if nobody who lives has
it. A process
of its own (`keeper`) keeps the leases alive while the application runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import shmq
from shmq.errors import LeaseFenced
from shmq.spark import keeper, staging
from shmq.spark.keeper import holder_again
from shmq.spark.options import Settings
from shmq.spark.reads import Application, Read, Reads, gone, is_alive, this_process


class Where(Protocol):
    """An instance that is read."""

    @property
    def broker(self) -> Any: ...

    @property
    def identity(self) -> str:
        """Of its memory."""

    @property
    def address(self) -> str:
        """Its name or address, for texts of errors."""

    @property
    def place(self) -> Any:
        """Where a process that is not this one finds it; None: by its name on this host."""


class Split(Protocol):
    """A lease: its id, and the number of its parts."""

    @property
    def id(self) -> int: ...

    @property
    def parts(self) -> int: ...


@dataclass
class Held:
    """The leases of a read on one instance. identity: of the channel. is_new: the name was opened
    now."""

    holder: Any
    identity: str
    leases: Sequence[Any]
    is_new: bool

    @property
    def ids(self) -> list[int]:
        """Of its leases."""
        return [lease.id for lease in self.leases]


class Holding:
    """The leases of one batch read, under its name."""

    def __init__(self, settings: Settings, name: str, reads: Reads) -> None:
        """reads: which are locked."""
        self._settings, self._name, self._reads = settings, name, reads
        self._application = Application.mine()
        self._new: list[Any] = []  # holders that were opened now

    def plan(
        self,
        hosts: Mapping[str, Where],
        each: Callable[[Mapping[str, Any], Callable[[Any], Any]], dict[str, Any]],
        take: Callable[[dict[str, Held]], None],
    ) -> dict[str, Held]:
        """Find the leases of the read on these instances, by the identity of their memory: those
        that its application has already, or a dead one has left; else those that `take` takes with
        the holders and puts into their `leases`.

        each: calls a function with each host. Raises LeaseFenced if another application, which
        lives, has the name, and LeaseLost, once, if what this one has read went back to the
        channel: what comes now are other rows."""
        self._new.clear()
        needed: list[Any] = []
        try:
            found = self._planned(hosts, each, take)
            needed = [one.holder for one in found.values()]
            return found
        finally:
            for holder in self._new:
                if holder not in needed:  # nobody is to take this process for the name's owner
                    holder.close()

    def _planned(
        self,
        hosts: Mapping[str, Where],
        each: Callable[[Mapping[str, Any], Callable[[Any], Any]], dict[str, Any]],
        take: Callable[[dict[str, Held]], None],
    ) -> dict[str, Held]:
        before = self._reads.of(self._application)
        held: dict[str, Held] = each(hosts, lambda host: self._found(host, before))
        self._check_lost(held, before)
        is_kept = before is not None and any(map(is_alive, before.keepers))
        if any(one.leases for one in held.values()):
            same = not any(one.is_new for one in held.values() if one.leases)
            if same and is_kept:
                return {key: one for key, one in held.items() if one.leases}
        else:
            take(held)
        used = {key: one for key, one in held.items() if one.leases}
        read = self._note(held, before)
        if used:
            self._keep(read, {key: hosts[key] for key in used}, used)
        return used

    # ---- the holder ----

    def _found(self, host: Where, before: Read | None) -> Held:
        settings, broker = self._settings, host.broker
        topic, channel = settings.topic, settings.channel
        broker.create_channel(topic, channel)
        identity: str = broker.channel_identity(topic, channel)
        known = None if before is None else before.holders.get(host.identity)
        if known is not None:
            with contextlib.suppress(LeaseFenced):
                holder = holder_again(broker, (topic, channel, self._name), known)
                return Held(holder, identity, holder.leases(), False)
        return self._opened(host, identity)

    def _opened(self, host: Where, identity: str) -> Held:
        settings, ttl = self._settings, self._settings.leaseTtl
        what = f"read {settings.channel_of(host.address)} under {self._name!r}"
        more: dict[str, Any] = {}
        if settings.many and isinstance(host.broker, shmq.Broker):  # tasks may read from elsewhere
            more["secret"] = settings.proof
        try:
            holder = host.broker.lease_holder_if_free(
                settings.topic, settings.channel, self._name, ttl, **more
            )
        except LeaseFenced as exc:
            raise LeaseFenced(
                f"{what}: {exc}: it is another application's, or a streaming query's. Give each of "
                "them a consumer of its own"
            ) from None
        self._new.append(holder)
        return Held(holder, identity, holder.leases(), True)

    # ---- what is written down ----

    def _check_lost(self, held: Mapping[str, Held], before: Read | None) -> None:
        """Raises LeaseLost if a lease that this application has read has ended otherwise than by
        `finish_lease` or `return_lease`; and forgets it, so that the next read takes anew."""
        if before is None:
            return
        lost: int = 0
        for key, (identity, ids) in before.leases.items():
            here = held.get(key)
            if here is None and self._settings.many:  # it may be away
                continue
            left = [] if here is None or here.identity != identity else here.ids
            gone_ones = set(ids) - set(left)
            lost = max(gone_ones - set(before.looked), default=lost)
            if gone_ones:
                before.leases[key] = (identity, [])
        if lost:
            self._reads.store(before)
            raise gone(self._reads.what, lost)

    def _note(self, held: Mapping[str, Held], before: Read | None) -> Read:
        """Write down the leases that are read from now on. Those on an instance that is away stay
        known."""
        read = Read(self._application.name, list(self._application.above))
        if before is not None and self._settings.many:
            read.leases |= before.leases
            read.holders |= before.holders
        for key, one in held.items():
            read.leases[key] = (one.identity, one.ids)
            read.holders[key] = (*one.holder.incarnation,)
            if not one.leases and one.is_new:
                del read.leases[key], read.holders[key]
        self._reads.note(read)
        return read

    def _keep(self, read: Read, hosts: Mapping[str, Where], used: Mapping[str, Held]) -> None:
        settings = self._settings
        kept = [
            keeper.Kept(
                settings.instance if host.place is None else None,
                settings.owner,
                None if host.place is None else dataclasses.asdict(host.place),
                (settings.topic, settings.channel, self._name),
                used[key].identity,
                (*used[key].holder.incarnation,),
                [(lease.id, lease.parts) for lease in used[key].leases],
            )
            for key, host in hosts.items()
        ]
        process = keeper.start(
            kept,
            [one.holder for one in used.values()],
            settings.leaseTtl,
            staging.application(),
        )
        read.keepers = [this_process(), process]  # until it is there, this one keeps them
        self._reads.store(read)
