"""The share of one client in the tables of topics and channels, so that a rest is left to others.

Nothing in memory says who made a topic, so each process counts what was made through it. A client's
share is measured by what is free, which is the same for all processes: however many processes and
clients there are, each leaves a part of what the ones before it have left, and no client fills a
table. The last entries are for processes of this host that attach, and for dead letters.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from shmq import _native
from shmq.door.seldom import Seldom
from shmq.errors import ShmqError
from shmq.gateway.asker import Asker
from shmq.layout import EntryState, Role, constant, number_in

#: A client may have so many, if there are any at all: a small `--max-topics` is meant for few.
_LEAST: Final = 4
#: Of each table: 1/16 is not for clients of the gateway.
_RESERVE: Final = 16
#: How much of what is free a client may have, for each part that it leaves. A topic may need a
#: queue of its own beside those of its channels, so queues are used up faster.
_TOPICS: Final = 1
_QUEUES: Final = 3

_log = logging.getLogger(__name__)
_refused = Seldom(_log, "refused topics and channels")
_asker: ContextVar[Asker | None] = ContextVar("asker", default=None)


class TooManyTopics(ShmqError):
    """A client has made as many topics as its share or its user's quota says."""


class TooManyChannels(ShmqError):
    """A client has made as many channels as its share says."""


@contextlib.contextmanager
def asking(asker: Asker) -> Iterator[None]:
    """Topics and channels that this thread or task makes inside the block are this client's."""
    token = _asker.set(asker)
    try:
        yield
    finally:
        _asker.reset(token)


@dataclass
class _Made:
    """The things that were made through this process, and that exist: name -> whose it is."""

    whose: dict[tuple[str, str], int] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)

    def add(self, name: tuple[str, str], whose: int) -> None:
        self.drop(name)
        self.whose[name] = whose
        self.counts[whose] += 1

    def drop(self, name: tuple[str, str]) -> None:
        before = self.whose.pop(name, None)
        if before is not None:
            self.counts[before] -= 1
            if not self.counts[before]:
                del self.counts[before]

    def tidy(self, is_there: Callable[[str, str], bool]) -> None:
        for name in [name for name in self.whose if not is_there(*name)]:
            self.drop(name)


class Shares:
    """The shares of the clients of one process. Its methods may be called in any thread."""

    def __init__(
        self,
        taken: Callable[[], tuple[int, int]],
        is_there: Callable[[str, str], bool],
        max_topics: Callable[[], int],
    ) -> None:
        """taken: how many topics and channels there are. is_there: whether a channel, or (channel
        empty) a topic, exists. max_topics: the option of now."""
        self._taken = taken
        self._is_there = is_there
        self._max_topics = max_topics
        self._lock = threading.Lock()
        self._topics, self._channels = _Made(), _Made()

    def topic(self, topic: str, quota: int | None) -> None:
        """Count a topic that the present client makes. quota: how many the access file allows,
        which has been checked; None: it does not say. Raises TooManyTopics."""
        asker = _asker.get()
        if asker is None:
            return
        with self._lock:
            if fault := self._fault(asker.whose, is_topic=True, quota=quota):
                self._tidy()
                fault = self._fault(asker.whose, is_topic=True, quota=quota)
            if not fault:
                self._topics.add((topic, ""), asker.whose)
                return
        self._refuse(asker, f"topic {topic!r}", fault)
        raise TooManyTopics(f"topic {topic!r} was not made: {fault}")

    def channel(self, topic: str, channel: str) -> None:
        """Count a channel that the present client makes. Raises TooManyChannels."""
        asker = _asker.get()
        if asker is None:
            return
        with self._lock:
            if fault := self._fault(asker.whose, is_topic=False):
                self._tidy()
                fault = self._fault(asker.whose, is_topic=False)
            if not fault:
                self._channels.add((topic, channel), asker.whose)
                return
        self._refuse(asker, f"channel {channel!r} of topic {topic!r}", fault)
        raise TooManyChannels(f"channel {channel!r} of topic {topic!r} was not made: {fault}")

    def _refuse(self, asker: Asker, what: str, fault: str) -> None:
        _refused(logging.WARNING, "client(%s): %s was not made: %s", asker.address, what, fault)

    def _tidy(self) -> None:
        """Give back the shares in what has been deleted."""
        self._topics.tidy(self._is_there)
        self._channels.tidy(self._is_there)

    def _fault(self, whose: int, *, is_topic: bool, quota: int | None = None) -> str:
        """Why a client may not make one more; empty: it may."""
        if len(self._topics.whose) + len(self._channels.whose) > 2 * constant("QUEUES"):
            self._tidy()
        topics, channels = self._taken()
        most = min(self._max_topics(), constant("TOPICS"))
        mine = self._topics.counts[whose]
        if is_topic:
            allowed = most if quota is not None else _TOPICS
            if fault := _beyond("topics", mine, most - topics, most, allowed):
                return fault
        # each topic has a queue for what comes before its first channel, or while it is paused
        free = constant("QUEUES") - topics - channels
        mine += self._channels.counts[whose]
        allowed = constant("QUEUES") if quota is not None else _QUEUES
        return _beyond("channels", mine, free, constant("QUEUES"), allowed)


def taken(directory: memoryview) -> tuple[int, int]:
    """How many topics and channels there are. It needs no numpy, which is slow to import."""
    topics = _column(directory, "topics", "topic", "state")
    states = _column(directory, "queues", "entry", "state")
    roles = _column(directory, "queues", "entry", "role")
    channels = sum(
        state != EntryState.FREE and role == Role.CHANNEL
        for state, role in zip(states, roles, strict=True)
    )
    return len(topics) - topics.count(EntryState.FREE), channels


def _column(directory: memoryview, table: str, structure: str, name: str) -> list[int]:
    """A field of 4 bytes of all entries of a table that were ever used."""
    count = number_in(directory, "directory", f"{table}_committed")
    at = number_in(directory, "directory", f"{table}_at")
    size, offset = _native.SIZES[structure], _native.LAYOUT[structure][name][1]
    words = directory[at : at + count * size].cast("I")
    return words[offset // 4 :: size // 4].tolist()


def _beyond(what: str, mine: int, free: int, most: int, times: int) -> str:
    """Why one more is too many for a client that has made `mine`. times: how many it may have for
    each that it leaves to others."""
    free -= most // _RESERVE
    if free <= 0:
        raised = what == "topics" and most < constant("TOPICS")
        return (
            f"the {what} of clients are used up: {most // _RESERVE} of {most} are kept for "
            f"processes of this host; delete some that are not used"
            f"{', or raise the option max_topics of the broker' if raised else ''}"
        )
    if mine >= max(times * free, _LEAST):
        return (
            f"this client has made {mine} {what}, and the {free} that are free are for others; "
            f"delete some that are not used, or let a user of the access file have more"
        )
    return ""
