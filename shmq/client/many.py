"""Taking messages from many topics."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

from shmq import _native
from shmq.client.consumer import Consumer
from shmq.client.handle import Reduction, Shown
from shmq.client.lanes import Plan
from shmq.client.message import Batch
from shmq.client.waiting import Waiting
from shmq.errors import Gone, ShmqError
from shmq.names import is_pattern

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shmq.views import DirectoryView

_log = logging.getLogger(__name__)


#: How to open a lane that is not there: create topic and channel, create the channel, or refuse.
Missing = Literal["create", "join", "refuse"]


class _Home(Protocol):
    """The broker that made it."""

    instance: str

    def native(self) -> _native.Broker: ...
    def directory(self) -> DirectoryView: ...
    def lane(
        self, topic: str, channel: str, most: int, timeout: float | str | None, missing: Missing
    ) -> Consumer: ...
    def join(self, topic: str, channel: str) -> None: ...
    def reduction(self, kind: str, *settings: object) -> Reduction: ...


class _Joiner:
    """Has the supervisor create the channels of topics that have come, in a thread that ends when
    there are no more, so that no take waits for the answer."""

    def __init__(self, home: _Home, channel: str, joined: Callable[[], None]) -> None:
        """joined: called after each answer."""
        self._home, self._channel, self._joined = home, channel, joined
        self._lock = threading.Lock()
        self._topics: dict[str, None] = {}

    def ask(self, topic: str) -> None:
        """Join this topic soon, unless that is under way."""
        with self._lock:
            idle = not self._topics
            self._topics[topic] = None
        if idle:
            threading.Thread(target=self._run, name="shmq-join", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                topic = next(iter(self._topics), None)
            if topic is None:
                return
            try:
                self._home.join(topic, self._channel)
            except Gone:
                pass  # it was deleted, or the broker was closed
            except ShmqError as exc:
                _left_out(topic, self._channel, exc)
            with self._lock:
                del self._topics[topic]
                done = not self._topics
            self._joined()
            if done:
                return


def _left_out(topic: str, channel: str, exc: Exception) -> None:
    _log.warning("%s/%s is left out: %s", topic, channel, exc)


class MultiConsumer(_native.Lanes, Waiting, metaclass=Shown):
    """Takes from one channel of many topics; returned by `Broker.consumer` for a list of topics or
    for a pattern. Any thread may use it.

    It has the methods of `Consumer`: `take`, `take_many`, iteration, `take_async`,
    `take_many_async`, `async for`, `fileno`, `limit`, `close`. `Message.topic` and `Batch.topic`
    tell where messages come from; those of one batch come from one topic. At most `max_in_flight`
    messages are in flight at a time, over all topics. A message that is requeued, or comes back
    after a timeout or a death, stays in its topic.

    policy "fair": the topics take turns, one call each; topics that have nothing are passed over.
    "strict": a topic is served only while those named before it have nothing that may be taken.
    "weighted": as long as all have messages, they give numbers of messages in the ratio of their
    weights. The topics that match one pattern take turns among themselves.

    A pattern follows topics: the channel is created on each topic that matches, a topic that comes
    later is joined within a moment, one that is deleted is left out. A channel that somebody
    deletes while its topic stays is not made again. If a topic that was named itself, or its
    channel, is deleted, `take` raises Gone.

    It can be pickled, as a Consumer can.
    """

    __slots__ = ("__dict__", "__weakref__")
    _internal = frozenset({"add", "consumers", "pass_on", "remove", "reopen", "wait", "wake"})

    def __init__(
        self,
        home: _Home,
        plan: Plan,
        channel: str,
        max_in_flight: int,
        msg_timeout: float | Literal["server"] | None,
    ) -> None:
        self._home = home
        self._plan = plan
        self._timeout = msg_timeout
        self.channel = channel
        """Name of the channel."""
        self._followed: dict[int, Consumer] = {}  # by index of the topic, those of patterns
        self._seen: npt.NDArray[np.int64] | None = None
        self._joiner: _Joiner | None = None  # once there is a topic that it is for
        weights = plan.level_weights
        super().__init__(
            home.native(), plan.policy == "strict", weights, max_in_flight, Batch, plan.follows
        )
        try:
            self._fill("join")
        except BaseException:
            self.close()
            raise

    if TYPE_CHECKING:

        def take_many(self, n: int, timeout: float | None = None) -> Batch: ...

    @property
    def topics(self) -> list[str]:
        """The topics that it takes from now."""
        return [consumer.topic for consumer in self.consumers]

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self._plan.policy

    @property
    def in_flight(self) -> int:
        """Number of messages that were taken and not settled yet, over all topics."""
        return sum(consumer.in_flight for consumer in self.consumers)

    def limit(self, max_in_flight: int) -> None:
        """Change how many messages may be in flight from now on, over all topics.

        max_in_flight: that number; 0 pauses the consumer. Messages that are in flight already stay
        so. Raises Gone when the consumer is closed.
        """
        for consumer in self.consumers:
            consumer.limit(max_in_flight)
        super().limit(max_in_flight)

    def close(self) -> None:
        """Return the messages that are not settled to their channels, and wake the waiting threads.

        They, and every later call, raise Gone; an iteration ends. May be called again.
        """
        super().close()
        self._quench()

    def __reduce__(self) -> Reduction:
        plan, most = self._plan, self.max_in_flight
        settings = (list(plan.entries), self.channel, most, self._timeout)
        return self._home.reduction("consumer", *settings, plan.policy, plan.weights)

    def __repr__(self) -> str:
        state = (
            ", closed"
            if self.closed
            else f": {len(self.consumers)} topics, {self.in_flight} of at most "
            f"{self.max_in_flight} in flight"
        )
        where = f"{', '.join(self._plan.entries)}/{self.channel}"
        return f"<shmq.MultiConsumer of {where!r} on {self._home.instance!r}, {self.policy}{state}>"

    # ---- lanes ----

    def _fill(self, missing: Missing) -> None:
        for number, entry in enumerate(self._plan.entries):
            if not is_pattern(entry):
                self._add(entry, self._plan.level(number), "create")
        if self._plan.follows:
            self._names(missing)

    def _add(self, topic: str, level: int, missing: Missing) -> Consumer:
        most = self.max_in_flight
        consumer = self._home.lane(topic, self.channel, most, self._timeout, missing)
        try:
            self.add(consumer, level)
        except BaseException:
            consumer.close()
            raise
        return consumer

    def _leave(self, consumer: _native.Consumer) -> None:
        self.remove(consumer)
        consumer.close()

    def _names(self, missing: Missing = "refuse") -> None:
        """Join the topics that have come, and leave those that have gone. Called when there are
        any, by `take` too, which has a timeout: channels that are missing then are made by the
        joiner. Rows of the table that changed are those with another state or generation."""
        directory = self._home.directory()
        table = directory.topics
        now = directory.topic_marks(table)
        before = now[:0] if self._seen is None else self._seen
        changed = (now[: len(before)] != before).nonzero()[0].tolist()
        self._seen = now
        for index in (*changed, *range(len(before), len(now))):
            gone = self._followed.pop(index, None)
            if gone is not None:
                self._leave(gone)
            name = directory.topic_name(table, index)
            level = None if name is None else self._plan.level_of(name)
            if name is not None and level is not None:
                self._follow(now, index, name, level, missing)

    def _follow(
        self,
        seen: npt.NDArray[np.int64],
        index: int,
        name: str,
        level: int,
        missing: Missing,
    ) -> None:
        try:
            self._followed[index] = self._add(name, level, missing)
        except Gone:
            if self.closed or self._broker.closed or self._broker.stopped:
                raise
            if missing == "refuse":
                seen[index] = -1  # look again with the next change: the channel was made
                if self._joiner is None:
                    self._joiner = _Joiner(self._home, self.channel, self.wake)
                self._joiner.ask(name)
            # else it was deleted meanwhile; one that has come in its place is heard of
        except ShmqError as exc:
            seen[index] = -1  # try again with the next change
            _left_out(name, self.channel, exc)

    def _gone(self, consumer: _native.Consumer) -> None:
        """The channel of a lane was deleted."""
        for index, followed in list(self._followed.items()):
            if followed is consumer:
                del self._followed[index]
                self._leave(consumer)
                return
        if consumer in self.consumers:
            consumer.take(0)  # raises Gone, and says what was deleted

    def _forked(self) -> None:
        """In a forked child: open its own consumers. Messages in flight stay the parent's."""
        if self.reopen(self._home.native()):
            self._followed = {}
            self._seen = None
            self._joiner = None  # its thread is the parent's
            self._fill("refuse")
