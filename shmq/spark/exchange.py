"""Messages between tasks of one job, or of jobs that run at the same time.

    tasks, results = Exchange("jobs", "tasks"), Exchange("jobs", "results")

    def publish(rows):                                  # rdd.foreachPartition(publish)
        tasks.publish(row.path.encode() for row in rows)

    def work(batches):                                  # df.mapInArrow(work, df.schema)
        for message in tasks.messages(idle=2.0):
            results.publish([measure(message.body)])    # then the message is finished
        yield from batches

A task holds a message until its loop asks for the next one; then the message is finished. If the
loop is left or raises, or the task ends in any other way, the message goes back at once; if the
worker process is killed, within milliseconds. Spark uses a worker process for many tasks, so
nothing here relies on the end of the process.

Spark may have no free slot for one side while the other runs, so every wait is bounded: a loop ends
when no message came for `idle` seconds. Run the two sides as jobs of two threads, or as one barrier
stage.
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
    """A channel that tasks publish to and take from. Spark ships it with the tasks' functions; each
    worker process attaches once.

    instance, topic, channel: names. owner: the user whose broker it may be, as in `shmq.attach`.
    Every method raises the errors of `shmq.attach`.
    """

    instance: str
    topic: str
    channel: str = "spark"
    owner: str | None = None

    def create(self) -> None:
        """Create topic and channel. Call it in the driver before a job: messages that are published
        while the topic has no channel go only to the first one."""
        attached(self.instance, self.owner).create_channel(self.topic, self.channel)

    def publish(self, bodies: Iterable[Any], timeout: float = 60.0, at_once: int = 200) -> int:
        """Publish bodies, and return their number. A task that Spark retries publishes them again.

        bodies: bytes-likes, or one Arrow array of binary or string. timeout: seconds to wait for
        room. at_once: the number of bodies published together. Raises Full if there was no room in
        time, and the other errors of `Producer.publish_many`.
        """
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
        """Yield messages until none came for `idle` seconds. Each is finished when the loop asks
        for the next; messages that are not finished when the loop ends go back.

        at_once: the number of messages that the task takes at a time, which other tasks cannot get.
        msg_timeout: seconds, as of `Broker.consumer`; None: no limit while the task lives.
        """
        for batch in self._taken(idle, at_once, msg_timeout):
            for message in batch:
                yield message
                _finish(message)

    def batches(
        self, idle: float, at_once: int = 1000, msg_timeout: float | None = None
    ) -> Iterator[Batch]:
        """Like `messages`, for whole batches (`bodies()`, `to_arrow()`), each of which is finished
        together. at_once: the largest number of messages in a batch."""
        for batch in self._taken(idle, at_once, msg_timeout):
            yield batch
            _finish(batch)

    def _taken(self, idle: float, at_once: int, msg_timeout: float | None) -> Iterator[Batch]:
        consumer: Consumer = attached(self.instance, self.owner).consumer(
            self.topic, self.channel, at_once, msg_timeout
        )
        with consumer:  # closing it gives back the messages that are not finished
            while batch := consumer.take_many(at_once, idle):
                yield batch


def _finish(what: Message | Batch) -> None:
    try:
        what.finish()
    except NotInFlight:  # the loop answered it, or it timed out and was delivered again
        return
