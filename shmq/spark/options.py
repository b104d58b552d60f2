"""The options of `format("shmq")`, each declared once with its parser, default and help."""

from __future__ import annotations

import hashlib
import os
import re
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shmq.arguments import LONGEST, MOST, MOST_NUMBER
from shmq.leased import checked_secret
from shmq.names import check_instance, check_name
from shmq.remote.address import Address

#: The columns that a row may have, and those it has by default.
COLUMNS: Final = ("id", "timestamp", "attempts", "body", "topic", "channel", "properties")
_DEFAULT_COLUMNS: Final = "id,timestamp,attempts,body"

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZES: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
#: The word `never` means nothing for this option.
_NO_WORD: Final = object()
#: The largest version of a write, which marks of writers have room for.
_VERSIONS: Final = (1 << 62) - 1


@dataclass(frozen=True)
class SparkOption:
    """One option. name: as users of Spark write it; Spark ignores its case."""

    name: str
    default: Any
    parse: Callable[[str], Any]
    help: str
    where: str = "read, write"
    """Where it applies: read (batch and streaming), batch or stream (reads of that kind only),
    write; separated by commas."""
    is_secret: bool = False
    """Whether no text may repeat its value."""
    is_listed: bool = True
    """Whether lists of the options have it: not if its default needs no thought."""


def _text(text: str) -> str:
    return text.strip()


def _flag(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.strip().lower() == "true"


@dataclass(frozen=True)
class Whole:
    """Parses a whole number from low to high."""

    low: int
    high: int = MOST

    def __call__(self, text: str) -> int:
        found = re.fullmatch(r"\s*(-?[0-9]{1,20})\s*", text)
        if not found or not self.low <= int(found[1]) <= self.high:
            raise ValueError(f"must be a whole number from {self.low} to {self.high}")
        return int(found[1])


@dataclass(frozen=True)
class Size:
    """Parses a number of bytes, 1 or more."""

    high: int = MOST

    def __call__(self, text: str) -> int:
        found = re.fullmatch(r"\s*([0-9]{1,20})\s*([kmg]?)(?:i?b)?\s*", text.lower())
        size = int(found[1]) * _SIZES[found[2]] if found else 0
        if not 0 < size <= self.high:
            raise ValueError(f"must be a size such as 65536, 512k, 64m, from 1 to {self.high}")
        return size


@dataclass(frozen=True)
class Seconds:
    """Parses a duration. never: what the word `never` stands for, if it may be written."""

    low: float = 0.0
    never: Any = _NO_WORD
    high: float = LONGEST

    def __call__(self, text: str) -> Any:
        if text.strip().lower() == "never" and self.never is not _NO_WORD:
            return self.never
        found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(ms|s|m|h)?\s*", text.lower())
        seconds = float(found[1]) * _UNITS[found[2] or "s"] if found else -1.0
        if not self.low <= seconds <= self.high:
            never = "" if self.never is _NO_WORD else ", or never"
            raise ValueError(
                f"must be a duration such as 500ms, 30s, 10m, from {_shown(self.low)} to "
                f"{_shown(self.high)}{never}"
            )
        return seconds


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}ms" if 0 < seconds < 1 else f"{seconds:.0f}s"


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not set(names) <= set(COLUMNS) or len(set(names)) != len(names):
        raise ValueError(f"must be some of {', '.join(COLUMNS)}, each once, with commas between")
    return names


def addresses(text: str) -> tuple[str, ...]:
    """HOST:PORT of each address in a list with commas between. The port is 4150 if it is left out.
    Raises ValueError for none, for what is no address, and for one that is named twice."""
    found = [str(Address.parse(word.strip())) for word in text.split(",") if word.strip()]
    if not found or len(set(found)) != len(found):
        raise ValueError("must be addresses HOST:PORT, each once, with commas between")
    return tuple(found)


def _urls(text: str) -> tuple[str, ...]:
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        url = word if "://" in word else f"http://{word}"
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{word!r} is no URL of an nsqlookupd, such as http://HOST:4161")
        found.append(url.rstrip("/"))
    if not found:
        raise ValueError("must be URLs of nsqlookupds, such as http://HOST:4161")
    return tuple(found)


def _certificates(text: str) -> str | None:
    """`true`, or the path of a file; None for `false`."""
    word = text.strip()
    return word.lower() if word.lower() == "true" else word if word.lower() != "false" else None


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in choices:
            raise ValueError(f"must be {' or '.join(choices)}")
        return text.strip().lower()

    return parse


