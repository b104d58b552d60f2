"""Moves messages from another system into a topic, each once.

The topic remembers for each lane the number of its last message (`shmq_publish_once`). One store in
shared memory decides both this mark and the publish, so no death can come between them. A message
that was published and not acknowledged comes again, and is left out by its number. The mark lives
as long as the broker's memory; fresh memory has what was acknowledged alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shmq.configurable import at_once
from shmq.errors import BadArgument, Full, Rejected
from shmq.forward.loop import Loop
from shmq.forward.origin import Origin, Portion
from shmq.patience import Patience

if TYPE_CHECKING:
    from shmq.broker import Broker

#: Every mark counts in one epoch.
_EPOCH: Final = 1
#: Messages that are asked for at once, by default.
_MOST: Final = 999
#: Messages, and bytes, that are published at once.
_ROWS: Final = 2048
_BYTES: Final = 4 << 20
#: Seconds that one wait for messages, or for room, lasts.
_WAIT: Final = 0.5


def _key(lane: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"forward\0{lane}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


class Receiver(Loop):
    """Publishes what an origin has until `stop`."""

    def __init__(self, broker: Broker, topic: str, origin: Origin, most: int | None = None) -> None:
        """most: messages that are asked for at once."""
        super().__init__(origin)
        self._origin, self._most = origin, most or _MOST
        self._producer: Any = broker.producer(topic)
        self._rows, self._size = at_once(broker, topic, _ROWS, _BYTES)

    def _connect(self) -> None:
        self._origin.open(self._reached)

    def _reached(self, lane: str) -> int:
        """The number of the last message that was published."""
        epoch, number = self._producer.mark(*_key(lane))
        return int(number) if epoch == _EPOCH + 1 else 0

    def _move(self, until_empty: bool) -> bool:
        while not self._stopping.is_set():
            portions = self._origin.take(self._most, _WAIT)
            if not portions:
                if until_empty and self._origin.drained():
                    return True
                self._origin.idle()
                continue
            for portion in portions:
                if not self._publish(portion):
                    return True
            self._origin.done(portions)
        return True

    def _publish(self, portion: Portion) -> bool:
        """Publish what of it was not published. Returns False if `stop` came before there was
        room: the rest comes again."""
        after = self._reached(portion.lane)
        found = list(zip(portion.numbers, portion.bodies, strict=True))
        fresh = [(number, body) for number, body in found if number > after]
        self.progress.resumed += len(found) - len(fresh)
        rows = [(number, body) for number, body in fresh if body]
        self.progress.skipped += len(fresh) - len(rows)
        for piece in self._pieces(rows):
            upto = piece[-1][0]
            patience = Patience()
            while (published := self._try(portion.lane, piece, after, upto, patience)) is None:
                if self._stopping.is_set():
                    return False
                self._origin.idle()
            if not published:  # by another process: begin again with what it has left
                return self._publish(portion)
            after = upto
            self._stored(len(piece), sum(len(body) for _, body in piece))
        return True

    def _try(
        self,
        lane: str,
        piece: Sequence[tuple[int, bytes]],
        after: int,
        upto: int,
        patience: Patience,
    ) -> bool | None:
        """Publish messages. Returns None if there is no room, and False if somebody else has
        published in this lane since `after` was read."""
        bodies = [body for _, body in piece]
        ends = np.zeros(len(bodies) + 1, np.int64)
        np.cumsum([len(body) for body in bodies], out=ends[1:])
        arguments = (b"".join(bodies), ends, True, 0, len(bodies), *_key(lane), _EPOCH)
        try:
            return self._producer.publish_once(*arguments, after, upto, _WAIT) is not None
        except Rejected:
            raise
        except Full as exc:
            patience.refused(exc)
            return None
        except BadArgument:
            if self._reached(lane) == after:
                raise
            return False

    def _pieces(self, rows: Sequence[tuple[int, bytes]]) -> Iterator[Sequence[tuple[int, bytes]]]:
        """The rows in pieces that a queue has room for."""
        piece: list[tuple[int, bytes]] = []
        size = 0
        for row in rows:
            if piece and (len(piece) == self._rows or size + len(row[1]) > self._size):
                yield piece
                piece, size = [], 0
            piece.append(row)
            size += len(row[1])
        if piece:
            yield piece
