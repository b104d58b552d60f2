"""Consumers of many topics. The messages of each topic are logged as those of a consumer of this
topic alone, in a file of its own, so that every rule for messages holds for them too."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from chaos.storm import history
from chaos.storm.actors import Consumer, Delivery, Place
from chaos.storm.history import Log, Outcome, Settling, What, record

import shmq

#: The last one comes later, and has no channel before a consumer of the pattern joins it.
TOPICS = ("many.high", "many.mid", "many.low", "many.new")
LATER = TOPICS[-1]
CHANNEL = "m"


class ManyConsumer(Consumer):
    """Takes by a list and by a pattern, with each policy."""

    role = "many-consumer"
    max_in_flights = (1, 7, 60)
    takes_until_closed = 200
    ways: ClassVar[tuple[tuple[list[str], str], ...]] = (
        (["many.high", "many.*"], "strict"),
        (["many.high", "many.mid", "many.*"], "weighted"),
        (["many.*"], "fair"),
        (["many.**"], "strict"),
    )

    def __init__(self, place: Place, number: int, seed: int) -> None:
        super().__init__(place, number, seed)
        self.logs = {place.topic: self.log}
        for topic in TOPICS:
            if topic not in self.logs:
                name = history.file_name(number, self.role, topic, place.channel)
                self.logs[topic] = Log(place.directory / name)
                self.logs[topic].write(record(What.ACTOR, key=number, id=self.timeout_ns))

    def open(self, max_in_flight: int) -> shmq.Consumer:
        assert self.broker is not None
        topics, policy = self.choice.choice(self.ways)
        return self.broker.consumer(  # type: ignore[call-overload,no-any-return]
            topics, self.place.channel, max_in_flight=max_in_flight, policy=policy
        )

    def close(self, consumer: shmq.Consumer) -> None:
        """The messages of all topics go back."""
        ops = {topic: log.next_op() for topic, log in self.logs.items()}
        for topic, log in self.logs.items():
            log.write(record(What.SETTLE, op=ops[topic], flag=Settling.CLOSE))
        self.core(consumer.close)
        for topic, log in self.logs.items():
            log.write(record(What.SETTLED, op=ops[topic], flag=Outcome.DONE))

    def _taking(self, n: int, call: Callable[[], list[shmq.Message]]) -> list[Delivery]:
        """Before the call nobody knows of which topic it will be."""
        ops = {topic: log.next_op() for topic, log in self.logs.items()}
        for topic, log in self.logs.items():
            log.write(record(What.TAKE, op=ops[topic], count=n))
        messages = self.core(call)
        taken: list[Delivery] = []
        # the one that has something first, because a death may come in between
        for topic in sorted(self.logs, key=lambda name: not messages or messages[0].topic != name):
            self.log = self.logs[topic]
            mine = [message for message in messages if message.topic == topic]
            taken += self._taken(ops[topic], mine)
        assert len(taken) == len(messages), [message.topic for message in messages]
        if messages:
            assert len({message.topic for message in messages}) == 1, "a batch of two topics"
            self.log = self.logs[messages[0].topic]  # its messages are settled there
        return taken