OPTIONS: Final = (
    SparkOption(
        "instance",
        None,
        check_instance,
        "the broker's name; else SHMQ_INSTANCE, else default",
    ),
    SparkOption(
        "instances",
        None,
        addresses,
        "instead of instance, the instances of many hosts: HOST:PORT of their gateways, with "
        "commas between; one on this host is read in shared memory all the same",
    ),
    SparkOption(
        "lookupd",
        None,
        _urls,
        "instead of instances, the instances that these nsqlookupds know for the topic: URLs of "
        "their HTTP interfaces, with commas between",
        "read",
    ),
    SparkOption(
        "onMissingHost",
        "fail",
        _one_of("fail", "wait", "skip"),
        "what to do if one of many instances does not answer: fail; wait until it does; skip it "
        "(reads only), without finishing what it holds, and read it again when it answers",
    ),
    SparkOption(
        "hostTimeout",
        10.0,
        Seconds(0.001),
        "how long one of many instances may take for an answer until it counts as missing",
        is_listed=False,
    ),
    SparkOption(
        "tls",
        None,
        _certificates,
        "how the connections to many instances are encrypted: true, or the file with the "
        "certificates that are trusted; else not",
    ),
    SparkOption(
        "token",
        None,
        _text,
        "what shows many instances who the query is, if they ask for it: a token of their access "
        "file, or NAME:PASSWORD",
        is_secret=True,
    ),
    SparkOption(
        "authSecret",
        None,
        _text,
        "the same as token, by the name that NSQ has for it",
        is_secret=True,
        is_listed=False,
    ),
    SparkOption(
        "secret",
        None,
        checked_secret,
        "16 characters or more that only the runs of this query know: with it a later run proves "
        "to the instances that leases and writes are its own; else made of token or authSecret",
        is_secret=True,
    ),
    SparkOption(
        "transport",
        "auto",
        _one_of("auto", "tcp"),
        "how an executor reads one of many instances: auto: in shared memory if it is on the "
        "executor's host, else over TCP; tcp: always over TCP",
        "read",
        is_listed=False,
    ),
    SparkOption(
        "owner",
        None,
        _text,
        "the user (name or uid) whose broker it may be, besides this user and root; else "
        "SHMQ_OWNER, else nobody",
    ),
    SparkOption(
        "topic",
        "",
        lambda text: check_name(text, "topic"),
        "the topic; must be given",
    ),
    SparkOption(
        "channel",
        "spark",
        lambda text: check_name(text, "channel"),
        "the channel that is read",
        "read",
    ),
    SparkOption(
        "consumer",
        None,
        _text,
        "the name that the leases are held under, one for each query and application; with it the "
        "next run of a program that died finds what that one held; else one that nothing else has",
        "read",
    ),
    SparkOption(
        "peek",
        False,
        _flag,
        "look at the messages that wait in memory, and take none: for show(), limit() and count() "
        "on a channel that consumers need",
        "batch",
    ),
    SparkOption(
        "columns",
        _columns(_DEFAULT_COLUMNS),
        _columns,
        "the columns of a row: some of " + ", ".join(COLUMNS),
        "read",
    ),
    SparkOption(
        "numPartitions",
        min(os.cpu_count() or 1, 32),
        Whole(1, MOST_NUMBER),
        "partitions of a batch, at most 32",
        "read",
    ),
    SparkOption(
        "minPartitionRows",
        1000,
        Whole(1, MOST_NUMBER),
        "rows below which a batch is not split further",
        "read",
        is_listed=False,
    ),
    SparkOption(
        "maxMessagesPerTrigger",
        1_000_000,
        Whole(1, MOST_NUMBER),
        "messages of a micro-batch, or of one batch read, at most",
        "read",
    ),
    SparkOption(
        "maxBytesPerTrigger",
        256 << 20,
        Size(),
        "bytes of bodies of the same, at most",
        "read",
    ),
    SparkOption(
        "minMessagesPerTrigger",
        0,
        Whole(0),
        "wait for this number of messages...",
        "stream",
        is_listed=False,
    ),
    SparkOption(
        "maxTriggerDelay",
        1.0,
        Seconds(never=LONGEST),
        "...but not longer than this",
        "stream",
        is_listed=False,
    ),
    SparkOption(
        "pollTimeout",
        0.1,
        Seconds(),
        "how long an idle query waits for messages at a time",
        "stream",
        is_listed=False,
    ),
    SparkOption(
        "leaseTtl",
        600.0,
        Seconds(0.001, never=None),
        "time after the end of the driver, or without a sign of life of it, after which what it "
        "holds goes back to the channel",
        "read",
    ),
    SparkOption(
        "restartGrace",
        None,
        Seconds(0.001, never=LONGEST),
        "the same after the driver's process ended; else leaseTtl; not for many instances",
        "read",
        is_listed=False,
    ),
    SparkOption(
        "maxReplays",
        0,
        Whole(0),
        "plan a micro-batch at most this number of times, then fail; 0: no limit",
        "stream",
        is_listed=False,
    ),
    SparkOption(
        "failOnDataLoss",
        True,
        _flag,
        "fail where messages that the checkpoint names are lost, were processed and come again, or "
        "are left out by a write, because of a later txnVersion; false: log it and go on",
        "stream, write",
    ),
    SparkOption(
        "onLostLease",
        "fail",
        _one_of("fail", "warn"),
        "what to do if a micro-batch was processed but its messages went back to the channel "
        "meanwhile, so that they come again",
        "stream",
        is_listed=False,
    ),
    SparkOption(
        "publish",
        "commit",
        _one_of("commit", "immediate"),
        "commit: all rows of a write, exactly once, when it succeeded; immediate: each "
        "batch of rows at once, and again if Spark retries a task",
        "write",
    ),
    SparkOption(
        "txnAppId",
        None,
        _text,
        "name for exactly-once over separate writes; a streaming query has its own; another one "
        "for a new checkpoint, and for each write of a micro-batch",
        "write",
    ),
    SparkOption(
        "txnVersion",
        None,
        Whole(0, _VERSIONS),
        "number of a batch write under txnAppId; if it is the last one that was written, the write "
        "is skipped; below that it is an error",
        "write",
    ),
    SparkOption(
        "body",
        "body",
        _text,
        "the column that is published: binary or string",
        "write",
    ),
    SparkOption(
        "staging",
        None,
        _text,
        "directory on this host for rows that are not committed yet; else one in /dev/shm",
        "write",
        is_listed=False,
    ),
    SparkOption(
        "timeout",
        60.0,
        Seconds(never=None),
        "how long a write waits for room in the broker",
        "write",
    ),
)

