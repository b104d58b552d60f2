"""The account of messages published and delivered. Its memory is bounded, however long the soak.

Every body begins with its publisher's number and its own, counted from 0. An actor appends a record
to a log of its own for what has happened: a publish that returned (how many of this publisher's are
owed now), and before it finishes a message, that this came. A record is shorter than a page and
written by one call, so a kill leaves it whole or not at all. The ledger reads the logs as they grow
and keeps, for each channel and publisher, up to which number everything came and what came besides.
"""

from __future__ import annotations

import enum
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_RECORD: Final = struct.Struct("<BBHIQ")
_HEAD: Final = struct.Struct("<IQ")
#: Of the shortest body.
LEAST: Final = _HEAD.size


class What(enum.IntEnum):
    """Kinds of records."""

    OWED = 1
    """place: a topic; number: how many of this publisher's messages it owes its channels."""
    CAME = 2
    """place: a channel."""
    COUNT = 3
    """place: a counter; number: what is added to it."""


def body(publisher: int, number: int, size: int) -> bytes:
    """A message of about `size` bytes."""
    return _HEAD.pack(publisher, number) + bytes(max(size - LEAST, 0))


def parse(data: bytes) -> tuple[int, int]:
    """Publisher and number of a body."""
    publisher, number = _HEAD.unpack_from(data)
    return publisher, number


class Log:
    """Where one actor writes."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, what: What, place: int, items: Iterable[tuple[int, int]]) -> None:
        """A record for each (publisher, number)."""
        data = b"".join(_RECORD.pack(what, place, 0, *item) for item in items)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


@dataclass
class _Came:
    """Of one publisher in one channel: all below `upto`, and `beyond`."""

    upto: int = 0
    beyond: set[int] = field(default_factory=set)

    def add(self, number: int) -> bool:
        """Whether it is new."""
        if number < self.upto or number in self.beyond:
            return False
        self.beyond.add(number)
        while self.upto in self.beyond:
            self.beyond.remove(self.upto)
            self.upto += 1
        return True


class Ledger:
    """All logs together. places: (topic, channel) of each channel, by its number."""

    def __init__(self, topics: Sequence[str], places: Sequence[tuple[str, str]]) -> None:
        self._topics = list(topics)
        self._places = list(places)
        self._owed: list[dict[int, int]] = [{} for _ in topics]
        self._came: list[dict[int, _Came]] = [{} for _ in places]
        self._settled: list[set[int]] = [set() for _ in places]
        self._read: dict[Path, int] = {}
        self.counts: Counter[int] = Counter()
        self.published = self.came = self.again = 0

    def read(self, path: Path) -> bool:
        """Read the part of a log that is new; returns true if there was any."""
        start = self._read.get(path, 0)
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read()
        data = data[: len(data) - len(data) % _RECORD.size]
        for what, place, _, publisher, number in _RECORD.iter_unpack(data):
            self._enter(What(what), place, publisher, number)
        self._read[path] = start + len(data)
        return bool(data)

    def close(self, path: Path) -> None:
        """Read the last of a log whose writer has ended, and remove it."""
        self.read(path)
        del self._read[path]
        path.unlink()

    def _enter(self, what: What, place: int, publisher: int, number: int) -> None:
        if what is What.COUNT:
            self.counts[place] += number
        elif what is What.OWED:
            owed = self._owed[place]
            self.published += number - owed.get(publisher, 0)
            owed[publisher] = number
        elif publisher in self._settled[place]:
            self.again += 1
        else:
            new = self._came[place].setdefault(publisher, _Came()).add(number)
            self.came += new
            self.again += not new

    def forget(self, ended: Iterable[int]) -> None:
        """Publishers that have ended and whose messages all came need no more memory. A message of
        a publish that a death cut off may still be delivered: it counts as a redelivery."""
        for publisher in list(ended):
            for topic, name in enumerate(self._topics):
                if publisher not in self._owed[topic]:
                    continue
                owed = self._owed[topic][publisher]
                channels = [at for at, place in enumerate(self._places) if place[0] == name]
                for at in channels:
                    came = self._came[at].get(publisher)
                    if came is not None and came.upto >= owed:
                        del self._came[at][publisher]
                        self._settled[at].add(publisher)
                if all(publisher in self._settled[at] for at in channels):
                    del self._owed[topic][publisher]

    def missing(self) -> Iterator[tuple[str, int, int]]:
        """Of each channel and publisher whose messages have not all come: where, who, how many."""
        for at, (name, channel) in enumerate(self._places):
            for publisher, owed in self._owed[self._topics.index(name)].items():
                if publisher in self._settled[at]:
                    continue
                came = self._came[at].get(publisher, _Came())
                beyond = sum(number < owed for number in came.beyond)
                if lost := owed - min(came.upto, owed) - beyond:
                    yield f"{name}/{channel}", publisher, lost
