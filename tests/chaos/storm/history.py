"""The history of a storm: what every process knew of what it did, in files that death cannot tear.

A process appends records of a fixed size to a file of its own, each group in one write: before a
call what it is going to do, after it what came of it. A kill inside write(2) may cut a group, but
no record (32 bytes never lie across two pages), so what is missing is seen: a call without its end
was under way, and may or may not have happened.

Files are named `<number>.<role>[.<topic>[.<channel>]].log`; the number is the actor's, and a dot in
a name is written as `~`. `storm.json` says what the checker cannot see in them: which channels
there are from the beginning, what is promised of each, and the settings that they had in turn.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

_RECORD = struct.Struct("<BBHIQQq")
RECORD = np.dtype(
    [
        ("what", "u1"),
        ("flag", "u1"),
        ("count", "<u2"),
        ("op", "<u4"),
        ("id", "<u8"),
        ("key", "<u8"),
        ("at", "<i8"),
    ]
)
assert RECORD.itemsize == _RECORD.size == 32

SETTINGS = "storm.json"


class What(IntEnum):
    """Kinds of records. `at` is CLOCK_MONOTONIC in ns; `op` joins a call's records."""

    ACTOR = 1  # first of each file. key: actor, id: its message timeout in ns (0: never)
    PUBLISH = 2  # key: of the first message, count: messages, id: ns it is deferred
    PUBLISHED = 3  # flag: Outcome, id: of the first message
    TAKE = 4  # count: messages wanted, 0: all that come until the connection ends (no TAKEN)
    TAKEN = 5  # count: DELIVERY records that follow
    DELIVERY = 6  # key and id of the message, count: attempts, flag: 1 if its body is as published
    SETTLE = 7  # flag: Settling, count: ITEM records that follow (CLOSE: none), id: ns of delay
    ITEM = 8  # key and id of the message, count: attempts
    SETTLED = 9  # flag: Outcome
    ASK = 10  # flag: Verb (key: see there), id: the channel's name (`packed`), 0: the topic itself
    ANSWERED = 11  # flag: Outcome
    TTL = 19  # before the PUBLISH with this op. id: ns that its messages live
    LETTER = 20  # of the DELIVERY with this op and id. flag: Reason, count: failures, key: `packed`
    # name of the channel it came from, or 0 if that, its error or its time is not as it should be
    ACCESS = (
        22  # of a results store. flag: Access, count: which key, key: the value to be stored or
    )
    # the number to be added, id: ns that the value lives, 0: for ever
    ERRAND = 24  # flag: Errand, key: see there, count: 1 if it is as it was sent
    ACCESSED = 23  # flag: Outcome, count: 1 if it was found or stored, key: the value or the number
    # found, id: 1 if its body is as it was stored
    # the storm's own, of the actor `key`
    KILL = 12  # about to be killed (flag 1: told to die in one of its next calls)
    DEAD = 13  # waited for
    STOP = 14  # about to be stopped
    CONTINUED = 15
    SERVING = 16  # a supervisor answers
    ENDING = 17  # the supervisor is about to be asked to end
    GATEWAY = 18  # a gateway is about to be killed, flag 1: it was
    COUNTED = 21  # flag: Counter, count: place in `Settings.channels`, key: its value; op: 1 if
    # nobody was at work; id: messages that waited in memory, and may have expired uncounted since


class Access(IntEnum):
    """Calls on a results store."""

    SET = 1
    ADD = 2
    GET = 3  # wait, too
    POP = 4  # a wait that deletes, too
    DELETE = 5
    COUNT = 6


class Errand(IntEnum):
    """Steps of an item of a queue, or a task of a pool, of that key."""

    CAME = 1  # no errand: a process attaches, or has attached
    BEGUN = 2  # about to be sent
    SENT = 3  # the call returned
    ASKED = 4  # somebody asks for the next one, or waits for a value
    HAD = 5  # it was got, or its value came
    ENDING = 6  # about to be said to be done
    ENDED = 7  # the call returned


class Outcome(IntEnum):
    """Of a call that came back."""

    DONE = 0
    REFUSED = 1  # an error that says: nothing happened
    UNKNOWN = 2  # for some of its messages one, for some the other


class Settling(IntEnum):
    FINISH = 1
    REQUEUE = 2  # a failure, with a delay of the caller's
    TOUCH = 3
    CLOSE = 4
    RETRY = 5  # a failure, with the channel's delay
    RELEASE = 6  # no failure
    REJECT = 7
    REDRIVE = 8  # of a dead letter: back to the channel it came from


class Verb(IntEnum):
    CREATE = 1
    DELETE = 2
    PAUSE = 3
    UNPAUSE = 4
    EMPTY = 5
    CONFIGURE = 6  # key: place in `Settings.palette`


class Reason(IntEnum):
    """Why a message is a dead letter, as it says itself."""

    NONE = 0
    ATTEMPTS = 1
    REJECTED = 2
    EXPIRED = 3
    OVERFLOW = 4


class Counter(IntEnum):
    """Counters of a channel, and what it has on disk."""

    DROPPED = 1
    DROPPED_OLDEST = 2
    EXPIRED = 3
    DEAD_LETTERED = 4
    REJECTED = 5
    SPILLED = 6
    BYTES_ON_DISK = 7