_BY_NAME: Final = {option.name.lower(): option for option in OPTIONS}
#: Names that users of other sources know, and what shmq has in their place.
_OTHERS: Final = {
    "subscribe": "topic",
    "assign": "topic",
    "kafka.bootstrap.servers": "instance, or instances",
    "group.id": "channel",
    "kafka.group.id": "channel",
    "maxoffsetspertrigger": "maxMessagesPerTrigger",
    "startingoffsets": "channel: a topic's first one has all, another one what comes",
    "includeheaders": "columns, with properties",
}
#: Options that Spark itself adds.
_SPARKS: Final = {"path", "checkpointlocation", "header"}


class Settings:
    """The parsed options of one read or write, as attributes of their names. Raises ValueError for
    an unknown option or a value that is not valid."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._values: dict[str, Any] = {option.name: option.default for option in OPTIONS}
        for name, text in given.items():
            option = _BY_NAME.get(name.lower())
            if option is None:
                if name.lower() in _SPARKS:
                    continue
                known = ", ".join(item.name for item in OPTIONS if item.is_listed)
                hint = _OTHERS.get(name.lower())
                here = f" (here it is {hint})" if hint else ""
                raise ValueError(f"shmq has no option {name!r}{here}; there are {known}")
            try:
                self._values[option.name] = option.parse(text)
            except ValueError as exc:
                shown = "" if option.is_secret else f", {text!r}"
                raise ValueError(f"option {option.name} of shmq{shown}: {exc}") from None
        if not self._values["failOnDataLoss"] and "onlostlease" not in {*map(str.lower, given)}:
            self._values["onLostLease"] = "warn"
        if not self._values["topic"]:
            raise ValueError('shmq needs to know what to read or write: .option("topic", NAME)')
        named = [name for name in ("instance", "instances", "lookupd") if self._values[name]]
        if len(named) > 1:
            raise ValueError(f"options {' and '.join(named)} of shmq: give one of them")
        if self._values["instance"] is None:
            self._values["instance"] = os.environ.get("SHMQ_INSTANCE") or "default"
        if self._values["token"] and self._values["authSecret"]:
            raise ValueError("options token and authSecret of shmq are one thing: give one of them")
        #: identifies this DataFrame: the same in every copy that Spark sends
        self.stamp = uuid.uuid4().hex

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def proof(self) -> str:
        """With what a run of the query proves to other hosts that leases, staged rows and marks are
        its own: the option secret, else what follows from token or authSecret."""
        if self.secret is not None:
            return str(self.secret)
        data = f"shmq spark\0{self.token or self.authSecret or ''}".encode()
        return hashlib.blake2b(data, digest_size=16).hexdigest()

    @property
    def many(self) -> bool:
        """Whether many instances are read, over TCP."""
        return bool(self.instances or self.lookupd)

    @property
    def where(self) -> str:
        """The channel and instance, for texts of errors."""
        return self.channel_of(self.instance)

    def channel_of(self, instance: str) -> str:
        """The channel, of the instance of this name or address, for texts of errors."""
        return f"{self.topic}/{self.channel} of instance {instance!r}"


def table(options: Iterable[SparkOption] = OPTIONS) -> str:
    """The options as text for a docstring."""
    lines = []
    for option in options:
        if not option.is_listed:
            continue
        default = ",".join(option.default) if isinstance(option.default, tuple) else option.default
        shown = "" if default in (None, "") else f" [{default}]"
        lines.append(f"    {option.name} ({option.where}): {option.help}{shown}")
    return "\n".join(lines)
