"""The broker of Taskiq."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncGenerator
from typing import Final

import anyio
import anyio.to_thread
from taskiq import AckableMessage, AsyncBroker, BrokerMessage
from taskiq.serializers import PickleSerializer

import shmq
from shmq.integrations.lanes import check_max_priority, lane_number, lanes_of
from shmq.integrations.link import put_off
from shmq.integrations.taskiq.dead import DeadLetters, error_of_delivery
from shmq.integrations.taskiq.ties import AsyncLink

#: The channel of each topic. All workers share it.
CHANNEL: Final = "workers"

#: The receiver of Taskiq asks for as many messages as it may have.
_MAX_IN_FLIGHT: Final = 65535
#: Seconds between two tries to find an instance that was stopped.
_PAUSE: Final = 1.0

_log = logging.getLogger(__name__)


class Broker(AsyncBroker):
    """A broker whose queue is a topic of shmq.

    instance: the name of a running instance, None for SHMQ_INSTANCE or `default`, or an
    `shmq.Broker`. It is attached at `startup`, so a program may be imported without it.
    queue_name: the topic. The label `queue_name` of a task names another one, which a broker of
    that name listens to.
    max_priority: the highest `priority` label. The queue has then up to four lanes, and a message
    of a higher lane goes before all of a lower one. None: one lane. All programs of a queue must
    say the same.
    owner: the user whose instance it may be, as in `shmq.attach`.
    timeout: seconds to wait for an instance that does not run.

    The label `delay` of a task is the number of seconds before it may be delivered. A task that was
    delivered is in flight until Taskiq acknowledges it; it has no time-out while its worker lives,
    and is delivered again at once when the worker dies.

    Raises shmq's NotRunning if no instance runs. Taskiq makes a SendTaskError of an error of
    `kick`.
    """

    def __init__(
        self,
        instance: str | shmq.Broker | None = None,
        *,
        queue_name: str = "taskiq",
        max_priority: int | None = None,
        owner: str | int | None = None,
        timeout: float = 10.0,
    ) -> None:
        super().__init__()
        self.queue_name = queue_name
        self.max_priority = check_max_priority(max_priority)
        self._link = AsyncLink(instance, owner, timeout)
        self._link.unpickles = lambda: isinstance(self.serializer, PickleSerializer)
        self._consumer: shmq.Consumer | shmq.MultiConsumer | None = None

    @property
    def attachment(self) -> shmq.Broker:
        """The attachment, for `stats()`, `dead()` and everything else. Raises NotRunning."""
        return self._link.broker

    def topics(self, queue_name: str | None = None) -> list[str]:
        """The topics of a queue, that of the lowest priority first. None: this broker's queue."""
        return lanes_of(queue_name or self.queue_name, self.max_priority)

    # ---- life ----

    async def startup(self) -> None:
        """Attach to the instance, make the topics, and start middlewares and result backend. Raises
        NotRunning."""
        await anyio.to_thread.run_sync(self._open)
        await super().startup()

    def _open(self) -> None:
        for topic in self.topics():
            self._link.retried(functools.partial(self._link.producer, topic, CHANNEL))

    async def shutdown(self) -> None:
        """Stop middlewares and result backend, and detach. Messages in flight go back."""
        await super().shutdown()
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
        self._link.close()

    # ---- messages ----

    async def kick(self, message: BrokerMessage) -> None:
        """Send a task. Raises shmq's NotRunning, Gone, Full and MessageTooBig, and ValueError for a
        label `delay` or `priority` that is no number."""
        labels = message.labels
        topics = self.topics(labels.get("queue_name"))
        topic = topics[lane_number(int(labels.get("priority") or 0), self.max_priority)]
        delay = float(labels.get("delay") or 0)
        await self._link.publish_async(topic, CHANNEL, message.message, delay)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Yield the messages of the queue. After a stop of the instance it waits for the next
        start."""
        consumer = await self._consume()
        while True:
            try:
                delivery = await consumer.take_async()
            except shmq.Gone:
                if consumer.closed and self._consumer is not consumer:
                    return  # this broker was shut down
                _log.warning("the instance was stopped: looking for it again")
                consumer = await self._consume()
                continue
            if not self._link.refuses(delivery) and not put_off(delivery):
                yield AckableMessage(data=delivery.body, ack=self._ack_of(delivery))

    async def _consume(self) -> shmq.Consumer | shmq.MultiConsumer:
        while True:
            try:
                self._consumer = await anyio.to_thread.run_sync(
                    self._link.consumer, self.topics(), CHANNEL, _MAX_IN_FLIGHT
                )
            except shmq.NotRunning as exc:
                _log.warning("no consumer yet: %s", exc)
                await anyio.sleep(_PAUSE)
            else:
                return self._consumer

    def _ack_of(self, delivery: shmq.Message) -> _Ack:
        letters = any(isinstance(each, DeadLetters) for each in self.middlewares)
        return _Ack(delivery, letters)


class _Ack:
    """The acknowledgement of one delivery."""

    def __init__(self, delivery: shmq.Message, letters: bool) -> None:
        self._delivery = delivery
        self._letters = letters

    def __call__(self) -> None:
        error = error_of_delivery() if self._letters else None
        try:
            if error is None:
                self._delivery.finish()
            else:
                self._delivery.reject(error)
        except (shmq.NotInFlight, shmq.Gone) as exc:
            # the queue was emptied, or the instance was stopped and has the message on disk
            _log.warning("message %s is not in flight any more: %s", self._delivery.id, exc)
