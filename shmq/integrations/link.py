"""The tie between a task framework's objects and an instance of shmq: it attaches when it is first
used, and again after the instance was stopped and started."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from shmq.broker import Broker, attach
from shmq.client import Consumer, Message, MultiConsumer, Producer, Results
from shmq.errors import Gone, NotRunning
from shmq.seal import refuse

T = TypeVar("T")

#: The property of a message that is deferred for longer than the instance allows at a time: when it
#: is due, in ms since 1970.
NOT_BEFORE: Final = "not-before"
#: Seconds between two tries of a call that met a broker which stops.
PAUSE: Final = 0.02
#: Seconds before its time at which such a message counts as due.
_EARLY: Final = 0.001


def _never() -> bool:
    return False


class Link:
    """One process's handles of an instance, which are made when they are first asked for.

    instance: its name, None for SHMQ_INSTANCE or `default`, or a broker that is attached already;
    that one is never closed. owner: as in `shmq.attach`. timeout: seconds to wait for an instance
    that does not run.

    A forked child may use the parent's link: its handles attach again by themselves.
    """

    def __init__(
        self, instance: str | Broker | None, owner: str | int | None, timeout: float
    ) -> None:
        self._given = instance if isinstance(instance, Broker) else None
        self._name = None if isinstance(instance, Broker) else instance
        self._owner, self._timeout = owner, timeout
        self._broker = self._given
        self._producers: dict[tuple[str, str], Producer] = {}
        self._stores: dict[tuple[str, int | None, int | None], Results] = {}
        self.unpickles: Callable[[], bool] = _never
        """Whether who takes a message unpickles it: then what is sent is sealed, and what is not
        sealed is refused."""

    @property
    def broker(self) -> Broker:
        """The attachment. Raises what `shmq.attach` raises."""
        held = self._broker
        if held is None:
            held = self._broker = attach(self._name, self._timeout, self._owner)
        return held

    def close(self) -> None:
        """End the attachment, unless it was given. The next use attaches again."""
        held = self._broker
        self._forget()
        if held is not None and held is not self._given:
            held.close()

    def _forget(self) -> None:
        self._producers, self._stores = {}, {}
        self._broker = self._given

    def retried(self, call: Callable[[], T]) -> T:
        """The result of a call that asks this link for its handles. It is made again if a handle
        was gone because the instance was stopped or the topic deleted meanwhile, and while the
        instance is about to stop: for `timeout` seconds from then. A worker that sends its task
        again cannot be asked a second time."""
        late = None
        while True:
            try:
                return call()
            except (Gone, NotRunning):
                late = late or time.monotonic() + self._timeout
                if not self.may_return(late):
                    raise
            time.sleep(PAUSE)

    def may_return(self, late: float) -> bool:
        """After a call failed: forget the handles, and say whether to make it again. late: until
        when, of time.monotonic()."""
        held = self._broker
        self.renew()
        if held is None:
            return False  # `attach` has waited already
        return time.monotonic() < late and not (held is self._given and held.ended)

    def renew(self) -> None:
        """Forget the handles after one was gone. The next ones are new, and of a new attachment if
        the instance was stopped."""
        held = self._broker
        if held is None or held.ended:
            self._forget()
        else:
            self._producers, self._stores = {}, {}

    # ---- messages ----

    def producer(self, topic: str, channel: str) -> Producer:
        """A producer of the topic, which has this channel from then on."""
        found = self._producers.get((topic, channel))
        if found is None:
            self.broker.create_channel(topic, channel)
            found = self._producers[topic, channel] = self.broker.producer(topic)
        if self.unpickles():
            found.seal()
        return found

    def refuses(self, message: Message) -> bool:
        """Make a message that must not be unpickled a dead letter. Returns whether it was one."""
        if message.sealed or not self.unpickles():
            return False
        refuse(message)
        return True

    def publish(self, topic: str, channel: str, body: bytes, delay: float = 0.0) -> None:
        """Publish to the channel; not to be delivered for `delay` seconds. Raises what
        `Producer.publish` raises."""

        def work() -> None:
            if not delay > 0:
                self.producer(topic, channel).publish(body)
                return
            defer, due = self.terms(delay)
            self.producer(topic, channel).publish(body, defer, properties=due)

        self.retried(work)

    def terms(self, delay: float) -> tuple[float, dict[str, str] | None]:
        """The deferral and the properties of a message that is delayed by so many seconds."""
        most = self.broker.limits["max_req_timeout"] / 1e9
        if delay <= most:
            return delay, None
        return most, {NOT_BEFORE: f"{(time.time() + delay) * 1e3:.0f}"}

    def consumer(
        self, topics: Sequence[str], channel: str, max_in_flight: int
    ) -> Consumer | MultiConsumer:
        """A consumer of the channel of all these topics, the last of which goes before the others.
        Messages in flight to it have no time-out while it lives."""

        def work() -> Consumer | MultiConsumer:
            if len(topics) == 1:
                return self.broker.consumer(topics[0], channel, max_in_flight, None)
            names = list(reversed(topics))
            return self.broker.consumer(names, channel, max_in_flight, None, policy="strict")

        return self.retried(work)

    def store(
        self, name: str, max_keys: int | None = None, max_bytes: int | None = None
    ) -> Results:
        """The results store of this name. The limits are those of a store that is made now."""
        found = self._stores.get((name, max_keys, max_bytes))
        if found is None:
            limits: dict[str, int] = {}
            if max_keys is not None:
                limits["max_keys"] = max_keys
            if max_bytes is not None:
                limits["max_bytes"] = max_bytes
            found = self.broker.results(name, **limits)
            self._stores[name, max_keys, max_bytes] = found
        return found


def put_off(message: Message) -> bool:
    """Give back a message that was deferred for longer than the instance allows at a time, if it is
    not due yet. Returns whether it was given back."""
    properties = message.properties
    if not properties or NOT_BEFORE not in properties:
        return False
    left = int(properties[NOT_BEFORE]) / 1e3 - time.time()
    if left <= _EARLY:
        return False
    message.requeue(delay=left, failed=False)
    return True
