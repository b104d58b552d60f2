"""One consumer of many topics against a plain model of its policy: which topic is next, how many
messages come, and that none is left lying."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.in_process_broker import World

from shmq import _native
from shmq.client import Batch, Consumer, Producer

TOPICS = 5
LIMIT = 6
NAMES = [f"t{number}" for number in range(TOPICS)]


def nothing() -> Any:
    raise AssertionError("not here")


class Level:
    """The topics of one level, which take turns."""

    def __init__(self, weight: int) -> None:
        self.share = Fraction(1, weight)
        self.standing = Fraction(0)
        self.topics: list[int] = []
        self.turn = 0

    def next(self, waiting: dict[int, list[bytes]]) -> int | None:
        turned = self.topics[self.turn :] + self.topics[: self.turn]
        return next((topic for topic in turned if waiting[topic]), None)

    def served(self, topic: int) -> None:
        self.turn = (self.topics.index(topic) + 1) % len(self.topics)

    def leave(self, topic: int) -> None:
        at = self.topics.index(topic)
        self.topics.remove(topic)
        self.turn -= at < self.turn
        if self.turn >= len(self.topics):
            self.turn = 0


class Policies(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(mem_queue_size=512, in_flight_slots=64, arena_size=1 << 20)
        self.broker = self.world.attach_native()
        self.waiting: dict[int, list[bytes]] = {topic: [] for topic in range(TOPICS)}
        self.held: list[tuple[int, Any]] = []
        self.number = 0
        self.producers, self.consumers, self.rivals = [], [], []
        for name in NAMES:
            index, generation = self.world.create_topic(name)
            queue = self.world.create_channel(name, "c")
            self.producers.append(Producer(self.broker, index, generation, name, nothing, nothing))
            for there in (self.consumers, self.rivals):
                there.append(Consumer(self.broker, *queue, name, "c", 64, 0, Batch, nothing))

    @initialize(
        policy=some.sampled_from(["fair", "strict", "weighted"]),
        levels=some.lists(some.integers(0, 2), min_size=TOPICS, max_size=TOPICS),
        weights=some.lists(some.sampled_from([1, 2, 3, 4, 8, 20]), min_size=3, max_size=3),
    )
    def choose(self, policy: str, levels: list[int], weights: list[int]) -> None:
        self.strict = policy == "strict"
        self.level_of = [0] * TOPICS if policy == "fair" else levels
        self.levels = [Level(weight) for weight in weights]
        self.time = Fraction(0)
        self.lanes = _native.Lanes(self.broker, self.strict, weights, LIMIT, Batch, False)
        for topic in range(TOPICS):
            self._join(topic)

    def _join(self, topic: int) -> None:
        self.lanes.add(self.consumers[topic], self.level_of[topic])
        self.levels[self.level_of[topic]].topics.append(topic)

    def _is_lane(self, topic: int) -> bool:
        return topic in self.levels[self.level_of[topic]].topics

    def _standing(self, level: Level) -> Fraction:
        return max(level.standing, self.time)

    def _expected(self) -> int | None:
        found = [(level, level.next(self.waiting)) for level in self.levels]
        ready = [(level, topic) for level, topic in found if topic is not None]
        if len(self.held) >= LIMIT or not ready:
            return None
        if self.strict:
            return ready[0][1]
        return min(ready, key=lambda item: self._standing(item[0]))[1]

    def _served(self, topic: int, count: int) -> None:
        level = self.levels[self.level_of[topic]]
        level.served(topic)
        self.time = self._standing(level)
        level.standing = self.time + count * level.share

    @rule(topic=some.integers(0, TOPICS - 1), count=some.integers(1, 6))
    def publish(self, topic: int, count: int) -> None:
        if len(self.waiting[topic]) + count > 400:
            return
        bodies = [b"%d" % (self.number + i) for i in range(count)]
        self.number += count
        self.producers[topic].publish_many(bodies, timeout=0)
        self.waiting[topic] += bodies

    @rule()
    def take(self) -> None:
        topic = self._expected()
        message = self.lanes.take(0)
        if topic is None:
            assert message is None
            return
        assert message is not None
        assert message.topic == NAMES[topic]
        assert message.body == self.waiting[topic].pop(0)
        self.held.append((topic, message))
        self._served(topic, 1)

    @rule(most=some.integers(1, 10))
    def take_many(self, most: int) -> None:
        topic = self._expected()
        batch = self.lanes.take_many(most, 0)
        if topic is None:
            assert len(batch) == 0
            assert batch.topic is None
            return
        count = min(most, len(self.waiting[topic]), LIMIT - len(self.held))
        expected, self.waiting[topic] = self.waiting[topic][:count], self.waiting[topic][count:]
        assert batch.topic == NAMES[topic]
        assert batch.bodies() == expected
        self.held += [(topic, message) for message in batch]
        self._served(topic, count)

    @precondition(lambda self: self.held)
    @rule(which=some.integers(0, LIMIT - 1))
    def finish(self, which: int) -> None:
        _, message = self.held.pop(which % len(self.held))
        message.finish()

    @precondition(lambda self: self.held)
    @rule(which=some.integers(0, LIMIT - 1))
    def requeue(self, which: int) -> None:
        """It stays in its topic, behind what waits there."""
        topic, message = self.held.pop(which % len(self.held))
        message.requeue()
        self.waiting[topic].append(message.body)

    @rule(topic=some.integers(0, TOPICS - 1))
    def a_rival_takes(self, topic: int) -> None:
        message = self.rivals[topic].take(0)
        if self.waiting[topic]:
            assert message is not None
            assert message.body == self.waiting[topic].pop(0)
            message.finish()
        else:
            assert message is None

    @rule(topic=some.integers(0, TOPICS - 1))
    def come_or_go(self, topic: int) -> None:
        if self._is_lane(topic):
            if any(held == topic for held, _ in self.held):
                return
            self.lanes.remove(self.consumers[topic])
            self.levels[self.level_of[topic]].leave(topic)
        else:
            self._join(topic)

    @rule()
    def look(self) -> None:
        assert self.lanes.wait(0) == (self._expected() is not None)

    def teardown(self) -> None:
        if hasattr(self, "lanes"):
            for _, message in self.held:
                message.finish()
            self.held = []
            for topic in range(TOPICS):
                if not self._is_lane(topic):
                    self._join(topic)
            while self._expected() is not None:
                self.take()
                self.finish(0)
            assert self.lanes.take(0) is None
            assert not any(self.waiting.values())
            self.lanes.close()
        self.broker.detach()
        self.world.close()


Policies.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestPolicies = Policies.TestCase
