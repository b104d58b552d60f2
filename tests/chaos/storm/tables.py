"""The logs of a storm as numpy tables, for the rules of `checker`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from chaos.storm.history import Counter as CounterOf
from chaos.storm.history import (
    File,
    Outcome,
    Promise,
    Settings,
    Settling,
    Verb,
    What,
    describe_key,
    read_files,
    unpacked,
)

Array = np.ndarray


NEVER = np.iinfo(np.int64).max
_PUBLISH = np.dtype(
    [
        ("key", "u8"),
        ("topic", "u2"),
        ("begin", "i8"),
        ("end", "i8"),
        ("outcome", "u1"),
        ("parts", "u4"),
        ("id", "u8"),
        ("defer", "i8"),
        ("ttl", "i8"),
    ]
)


_DELIVERY = np.dtype(
    [
        ("channel", "u2"),
        ("key", "u8"),
        ("id", "u8"),
        ("attempts", "i4"),
        ("good", "?"),
        ("begin", "i8"),
        ("end", "i8"),
        ("file", "u4"),
        ("op", "u4"),
        ("message", "i8"),
        ("home", "u2"),
        ("reason", "u1"),
        ("failures", "u2"),
        ("source", "u8"),
    ]
)


_ITEM = np.dtype(
    [
        ("channel", "u2"),
        ("key", "u8"),
        ("id", "u8"),
        ("attempts", "i4"),
        ("kind", "u1"),
        ("outcome", "u1"),
        ("begin", "i8"),
        ("end", "i8"),
        ("delay", "i8"),
        ("file", "u4"),
        ("message", "i8"),
        ("home", "u2"),
    ]
)


# ---- the tables ----


@dataclass
class Consumer:
    """One consumer's life."""

    file: File
    channel: int
    timeout: int  # ns, NEVER: none
    killed: int = NEVER
    closes: list[int] = field(default_factory=list)
    """When it began to close; one actor opens many consumers."""
    closed: list[int] = field(default_factory=list)
    """When each of these calls came back; NEVER: it did not."""
    open_takes: int = 0
    """Takes of which it is not known what they took."""
    slow_takes: int = 0
    """Takes in which what they took at first may have timed out; they take again then."""
    streams: int = 0
    """Connections to the gateway: nobody knows what was on its way when they ended."""


@dataclass
class Span:
    """A time, by CLOCK_MONOTONIC."""

    begin: int
    end: int = NEVER

    def meets(self, begin: int, end: int) -> bool:
        return self.begin <= end and begin <= self.end


@dataclass
class Ask:
    """An operator's request."""

    verb: int
    topic: str
    channel: str
    outcome: int
    span: Span
    key: int = 0


@dataclass
class Reign:
    """Settings of a channel, and when they may have held."""

    settings: dict[str, Any]
    span: Span


@dataclass(frozen=True)
class Count:
    """A counter of a channel, which begins again when the supervisor was asked to end."""

    counter: CounterOf
    channel: int
    value: int
    at: int
    quiet: bool
    """Nobody was at work."""
    waiting: int
    """Messages in memory, which may have expired since."""


