"""Whose turn it is: the order in which the queues of a connection are served."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Final, Generic, Protocol, TypeVar

from kombu.utils.scheduling import cycle_by_name

#: As of kombu's Redis transport.
ROUND_ROBIN: Final = "round_robin"


class Source(Protocol):
    """A queue that a channel consumes."""

    consumer: Any

    @property
    def name(self) -> str:
        """The queue's name, by which the strategy knows it."""

    @property
    def channel(self) -> Hashable:
        """The channel: its queues take turns among each other."""

    @property
    def strategy(self) -> Any:
        """The channel's `queue_order_strategy`."""

    def wants(self) -> bool:
        """Whether its channel may be given a message now."""

    def deliver(self) -> bool:
        """Take a message and hand it on. Returns False if there is none."""


S = TypeVar("S", bound=Source)


class _Channel(Generic[S]):
    """The queues of one channel, in the order of its strategy."""

    def __init__(self, strategy: Any) -> None:
        self._cycle: Any = cycle_by_name(strategy)()
        self._sources: dict[str, S] = {}

    def __bool__(self) -> bool:
        return bool(self._sources)

    def __iter__(self) -> Iterator[S]:
        for name in self._cycle.consume(len(self._sources)):
            source = self._sources.get(name)  # a delivery may have cancelled it
            if source is not None:
                yield source

    def add(self, source: S) -> None:
        self._sources[source.name] = source
        self._cycle.update(list(self._sources))

    def remove(self, source: S) -> None:
        if self._sources.get(source.name) is source:
            del self._sources[source.name]
            self._cycle.update(list(self._sources))

    def served(self, source: S) -> None:
        self._cycle.rotate(source.name)


class Turns(Generic[S]):
    """The sources of a connection. Its channels take turns, so that no flood of tasks holds up what
    steers a worker. The queues of a channel are served as its `queue_order_strategy` says, which is
    one of kombu's: `round_robin` (each queue in turn), `priority` (in the order in which they were
    named: the first one that has a message), `sorted` (the same, by name), or a class like those.
    """

    def __init__(self) -> None:
        self._channels: dict[Hashable, _Channel[S]] = {}

    def add(self, source: S) -> None:
        """Serve this one too."""
        channel = self._channels.get(source.channel)
        if channel is None:
            channel = self._channels[source.channel] = _Channel(source.strategy)
        channel.add(source)

    def remove(self, source: S) -> None:
        """Serve it no more."""
        channel = self._channels.get(source.channel)
        if channel is not None:
            channel.remove(source)
            if not channel:
                del self._channels[source.channel]

    def clear(self) -> None:
        """Serve none."""
        self._channels.clear()

    def __iter__(self) -> Iterator[S]:
        """Yields the sources, the one whose turn it is first."""
        for channel in list(self._channels.values()):
            yield from channel

    def served(self, source: S) -> None:
        """A message of this one was delivered: its channel's turn is over, and within the channel
        its own, if the strategy knows turns."""
        channel = self._channels.pop(source.channel, None)
        if channel is not None:
            self._channels[source.channel] = channel
            channel.served(source)
