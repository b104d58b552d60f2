"""The part of a broker's handle for leases: their holders, and reading them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shmq import _native
from shmq.client.arguments import number
from shmq.client.lease import LeasedBatch, LeaseHolder, read_lease
from shmq.finder import Finder
from shmq.leased import READ_BYTES, READ_ROWS
from shmq.names import check_name
from shmq.option_types import to_ns

if TYPE_CHECKING:
    from shmq.client.disk import Files
    from shmq.sources import NativeSource


class Lessor(Finder):
    """Leases of any channel, for a `Broker`."""

    def views(self) -> NativeSource:
        """Read-only views of the segments. Raises Gone."""
        raise NotImplementedError

    def lease_holder(
        self,
        topic: str,
        channel: str,
        name: str,
        ttl: float | None = 600.0,
        grace: float | None = None,
        keepalive: bool = False,
    ) -> LeaseHolder:
        """Return a holder of leases of the channel under a name; topic and channel are created if
        they are missing.

        name: 1 to 79 bytes. An earlier holder of the name is fenced: its calls raise LeaseFenced,
        and its open leases belong to the new holder.
        ttl: the seconds without a sign of life after which the leases go back to the channel (0.001
        to 1e9); None: never.
        grace: the same after the holder was closed or its process ended; None: as ttl.
        keepalive: a thread of this process gives the signs of life.

        Raises BadName, NotRunning, Gone, ValueError or TypeError for the times, and ShmqError if
        64 other names are taken.
        """
        check_name(topic, "topic")
        check_name(channel, "channel")
        times: list[int] = []
        for label, seconds in (("ttl", ttl), ("grace", ttl if grace is None else grace)):
            if seconds is not None and not 0.001 <= number(label, seconds) <= 1e9:
                raise ValueError(f"{label} must be None or from 0.001 to 1e9 s, not {seconds}")
            times.append(0 if seconds is None else to_ns(seconds))
        ttl_ns, grace_ns = times

        def opened(native: _native.Broker, queue: int, serial: int) -> LeaseHolder:
            files = functools.partial(self._files, queue, serial)
            return LeaseHolder(
                native, queue, serial, topic, channel, name, ttl_ns, grace_ns, keepalive, files
            )

        return self._opened(functools.partial(self._queue, topic, channel), opened)

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

    def lease_holder_again(
        self, topic: str, channel: str, name: str, holder: tuple[int, int, int, int]
    ) -> LeaseHolder:
        """Another handle of a holder, which fences nobody, for the rest of the package. holder:
        (queue, serial, index, incarnation)."""
        files = functools.partial(self._files, *holder[:2])
        return LeaseHolder.reopened(self.native(), topic, channel, name, holder, files)

    def lease_holder_known(
        self, topic: str, channel: str, name: str, incarnation: tuple[int, int]
    ) -> LeaseHolder:
        """Another handle of the holder that has this `LeaseHolder.incarnation`. Its calls raise
        LeaseFenced if there is none. Raises Gone if there is no such channel, and BadName."""
        _, queue, serial = self._existing_queue(topic, channel)
        return self.lease_holder_again(topic, channel, name, (queue, serial, *incarnation))

    def _files(self, queue: int, serial: int) -> Files:
        from shmq.client.disk import Files

        source = self.views()
        view = source.queue_at(queue, serial)
        directory = source.directory
        path, most = directory.data_path, directory.limits["max_msg_size"]
        return Files(view, path, int(most))
