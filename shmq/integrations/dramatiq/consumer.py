"""A worker's consumer of one queue of Dramatiq."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import dramatiq
from dramatiq.errors import ConnectionClosed, ConnectionFailed, DecodeError
from dramatiq.logging import get_logger

import shmq
from shmq.integrations.link import put_off


class MessageProxy(dramatiq.MessageProxy):
    """A message of Dramatiq and its delivery."""

    def __init__(self, message: dramatiq.Message[Any], delivery: shmq.Message) -> None:
        super().__init__(message)
        self.delivery = delivery
        self.error: str | None = None
        """The exception with which it failed last."""

    def stuff_exception(self, exception: BaseException) -> None:
        """Keep the exception for the middleware, and its text for the dead letter."""
        super().stuff_exception(exception)
        self.error = f"{type(exception).__name__}: {exception}"


class Consumer(dramatiq.Consumer):
    """The messages of a queue, which stay in flight until they are acknowledged or rejected.

    They have no time-out while this consumer lives. Those that are neither acknowledged nor
    rejected when it is closed, or when its process dies, are delivered again.
    """

    def __init__(
        self,
        consumer: shmq.Consumer | shmq.MultiConsumer,
        timeout: int,
        refuses: Callable[[shmq.Message], bool],
    ) -> None:
        """timeout: milliseconds that a call waits for the next message. refuses: makes a message
        that must not be decoded a dead letter, and says whether it was one."""
        self._refuses = refuses
        self.logger = get_logger(__name__, type(self))
        self._consumer = consumer
        self._seconds = timeout / 1e3

    def __next__(self) -> MessageProxy | None:
        """The next message, or None if none comes in time. Raises ConnectionClosed if the instance
        was stopped."""
        try:
            delivery = self._consumer.take(self._seconds)
            if delivery is None or self._refuses(delivery) or put_off(delivery):
                return None
        except shmq.Gone as exc:
            raise ConnectionClosed(str(exc)) from exc
        except shmq.NotRunning as exc:
            raise ConnectionFailed(str(exc)) from exc
        try:
            return MessageProxy(dramatiq.Message.decode(delivery.body), delivery)
        except DecodeError as exc:
            self.logger.error("Message %s is a dead letter: %s", delivery.id, exc, exc_info=True)
            delivery.reject(f"{exc}: {exc.error}")
            return None

    def ack(self, message: Any) -> None:
        """Finish a message that was processed."""
        self._settle(message, message.delivery.finish)

    def nack(self, message: Any) -> None:
        """Make a dead letter of a message that failed, with the exception as its error."""
        self._settle(message, lambda: message.delivery.reject(message.error))

    def _settle(self, message: MessageProxy, settle: Callable[[], None]) -> None:
        try:
            settle()
        except (shmq.NotInFlight, shmq.Gone) as exc:
            # the queue was flushed, or the instance was stopped and has the message on disk
            self.logger.warning("Message %s is not in flight any more: %s", message.message_id, exc)

    def requeue(self, messages: Iterable[Any]) -> None:
        """Give messages back to their queue. This counts as no failure."""
        for message in messages:
            with contextlib.suppress(shmq.NotInFlight, shmq.Gone):  # it is back already
                message.delivery.requeue(failed=False)

    def close(self) -> None:
        """End this consumer. Its messages go back to their queue."""
        self._consumer.close()
