"""One consumer of many topics, between processes: policies, patterns, deaths, forks."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.processes import Child, eventually, say, stop_process
from support.recount import recount_all

import shmq
from shmq import _native
from shmq.errors import BadName, Gone

Open = Callable[..., shmq.Broker]
Spawn = Callable[..., Child]

LANES = ["jobs.high", "jobs", "jobs.low"]


def take_topics(consumer: shmq.MultiConsumer, count: int, timeout: float | None = 0) -> list[str]:
    """The topics of the next messages, which are finished."""
    found = []
    for _ in range(count):
        message = consumer.take(timeout)
        assert message is not None
        found.append(message.topic)
        message.finish()
    return found


def in_flight(broker: shmq.Broker) -> int:
    return sum(channel.in_flight for topic in broker.stats().topics for channel in topic.channels)


# ---- which topic is next ----


def test_one_topic_gives_the_consumer_of_one_topic(broker: shmq.Broker) -> None:
    assert type(broker.consumer("t", "c")) is shmq.Consumer
    assert type(broker.consumer("t", "c", policy="strict")) is shmq.Consumer
    assert type(broker.consumer(["t"], "c")) is shmq.MultiConsumer
    assert type(broker.consumer("t*", "c")) is shmq.MultiConsumer


def test_priorities_are_topics_that_strict_serves_in_their_order(broker: shmq.Broker) -> None:
    jobs = broker.consumer(LANES, "c", policy="strict")
    producer = broker.producer("jobs")
    producer.publish(b"1", priority="low")
    producer.publish(b"2")
    producer.publish_many([b"3", b"4"], priority="high")
    assert [message.topic for message in (jobs.take(0), jobs.take(0))] == ["jobs.high"] * 2
    producer.publish(b"5", priority="high")
    assert take_topics(jobs, 3) == ["jobs.high", "jobs", "jobs.low"]
    assert jobs.take(0) is None
    assert jobs.in_flight == 2


def test_what_is_requeued_stays_in_its_topic(broker: shmq.Broker) -> None:
    jobs = broker.consumer(LANES, "c", policy="strict")
    broker.producer("jobs").publish(b"x", priority="high")
    message = jobs.take(0)
    message.requeue()
    assert broker.channel_depth("jobs.high", "c") == 1
    again = jobs.take(0)
    assert (again.topic, again.body, again.attempts) == ("jobs.high", b"x", 2)


@pytest.mark.parametrize(
    ("topics", "weights", "ratio"),
    [
        (3, None, [8, 4, 1]),
        (2, None, [2, 1]),
        (4, None, [8, 4, 2, 1]),
        (3, [5, 3, 1], [5, 3, 1]),
    ],
)
def test_weighted_shares_by_messages(
    broker: shmq.Broker, topics: int, weights: list[int] | None, ratio: list[int]
) -> None:
    names = [f"t{number}" for number in range(topics)]
    consumer = broker.consumer(names, "c", policy="weighted", weights=weights)
    for name in names:
        broker.producer(name).publish_many([b"x"] * 20 * max(ratio))
    counted = Counter(take_topics(consumer, 10 * sum(ratio)))
    assert [counted[name] for name in names] == [10 * share for share in ratio]


def test_fair_gives_each_topic_its_turn_and_batches_are_of_one(broker: shmq.Broker) -> None:
    consumer = broker.consumer(["a", "b", "c"], "c")
    assert consumer.policy == "fair"
    broker.producer("a").publish_many([b"x"] * 50)
    broker.producer("c").publish_many([b"x"] * 2)
    sizes = []
    while batch := consumer.take_many(10, 0):
        sizes.append((batch.topic, len(batch)))
        assert {message.topic for message in batch} == {batch.topic}
        batch.finish()
    assert sizes == [("a", 10), ("c", 2), *[("a", 10)] * 4]


def test_topics_of_one_pattern_take_turns_within_their_level(broker: shmq.Broker) -> None:
    for name in ("tenant.a", "tenant.b", "vip"):
        broker.create_topic(name)
    consumer = broker.consumer(["vip", "tenant.*"], "c", policy="strict")
    for name in ("tenant.a", "tenant.b", "vip"):
        broker.producer(name).publish_many([b"x"] * 2)
    found = take_topics(consumer, 6)
    assert found[:2] == ["vip"] * 2
    assert found[2:] in (["tenant.a", "tenant.b"] * 2, ["tenant.b", "tenant.a"] * 2)


# ---- the limit ----


def test_the_limit_is_over_all_topics_and_a_finish_ends_a_wait(broker: shmq.Broker) -> None:
    consumer = broker.consumer(["a", "b"], "c", max_in_flight=2)
    for name in ("a", "b"):
        broker.producer(name).publish_many([b"x"] * 2)
    held = [consumer.take(0), consumer.take(0)]
    assert consumer.take(0) is None
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(consumer.take()))
    thread.start()
    held[0].finish()
    thread.join()
    assert consumer.in_flight == 2
    assert consumer.take(0) is None
    consumer.limit(3)
    assert consumer.take(0) is not None
    assert consumer.max_in_flight == 3


# ---- waiting ----


def test_a_sleeper_is_woken_by_any_of_many_topics(broker: shmq.Broker) -> None:
    names = [f"t{number}" for number in range(40)]
    consumer = broker.consumer(names, "c")
    assert consumer.take(0) is None
    found: list[str] = []

    def take() -> None:
        found.extend(message.topic for message in itertools.islice(consumer, len(names)))

    thread = threading.Thread(target=take)
    thread.start()
    for number, name in enumerate(reversed(names), 1):
        broker.producer(name).publish(b"x")
        eventually(lambda number=number: len(found) == number)
    thread.join()
    assert found == names[::-1]


def test_an_iteration_ends_with_the_consumer_and_a_take_raises(broker: shmq.Broker) -> None:
    consumer = broker.consumer(["a", "b"], "c")
    ended = threading.Thread(target=lambda: list(consumer))
    ended.start()
    raised: list[BaseException] = []

    def take() -> None:
        try:
            consumer.take()
        except Gone as exc:
            raised.append(exc)

    waits = threading.Thread(target=take)
    waits.start()
    consumer.close()
    ended.join()
    waits.join()
    assert raised
    with pytest.raises(Gone):
        consumer.take(0)
    assert list(consumer) == []
    consumer.close()
    assert "closed" in repr(consumer)


def test_an_iteration_ends_when_the_broker_stops(broker: shmq.Broker) -> None:
    joined = shmq.attach(broker.instance)
    consumer = joined.consumer(["a", "b*"], "c")
    found: list[object] = []
    iterates = threading.Thread(target=lambda: found.append(list(consumer)))
    iterates.start()
    broker.producer("b1").publish(b"x")
    eventually(lambda: consumer.in_flight == 1)
    broker.close()
    iterates.join()
    assert len(found) == 1
    joined.close()


# ---- deaths ----


def hold_some(instance, topics, count):
    broker = shmq.attach(instance)
    consumer = broker.consumer(topics.split(), "c", max_in_flight=1000)
    held = [consumer.take(60) for _ in range(int(count))]
    assert all(held)
    say("holds", len({message.topic for message in held}))
    sys.stdin.readline()
    consumer.take()


def test_all_that_a_killed_consumer_of_many_held_comes_back(
    broker: shmq.Broker, child: Spawn
) -> None:
    names = [f"t{number}" for number in range(30)]
    for name in names:
        broker.create_channel(name, "c")
        broker.producer(name).publish_many([b"1", b"2", b"3"])
    holder = child(hold_some, broker.instance, " ".join(names), 60)
    holder.said("holds 30")
    holder.kill()
    eventually(lambda: in_flight(broker) == 0)
    with broker.consumer("t*", "c", max_in_flight=1000) as consumer:
        found = Counter(take_topics(consumer, 90))
        assert consumer.take(0) is None
    assert found == dict.fromkeys(names, 3)
    recount_all(broker.instance)


def test_a_consumer_that_is_killed_asleep_leaves_its_turn_to_others(
    broker: shmq.Broker, child: Spawn
) -> None:
    names = [f"t{number}" for number in range(20)]
    sleepers = [child(hold_some, broker.instance, " ".join(names), 0) for _ in range(3)]
    for sleeper in sleepers:
        sleeper.said("holds")
        sleeper.tell()
    consumer = broker.consumer(names, "c")
    asleep = _native.CONSTANTS["TURN_ASLEEP"]
    eventually(lambda: sum(broker.directory().waiters["turn"] == asleep) == 3)
    for sleeper in sleepers:
        sleeper.kill()
    for name in names:
        broker.producer(name).publish(b"x")
    found = []
    while len(found) < len(names):
        message = consumer.take()
        found.append(message.topic)
        message.finish()
    assert sorted(found) == sorted(names)


def take_and_log(instance, pattern):
    broker = shmq.attach(instance)
    say("ready")
    for message in broker.consumer(pattern, "c", max_in_flight=3):
        body = message.body.decode()
        message.finish()
        say("took", body)


def test_nothing_is_lost_while_consumers_are_killed_and_topics_come_and_go(
    broker: shmq.Broker, child: Spawn
) -> None:
    """Each message of a topic that stays is taken, by a consumer that lives or by its successor."""
    names = [f"stay.{number}" for number in range(10)]
    for name in names:
        broker.create_channel(name, "c")
    takers = [child(take_and_log, broker.instance, "*.*") for _ in range(2)]
    for taker in takers:
        taker.said("ready")
    gone = list(takers)
    total = 0
    for turn in range(6):
        broker.create_topic(f"come.{turn}")
        broker.producer(f"come.{turn}").publish(b"stays unknown")
        for name in names:
            broker.producer(name).publish_many([b"%d" % (total + i) for i in range(5)])
            total += 5
        victim = takers.pop(0)
        victim.kill()
        if turn % 2:
            broker.delete_topic(f"come.{turn}")
        gone.append(child(take_and_log, broker.instance, "*.*"))
        takers.append(gone[-1])

    def taken() -> set[str]:
        lines = [line for taker in gone for line in taker.lines]
        return {line.split()[1] for line in lines if line.startswith("took") and line[5:].isdigit()}

    def empty() -> bool:
        topics = [topic for topic in broker.stats().topics if topic.name.startswith("stay")]
        return not any(c.depth or c.in_flight for topic in topics for c in topic.channels)

    eventually(empty)
    # one that was killed between its finish and its line logs nothing: at most one each
    eventually(lambda: total - len(taken()) <= 6)
    deleted = {f"come.{turn}" for turn in range(1, 6, 2)}
    assert not deleted & {topic.name for topic in broker.stats().topics}
    for taker in takers:
        taker.kill()
    recount_all(broker.instance)


# ---- patterns ----


def test_a_pattern_joins_topics_that_come_and_leaves_those_that_go(broker: shmq.Broker) -> None:
    broker.producer("tenant.a").publish(b"before")
    consumer = broker.consumer("tenant.*", "c")
    assert consumer.topics == ["tenant.a"]
    assert take_topics(consumer, 1) == ["tenant.a"]
    for other in ("tenant", "tenants.a", "tenant.a.high", "x.tenant.a"):
        broker.create_topic(other)
    broker.producer("tenant.b").publish(b"x")
    assert take_topics(consumer, 1, None) == ["tenant.b"]
    broker.delete_topic("tenant.a")
    assert consumer.take(0) is None
    assert consumer.topics == ["tenant.b"]
    broker.producer("tenant.a").publish(b"again")
    assert take_topics(consumer, 1, None) == ["tenant.a"]
    deep = broker.consumer("tenant.**", "deep")
    assert sorted(deep.topics) == ["tenant.a", "tenant.a.high", "tenant.b"]


def test_a_sleeper_on_a_pattern_hears_of_a_topic_at_once(broker: shmq.Broker) -> None:
    consumer = broker.consumer("tenant.*", "c")
    taken: list[str] = []
    thread = threading.Thread(target=lambda: taken.append(consumer.take().topic))
    thread.start()
    broker.producer("tenant.new").publish(b"x")
    thread.join()
    assert taken == ["tenant.new"]


def test_a_topic_that_nobody_could_join_is_joined_under_the_next_supervisor(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker]
) -> None:
    supervisor = serve(tcp_address="", http_address="")
    broker = attach()
    broker.create_topic("t.a")
    consumer = broker.consumer("other.*", "c")
    pattern = shmq.client.lanes.plan(["t.*"], None, None)
    supervisor.kill()
    eventually(lambda: not broker.supervisor_alive())
    consumer._plan = pattern  # as if the topic had come right before the death
    consumer._seen = consumer._seen[:0]
    consumer._names()
    assert consumer.topics == []
    serve(tcp_address="", http_address="")
    eventually(lambda: consumer.take(0) is None and consumer.topics == ["t.a"])


def test_no_take_waits_for_a_supervisor_that_does_not_answer(
    broker: shmq.Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """It finds nothing, and takes when the supervisor goes on. A take that waited for the answer in
    vain would leave the topic out, with a warning."""
    consumer = broker.consumer(["there", "tenant.*"], "c")
    broker.producer("there").publish(b"0")
    broker.create_topic("tenant.a")
    stop_process(broker.supervisor_pid)
    try:
        assert take_topics(consumer, 1) == ["there"]
        assert consumer.take(0) is None
        assert consumer.take(0.01) is None
        assert len(consumer.take_many(5, 0)) == 0
        assert consumer.topics == ["there"]
    finally:
        os.kill(broker.supervisor_pid, signal.SIGCONT)
    assert caplog.messages == []
    broker.producer("tenant.a").publish(b"1")
    assert consumer.take(60).topic == "tenant.a"


def test_a_waiting_task_joins_too(broker: shmq.Broker) -> None:
    async def main() -> str:
        consumer = broker.consumer("tenant.*", "c")
        taking = asyncio.create_task(consumer.take_async(60))
        await asyncio.sleep(0)
        producer = await asyncio.to_thread(broker.producer, "tenant.a")
        await producer.publish_async(b"x")
        message = await taking
        assert message is not None
        return message.topic

    assert asyncio.run(main()) == "tenant.a"


def test_a_channel_that_somebody_deletes_is_not_made_again(broker: shmq.Broker) -> None:
    broker.create_topic("tenant.a")
    broker.create_topic("tenant.b")
    consumer = broker.consumer("tenant.*", "c")
    broker.delete_channel("tenant.a", "c")
    broker.producer("tenant.b").publish(b"x")
    assert take_topics(consumer, 1, None) == ["tenant.b"]
    broker.create_topic("tenant.c")
    eventually(lambda: consumer.take(0) is None and len(consumer.topics) == 2)
    assert consumer.topics == ["tenant.b", "tenant.c"]
    broker.delete_topic("tenant.a")
    broker.create_topic("tenant.a")
    eventually(lambda: consumer.take(0) is None and len(consumer.topics) == 3)
    assert sorted(consumer.topics) == ["tenant.a", "tenant.b", "tenant.c"]


def test_a_topic_that_was_named_raises_when_it_is_deleted(broker: shmq.Broker) -> None:
    consumer = broker.consumer(["named", "other*"], "c")
    broker.delete_topic("named")
    with pytest.raises(Gone, match="named/c"):
        consumer.take(0)


def test_a_topic_belongs_to_the_first_entry_that_fits(broker: shmq.Broker) -> None:
    broker.create_topic("t.vip")
    broker.create_topic("t.a")
    consumer = broker.consumer(["t.*", "t.vip"], "c", policy="strict")
    for name in ("t.vip", "t.a"):
        broker.producer(name).publish(b"x")
    assert take_topics(consumer, 2) == ["t.a", "t.vip"]


def test_a_deleted_topic_is_not_made_again_by_who_joins_it(broker: shmq.Broker) -> None:
    with pytest.raises(Gone):
        broker.lane("never", "c", 1, None, "join")
    broker.create_topic("there")
    native = broker.native()
    with pytest.raises(Gone):
        native.request(_native.CONSTANTS["JOIN_CHANNEL"], "never", "c", 60 * 10**9)
    assert [topic.name for topic in broker.stats().topics] == ["there"]


# ---- forks and copies ----


def test_a_forked_child_takes_for_itself(broker: shmq.Broker) -> None:
    consumer = broker.consumer(["a", "b*"], "c")
    broker.producer("a").publish(b"parent's")
    held = consumer.take(0)
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            broker.producer("b1").publish(b"child's")
            message = consumer.take(60)
            message.finish()
            os.write(writable, f"{message.topic} {consumer.in_flight}".encode())
            try:
                held.finish()
            except shmq.NotInFlight:
                os.write(writable, b" not mine")
        finally:
            broker.close()
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(readable, 100) == b"b1 0 not mine"
    os.close(readable)
    os.close(writable)
    assert consumer.in_flight == 1
    held.finish()
    broker.producer("b1").publish(b"x")
    assert consumer.take(60).topic == "b1"


def test_a_copy_is_a_consumer_of_the_same_topics(broker: shmq.Broker) -> None:
    consumer = broker.consumer(
        ["a", "b*"], "c", max_in_flight=7, msg_timeout=None, policy="weighted", weights=[3, 1]
    )
    copy = pickle.loads(pickle.dumps(consumer))
    assert (copy.channel, copy.max_in_flight, copy.policy) == ("c", 7, "weighted")
    assert copy.topics == ["a"]
    assert copy.__reduce__()[1][1:] == consumer.__reduce__()[1][1:]
    copy.close()


# ---- priorities ----


def test_a_priority_names_a_topic_beside_the_topic(broker: shmq.Broker) -> None:
    producer = broker.producer("t")
    assert producer.publish(b"x", priority=None)
    assert producer.publish(b"x", priority="high")
    assert len(producer.publish_many([b"1", b"2"], priority="high")) == 2
    assert producer.publish(bytearray(b"buffer"), 0, 5, priority="high")
    broker.producer("e#ephemeral").publish(b"x", priority="low")
    depths = {topic.name: topic.depth for topic in broker.stats().topics}
    assert depths == {"t": 1, "t.high": 4, "e#ephemeral": 0, "e.low#ephemeral": 1}
    copy = pickle.loads(pickle.dumps(producer))
    copy.publish(b"x", priority="high")
    producer.close()
    with pytest.raises(Gone):
        producer.publish(b"x", priority="high")
    with pytest.raises(Gone):
        producer.publish_many([b"x"], priority="high")


@pytest.mark.parametrize("priority", ["", "no spaces", "a/b", "x" * 64, "*", "low#ephemeral"])
def test_a_priority_that_makes_no_name_is_refused(broker: shmq.Broker, priority: str) -> None:
    producer = broker.producer("t")
    with pytest.raises(BadName, match="priority"):
        producer.publish(b"x", priority=priority)
    with pytest.raises(BadName, match="priority"):
        producer.publish_many([b"x"], priority=priority)
    assert [topic.name for topic in broker.stats().topics] == ["t"]


def test_a_priority_is_a_str(broker: shmq.Broker) -> None:
    for wrong in (5, b"high", ["high"]):
        with pytest.raises(TypeError, match="priority"):
            broker.producer("t").publish(b"x", priority=wrong)  # type: ignore[arg-type]


# ---- bad input ----


@pytest.mark.parametrize(
    ("topics", "how", "error", "text"),
    [
        ([], {}, ValueError, "empty list"),
        (["a", "a"], {}, ValueError, "'a' twice"),
        (["a*", "b", "a*"], {}, ValueError, r"'a\*' twice"),
        (["a", "b"], {"policy": "best"}, ValueError, "fair, strict, weighted"),
        ("a", {"policy": "best"}, ValueError, "fair, strict, weighted"),
        (["a", "no spaces"], {}, BadName, "no spaces"),
        (["a", ""], {}, BadName, "topic name"),
        ("a***", {}, BadName, "pattern"),
        ("a *", {}, BadName, "pattern"),
        ("a[*]", {}, BadName, "pattern"),
        ("*" + "a" * 64, {}, BadName, "pattern"),
        (["a", 5], {}, TypeError, "topic name must be str"),
        (5, {}, TypeError, "topic must be"),
        (b"a", {}, TypeError, "topic must be"),
        ({"a": 1}, {}, TypeError, "topic must be"),
        (["a", "b"], {"weights": [1]}, ValueError, "1 numbers for 2"),
        (["a", "b"], {"weights": [1, 0]}, ValueError, "from 1 to 1000000"),
        (["a", "b"], {"weights": [1, 1.5]}, TypeError, "whole numbers"),
        (["a", "b"], {"weights": "12"}, TypeError, "list of whole numbers"),
        (["a", "b"], {"weights": [2, 1], "policy": "strict"}, ValueError, "policy='weighted'"),
        (["a", "b"], {"max_in_flight": 0}, ValueError, "max_in_flight"),
        ("a*", {"msg_timeout": 0}, ValueError, "msg_timeout"),
    ],
)
def test_bad_input_is_refused_and_makes_nothing(
    broker: shmq.Broker, topics: Any, how: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        broker.consumer(topics, "c", **how)
    assert broker.stats().topics == []


def test_a_bad_channel_is_refused(broker: shmq.Broker) -> None:
    with pytest.raises(BadName, match="channel"):
        broker.consumer(["a"], "no spaces")
