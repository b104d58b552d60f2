"""Taking messages from one channel of a broker on another host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

from shmq import arguments
from shmq.errors import Gone, NotInFlight
from shmq.remote.subscription import Delivery, Subscription

_MOST: Final = (1 << 32) - 1


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
    def answered(self) -> bool:
        """Whether it was finished or requeued here."""
        return self._answered

    @property
    def view(self) -> memoryview:
        """The body, without copying."""
        return memoryview(self.body)

    def finish(self) -> None:
        """nsqd's FIN. Raises NotInFlight."""
        self._answer("FIN")
        self._answered = True

    def requeue(self, delay: float = 0.0) -> None:
        """nsqd's REQ. delay: seconds, of which the broker's max_req_timeout counts at most. Raises
        NotInFlight, and TypeError and ValueError for the delay."""
        seconds = min(arguments.delay("delay", delay), arguments.LONGEST)
        self._answer("REQ", f" {round(seconds * 1000)}")
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
    """Messages taken together; each can be answered, or all that are not. A call for all answers
    each that it can before it raises."""

    def bodies(self) -> list[bytes]:
        """The bodies."""
        return [message.body for message in self]

    def finish(self) -> None:
        """Finish all that are not answered. Raises NotInFlight as `RemoteMessage.finish`."""
        self._each(RemoteMessage.finish)

    def requeue(self, delay: float = 0.0) -> None:
        """Requeue all that are not answered. Raises as `RemoteMessage.requeue`."""
        self._each(lambda message: message.requeue(delay))

    def touch(self) -> None:
        """Touch all that are not answered. Raises as `finish`."""
        self._each(RemoteMessage.touch)

    def _each(self, answer: Callable[[RemoteMessage], None]) -> None:
        lost: NotInFlight | None = None
        for message in self:
            try:
                if not message.answered:
                    answer(message)
            except NotInFlight as exc:
                lost = lost or exc
        if lost is not None:
            raise lost


class RemoteConsumer:
    """Takes from one channel; returned by `RemoteBroker.consumer`. Any thread may use it.

    Up to `max_in_flight` messages are on their way or here at a time; their message timeout runs
    from when the broker sends them. A thread reads them and answers the broker's heartbeats. When
    the connection breaks it makes another; the messages that were not finished come again.

    It ends when it is closed, when its RemoteBroker is closed, or when nothing refers to it and its
    messages any more; messages that are not answered then go back. A forked child makes its own.
    """

    def __init__(self, subscription: Subscription, topic: str, channel: str) -> None:
        """subscription: not started."""
        self.topic = topic
        self.channel = channel
        self._subscription = subscription
        self._finalize = weakref.finalize(self, subscription.let_go)
        self._finalize.atexit = False
        subscription.start()

    @property
    def closed(self) -> bool:
        """Whether it was closed, by itself or with its RemoteBroker."""
        return self._subscription.closed

    # ---- for users ----

    def take(self, timeout: float | None = None) -> RemoteMessage | None:
        """The next message; None after `timeout` seconds (None: no limit; 0: do not wait).

        Raises Gone once it or its RemoteBroker is closed and in a forked child, Unreachable while
        no connection can be made, and the error with which the broker refuses the subscription.
        """
        found = self.take_many(1, timeout)
        return found[0] if found else None

    def take_many(self, n: int, timeout: float | None = None) -> RemoteMessages:
        """1 to n messages at once, as soon as there are any; none after the timeout. Raises as
        `take`."""
        subscription = self._subscription
        count, seconds = arguments.counted("n", n, _MOST), arguments.limit("timeout", timeout)
        if subscription.inherited:
            raise Gone(
                f"take from {self.topic}/{self.channel}: this consumer is the parent process's; "
                "make one in each process"
            )
        taken = subscription.arrivals.take(count, seconds, subscription)
        return RemoteMessages(RemoteMessage(self, *each) for each in taken)

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
        self._subscription.close(f"take from {self.topic}/{self.channel}: the consumer was closed")
        self._finalize.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<shmq.RemoteConsumer of {self.topic}/{self.channel}{state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a RemoteConsumer cannot be pickled; make one in each process")