@dataclass
class History:
    """Everything that was read, joined."""

    settings: Settings
    names: list[tuple[str, str]]
    """(topic, channel) by number."""
    topics: list[str]
    publishes: Array
    deliveries: Array
    items: Array
    consumers: dict[int, Consumer]
    """By place of the file."""
    asks: list[Ask]
    stops: dict[int, list[Span]]
    """By actor."""
    downs: list[Span]
    """No supervisor."""
    endings: list[Span]
    """A supervisor, asked to end, wrote everything to disk."""
    blows: list[Span]
    """A gateway, or the supervisor it follows, is dying."""
    roles: dict[int, tuple[str, str]]
    """(role, topic) by actor."""
    kills: dict[int, int]
    """When, by actor. One that was aimed came some time after."""
    aimed: set[int]
    homes: Array
    """By channel: the channel whose dead letters it has, or itself. Attempts go on in them, and the
    number of a message is the same in both."""
    reigns: dict[int, list[Reign]]
    """By channel, in their order."""
    counted: list[Count]
    files: list[File]
    """All that were read."""
    directory: Path

    @classmethod
    def read(cls, directory: Path) -> History:
        return _Reader(directory).history()

    def promise(self, channel: int) -> Promise | None:
        """None: it was made on the way."""
        for promise in self.settings.channels:
            if (promise.topic, promise.channel) == self.names[channel]:
                return promise
        return None

    def is_dead(self, channel: int) -> bool:
        """Whether it has another channel's dead letters."""
        return bool(self.homes[channel] != channel)

    def in_force(self, channel: int, begin: int = -NEVER, end: int = NEVER) -> list[dict[str, Any]]:
        """All settings that the channel may have had at some instant of this time."""
        return [each.settings for each in self.reigns[channel] if each.span.meets(begin, end)]

    @property
    def end(self) -> int:
        """When the last consumer wrote its last line."""
        return max(
            (
                int(each.file.records["at"][-1])
                for each in self.consumers.values()
                if len(each.file.records)
            ),
            default=0,
        )

    def of_topic(self, topic: str) -> Array:
        """Its publishes."""
        return self.publishes[self.publishes["topic"] == self.topics.index(topic)]

    def by_message(self) -> tuple[Array, Array]:
        """Deliveries by message and attempts; places of those that follow one of the same
        message."""
        rows = self.deliveries
        rows = rows[np.lexsort((rows["attempts"], rows["message"]))]
        return rows, np.flatnonzero(rows["message"][1:] == rows["message"][:-1]) + 1

    def channel_name(self, channel: int) -> str:
        return "/".join(self.names[channel])

    def describe(self, row: np.void) -> str:
        """A delivery or an item."""
        name = self.consumers[int(row["file"])].file.name
        return (
            f"{self.channel_name(int(row['channel']))} {describe_key(int(row['key']))} "
            f"id {int(row['id']):016x} attempts {int(row['attempts'])} "
            f"[{int(row['begin'])}, {int(row['end'])}] of {name}"
        )


