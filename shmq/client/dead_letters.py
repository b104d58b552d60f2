"""The dead letters of a channel: messages that failed too often, were rejected or were too old."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from shmq.arguments import counted, whole
from shmq.errors import BadArgument, Gone, ShmqError
from shmq.names import check_name
from shmq.settings import dead_topic

if TYPE_CHECKING:
    from shmq._native import Broker
    from shmq.client.consumer import Consumer
    from shmq.client.message import Message
    from shmq.peek import Peeked
    from shmq.settings import Settings
    from shmq.sources import NativeSource

#: The channel of a dead topic that holds its letters.
CHANNEL: Final = "dead"
#: Why a message died.
REASONS: Final = ("attempts", "rejected", "expired", "overflow")

_PATIENCE = 1.0  # seconds to wait for letters that are read from disk


@dataclass(frozen=True)
class DeadLetter:
    """A message that died. id, timestamp (ns since 1970), attempts, body and properties are those
    that it had in its channel."""

    id: str
    timestamp: int
    attempts: int
    body: bytes
    properties: Mapping[str, bytes]
    reason: str | None
    """Why: one of "attempts", "rejected", "expired", "overflow". This and what follows is None if
    the message was too long to carry it."""
    error: str | None
    """The text of the rejection."""
    source: str | None
    """Where it died, `TOPIC/CHANNEL`."""
    failures: int | None
    when: int | None
    """When it died, ns since 1970."""
    pid: int | None
    """The process that had it last."""

    @classmethod
    def of(cls, seen: Peeked | Message) -> DeadLetter:
        """The dead letter that was peeked at or taken."""
        notes = {name: value for name, value in seen.properties.items() if name.startswith("dead-")}
        text = {
            name.removeprefix("dead-"): value.decode("utf-8", "replace")
            for name, value in notes.items()
        }
        return cls(
            id=seen.id,
            timestamp=seen.timestamp,
            attempts=seen.attempts,
            body=seen.body,
            properties={k: v for k, v in seen.properties.items() if k not in notes},
            reason=text.get("reason"),
            error=text.get("error"),
            source=text.get("from"),
            failures=_number(text.get("failures")),
            when=_number(text.get("when")),
            pid=_number(text.get("pid")),
        )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


@dataclass(frozen=True)
class DeadGroup:
    """The dead letters of one reason and one error."""

    reason: str | None
    error: str | None
    count: int
    first: int | None
    """When the first of them died, ns since 1970; `last`: the last."""
    last: int | None


class _Home(Protocol):
    """The part of a broker that this module needs."""

    def consumer(self, topic: str, channel: str, max_in_flight: int = ...) -> Consumer: ...
    def peek(
        self, topic: str, channel: str | None, state: str = ..., n: int = ...
    ) -> list[Peeked]: ...
    def channel_depth(self, topic: str, channel: str) -> int: ...
    def views(self) -> NativeSource: ...
    def native(self) -> Broker: ...


class DeadLetters:
    """The dead letters of one channel; returned by `Broker.dead`.

    `reason` (one of "attempts", "rejected", "expired", "overflow") and `error` (a part of the text)
    choose among them; None chooses all. With `exact` they name one group of `ls`: `error` is the
    whole text, and None means the letters that have no reason or no error.
    """

    def __init__(self, home: _Home, topic: str, channel: str, via: str | None) -> None:
        """via: the dead topic's channel that holds the letters; None: `dead`, or its only one.
        Raises as `Broker.dead`."""
        self._home = home
        self._place = check_name(topic, "topic"), check_name(channel, "channel")
        name = home.native().dead_topic(*self._queue())
        self._is_shared = name != dead_topic(topic, channel)
        self._via = via
        self.topic = name
        """Name of the dead topic."""

    def __repr__(self) -> str:
        return f"<shmq.DeadLetters of {'/'.join(self._place)!r} in {self.topic!r}>"

    # ---- look ----

    def ls(self, reason: str | None = None, error: str | None = None) -> list[DeadGroup]:
        """Count the dead letters in memory by reason and error, the most frequent first. Raises
        ValueError for an unknown reason, and ShmqError if the dead topic has several channels and
        none of them is `dead`."""
        groups: dict[tuple[str | None, str | None], list[DeadLetter]] = {}
        for letter in self.peek(sys.maxsize, reason, error):
            groups.setdefault((letter.reason, letter.error), []).append(letter)
        found = []
        for (why, text), letters in groups.items():
            times = [letter.when for letter in letters if letter.when is not None]
            first, last = min(times, default=None), max(times, default=None)
            found.append(DeadGroup(why, text, len(letters), first, last))
        return sorted(found, key=lambda group: -group.count)

    def peek(
        self, n: int = 10, reason: str | None = None, error: str | None = None
    ) -> list[DeadLetter]:
        """Return up to n of the dead letters in memory, the oldest first, without taking them.
        Raises as `ls`."""
        n = counted("n", n, least=0)
        chosen = self._filter(reason, error)
        try:
            seen = self._home.peek(self.topic, self._channel(), "ready", sys.maxsize)
        except Gone:
            return []  # nothing has died yet
        return [letter for letter in map(DeadLetter.of, seen) if chosen(letter)][:n]

    @property
    def depth(self) -> int:
        """The number of messages that wait in the dead topic's channel, in memory and on disk, of
        all channels whose dead letters go there."""
        try:
            name = self._channel()
            return 0 if name is None else self._home.channel_depth(self.topic, name)
        except Gone:
            return 0

    # ---- change ----

    def redrive(
        self,
        n: int | None = None,
        reason: str | None = None,
        error: str | None = None,
        exact: bool = False,
    ) -> int:
        """Move dead letters back to the channel they came from, up to n of them. Each moves in one
        transaction, keeps id, body and properties, and begins a new life: it has not failed yet,
        its timestamp is the time of the move, from which the channel's `message_ttl` counts, and a
        `ttl` of its own is forgotten. Returns how many.

        Raises Gone if the channel was deleted, Full if it has no room for the rest, MessageTooBig
        if one can never fit, BadArgument if its topic is paused, and otherwise as `ls`. The letters
        that were not moved are in the dead topic then.
        """
        queue = self._queue()
        chosen = self._filter(reason, error, exact)
        return self._settle(n, chosen, lambda taker, letter: taker.redrive(letter, *queue))

    def drop(
        self,
        n: int | None = None,
        reason: str | None = None,
        error: str | None = None,
        exact: bool = False,
    ) -> int:
        """Delete dead letters, up to n of them. Returns how many. Raises as `ls`."""
        chosen = self._filter(reason, error, exact)
        return self._settle(n, chosen, lambda taker, letter: letter.finish())

    def _settle(
        self,
        n: int | None,
        chosen: Callable[[DeadLetter], bool],
        act: Callable[[Consumer, Message], None],
    ) -> int:
        done = 0
        if n is not None and whole("n", n) < 1:
            raise ValueError(f"n must be 1 or more, or None for all, not {n}")
        if not self._exists():
            return 0
        with self._home.consumer(self.topic, self._channel() or CHANNEL, 1) as taker:
            for letter in self._once_each(taker):
                if chosen(DeadLetter.of(letter)):
                    act(taker, letter)
                    done += 1
                    if done == n:
                        break
                else:
                    letter.requeue(0, failed=False)
        return done

    def _once_each(self, taker: Consumer) -> Iterator[Message]:
        """Take each letter that is there now once. Those that are given back go behind the others,
        so the first that comes again ends it."""
        seen: set[str] = set()
        while True:
            waiting = self._home.channel_depth(self.topic, taker.channel)
            letter = taker.take(_PATIENCE if waiting else 0)
            if letter is None:
                return
            if letter.id in seen:
                letter.requeue(0, failed=False)
                return
            seen.add(letter.id)
            yield letter

    def _filter(
        self, reason: str | None, error: str | None, exact: bool = False
    ) -> Callable[[DeadLetter], bool]:
        if reason is not None and reason not in REASONS:
            raise ValueError(f"reason must be one of {', '.join(REASONS)}, not {reason!r}")

        def chosen(letter: DeadLetter) -> bool:
            ours = (
                not self._is_shared
                if letter.source is None
                else letter.source == "/".join(self._place)
            )
            if exact:
                return ours and (letter.reason, letter.error) == (reason, error)
            return (
                ours
                and (reason is None or letter.reason == reason)
                and (error is None or error in (letter.error or ""))
            )

        return chosen

    def _queue(self) -> tuple[int, int]:
        """Queue and serial of the channel that the letters came from. Raises Gone."""
        native, (topic, channel) = self._home.native(), self._place
        found = native.find_topic(topic)
        queue = None if found is None else native.find_queue(found[0], channel)
        if queue is None:
            raise Gone(f"there is no channel {topic}/{channel}")
        return queue

    def _exists(self) -> bool:
        try:
            self._channel()
        except Gone:
            return False
        return True

    def _channels(self) -> list[str]:
        directory = self._home.views().directory
        topics = [entry.index for entry in directory.live_topics() if entry.name == self.topic]
        if not topics:
            raise Gone(f"there is no topic {self.topic!r}")
        found = [entry.channel for entry in directory.live_queues() if entry.topic == topics[0]]
        return [channel for channel in found if channel is not None]

    def _channel(self) -> str | None:
        """The channel with the letters; None if they are in the topic's backlog. Raises Gone if
        there is no dead topic yet."""
        if self._via is not None:
            return self._via
        names = self._channels()
        if CHANNEL in names or not names:
            return CHANNEL if names else None
        if len(names) > 1:
            raise ShmqError(
                f"the dead topic {self.topic!r} has the channels {', '.join(sorted(names))}: say "
                "which one holds the letters (via=CHANNEL)"
            )
        return names[0]


def check_no_cycle(source: NativeSource, topic: str, channel: str, settings: Settings) -> None:
    """Raise BadArgument if the dead letters of a channel with these settings would go to a topic
    whose channels have dead letters of their own, or if this topic holds dead letters: they would
    go round in circles."""
    mine = settings.dead_topic_of(topic, channel)
    if mine is None:
        return
    names = {entry.index: entry.name for entry in source.directory.live_topics()}
    for entry in source.directory.live_queues():
        name, other = names.get(entry.topic, ""), entry.channel
        if other is None or (name != mine and dead_topic(name, other) != topic):
            continue  # only these are mapped; the core knows a dead topic when it has letters
        held = source.queue(entry).settings
        target = None if held is None else held.dead_topic_of(name, other)
        if name == mine and target is not None:
            raise BadArgument(
                f"the dead letters of {topic}/{channel} would go to {mine!r}, whose channel "
                f"{other!r} has dead letters of its own (in {target!r}): name another topic "
                "(dead_letter=TOPIC)"
            )
        if target == topic:
            raise BadArgument(
                f"topic {topic!r} holds the dead letters of {name}/{other}, so its channels "
                "have none of their own"
            )
