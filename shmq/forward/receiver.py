"""Moves messages from another system into a topic, each once.

The topic remembers for each lane the number of its last message (`shmq_publish_once`). One store in
shared memory decides both this mark and the publish, so no death can come between them. A message
that was published and not acknowledged comes again, and is left out by its number. The mark lives
as long as the broker's memory; fresh memory has what was acknowledged alone.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from shmq.configurable import at_once
from shmq.errors import BadArgument, Full, MessageTooBig, Rejected
from shmq.forward.headers import NoProperties
from shmq.forward.loop import Loop
from shmq.forward.origin import Origin, Portion
from shmq.forward.refusal import STOP, Refusal, Stopped, told
from shmq.patience import Patience
from shmq.printing import said
from shmq.seal import check_open

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
#: Bytes that a message with properties takes beside them and its body.
_BESIDE: Final = 12

#: A message that may be published: its number, body, and block of properties.
_Row: TypeAlias = tuple[int, bytes, bytes]
_Fresh: TypeAlias = tuple[int, bytes, bytes | NoProperties]


def _key(lane: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"forward\0{lane}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


class Receiver(Loop):
    """Publishes what an origin has until `stop`."""

    def __init__(
        self,
        broker: Broker,
        topic: str,
        origin: Origin,
        most: int | None = None,
        refused: str = STOP,
    ) -> None:
        """most: messages that are asked for at once. refused: what becomes of messages that the
        topic never takes, `STOP` or `SKIP`. Raises NotSealed if the topic is that of a pool or a
        queue."""
        super().__init__(origin)
        check_open(broker, topic, f"forward from {origin}")
        self._origin, self._most = origin, most or _MOST
        self._topic, self._refused = topic, refused
        self._producer: Any = broker.producer(topic)
        self._rows, self._size = at_once(broker, topic, _ROWS, _BYTES)
        self._limit = broker.limits["max_msg_size"]

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
                self._well()
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
        blocks = portion.properties or [b""] * len(portion.numbers)
        found = list(zip(portion.numbers, portion.bodies, blocks, strict=True))
        fresh = [row for row in found if row[0] > after]
        self.progress.resumed += len(found) - len(fresh)
        rows = [row for row in fresh if row[1]]
        self.progress.skipped += len(fresh) - len(rows)
        kept, refusals = self._sifted(portion.lane, rows)
        pieces = deque(self._pieces(kept))
        while pieces:
            piece = pieces.popleft()
            upto = piece[-1][0]
            patience = Patience()
            try:
                while (published := self._try(portion.lane, piece, after, upto, patience)) is None:
                    if self._stopping.is_set():
                        return False
                    self._well()
                    self._origin.idle()
            except MessageTooBig as exc:
                if len(piece) > 1:
                    middle = len(piece) // 2
                    pieces.extendleft((piece[middle:], piece[:middle]))
                    continue
                why = said(str(exc).encode())
                refusals.insert(0, self._refusal(portion.lane, piece[0], why))
                if self._refused == STOP:
                    break
                continue
            if not published:  # by another process: begin again with what it has left
                return self._publish(portion)
            after = upto
            self._stored(len(piece), sum(len(body) for _, body, _ in piece))
        self._give_up(refusals)
        return True

    def _sifted(self, lane: str, rows: Sequence[_Fresh]) -> tuple[list[_Row], list[Refusal]]:
        """The rows that the topic takes, and the others; with `STOP` none behind the first of
        them."""
        kept: list[_Row] = []
        refusals: list[Refusal] = []
        for number, body, block in rows:
            if isinstance(block, NoProperties):
                why = str(block)
            elif len(body) + (len(block) + _BESIDE if block else 0) > self._limit:
                why = f"max_msg_size is {self._limit} bytes"
                why += f", of which {_BESIDE} are taken beside properties" if block else ""
            else:
                kept.append((number, body, block))
                continue
            refusals.append(self._refusal(lane, (number, body, block), why))
            if self._refused == STOP:
                break
        return kept, refusals

    def _refusal(self, lane: str, row: _Fresh, why: str) -> Refusal:
        number, body, block = row
        size = block.size if isinstance(block, NoProperties) else len(block)
        alone = size > 0 and len(body) <= self._limit
        return Refusal(self._origin.named(lane, number), len(body), size, why, alone)

    def _give_up(self, refusals: Sequence[Refusal]) -> None:
        """Do with messages that the topic never takes what was said. Raises Stopped."""
        self.progress.refused += len(refusals)
        if refusals and self._refused == STOP:
            tried = f"forward from {self._origin} into {self._topic}"
            raise Stopped(tried, refusals[0], "it and what follows stay there")
        self.progress.skipped += len(refusals)
        done = f"{self._origin}: {len(refusals)} left out by --refused={self._refused}"
        for line in told(refusals, done):
            self._say(line)

    def _try(
        self,
        lane: str,
        piece: Sequence[_Row],
        after: int,
        upto: int,
        patience: Patience,
    ) -> bool | None:
        """Publish messages. Returns None if there is no room, and False if somebody else has
        published in this lane since `after` was read."""
        bodies = [body for _, body, _ in piece]
        blocks = [block for _, _, block in piece] if any(row[2] for row in piece) else None
        ends = np.zeros(len(bodies) + 1, np.int64)
        np.cumsum([len(body) for body in bodies], out=ends[1:])
        arguments = (b"".join(bodies), ends, True, 0, len(bodies), *_key(lane), _EPOCH)
        try:
            marks = (after, upto, _WAIT)
            return self._producer.publish_once(*arguments, *marks, blocks) is not None
        except Full as exc:
            patience.refused(exc)
            if isinstance(exc, Rejected):  # which waits for nothing
                self._stopping.wait(_WAIT)
            return None
        except BadArgument:
            if self._reached(lane) == after:
                raise
            return False

    def _pieces(self, rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
        """The rows in pieces that a queue has room for."""
        piece: list[_Row] = []
        size = 0
        for row in rows:
            more = len(row[1]) + len(row[2])
            if piece and (len(piece) == self._rows or size + more > self._size):
                yield piece
                piece, size = [], 0
            piece.append(row)
            size += more
        if piece:
            yield piece