class _Reader:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._settings = Settings.load(directory)
        self._files = list(read_files(directory))
        self._channels: dict[tuple[str, str], int] = {}
        self._topics: dict[str, int] = {}
        for promise in self._settings.channels:
            self._channel(promise.topic, promise.channel)
        self._publishes: list[Array] = []
        self._deliveries: list[Array] = []
        self._items: list[Array] = []
        self._consumers: dict[int, Consumer] = {}
        self._asks: list[Ask] = []
        self._roles: dict[int, tuple[str, str]] = {}
        self._journal = np.empty(0, self._files[0].records.dtype) if self._files else None

    def history(self) -> History:
        for place, file in enumerate(self._files):
            self._roles[file.actor] = (file.role, file.topic)
            if file.role == "storm":
                self._journal = file.records
                continue
            if file.topic:
                self._topic(file.topic)
            self._read_publishes(file)
            self._read_asks(file)
            if file.channel:
                self._read_consumer(place, file)
        kills, aimed, stops, downs, endings, gateways = self._read_journal()
        homes = self._homes()
        for consumer in self._consumers.values():
            consumer.killed = kills.get(consumer.file.actor, NEVER)
        deliveries = _join(self._deliveries, _DELIVERY)
        items = _join(self._items, _ITEM)
        _number_messages(deliveries, items, homes)
        return History(
            self._settings,
            list(self._channels),
            list(self._topics),
            _join(self._publishes, _PUBLISH),
            deliveries,
            items,
            self._consumers,
            self._asks,
            stops,
            downs,
            endings,
            gateways + downs,
            self._roles,
            kills,
            aimed,
            homes,
            {number: self._reigns(name) for name, number in self._channels.items()},
            self._counted(),
            self._files,
            self._directory,
        )

    def _homes(self) -> Array:
        homes = np.arange(len(self._channels))
        for promise in self._settings.channels:
            for (topic, _), number in self._channels.items():
                if promise.dead and topic == promise.dead:
                    homes[number] = self._channels[promise.topic, promise.channel]
        return homes

    def _reigns(self, name: tuple[str, str]) -> list[Reign]:
        """Those of a call that did not come back hold from its begin, or never; those before it
        until a later call has come back."""
        palette = self._settings.palette
        first = [each for each in self._settings.channels if (each.topic, each.channel) == name]
        reigns = [Reign(palette[first[0].settings] if first else palette[0], Span(-NEVER))]
        asks = [each for each in self._asks if (each.topic, each.channel) == name]
        for ask in sorted(asks, key=lambda each: each.span.begin):
            if ask.verb != Verb.CONFIGURE or ask.outcome == Outcome.REFUSED:
                continue
            if ask.outcome == Outcome.DONE:
                for reign in reigns:
                    reign.span.end = min(reign.span.end, ask.span.end)
            reigns.append(Reign(palette[ask.key], Span(ask.span.begin)))
        return reigns

    def _counted(self) -> list[Count]:
        rows = self._journal
        rows = rows[rows["what"] == What.COUNTED] if rows is not None else ()
        promises = self._settings.channels
        return [
            Count(
                CounterOf(int(row["flag"])),
                self._channels[
                    promises[int(row["count"])].topic, promises[int(row["count"])].channel
                ],
                int(row["key"]),
                int(row["at"]),
                bool(row["op"]),
                int(row["id"]),
            )
            for row in rows
        ]

    def _channel(self, topic: str, channel: str) -> int:
        self._topic(topic)
        return self._channels.setdefault((topic, channel), len(self._channels))

    def _topic(self, topic: str) -> int:
        return self._topics.setdefault(topic, len(self._topics))

    def _read_publishes(self, file: File) -> None:
        begins, ends, ended = calls_of(file.records, What.PUBLISH, What.PUBLISHED)
        rows = np.zeros(len(begins), _PUBLISH)
        rows["key"], rows["parts"], rows["defer"] = begins["key"], begins["count"], begins["id"]
        rows["topic"] = self._topic(file.topic) if file.topic else 0
        rows["begin"], rows["end"] = begins["at"], np.where(ended, ends["at"], NEVER)
        rows["outcome"] = np.where(ended, ends["flag"], Outcome.UNKNOWN)
        rows["id"] = np.where(ended, ends["id"], 0)
        lives = file.records[file.records["what"] == What.TTL]
        rows["ttl"][np.searchsorted(begins["op"], lives["op"])] = lives["id"]
        self._publishes.append(rows)

    def _read_asks(self, file: File) -> None:
        begins, ends, ended = calls_of(file.records, What.ASK, What.ANSWERED)
        for begin, end, known in zip(begins, ends, ended, strict=True):
            self._asks.append(
                Ask(
                    int(begin["flag"]),
                    file.topic,
                    unpacked(int(begin["id"])),
                    int(end["flag"]) if known else Outcome.UNKNOWN,
                    Span(int(begin["at"]), int(end["at"]) if known else NEVER),
                    int(begin["key"]),
                )
            )

    def _read_consumer(self, place: int, file: File) -> None:
        records = file.records
        channel = self._channel(file.topic, file.channel)
        head = records[records["what"] == What.ACTOR]
        timeout = int(head["id"][0]) if len(head) else 0
        consumer = self._consumers[place] = Consumer(file, channel, timeout or NEVER)

        takes, taken, ended = calls_of(records, What.TAKE, What.TAKEN)
        consumer.streams = int((takes["count"] == 0).sum())
        delivered = records[records["what"] == What.DELIVERY]
        counts = Counter(delivered["op"].tolist())
        consumer.open_takes = (
            int((~ended).sum())
            - consumer.streams
            + sum(
                counts[op] < count
                for op, count in zip(
                    taken["op"][ended].tolist(), taken["count"][ended].tolist(), strict=True
                )
            )
        )
        took = (taken["at"] - takes["at"])[ended & (taken["count"] > 0)]
        consumer.slow_takes = int((took >= consumer.timeout).sum())
        at = np.searchsorted(takes["op"], delivered["op"])
        rows = np.zeros(len(delivered), _DELIVERY)
        for name in ("key", "id", "op"):
            rows[name] = delivered[name]
        rows["attempts"], rows["good"] = delivered["count"], delivered["flag"] == 1
        rows["channel"], rows["file"] = channel, place
        rows["begin"], rows["end"] = takes["at"][at], delivered["at"]
        letters = records[records["what"] == What.LETTER]
        places = {
            (op, id_): place
            for place, (op, id_) in enumerate(
                zip(delivered["op"].tolist(), delivered["id"].tolist(), strict=True)
            )
        }
        for letter in letters:
            row = rows[places[int(letter["op"]), int(letter["id"])]]
            row["reason"], row["failures"] = letter["flag"], letter["count"]
            row["source"] = letter["key"]
        self._deliveries.append(rows)

        settles, settled, ended = calls_of(records, What.SETTLE, What.SETTLED)
        closing = settles["flag"] == Settling.CLOSE
        consumer.closes = settles["at"][closing].tolist()
        consumer.closed = np.where(ended, settled["at"], NEVER)[closing].tolist()
        listed = records[records["what"] == What.ITEM]
        counts = Counter(listed["op"].tolist())
        # cut in the middle of its announcement, it was never called
        called = np.array(
            [
                counts[op] == count
                for op, count in zip(settles["op"].tolist(), settles["count"].tolist(), strict=True)
            ],
            bool,
        )
        at = np.searchsorted(settles["op"], listed["op"])
        items = np.zeros(len(listed), _ITEM)
        for name in ("key", "id"):
            items[name] = listed[name]
        items["attempts"], items["kind"] = listed["count"], settles["flag"][at]
        items["outcome"] = np.where(ended, settled["flag"], Outcome.UNKNOWN)[at]
        items["begin"], items["end"] = settles["at"][at], np.where(ended, settled["at"], NEVER)[at]
        items["delay"], items["channel"], items["file"] = settles["id"][at], channel, place
        self._items.append(items[called[at]] if len(items) else items)

    def _read_journal(
        self,
    ) -> tuple[dict[int, int], set[int], dict[int, list[Span]], list[Span], list[Span], list[Span]]:
        kills: dict[int, int] = {}
        aimed: set[int] = set()
        stops: dict[int, list[Span]] = {}
        downs: list[Span] = []
        endings: list[Span] = []
        gateways: list[Span] = []
        for row in self._journal if self._journal is not None else ():
            what, actor, at = int(row["what"]), int(row["key"]), int(row["at"])
            serves = self._roles.get(actor, ("", ""))[0] == "supervisor"
            if what == What.KILL:
                kills[actor] = at
                if row["flag"]:
                    aimed.add(actor)
                for stop in stops.get(actor, ()):
                    stop.end = min(stop.end, at)
            elif what == What.STOP:
                stops.setdefault(actor, []).append(Span(at))
            elif what == What.CONTINUED and actor in stops:
                stops[actor][-1].end = at
            elif what == What.GATEWAY:
                if row["flag"]:
                    gateways[-1].end = at
                else:
                    gateways.append(Span(at))
            elif what == What.ENDING:
                endings.append(Span(at))
            elif what == What.DEAD and serves and endings:
                endings[-1].end = min(endings[-1].end, at)
            lost = (What.KILL, What.STOP, What.DEAD)
            if (serves and what in lost) or what == What.ENDING:
                downs.append(Span(at))
            elif what == What.SERVING or (serves and what == What.CONTINUED):
                for down in downs:
                    down.end = min(down.end, at)
        return kills, aimed, stops, downs, endings, gateways


