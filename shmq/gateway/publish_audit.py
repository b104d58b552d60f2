"""The publishers, topics and numbers of messages, as lines of the audit log (`--audit-publish`).

There is one line in each interval for each client address, user and topic, and not one for each
message. Connections count by themselves, the fast ways too; here the counts are collected.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Set
from typing import Protocol

from shmq import audit


class Publisher(Protocol):
    """A connection of TCP; `tcp.Connection` implements it."""

    peer: str

    @property
    def user(self) -> str:
        """The user of the access file; empty: there is none."""

    def published(self) -> Mapping[bytes, int]:
        """Topic -> messages that were published over this connection so far."""


class PublishAudit:
    """The counts of one gateway process; used in the event loop's thread only."""

    def __init__(self, interval: float) -> None:
        """interval: seconds; 0: nothing is counted."""
        self.interval = interval
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._seen: dict[Publisher, dict[bytes, int]] = {}

    def add(self, peer: str, user: str, topic: str, messages: int) -> None:
        """Count messages of a client."""
        if self.interval:
            self._counts[peer, user, topic] += messages

    def collect(self, connection: Publisher, last: bool = False) -> None:
        """Count what a connection has published since the last call. last: it has ended."""
        if not self.interval:
            return
        seen = self._seen.setdefault(connection, {})
        for topic, count in connection.published().items():
            more = count - seen.get(topic, 0)
            if more:
                seen[topic] = count
                self.add(connection.peer, connection.user, topic.decode(), more)
        if last:
            del self._seen[connection]

    def write(self) -> None:
        """Write the lines, and begin anew."""
        counts, self._counts = self._counts, Counter()
        for (peer, user, topic), messages in sorted(counts.items()):
            named = {"user": user} if user else {}
            audit.note("publish", topic, "", "done", peer or "@", messages=messages, **named)

    async def run(self, connections: Set[Publisher]) -> None:
        """Write the lines of each interval."""
        while True:
            await asyncio.sleep(self.interval)
            for connection in list(connections):
                self.collect(connection)
            self.write()
