"""The part of a broker's handle for leases: their holders, and reading them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmq import _native, procfs
from shmq.arguments import number
from shmq.client.lease import Elsewhere, LeasedBatch, LeaseHolder, read_lease
from shmq.errors import Gone, LeaseFenced, LeaseLost
from shmq.finder import Finder
from shmq.layout import text
from shmq.leased import READ_BYTES, READ_ROWS, proof_of
from shmq.names import check_name
from shmq.option_types import to_ns

if TYPE_CHECKING:
    from shmq.client.disk import Files
    from shmq.peek import LeaseEntry


@dataclass(frozen=True)
class LeaseOwner:
    """The owner of a name of leases. process: it as `PID-START`; None if it does not live.
    proof: `proof_of` its secret; (0, 0): none. leases: those that are open."""

    process: str | None
    proof: tuple[int, int]
    leases: tuple[LeaseEntry, ...]


class Lessor(Finder):
    """Leases of any channel, for a `Broker`."""

    def lease_holder(
        self,
        topic: str,
        channel: str,
        name: str,
        ttl: float | None = 600.0,
        grace: float | None = None,
        keepalive: bool = False,
        secret: str | None = None,
    ) -> LeaseHolder:
        """Return a holder of leases of the channel under a name; topic and channel are created if
        they are missing.

        name: 1 to 79 bytes. An earlier holder of the name is fenced: its calls raise LeaseFenced,
        and its open leases belong to the new holder.
        ttl: the seconds without a sign of life after which the leases go back to the channel (0.001
        to 1e9); None: never.
        grace: the same after the holder was closed or its process ended; None: as ttl.
        keepalive: a thread of this process gives the signs of life.
        secret: 16 to 200 characters with which clients on the network may open the name again and
        read its leases, see `shmq.connect`; None: they may not while it has an owner or leases.

        Raises BadName, NotRunning, Gone, ValueError or TypeError for the times and the secret, and
        ShmqError if 64 other names are taken.
        """
        proof = (0, 0) if secret is None else proof_of(secret)
        return self.lease_holder_for(topic, channel, name, (ttl, grace), keepalive, proof)

    def lease_holder_for(
        self,
        topic: str,
        channel: str,
        name: str,
        times: tuple[float | None, float | None],
        keepalive: bool,
        proof: tuple[int, int],
        elsewhere: Elsewhere | None = None,
    ) -> LeaseHolder:
        """`lease_holder`, also for a holder that is elsewhere, for the rest of the package. times:
        ttl and grace. proof: `proof_of` its secret. Raises LeaseFenced if the name is another's."""
        ttl, grace = times
        check_name(topic, "topic")
        check_name(channel, "channel")
        both: list[int] = []
        for label, seconds in (("ttl", ttl), ("grace", ttl if grace is None else grace)):
            if seconds is not None and not 0.001 <= number(label, seconds) <= 1e9:
                raise ValueError(f"{label} must be None or from 0.001 to 1e9 s, not {seconds}")
            both.append(0 if seconds is None else to_ns(seconds))
        ttl_ns, grace_ns = both

        def opened(native: _native.Broker, queue: int, serial: int) -> LeaseHolder:
            files = functools.partial(self._files, queue, serial)
            names = (topic, channel, name)
            return LeaseHolder(
                native, queue, serial, *names, ttl_ns, grace_ns, keepalive, files, proof, elsewhere
            )

        return self._opened(functools.partial(self._queue, topic, channel), opened)

    def lease_holder_if_free(
        self,
        topic: str,
        channel: str,
        name: str,
        ttl: float | None,
        keepalive: bool = False,
        secret: str | None = None,
    ) -> LeaseHolder:
        """`lease_holder`, for the rest of the package, with a grace that is as long as ttl. Raises
        LeaseFenced as `check_free`."""
        self.check_free(topic, channel, name)
        proof = (0, 0) if secret is None else proof_of(secret)
        return self.lease_holder_for(topic, channel, name, (ttl, ttl), keepalive, proof)

    def check_free(self, topic: str, channel: str, name: str, owner_is: str = "") -> None:
        """Check, for the rest of the package, that no owner of a name of leases lives, and that no
        lease of it was asked for by `look(replay=True)`, as those that a checkpoint names. Raises
        LeaseFenced. owner_is: what the error says of the owner, instead of its process."""
        try:
            owner = self.lease_owner(topic, channel, name)
        except Gone:  # there is no such channel yet
            return
        if owner is None:
            return
        if owner.process is not None:
            who = owner_is or f"process {owner.process.split('-')[0]}"
            raise LeaseFenced(f"{who} leases under this name, and lives")
        if planned := [lease.id for lease in owner.leases if lease.replays]:
            raise LeaseFenced(
                f"the checkpoint of a streaming query names lease {planned[-1]} of this name"
            )

    def read_lease(
        self,
        topic: str,
        channel: str,
        lease: int,
        part: int = 0,
        rows: int = READ_ROWS,
        max_bytes: int = READ_BYTES,
        properties: bool = False,
    ) -> Iterator[LeasedBatch]:
        """Yield one part of an open lease, whoever holds it, in batches, as
        `LeaseHolder.read_lease` does. Raises Gone if there is no such channel, and LeaseLost if
        the lease has ended."""
        native, queue, serial = self._existing_queue(topic, channel)
        files = functools.partial(self._files, queue, serial)
        return read_lease(native, queue, serial, lease, part, files, rows, max_bytes, properties)

    def lease_owner(self, topic: str, channel: str, name: str) -> LeaseOwner | None:
        """The owner of a name of leases, looked at without a lock, for the rest of the package;
        None if there never was one. Raises Gone if there is no such channel."""
        from shmq.peek import open_leases  # needs numpy

        _, queue, serial = self._existing_queue(topic, channel)
        view = self.views().queue_at(queue, serial)
        for row in view.lease_holders.copy():
            if int(row["state"]) and text(row["name"]) == name:
                break
        else:
            return None
        pid = int(row["pid"])
        lives = int(row["client"]) and procfs.start_time(pid) == int(row["start_time"])
        leases = tuple(entry for entry in open_leases(view) if entry.holder == name)
        proof = int(row["proof"][0]), int(row["proof"][1])
        return LeaseOwner(f"{pid}-{int(row['start_time'])}" if lives else None, proof, leases)

    def leases_returned(self, identity: str, name: str) -> list[int] | None:
        """The leases under a name that were returned when the broker was stopped, in a channel that
        had this identity then, for the rest of the package. None: no stop of that memory is known.
        Raises ShmqError if the file that says so cannot be read."""
        from shmq.storage import returned_leases

        path = self.views().directory.data_path
        try:
            found = returned_leases.load(path).get(identity)
        except OSError as exc:
            raise LeaseLost(
                f"it is not known which leases the last stop of instance {self.instance!r} "
                f"returned: {exc.strerror}: {exc.filename}"
            ) from None
        return None if found is None else found.get(name, [])

    def lease_holder_again(
        self,
        topic: str,
        channel: str,
        name: str,
        holder: tuple[int, int, int, int],
        most: int = 0,
    ) -> LeaseHolder:
        """Another handle of a holder, which fences nobody, for the rest of the package. holder:
        (queue, serial, index, incarnation). most: of `LeaseHolder.reopened`."""
        files = functools.partial(self._files, *holder[:2])
        return LeaseHolder.reopened(self.native(), topic, channel, name, holder, files, most)

    def lease_holder_known(
        self, topic: str, channel: str, incarnation: tuple[int, int], most: int
    ) -> LeaseHolder:
        """Another handle of the holder that has this `LeaseHolder.incarnation`. Its calls raise
        LeaseFenced if there is none. Raises Gone if there is no such channel, and BadName."""
        _, queue, serial = self._existing_queue(topic, channel)
        return self.lease_holder_again(topic, channel, "", (queue, serial, *incarnation), most)

    def check_reader(
        self,
        topic: str,
        channel: str,
        lease: int,
        holder: tuple[int, int] | None,
        proof: tuple[int, int] | None,
    ) -> None:
        """Check, for the rest of the package, that an open lease is of the holder with this
        incarnation, or of one whose secret has this `proof_of`. Raises LeaseFenced if it is not,
        LeaseLost if there is no such lease, and Gone."""
        _, queue, serial = self._existing_queue(topic, channel)
        view = self.views().queue_at(queue, serial)
        rows, holders = view.leases, view.lease_holders
        row = rows[lease % len(rows)].copy() if len(rows) else None
        if row is None or int(row["word"]) >> 8 != lease:
            raise LeaseLost(f"read lease {lease} of {topic}/{channel}: it is not open")
        index = int(row["holder"]) % len(holders)
        its = holders[index].copy()
        if holder is not None and (index, int(its["incarnation"])) == holder:
            return
        found = int(its["proof"][0]), int(its["proof"][1])
        if proof is not None and found == proof:
            return
        raise LeaseFenced(
            f"read lease {lease} of {topic}/{channel}: it is another holder's; over the network "
            "only that holder reads it, and clients with its secret"
        )

    def _files(self, queue: int, serial: int) -> Files:
        from shmq.client.disk import Files

        source = self.views()
        view = source.queue_at(queue, serial)
        directory = source.directory
        path, most = directory.data_path, directory.limits["max_msg_size"]
        return Files(view, path, int(most))