def _join(tables: list[Array], dtype: np.dtype) -> Array:
    return np.concatenate(tables) if tables else np.empty(0, dtype)


def calls_of(records: Array, begin: What, end: What) -> tuple[Array, Array, Array]:
    """Begins by op, their ends (where there is none: anything), whether there is one."""
    begins = records[records["what"] == begin]
    begins = begins[np.argsort(begins["op"], kind="stable")]
    ends = records[records["what"] == end]
    ends = ends[np.argsort(ends["op"], kind="stable")]
    if not len(ends):
        return begins, np.zeros(len(begins), records.dtype), np.zeros(len(begins), bool)
    at = np.minimum(np.searchsorted(ends["op"], begins["op"]), len(ends) - 1)
    return begins, ends[at], ends["op"][at] == begins["op"]


def _number_messages(deliveries: Array, items: Array, homes: Array) -> None:
    """One number for each message of each channel. (Two topics may give one id.)"""
    ids = np.unique(np.concatenate((deliveries["id"], items["id"])))
    for table in (deliveries, items):
        table["home"] = homes[table["channel"]] if len(table) else 0
        table["message"] = table["home"].astype(np.int64) * len(ids) + np.searchsorted(
            ids, table["id"]
        )


def life(settings: dict[str, Any]) -> int:
    """Of a message in a channel with these settings, in ns; NEVER: without an end."""
    seconds = settings.get("message_ttl")
    return NEVER if seconds is None else int(seconds * 1_000_000_000)


def messages_of(publishes: Array) -> Array:
    """Keys of all messages of these publishes, in their order."""
    parts = publishes["parts"].astype(np.int64)
    starts = np.cumsum(parts) - parts
    place = np.arange(parts.sum()) - np.repeat(starts, parts)
    return np.repeat(publishes["key"], parts) + place.astype(np.uint64)


def delivery_code(rows: Array) -> Array:
    """One number for each delivery."""
    return rows["message"] * (1 << 16) + rows["attempts"]
