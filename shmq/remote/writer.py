"""Rows that are staged on another host and published together, once: STAGE and COMMIT.

An attempt of a task uploads its rows in pieces, under a name that nobody else has. Nobody sees them
until a commit names the attempt. The broker's first commit of an epoch decides which attempts
belong to it; a repeated commit goes on with those, after the last message that was published.
"""

from __future__ import annotations

import json
import struct
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shmq import arguments
from shmq.errors import BadArgument, Full, MemoryLost
from shmq.names import check_name
from shmq.patience import Patience
from shmq.remote.connections import Connections

_SIZE: Final = struct.Struct(">i")
#: Bytes of one piece, its bodies' sizes included, unless a single body has more.
_PIECE: Final = 1 << 20
_LONGEST_KEY: Final = 200
#: Seconds that the broker may publish until it answers, besides the client's timeout; and seconds
#: for which a commit asks again although there was no room for any more of it.
_ANSWER: Final = 10.0
_COMMIT: Final = 600.0


@dataclass(frozen=True)
class Staged:
    """The rows that one attempt of a task has staged. It can be pickled, and is passed to
    `RemoteBroker.commit`."""

    attempt: str
    """How the broker knows them."""
    rows: int
    size: int
    """Bytes that they take where they are staged."""
    memory: str
    """The identity of the broker's memory then, see `RemoteBroker.identity`."""


class Writer:
    """Stages and commits under one key, which is of whoever has the secret."""

    def __init__(self, connections: Connections, topic: str, key: str, secret: str) -> None:
        check_name(topic, "topic")
        if not 1 <= len(key) <= _LONGEST_KEY:
            raise ValueError(f"writer must have 1 to {_LONGEST_KEY} characters, not {key!r}")
        self._connections = connections
        self._topic = topic
        self._key = key
        self._secret = secret

    def _document(self, epoch: int) -> dict[str, Any]:
        epoch = arguments.counted("epoch", epoch, (1 << 62) - 1, least=0)
        return {"writer": self._key, "epoch": epoch, "secret": self._secret}

    def stage(self, epoch: int, bodies: Iterable[Any]) -> Staged | None:
        """Upload the bodies; see `RemoteBroker.stage`."""
        attempt = uuid.uuid4().hex
        document = {**self._document(epoch), "attempt": attempt}
        rows = size = 0
        memory = ""
        for piece, count in _pieces(bodies):
            answer = self._send({**document, "at": size, "rows": count}, piece)
            if memory and answer["memory"] != memory:
                raise self._lost(epoch)
            rows, size, memory = rows + count, int(answer["size"]), str(answer["memory"])
        return Staged(attempt, rows, size, memory) if rows else None

    def _lost(self, epoch: int) -> MemoryLost:
        return MemoryLost(
            f"stage epoch {epoch} of {self._key!r} for {self._topic}: the broker was started with "
            "fresh memory meanwhile; stage again"
        )

    def _send(self, document: dict[str, Any], piece: bytes) -> dict[str, Any]:
        """Upload a piece. `at` says where it belongs, so that it may be sent again."""
        head = json.dumps(document, separators=(",", ":")).encode()
        size = _SIZE.pack(4 + len(head) + len(piece)) + _SIZE.pack(len(head))
        data = b"".join((f"STAGE {self._topic}\n".encode(), size, head, piece))
        tried = f"stage rows for {self._topic}"

        def once(deadline: float) -> dict[str, Any]:
            with self._connections.borrowed(deadline) as connection:
                connection.send(data, deadline, tried)
                return connection.answer(deadline, tried, "STAGE", 1)

        return self._connections.again(once, tried)

    def commit(self, epoch: int, staged: Sequence[Staged], skip: bool = False) -> int:
        """Publish; see `RemoteBroker.commit`."""
        memories = {item.memory for item in staged}
        if len(memories) > 1:
            raise self._lost(epoch)
        attempts = [
            {"attempt": item.attempt, "rows": item.rows, "size": item.size} for item in staged
        ]
        document = self._document(epoch) | {"attempts": attempts, "skip": skip}
        if memories:
            document["memory"] = memories.pop()
        deadline = self._connections.deadline(_COMMIT)
        published = 0
        patience = Patience()
        while True:
            answer = self._connections.ask("COMMIT", (self._topic,), document, _ANSWER)
            published += int(answer["published"])
            if answer["done"]:
                return published
            if answer["published"]:
                deadline = self._connections.deadline(_COMMIT)
                patience.over()
            else:
                patience.refused(
                    f"commit epoch {epoch} of {self._key!r} to {self._topic}: the broker at "
                    f"{self._connections.address} has no room for more of it; add consumers there, "
                    "or raise the limit of the channel that is full (its log names it)"
                )
            if time.monotonic() > deadline:
                raise Full(
                    f"commit epoch {epoch} of {self._key!r} to {self._topic}: there was no room "
                    "for all of it; commit again, which goes on with the rest"
                )

    def abandon(self, epoch: int) -> None:
        """Forget; see `RemoteBroker.abandon`."""
        self._connections.ask("ABANDON", (self._topic,), self._document(epoch))


def _pieces(bodies: Iterable[Any]) -> Iterator[tuple[bytes, int]]:
    """The bodies in pieces, the sizes of each before them; and how many are in each."""
    parts: list[bytes] = []
    size = 0
    for index, body in enumerate(arguments.bodies("stage", bodies)):
        data = arguments.body("stage", body, index)
        if not data:
            raise BadArgument("stage: a message has 1 byte or more")
        if parts and size + 4 + len(data) > _PIECE:
            yield _piece(parts), len(parts)
            parts, size = [], 0
        parts.append(data)
        size += 4 + len(data)
    if parts:
        yield _piece(parts), len(parts)


def _piece(bodies: list[bytes]) -> bytes:
    sizes = struct.pack(f"<{len(bodies)}I", *(len(body) for body in bodies))
    return b"".join((sizes, *bodies))
