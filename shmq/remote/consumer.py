"""Taking messages from one channel of a broker on another host."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, Self

from shmq.errors import Gone, NotInFlight, ShmqError
from shmq.remote.subscription import Delivery, Subscription

_LONG: Final = 1e9


class RemoteMessage:
    """One delivery of a message; as `Message`, without properties.

    `finish`, `requeue` and `touch` do not wait for an answer. They raise NotInFlight if the message
    was answered already, or if the connection by which it came has broken since: then it is
    delivered again. If it timed out just before, that is not known here.
    """

    __slots__ = ("_answered", "_consumer", "_of", "attempts", "body", "id", "timestamp")

    def __init__(self, consumer: RemoteConsumer, of: int, delivery: Delivery) -> None:
        """of: the connection by which it came."""
        self._consumer = consumer
        self._of = of
        self._answered = False
        self.timestamp, self.attempts, self.id, self.body = delivery

    @property
    def view(self) -> memoryview:
        """The body, without copying."""
        return memoryview(self.body)

    def finish(self) -> None:
        """nsqd's FIN. Raises NotInFlight."""
        self._answer("FIN")
        self._answered = True

    def requeue(self, delay: float = 0.0) -> None:
        """nsqd's REQ. delay: seconds. Raises NotInFlight."""
        self._answer("REQ", f" {round(delay * 1000)}")
        self._answered = True

    def touch(self) -> None:
        """nsqd's TOUCH. Raises NotInFlight."""
        self._answer("TOUCH")

    def _answer(self, command: str, words: str = "") -> None:
        if self._answered:
            raise NotInFlight(f"{command} {self.id}: it was answered already")
        self._consumer.answer(self._of, f"{command} {self.id}{words}\n".encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self._answered:
            return
        if kind is None:
            self.finish()
            return
        try:
            self.requeue()
        except NotInFlight:
            return

    def __repr__(self) -> str:
        return f"<shmq.RemoteMessage {self.id}, {len(self.body)} bytes, attempt {self.attempts}>"


class RemoteMessages(list[RemoteMessage]):
    """Messages taken together; each can be answered, or all that are not."""

    def bodies(self) -> list[bytes]:
        """The bodies."""
        return [message.body for message in self]

    def finish(self) -> None:
        """Finish all. Raises NotInFlight as `RemoteMessage.finish`."""
        for message in self:
            message.finish()

    def requeue(self, delay: float = 0.0) -> None:
        """Requeue all. Raises as `finish`."""
        for message in self:
            message.requeue(delay)

    def touch(self) -> None:
        """Touch all. Raises as `finish`."""
        for message in self:
            message.touch()


class RemoteConsumer:
    """Takes from one channel; returned by `RemoteBroker.consumer`. Any thread may use it.

    Up to `max_in_flight` messages are on their way or here at a time; their message timeout runs
    from when the broker sends them. A thread reads them and answers the broker's heartbeats. When
    the connection breaks it makes another; the messages that were not finished come again.
    """

    def __init__(self, subscription: Subscription, topic: str, channel: str) -> None:
        """subscription: not started."""
        self.topic = topic
        self.channel = channel
        self.closed = False
        self._arrived: deque[tuple[int, Delivery]] = deque()
        self._changed = threading.Condition()
        self._error: ShmqError | None = None
        self._subscription = subscription
        subscription.start(self._deliver, self._failed)

    # ---- called by the subscription's thread ----

    def _deliver(self, of: int, deliveries: list[Delivery]) -> None:
        with self._changed:
            if self._arrived and self._arrived[-1][0] != of:
                self._arrived.clear()  # of a connection that broke; they come again
            self._arrived.extend((of, delivery) for delivery in deliveries)
            # The broker has at most so many on their way here. Those before have timed out there,
            # and come again.
            while len(self._arrived) > self._subscription.most:
                self._arrived.popleft()
            self._error = None
            self._changed.notify_all()

    def _failed(self, error: ShmqError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    # ---- for users ----

    def take(self, timeout: float | None = None) -> RemoteMessage | None:
        """The next message; None after `timeout` seconds (None: no limit; 0: do not wait).

        Raises Gone once it is closed, Unreachable while no connection can be made, and the error
        with which the broker refuses the subscription.
        """
        found = self.take_many(1, timeout)
        return found[0] if found else None

    def take_many(self, n: int, timeout: float | None = None) -> RemoteMessages:
        """1 to n messages at once, as soon as there are any; none after the timeout. Raises as
        `take`."""
        end = time.monotonic() + (_LONG if timeout is None else timeout)
        with self._changed:
            while True:
                if self.closed:
                    raise Gone(f"take from {self.topic}/{self.channel}: the consumer was closed")
                while self._arrived and self._arrived[0][0] != self._subscription.number:
                    self._arrived.popleft()
                if self._arrived:
                    count = min(n, len(self._arrived))
                    taken = [self._arrived.popleft() for _ in range(count)]
                    return RemoteMessages(RemoteMessage(self, *each) for each in taken)
                if self._error is not None:
                    raise self._error
                left = end - time.monotonic()
                if left <= 0:
                    return RemoteMessages()
                self._changed.wait(min(left, 3600))

    def messages(self) -> Iterator[RemoteMessage]:
        """Take one message after the other; ends when the consumer is closed."""
        while True:
            try:
                message = self.take()
            except Gone:
                if self.closed:
                    return
                raise
            assert message is not None
            yield message

    def __iter__(self) -> Iterator[RemoteMessage]:
        return self.messages()

    def answer(self, of: int, line: bytes) -> None:
        """Send an answer to a message, for RemoteMessage. Raises NotInFlight if its connection
        broke."""
        if self.closed or not self._subscription.answer(of, line):
            raise NotInFlight(
                f"{line.decode().strip()}: the connection by which it came has ended, so the "
                "message is delivered again"
            )

    def close(self) -> None:
        """End the subscription: messages that are not answered go back. Idempotent."""
        with self._changed:
            self.closed = True
            self._arrived.clear()
            self._changed.notify_all()
        self._subscription.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<shmq.RemoteConsumer of {self.topic}/{self.channel}{state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a RemoteConsumer cannot be pickled; make one in each process")