# ---- messages: the body names it and can be checked ----

_PUBLISH_BITS, _PART_BITS = 24, 16
_HEAD = struct.Struct("<IQI")  # crc32 of what follows, key, length
LEAST_BYTES = _HEAD.size


def key_of(actor: int, publish: int, part: int = 0) -> int:
    """The name of a message: its producer, which of its publishes, which message of that."""
    return actor << (_PUBLISH_BITS + _PART_BITS) | publish << _PART_BITS | part


def part_of(key: int) -> int:
    """Which message of its publish."""
    return key & ((1 << _PART_BITS) - 1)


def describe_key(key: int) -> str:
    """For people."""
    publish = key >> _PART_BITS & ((1 << _PUBLISH_BITS) - 1)
    return f"message {key >> (_PUBLISH_BITS + _PART_BITS)}/{publish}/{part_of(key)}"


def make_body(key: int, nbytes: int, filler: bytes) -> bytes:
    """A body of nbytes (at least LEAST_BYTES) that says which message it is."""
    start = key % 251
    rest = filler[start : start + nbytes - LEAST_BYTES]
    body = _HEAD.pack(0, key, nbytes)[4:] + rest
    return zlib.crc32(body).to_bytes(4, "little") + body


def read_body(body: bytes | memoryview) -> tuple[int, bool]:
    """(key, whether every byte is as it was published); key 0 if it cannot be read."""
    if len(body) < LEAST_BYTES:
        return 0, False
    crc, key, nbytes = _HEAD.unpack_from(body)
    return key, nbytes == len(body) and zlib.crc32(memoryview(body)[4:]) == crc


def packed(name: str) -> int:
    """A name of up to 8 bytes as a number."""
    raw = name.encode()
    assert len(raw) <= 8, name
    return int.from_bytes(raw, "little")


def unpacked(number: int) -> str:
    return number.to_bytes(8, "little").rstrip(b"\0").decode(errors="replace")


# ---- writing ----


def record(
    what: What,
    *,
    flag: int = 0,
    count: int = 0,
    op: int = 0,
    id: int = 0,
    key: int = 0,
    at: int = 0,
) -> bytes:
    """One record; at 0: now."""
    return _RECORD.pack(what, flag, count, op, id, key, at or time.monotonic_ns())


class Log:
    """One process's file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.ops = 0

    def next_op(self) -> int:
        """A number for the next call."""
        self.ops += 1
        return self.ops

    def write(self, records: bytes) -> None:
        """All or, if we are killed in it, the first of them. OSError if the disk is full."""
        written = os.write(self._fd, records)
        if written != len(records):
            raise OSError(f"only {written} of {len(records)} bytes were written")


def file_name(actor: int, role: str, topic: str = "", channel: str = "") -> str:
    names = (f"{actor:06d}", role, topic.replace(".", "~"), channel)
    return ".".join(filter(None, names)) + ".log"


# ---- what the checker cannot see in the files ----


@dataclass(frozen=True)
class Promise:
    """Of one channel that is there from the beginning (or gets all there was before it)."""

    topic: str
    channel: str
    fifo: bool = False  # nothing is ever requeued on it, or times out
    hungry: bool = False  # somebody always waits, so a death's redelivery is not late
    settings: int = 0  # place in `Settings.palette` of those it begins with
    dead: str = ""  # the topic of its dead letters, which come from no other channel


@dataclass(frozen=True)
class Settings:
    """`storm.json`."""

    seed: int
    channels: list[Promise] = field(default_factory=list)
    commit: str = ""
    options: dict[str, object] = field(default_factory=dict)
    palette: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    """Settings of channels, as `Broker.configure` takes them; what is not named has its default."""
    tuned: dict[str, list[int]] = field(default_factory=dict)
    """By channel: places in the palette that an operator may choose."""

    def save(self, directory: Path) -> None:
        (directory / SETTINGS).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, directory: Path) -> Settings:
        data = json.loads((directory / SETTINGS).read_text())
        data["channels"] = [Promise(**channel) for channel in data["channels"]]
        return cls(**data)


def home_of(directory: Path, dead: str) -> tuple[str, str]:
    """(topic, channel) whose dead letters go to this topic."""
    for promise in Settings.load(directory).channels:
        if promise.dead == dead:
            return promise.topic, promise.channel
    raise LookupError(dead)


# ---- reading ----


@dataclass(frozen=True)
class File:
    """One process's records."""

    name: str
    actor: int
    role: str
    topic: str
    channel: str
    records: np.ndarray

    @classmethod
    def read(cls, path: Path) -> File:
        words = path.name.removesuffix(".log").split(".")
        actor, role, topic, channel = (*words, "", "")[:4]
        topic = topic.replace("~", ".")
        raw = path.read_bytes()
        whole = len(raw) // RECORD.itemsize * RECORD.itemsize
        return cls(path.name, int(actor), role, topic, channel, np.frombuffer(raw[:whole], RECORD))


def read_files(directory: Path) -> Iterable[File]:
    """Every log of a storm, by number."""
    for path in sorted(directory.glob("*.log")):
        yield File.read(path)
