"""/dev/shm is full in the middle of what settings of channels and patterns ask for: typed errors or
waiting, nothing lost, nothing twice. Each child has a small /dev/shm of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.processes import HELPERS, Child, say
from support.small_memory import mounted

import shmq

Spawn = Callable[..., Child]


def die_without_room(instance, data_path):
    from support.processes import eventually
    from support.small_memory import BALLAST, drain, fill

    with shmq.Broker(data_path=data_path, instance=instance, mem_queue_size=500) as broker:
        broker.create_channel("t", "c")
        broker.configure("t", "c", max_attempts=1, expired_to_dead=True)
        producer = broker.producer("t")
        for i in range(100):
            producer.publish(b"%06d" % i + bytes(500), ttl=0.001 if i >= 80 else None)
        fill()
        with broker.consumer("t", "c", max_in_flight=1000) as consumer:
            batch = consumer.take_many(500, 0)
            came = {
                int(body[:6]): message for body, message in zip(batch.bodies(), batch, strict=True)
            }
            assert came.keys() >= {*range(80)}, sorted(came)
            kept = []
            for number, message in came.items():
                if number % 3 == 0:
                    message.reject("no room")
                elif number % 3 == 1:
                    message.requeue()
                else:
                    message.finish()
                    kept.append(number)
            eventually(lambda: broker.stats().topics[0].channels[0].deferred > 40)
            dead = [topic for topic in broker.stats().topics if topic.name == "t.c.dead"]
            say("waiting", len(kept), any(topic.channels for topic in dead))
            assert consumer.take(0) is None
        BALLAST.unlink()
        gone = [number for number in range(100) if number not in kept]
        found = sorted(drain(broker, "t.c.dead", "dead", len(gone)))
        say("dead", found == gone, len(found))


def test_dead_letters_wait_while_their_topic_cannot_be_made(
    child: Spawn, instance: str, data_path: Path
) -> None:
    runner = child(die_without_room, instance, str(data_path), before=mounted("8m"), env=HELPERS)
    waiting, dead = runner.succeed(watchdog=100)
    assert waiting.endswith("False"), waiting
    assert dead.startswith("dead True"), dead


def join_without_room(instance, data_path):
    from support.processes import eventually
    from support.small_memory import BALLAST, fill

    with shmq.Broker(data_path=data_path, instance=instance) as broker:
        broker.create_channel("t.early", "other")
        consumer = broker.consumer("t.*", "c")
        assert consumer.topics == ["t.early"]
        broker.create_channel("late.a", "other")
        broker.producer("late.a").publish(b"before")
        fill()
        late = broker.consumer(["late.*", "t.*"], "c", policy="strict")
        say("joined", *late.topics)
        early = broker.producer("t.early")
        early.publish(b"early")
        with late.take(30) as message:
            say("took", message.topic, message.body.decode())
        try:
            broker.create_channel("more", "c")
        except shmq.Full as exc:
            say("full", "/dev/shm" in str(exc))
        BALLAST.unlink()
        broker.create_channel("more", "c")
        eventually(lambda: late.take(0) is None and "late.a" in late.topics)
        broker.producer("late.a").publish(b"after")
        with late.take(30) as message:
            say("took", message.topic, message.body.decode())
        assert late.take(0) is None
        other = broker.consumer("late.a", "other")
        say("other", *(other.take(30).body.decode() for _ in range(2)))


def test_a_topic_that_there_is_no_room_to_join_is_joined_when_there_is(
    child: Spawn, instance: str, data_path: Path
) -> None:
    runner = child(join_without_room, instance, str(data_path), before=mounted("8m"), env=HELPERS)
    assert runner.succeed(watchdog=100) == [
        "joined t.early",
        "took t.early early",
        "full True",
        "took late.a after",
        "other before after",
    ]


def limit_without_room(instance, data_path):
    from support.small_memory import BALLAST, drain, fill

    with shmq.Broker(data_path=data_path, instance=instance) as broker:
        for overflow in ("block", "reject", "drop-oldest", "drop-newest"):
            broker.create_channel(overflow, "c")
            broker.configure(overflow, "c", overflow=overflow, max_messages=2000)
        fill()
        broker.configure("block", "c", max_messages=1500)  # needs no page
        returned = {}
        for overflow in ("block", "reject", "drop-oldest", "drop-newest"):
            producer, done = broker.producer(overflow), []
            for i in range(400):
                try:
                    producer.publish(b"%06d" % i + bytes(3000), timeout=0)
                    done.append(i)
                except shmq.Full:
                    pass
            returned[overflow] = done
        say("returned", *map(len, returned.values()))
        BALLAST.unlink()
        for overflow, done in returned.items():
            for i in range(400, 900):
                broker.producer(overflow).publish(b"%06d" % i + bytes(3000), timeout=30)
            came = drain(broker, overflow, "c", 0)
            stats = next(t for t in broker.stats().topics if t.name == overflow).channels[0]
            dropped = stats.dropped + stats.dropped_oldest
            sent = [*done, *range(400, 900)]
            whole = len(came) + dropped == len(sent) and set(came) <= set(sent)
            say(overflow, whole and came == sorted(set(came)), stats.spilled, dropped)


def test_full_channels_lose_nothing_that_their_overflow_does_not_drop(
    child: Spawn, instance: str, data_path: Path
) -> None:
    runner = child(limit_without_room, instance, str(data_path), before=mounted("24m"), env=HELPERS)
    returned, *lines = runner.succeed(watchdog=100)
    assert all(int(count) < 400 for count in returned.split()[1:3]), returned
    assert [line.rsplit(maxsplit=1)[0] for line in lines] == [
        "block True 0",
        "reject True 0",
        "drop-oldest True 0",
        "drop-newest True 0",
    ], lines
