"""Properties in the life of a broker: overflow, restarts, deaths, damage, and the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import WATCHDOG, Child, eventually

import shmq
from shmq import shm

Open = Callable[..., shmq.Broker]
Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]

COUNT = 3000


def publish(broker: shmq.Broker, count: int = COUNT) -> None:
    """Message i has i as its body, and as a property if i is odd."""
    producer = broker.producer("t")
    for first in range(0, count, 100):
        numbers = range(first, min(first + 100, count))
        each = [{"n": str(number)} if number % 2 else None for number in numbers]
        producer.publish_many([b"%d" % number for number in numbers], properties=each)


def take_all(broker: shmq.Broker, count: int = COUNT) -> list[int]:
    """Take and finish this many, whose properties must be right. Returns their numbers."""
    found: list[int] = []
    with broker.consumer("t", "c", max_in_flight=500) as consumer:
        while len(found) < count:
            batch = consumer.take_many(500, timeout=WATCHDOG)
            assert batch, f"{len(found)} of {count}"
            for message in batch:
                number = int(message.body)
                assert message.properties == ({"n": b"%d" % number} if number % 2 else {})
                found.append(number)
            batch.finish()
    return found


def test_they_overflow_to_disk_and_come_back_in_order(open_broker: Open) -> None:
    broker = open_broker(mem_queue_size=256)
    broker.create_channel("t", "c")
    publish(broker)
    assert broker.channel_stats("t", "c").backend_depth > 0
    assert take_all(broker) == list(range(COUNT))


def test_they_survive_a_restart(serve: Serve, attach: Attach) -> None:
    server = serve(mem_queue_size=256)
    broker = attach()
    broker.create_channel("t", "c")
    publish(broker, 1000)
    broker.producer("t").publish(b"2001", defer=1.0, properties={"n": "2001"})
    assert server.kill(signal.SIGTERM) == 0
    serve(mem_queue_size=256)
    assert sorted(take_all(attach(), 1001)) == [*range(1000), 2001]


def test_they_survive_a_killed_supervisor(serve: Serve, attach: Attach) -> None:
    server = serve(mem_queue_size=256)
    broker = attach()
    broker.create_channel("t", "c")
    publish(broker, 1000)
    server.kill()
    serve(mem_queue_size=256)
    assert take_all(broker, 1000) == list(range(1000))


def test_they_wait_in_a_backlog_for_the_channels(open_broker: Open) -> None:
    broker = open_broker()
    broker.create_topic("t")
    broker.pause_topic("t")
    broker.create_channel("t", "c")
    broker.create_channel("t", "d")
    publish(broker, 200)
    broker.unpause_topic("t")
    assert take_all(broker, 200) == list(range(200))


def test_they_are_saved_from_a_damaged_segment(serve: Serve, attach: Attach) -> None:
    """The segment's header is overwritten; a start saves the messages of its slots."""
    server = serve()
    broker = attach()
    broker.create_channel("t", "c")
    publish(broker, 100)
    (entry,) = [one for one in broker.views().directory.live_queues() if one.channel == "c"]
    instance = broker.instance
    server.kill()
    path = Path("/dev/shm") / shm.queue_name(instance, entry.serial).lstrip("/")
    broker.close()
    with path.open("r+b") as segment:
        segment.write(bytes(8))  # the magic
    serve()
    again = attach()

    def replaced() -> bool:
        queues = [one for one in again.views().directory.live_queues() if one.channel == "c"]
        return bool(queues) and queues[0].serial != entry.serial

    eventually(replaced)
    assert sorted(take_all(again, 100)) == list(range(100))


# ---- the command line ----


def run(instance: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "shmq", words[0], "--instance", instance, *words[1:]]
    return subprocess.run(command, capture_output=True, timeout=WATCHDOG, env=os.environ)


def shown(instance: str, *words: str) -> str:
    done = run(instance, *words)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode()


def test_pub_takes_them_and_peek_and_tail_show_them(broker: shmq.Broker) -> None:
    instance = broker.instance
    broker.create_channel("t", "c")
    shown(instance, "pub", "t", "--property", "key=17", "--property", "a=b=c", "one")
    shown(instance, "pub", "t", "two")
    broker.producer("t").publish(b"three", properties={"raw": b"\xff"})

    table = shown(instance, "peek", "t", "c").splitlines()
    assert table[0].split() == ["ID", "PUBLISHED", "ATTEMPTS", "BYTES", "PROPERTIES", "BODY"]
    assert "key=17 a=b=c" in table[1]
    first, second, third = map(json.loads, shown(instance, "peek", "t", "c", "--json").splitlines())
    assert first["properties"] == {"key": "17", "a": "b=c"}
    assert "properties" not in second
    assert (third["properties_base64"], "properties" in third) == ({"raw": "/w=="}, False)

    text = shown(instance, "tail", "t", "c", "-n1", "--properties")
    assert text == "[key=17 a=b=c]\none\n"
    assert shown(instance, "tail", "t", "c", "-n1") == "two\n"
    document = json.loads(shown(instance, "tail", "t", "c", "-n1", "--json"))
    assert document["properties_base64"] == {"raw": "/w=="}
    eventually(lambda: broker.channel_depth("t", "c") == 0)


def test_peek_has_no_column_where_no_message_has_any(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"x")
    assert "PROPERTIES" not in shown(broker.instance, "peek", "t", "c")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("nothing", "give NAME=VALUE"),
        ("Key=1", "1 to 64 of the characters"),
        ("shmq-x=1", "reserved"),
        ("k=" + "x" * 5000, "into the body"),
    ],
)
def test_pub_refuses_what_is_no_property(broker: shmq.Broker, word: str, says: str) -> None:
    done = run(broker.instance, "pub", "t", "--property", word, "x")
    assert done.returncode != 0
    assert says in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
