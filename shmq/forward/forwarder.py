"""Moves messages from a channel into a target, one lease after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shmq.errors import LeaseLost, ShmqError
from shmq.forward.loop import Loop
from shmq.forward.marker import Marker
from shmq.forward.target import Source, Target
from shmq.leased import Lease

if TYPE_CHECKING:
    from shmq.client.lease import LeaseHolder
    from shmq.remote.lease import RemoteLeaseHolder

#: The name under which every forwarder of a channel leases: a second one fences the first.
HOLDER: Final = "forward"
#: Seconds that one wait for messages lasts.
_WAIT: Final = 0.5


@dataclass(frozen=True)
class _Batch:
    """A lease that was read."""

    lease: Lease
    ids: tuple[int, ...]
    bodies: list[bytes]
    stored: frozenset[int] = frozenset()
    """The messages that were left out, because the target has them."""

    def without(self, stored: set[int]) -> _Batch:
        """The same without these messages."""
        found = stored.intersection(self.ids)
        if not found:
            return self
        pairs = zip(self.ids, self.bodies, strict=True)
        kept = [(number, body) for number, body in pairs if number not in found]
        ids, bodies = tuple(number for number, _ in kept), [body for _, body in kept]
        return _Batch(self.lease, ids, bodies, frozenset(found))


class Forwarder(Loop):
    """Forwards one channel until `stop`."""

    def __init__(
        self,
        holder: LeaseHolder | RemoteLeaseHolder,
        identity: str,
        depth: Callable[[], int],
        source: Source,
        target: Target,
        most: int | None = None,
    ) -> None:
        """identity, depth: those of the channel. most: messages of a batch; None: as many as the
        target takes."""
        super().__init__(target)
        self._holder, self._identity, self._depth = holder, identity, depth
        self._source, self._target = source, target
        self._most = min(most or target.most, target.most)
        self._open: deque[Lease] = deque()
        self._doubt: set[int] = set()
        """Messages that the target has and that may come again."""
        self._parent = 0

    def _connect(self) -> None:
        """Connect, and finish the lease that the target has already."""
        marker = self._target.open()
        if marker is not None:
            self._settle(marker)
        self._open = deque(self._holder.leases())
        self._parent = self._open[-1].id if self._open else self._parent

    def _settle(self, marker: Marker) -> None:
        if marker.source != str(self._source):
            raise ShmqError(
                f"forward to {self._target}: the last marker there is of {marker.source}, not of "
                f"{self._source}; give another ?marker=SUBJECT, or --host as it was"
            )
        self._doubt = set(marker.doubt)
        try:
            if marker.identity == self._identity:
                self.progress.resumed += self._holder.finish_lease(marker.lease)
                return
        except LeaseLost:
            pass
        # The lease ended before it was finished, perhaps: its messages may come again.
        self._doubt.update(marker.ids)

    def _move(self, until_empty: bool) -> bool:
        batch: _Batch | None = None
        while True:
            if batch is None:
                self._target.idle()
                ends = until_empty and not self._depth()
                batch = self._next(0 if ends else _WAIT)
            if batch is None:
                if self._stopping.is_set() or (until_empty and not self._depth()):
                    return True
                if self._doubt and not self._depth():
                    self._doubt.clear()  # they would have come
                continue
            batch = batch.without(self._doubt)
            if not batch.bodies:
                self._finish(batch)
                batch = None
                continue
            doubt = tuple(self._doubt)
            marker = Marker(str(self._source), self._identity, batch.lease.id, batch.ids, doubt)
            self._target.send(batch.bodies, marker)
            sent, batch = batch, self._next(0)
            self._target.confirm()
            self._stored(len(sent.bodies), sum(map(len, sent.bodies)))
            self._finish(sent)

    def _finish(self, batch: _Batch) -> None:
        try:
            self._holder.finish_lease(batch.lease.id)
        except LeaseLost:  # an operator returned it
            if self._target.exact:
                self._doubt.update(batch.ids)
            return
        self.progress.resumed += len(batch.stored)
        self._doubt -= batch.stored

    # ---- reading ----

    def _next(self, timeout: float) -> _Batch | None:
        """The next lease, read; None if there is none within `timeout` seconds, or after `stop`."""
        while True:
            if self._open:
                lease = self._open.popleft()
            elif self._stopping.is_set():
                return None
            else:
                found = self._holder.lease(
                    self._most, self._target.most_bytes, parent=self._parent, timeout=timeout
                )
                if found is None:
                    return None
                lease = found
                self._parent = lease.id
            try:
                if lease.count > self._target.most:  # of a forwarder with another target
                    self._holder.return_lease(lease.id)
                    continue
                return self._read(lease)
            except LeaseLost:  # an operator returned it
                continue

    def _read(self, lease: Lease) -> _Batch:
        ids: list[int] = []
        bodies: list[bytes] = []
        for part in range(lease.parts):
            for rows in self._holder.read_lease(lease.id, part):
                ids += rows.ids.tolist()
                bodies += rows.bodies()
                if len(ids) > lease.count:
                    raise ShmqError(
                        f"forward from {self._source}: lease {lease.id} has {lease.count} messages,"
                        f" and {len(ids)} came"
                    )
        return _Batch(lease, tuple(ids), bodies)
