"""Tasks of one job, or of jobs that run at a time, hand each other messages.

    tasks, results = Exchange("jobs", "tasks"), Exchange("jobs", "results")

    def publish(rows):                                  # rdd.foreachPartition(publish)
        tasks.publish(row.path.encode() for row in rows)

    def work(batches):                                  # df.mapInArrow(work, df.schema)
        for message in tasks.messages(idle=2.0):
            results.publish([measure(message.body)])    # then the message is finished
        yield from batches

What a task has taken is its own until the loop comes back for more: then it is finished; if the
loop is left or raises, or the task ends in any other way, it goes back at once, and if its process
is killed, within milliseconds. Spark uses a worker process for many tasks, so nothing here waits
for its end.

Spark may have no slot for one side while the other runs, so every wait has an end: a loop ends when
nothing came for `idle` seconds. Run the two sides as jobs of two threads, or as one barrier stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shmq.client import Batch, Consumer, Message
from shmq.errors import NotInFlight
from shmq.spark.reading import attached


@dataclass(frozen=True)
class Exchange:
    """A channel as tasks use it; Spark ships it with their functions, each process attaches
    once."""

    instance: str
    topic: str
    channel: str = "spark"
    owner: str | None = None
    """The user whose broker it may be, as in `attach`."""

    def create(self) -> None:
        """Make topic and channel, in the driver, before a job: what is published without a channel
        goes to the first one only."""
        attached(self.instance, self.owner).create_channel(self.topic, self.channel)

    def publish(self, bodies: Iterable[Any], timeout: float = 60.0, at_once: int = 200) -> int:
        """Publish bodies (bytes-likes, or one Arrow array); how many. Full if there was no room for
        `timeout` seconds. A task that is tried again publishes again."""
        producer = attached(self.instance, self.owner).producer(self.topic)
        if hasattr(bodies, "null_count"):
            return len(producer.publish_many(bodies, timeout=timeout))
        rest, count = iter(bodies), 0
        while piece := list(islice(rest, at_once)):
            count += len(producer.publish_many(piece, timeout=timeout))
        return count

    def messages(
        self, idle: float, at_once: int = 16, msg_timeout: float | None = None
    ) -> Iterator[Message]:
        """One message after the other until none came for `idle` seconds. Each is finished when the
        loop asks for the next; what is not finished when the loop ends goes back.

        at_once: how many the task takes from the others at a time. msg_timeout: as of
        `Broker.consumer`; None: while the task lives.
        """
        for batch in self._taken(idle, at_once, msg_timeout):
            for message in batch:
                yield message
                _finish(message)

    def batches(
        self, idle: float, at_once: int = 1000, msg_timeout: float | None = None
    ) -> Iterator[Batch]:
        """The same for whole batches (`bodies()`, `to_arrow()`), which are finished together."""
        for batch in self._taken(idle, at_once, msg_timeout):
            yield batch
            _finish(batch)

    def _taken(self, idle: float, at_once: int, msg_timeout: float | None) -> Iterator[Batch]:
        consumer: Consumer = attached(self.instance, self.owner).consumer(
            self.topic, self.channel, at_once, msg_timeout
        )
        with consumer:  # its end gives back what is not finished
            while batch := consumer.take_many(at_once, idle):
                yield batch


def _finish(what: Message | Batch) -> None:
    try:
        what.finish()
    except NotInFlight:  # it was answered in the loop, or timed out and is another's
        return
