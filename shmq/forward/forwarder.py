"""Moves messages from a channel into a target, one lease after the other.

A message that the target refuses is found before it is sent, where the target's limits are known.
Otherwise the target refuses a batch: its halves are sent, and theirs, until one message is left
that is refused alone. A part that was stored has a marker that names its messages as in doubt, so
none of them is stored again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shmq.errors import LeaseLost, ShmqError
from shmq.forward.loop import Again, Loop
from shmq.forward.marker import Marker
from shmq.forward.refusal import DEAD, SKIP, STOP, Refusal, Refused, Stopped, told
from shmq.forward.target import Source, Target
from shmq.leased import Lease

if TYPE_CHECKING:
    from shmq.client.lease import LeaseHolder
    from shmq.forward.letters import Letters
    from shmq.remote.lease import RemoteLeaseHolder

#: The name under which every forwarder of a channel leases: a second one fences the first.
HOLDER: Final = "forward"
#: Seconds that one wait for messages lasts.
_WAIT: Final = 0.5

_NONE: Final[Mapping[str, bytes]] = {}


@dataclass(frozen=True)
class _Batch:
    """Messages of a lease that was read."""

    lease: Lease
    places: Sequence[int]
    """Of each message in the lease."""
    ids: tuple[int, ...]
    bodies: list[bytes]
    properties: list[Mapping[str, bytes]] | None
    """Of each message; None: none has any."""
    stored: frozenset[int] = frozenset()
    """The messages that were left out, because the target has them."""

    def chosen(self, which: Sequence[int]) -> _Batch:
        """Those of these indices."""
        properties = self.properties
        return _Batch(
            self.lease,
            [self.places[i] for i in which],
            tuple(self.ids[i] for i in which),
            [self.bodies[i] for i in which],
            None if properties is None else [properties[i] for i in which],
            self.stored,
        )

    def without(self, stored: set[int]) -> _Batch:
        """The same without these messages, which the target has."""
        found = stored.intersection(self.ids)
        if not found:
            return self
        kept = self.chosen([i for i, number in enumerate(self.ids) if number not in found])
        return _Batch(
            kept.lease, kept.places, kept.ids, kept.bodies, kept.properties, frozenset(found)
        )


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
        refused: str = STOP,
        letters: Letters | None = None,
        bodies_only: bool = False,
    ) -> None:
        """identity, depth: those of the channel. most: messages of a batch; None: as many as the
        target takes. refused: what becomes of messages that the target refuses, one of `POLICIES`.
        letters: for `dead`. bodies_only: properties are left out."""
        super().__init__(target)
        self._holder, self._identity, self._depth = holder, identity, depth
        self._source, self._target = source, target
        self._wish = most
        self._refused, self._letters = refused, letters
        self._with_properties = not bodies_only
        self._is_told = False
        """Whether it was said that the target takes no properties."""
        self._open: deque[Lease] = deque()
        self._doubt: set[int] = set()
        """Messages that the target has and that may come again."""
        self._bad: dict[int, str] = {}
        """Messages that the target refused alone, and why."""
        self._parent = 0
        self._last = 0
        """The last lease that is stored as a whole."""
        self._is_old = False
        """Whether a batch was looked at since the target was asked for its limits."""

    def _connect(self) -> None:
        """Connect, and finish the lease that the target has already."""
        self._reopen()
        self._open = deque(self._holder.leases())
        self._parent = self._open[-1].id if self._open else self._parent

    def _reopen(self) -> None:
        marker = self._target.open()
        self._is_old = False
        if marker is not None:
            self._settle(marker)

    def _settle(self, marker: Marker) -> None:
        if marker.source != str(self._source):
            raise ShmqError(
                f"forward to {self._target}: the last marker there is of {marker.source}, not of "
                f"{self._source}; give another ?marker=SUBJECT, or --host as it was"
            )
        self._doubt = set(marker.doubt)
        try:
            if marker.identity == self._identity:
                self._last = marker.lease
                if marker.lease:
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
                self._well()
                if self._stopping.is_set() or (until_empty and not self._depth()):
                    return True
                if self._doubt and not self._depth():
                    self._doubt.clear()  # they would have come
                continue
            batch = batch.without(self._doubt)
            rest = self._sifted(batch)
            if rest is None:
                return True
            if not rest.bodies:
                self._finish(batch)
                batch = None
                continue
            doubt = tuple(self._doubt)
            marker = Marker(str(self._source), self._identity, batch.lease.id, batch.ids, doubt)
            try:
                self._target.send(rest.bodies, marker, rest.properties)
                sent, batch = batch, self._next(0)
                self._target.confirm()
            except Refused as exc:
                self._isolate(rest, exc)
                raise Again from None
            self._stored(len(rest.bodies), sum(map(len, rest.bodies)))
            self._is_old = True
            self._last = sent.lease.id
            self._finish(sent)

    def _finish(self, batch: _Batch) -> None:
        for number in self._bad.keys() & set(batch.ids) if self._bad else ():
            del self._bad[number]
        try:
            self._holder.finish_lease(batch.lease.id)
        except LeaseLost:  # an operator returned it
            if self._target.exact:
                self._doubt.update(batch.ids)
            return
        self.progress.resumed += len(batch.stored)
        self._doubt -= batch.stored

    # ---- messages that the target refuses ----

    def _sifted(self, batch: _Batch) -> _Batch | None:
        """The messages that the target may take; what is said of the others was done. None if
        `stop` came before there was room for dead letters. Raises Stopped, and Again if the limits
        are to be asked for again before a message is given up."""
        found = dict(self._target.too_big(batch.bodies, batch.properties))
        for place, number in enumerate(batch.ids) if self._bad else ():
            if number in self._bad:
                found.setdefault(place, self._bad[number])
        if not found:
            return batch
        if self._is_old:
            raise Again
        self._is_old = True
        refusals = {place: self._refusal(batch, place, why) for place, why in found.items()}
        if self._refused == STOP:
            self._halt(batch, refusals[min(refusals)], len(refusals))
        if self._refused == DEAD:
            assert self._letters is not None
            rows = [
                (batch.places[i], batch.bodies[i], self._own(batch, i), refusal)
                for i, refusal in sorted(refusals.items())
            ]
            if not self._letters.put(batch.lease.id, rows, self._stopping.is_set):
                return None
            done = f"dead letters in {self._letters.topic}"
            self.progress.dead += len(refusals)
        else:
            done = f"left out by --refused={SKIP}"
            self.progress.skipped += len(refusals)
        self.progress.refused += len(refusals)
        count = f"{len(refusals)} message{'s' * (len(refusals) > 1)} of lease {batch.lease.id}"
        for line in told(refusals.values(), f"{self._source}: {count}: {done}"):
            self._say(line)
        return batch.chosen([i for i in range(len(batch.ids)) if i not in refusals])

    @staticmethod
    def _own(batch: _Batch, place: int) -> Mapping[str, bytes]:
        return _NONE if batch.properties is None else batch.properties[place]

    def _refusal(self, batch: _Batch, place: int, why: str) -> Refusal:
        body = batch.bodies[place]
        size = sum(len(name) + len(value) for name, value in self._own(batch, place).items())
        of_headers = size > 0 and not self._target.too_big([body], None)
        return Refusal(f"{batch.ids[place]:016x}", len(body), size, why, of_headers)

    def _halt(self, batch: _Batch, refusal: Refusal, count: int) -> None:
        self.progress.refused += count
        place = f"{self._source.topic}/{self._source.channel}"
        others = batch.lease.count - 1
        waits = f"it and {others} other{'s' * (others != 1)} wait in lease {batch.lease.id}"
        if count > 1:
            waits += f" ({count} of them are refused)"
        raise Stopped(f"forward {place} to {self._target}", refusal, f"{waits} of {place}")

    def _isolate(self, batch: _Batch, refused: Refused) -> None:
        """Find which messages of a batch that was refused the target refuses, and store the others
        on the way, in their order. `_bad` has the messages that were found then, and `_doubt`
        those that were stored."""
        self._reopen()
        why, parts = str(refused), deque([batch])
        while parts and not self._stopping.is_set():
            part = parts.popleft().without(self._doubt)
            if not part.ids:
                continue
            if self._target.too_big(part.bodies, part.properties):
                return  # it knows its limits now
            if part is not batch and not (why := self._try(part)):
                continue
            if len(part.ids) == 1:
                self._bad[part.ids[0]] = why
                continue
            middle = len(part.ids) // 2
            parts.appendleft(part.chosen(range(middle, len(part.ids))))
            parts.appendleft(part.chosen(range(middle)))

    def _try(self, part: _Batch) -> str:
        """Store a part of a lease; why it is refused, or an empty text."""
        doubt = (*self._doubt, *part.ids)
        marker = Marker(str(self._source), self._identity, self._last, (), doubt)
        try:
            self._target.send(part.bodies, marker, part.properties)
            self._target.confirm()
        except Refused as exc:
            self._reopen()
            return str(exc)
        self._doubt.update(part.ids)
        self._stored(len(part.ids), sum(map(len, part.bodies)))
        return ""

    # ---- reading ----

    def _next(self, timeout: float) -> _Batch | None:
        """The next lease, read; None if there is none within `timeout` seconds, or after `stop`."""
        while True:
            most = min(self._wish or self._target.most, self._target.most)
            if self._open:
                lease = self._open.popleft()
            elif self._stopping.is_set():
                return None
            else:
                found = self._holder.lease(
                    most, self._target.most_bytes, parent=self._parent, timeout=timeout
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
        properties: list[Mapping[str, bytes]] = []
        has_some = False
        for part in range(lease.parts):
            for rows in self._holder.read_lease(lease.id, part, properties=self._with_properties):
                ids += rows.ids.tolist()
                bodies += rows.bodies()
                if len(ids) > lease.count:
                    raise ShmqError(
                        f"forward from {self._source}: lease {lease.id} has {lease.count} messages,"
                        f" and {len(ids)} came"
                    )
                if self._with_properties and rows.has_properties:
                    has_some = True
                    properties += [_NONE] * (len(ids) - len(rows) - len(properties))
                    properties += rows.properties
        properties += [_NONE] * (len(ids) - len(properties)) if has_some else []
        if has_some and not self._target.has_headers and not self._is_told:
            self._is_told = True
            self._say(f"{self._target}: it takes no properties, so bodies are forwarded alone")
        return _Batch(lease, range(len(ids)), tuple(ids), bodies, properties if has_some else None)
