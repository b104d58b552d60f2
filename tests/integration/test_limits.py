"""Settings of channels, changed while all runs and kept over deaths and restarts; full channels."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import Child, eventually, say, stop_process

import shmq
from shmq.errors import BadArgument, Full, Gone, MessageTooBig, Rejected
from shmq.settings import NONE, Settings
from shmq.storage.data_path import existing_files

Open = Callable[..., shmq.Broker]


def limited(
    broker: shmq.Broker, topic: str = "t", **settings: Any
) -> tuple[shmq.Producer, shmq.Consumer]:
    broker.configure(topic, "c", **settings)
    return broker.producer(topic), broker.consumer(topic, "c")


def kill_supervisor(broker: shmq.Broker) -> None:
    pid = broker.supervisor_pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: broker.supervisor_pid != pid and broker.supervisor_alive())


def set_again_and_again(instance: str, key: str, values: list[object]) -> None:
    """Change one setting of t/c and of t, and say so when it was lost."""
    with shmq.attach(instance) as broker:
        say("ready")
        broker.consumer("go", "c").take(60)
        for value in values:
            for channel in ("c", None):
                now = broker.configure("t", channel, **{key: value})
                if not getattr(now, key) == getattr(broker.settings("t", channel), key) == value:
                    say("lost", key, str(value))
        say("done")


def test_no_change_of_one_setting_loses_another(
    open_broker: Open, child: Callable[..., Child]
) -> None:
    broker = open_broker()
    broker.create_topic("t")
    broker.producer("t").publish(b"makes a backlog")
    words: dict[str, list[object]] = {
        "max_attempts": list(range(1, 200)),
        "message_ttl": [1000.0 + i for i in range(200)],
    }
    broker.create_channel("go", "c")
    at_work = [
        child(set_again_and_again, broker.instance, key, values) for key, values in words.items()
    ]
    for each in at_work:
        each.said("ready")
    broker.producer("go").publish_many([b"go"] * 2)
    for each in at_work:
        each.said("done")
        assert not [line for line in each.lines if line.startswith("lost")]
    for channel in ("c", None):
        now = broker.settings("t", channel)
        assert (now.max_attempts, now.message_ttl) == (199, 1199)


def test_a_setting_that_is_changed_meanwhile_is_kept(
    open_broker: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else sets another one between the read and the write, of channel and topic."""
    broker = open_broker()
    broker.create_channel("u", "c")
    broker.create_topic("t")
    broker.producer("t").publish(b"makes a backlog")
    whole = Settings.check_names

    def other(self: Settings, topic: str, channel: str | None) -> Settings:
        monkeypatch.setattr(Settings, "check_names", whole)
        broker.configure(topic, channel, max_attempts=3)
        return self.check_names(topic, channel)

    for topic, channel in (("u", "c"), ("t", None)):
        monkeypatch.setattr(Settings, "check_names", other)
        now = broker.configure(topic, channel, message_ttl=60)
        assert (now.max_attempts, now.message_ttl) == (3, 60)
        assert broker.settings(topic, channel) == now
    native = broker.native()
    found = native.find_topic("t")
    assert found is not None
    backlog = native.find_queue(found[0], None)
    assert backlog is not None
    assert Settings.from_native(native.settings(*backlog)) == broker.settings("t")


def test_a_limit_that_the_backlog_refuses_changes_nothing(open_broker: Open) -> None:
    broker = open_broker()
    broker.create_topic("t")
    broker.producer("t").publish_many([b"x"] * 5)
    broker.configure("t", message_ttl=60)
    with pytest.raises(BadArgument, match="5 messages wait"):
        broker.configure("t", max_messages=4, overflow="reject")
    assert broker.settings("t") == Settings(message_ttl=60)


def command(broker: shmq.Broker, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shmq", *words, "--instance", broker.instance],
        capture_output=True,
        text=True,
        check=False,
    )


# ---- settings ----


def test_settings_are_kept_over_a_death_and_a_restart(
    open_broker: Open, tmp_path: Path, instance: str
) -> None:
    with shmq.Broker(tmp_path, instance=instance) as broker:
        own = broker.configure("t", "c", max_messages=5, overflow="reject", retry_delay="1s..1m")
        assert own == Settings(max_messages=5, overflow="reject", retry_delay=(1, 60))
        of_topic = broker.configure("t", message_ttl=60)
        broker.create_channel("t", "later")
        broker.create_channel("other", "c")
        kill_supervisor(broker)
        assert (broker.settings("t", "c"), broker.settings("t")) == (own, of_topic)
        broker.create_channel("t", "latest")
    with shmq.Broker(tmp_path, instance=instance) as broker:
        assert (broker.settings("t", "c"), broker.settings("t")) == (own, of_topic)
        assert broker.settings("t", "later") == broker.settings("t", "latest") == of_topic
        assert broker.settings("other", "c") == broker.settings("other") == NONE
        assert broker.stats().channel("t", "c").settings == own
        assert broker.stats().topic("t").settings == of_topic
        broker.delete_channel("t", "c")
        broker.create_channel("t", "c")
        assert broker.settings("t", "c") == of_topic
        broker.delete_topic("t")
    assert json.loads((tmp_path / "shmq.dat").read_text()).keys() == {"id_clock"}


def test_a_backlog_has_the_settings_of_its_topic_and_then_those_of_its_channel(
    open_broker: Open,
) -> None:
    table = {"jobs.*": {"max_messages": 3, "overflow": "reject"}}
    broker = open_broker(channels=table)
    broker.configure("jobs.a", message_ttl=60)
    producer = broker.producer("jobs.a")
    producer.publish_many([b"x"] * 2)
    backlog = broker.stats().topic("jobs.a").backlog
    assert backlog is not None
    assert backlog.settings == Settings(message_ttl=60)
    broker.create_channel("jobs.a", "c")
    expected = Settings(message_ttl=60, max_messages=3, overflow="reject")
    assert broker.settings("jobs.a", "c") == expected
    producer.publish(b"x")
    with pytest.raises(Rejected):
        producer.publish(b"x")


def test_settings_of_what_does_not_exist(open_broker: Open) -> None:
    broker = open_broker()
    with pytest.raises(Gone):
        broker.settings("t")
    with pytest.raises(TypeError, match="did you mean max_messages"):
        broker.configure("t", max_mesages=1)  # type: ignore[call-arg]
    result = command(broker, "channel", "set", "t", "c", "max_attempts=5")
    assert result.returncode == 1
    assert "there is no topic" in result.stderr
    assert broker.stats().topics == []


def test_the_command_line_sets_and_shows(open_broker: Open) -> None:
    broker = open_broker()
    broker.create_channel("t", "c")
    result = command(broker, "channel", "set", "t", "c", "max_bytes=64KiB", "overflow=block")
    assert result.returncode == 0, result.stderr
    assert broker.settings("t", "c") == Settings(max_bytes=65536, overflow="block")
    shown = command(broker, "channel", "show", "t", "c", "--json")
    assert json.loads(shown.stdout)["settings"] == broker.settings("t", "c").to_json()
    assert command(broker, "topic", "set", "t", "message_ttl=5s").returncode == 0
    lines = command(broker, "topic", "show", "t").stdout.splitlines()
    assert ["message_ttl", "5s"] in [line.split() for line in lines]
    result = command(broker, "channel", "set", "t", "c", "message_ttl=0s")
    assert result.returncode == 1
    assert "None for none" in result.stderr


def test_a_limit_that_cannot_hold_is_refused(open_broker: Open) -> None:
    broker = open_broker(mem_queue_size=1000)
    producer = broker.producer("t")
    broker.create_channel("t", "c")
    producer.publish_many([b"x"] * 5)
    with pytest.raises(BadArgument, match="5 messages wait already"):
        broker.configure("t", "c", max_messages=4, overflow="block")
    with pytest.raises(BadArgument, match="higher mem_queue_size"):
        broker.configure("t", "c", max_messages=1001, overflow="block")
    assert broker.settings("t", "c") == NONE
    broker.configure("t", "c", max_messages=4, overflow="drop-oldest")
    producer.publish(b"y")
    found = broker.channel_stats("t", "c")
    assert (found.depth, found.dropped_oldest) == (4, 2)


# ---- block ----


def test_a_full_channel_holds_up_its_publisher_until_there_is_room(open_broker: Open) -> None:
    producer, consumer = limited(broker := open_broker(), max_messages=3, overflow="block")
    producer.publish_many([b"0", b"1", b"2"])
    with pytest.raises(Full, match=r"t/c has 3 waiting; its max_messages is 3"):
        producer.publish(b"x", timeout=0)
    with pytest.raises(MessageTooBig, match="4 at once; max_messages of t/c is 3"):
        producer.publish_many([b"x"] * 4)
    done = threading.Event()

    def publish() -> None:
        producer.publish(b"3")
        done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    eventually(lambda: broker.views().queue(_entry(broker)).header["space"]["summary"] != 0)
    assert not done.is_set()
    message = consumer.take(timeout=5)
    assert message is not None
    assert message.body == b"0"
    assert done.wait(30)
    thread.join()
    message.finish()
    assert [m.body for m in consumer.take_many(9, timeout=5)] == [b"1", b"2", b"3"]


def _entry(broker: shmq.Broker) -> Any:
    (entry,) = broker.views().directory.live_queues()
    return entry


def fill(publish: Callable[[], object]) -> None:
    """Publish until there is no room."""
    with contextlib.suppress(Full):
        while True:
            publish()


def test_a_blocking_channel_never_touches_the_disk(open_broker: Open, tmp_path: Path) -> None:
    broker = open_broker(mem_queue_size=300, data_path=tmp_path / "data")
    producer, consumer = limited(broker, overflow="block")
    fill(lambda: producer.publish(b"x" * 100, timeout=0.2))
    found = broker.channel_stats("t", "c")
    assert (found.depth, found.backend_depth, found.spilled) == (300, 0, 0)
    fill(lambda: producer.publish(b"x", defer=1000, timeout=0))  # nor do deferred messages
    assert broker.channel_stats("t", "c").spilled == 0
    assert not any(files.has_data for files in existing_files(tmp_path / "data").values())
    assert len(consumer.take_many(200, timeout=5)) == 200


def test_a_blocked_publisher_goes_on_while_no_supervisor_lives(
    open_broker: Open, instance: str
) -> None:
    broker = open_broker()
    producer, consumer = limited(broker, max_messages=1, overflow="block")
    stop_process(broker.supervisor_pid)
    try:
        received = []

        def consume() -> None:
            for _ in range(200):
                message = consumer.take(timeout=30)
                assert message is not None
                received.append(message.body)
                message.finish()

        thread = threading.Thread(target=consume)
        thread.start()
        for i in range(200):
            producer.publish(b"%d" % i, timeout=30)
        thread.join()
    finally:
        os.kill(broker.supervisor_pid, signal.SIGCONT)
    assert received == [b"%d" % i for i in range(200)]


def test_the_messages_of_a_dead_consumer_make_no_room(open_broker: Open) -> None:
    broker = open_broker()
    producer, consumer = limited(broker, max_messages=2, overflow="block")
    producer.publish_many([b"0", b"1"])
    program = "import shmq, os; c = shmq.attach().consumer('t', 'c'); "
    program += "c.take(); c.take(); os._exit(0)"
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "SHMQ_INSTANCE": broker.instance},
        check=True,
    )
    eventually(lambda: broker.channel_stats("t", "c").returned == 2)
    with pytest.raises(Full):
        producer.publish(b"2", timeout=0)
    message = consumer.take(timeout=5)
    assert message is not None
    assert message.body == b"0"
    producer.publish(b"2", timeout=30)


def test_an_asyncio_publisher_waits_while_its_loop_goes_on(open_broker: Open) -> None:
    broker = open_broker()
    producer, consumer = limited(broker, max_messages=2, overflow="block")

    async def main() -> list[bytes]:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def publish() -> None:
            await producer.publish_many_async(iter([b"0", b"1"]))
            for i in range(2, 20):
                await producer.publish_async(b"%d" % i)

        turning, publishing = asyncio.create_task(turn()), asyncio.create_task(publish())
        received = []
        while len(received) < 20:
            before = turns
            message = await consumer.take_async(timeout=30)
            assert message is not None
            received.append(message.body)
            message.finish()
            assert turns >= before
        await publishing
        turning.cancel()
        await producer.publish_many_async([b"x", b"y"])
        with pytest.raises(Full):
            await producer.publish_async(b"z", timeout=0.05)
        with pytest.raises(ValueError, match="timeout"):
            await producer.publish_async(b"z", timeout=-1)
        assert turns > 20
        return received

    assert asyncio.run(main()) == [b"%d" % i for i in range(20)]


# ---- bytes ----


def test_properties_of_what_waits_are_no_part_of_max_bytes(open_broker: Open) -> None:
    """They are counted neither when a message has come nor when it goes, whichever way."""
    broker = open_broker()
    producer, consumer = limited(broker, max_bytes=1000, overflow="reject")
    more = {"n": "x" * 200}
    for ttl in (0.001, None):
        for _ in range(3):
            producer.publish(bytes(200), properties=more, ttl=ttl)
        if ttl:
            eventually(lambda: broker.channel_stats("t", "c").expired == 3)
    with pytest.raises(Rejected, match="t/c has 600 waiting"):
        producer.publish(bytes(500))
    broker.configure("t", "c", overflow="drop-oldest")
    for _ in range(20):
        producer.publish(bytes(200), properties=more)
    assert broker.channel_depth("t", "c") in (3, 4)
    consumer.take_many(4, 20).finish()
    broker.configure("t", "c", overflow="reject")
    producer.publish_many([bytes(250)] * 4)


# ---- reject ----


def test_reject_refuses_the_whole_publish_for_all_channels(open_broker: Open) -> None:
    broker = open_broker()
    producer, _ = limited(broker, max_messages=3, overflow="reject")
    broker.create_channel("t", "free")
    producer.publish_many([b"0", b"1"])
    began = time.monotonic()
    with pytest.raises(Rejected, match="t/c has 2 waiting") as caught:
        producer.publish_many([b"2", b"3"])
    assert isinstance(caught.value, Full)
    with pytest.raises(Rejected):
        producer.publish_many((body for body in (b"2", b"3")), timeout=600)
    assert time.monotonic() - began < 600
    loan = producer.loan(200_000)
    loan.__enter__()[0] = 1
    producer.publish(b"2")
    with pytest.raises(Rejected):
        loan.__exit__(None, None, None)
    stats = broker.stats()
    assert [stats.channel("t", name).depth for name in ("c", "free")] == [3, 3]
    assert stats.channel("t", "c").rejected == 3
    with pytest.raises(Rejected):
        asyncio.run(producer.publish_async(b"x"))


# ---- drop ----


def test_drop_oldest_keeps_the_latest(open_broker: Open) -> None:
    broker = open_broker()
    producer, consumer = limited(broker, max_messages=1, overflow="drop-oldest")
    broker.create_channel("t", "all")
    for i in range(100):
        producer.publish(b"%d" % i)
    message = consumer.take(timeout=5)
    assert message is not None
    assert message.body == b"99"
    found = broker.channel_stats("t", "c")
    assert (found.dropped_oldest, found.message_count, found.depth) == (99, 100, 0)
    assert broker.channel_depth("t", "all") == 100
    message.requeue()  # a message that came back is not dropped, and does not keep new ones out
    producer.publish(b"100")
    producer.publish(b"101")
    assert [m.body for m in consumer.take_many(9, timeout=5)] == [b"99", b"101"]


def test_drop_oldest_makes_room_for_large_bodies(open_broker: Open) -> None:
    broker = open_broker(arena_size=4 << 20, max_msg_size=1 << 20)
    producer, consumer = limited(broker, max_messages=1000, overflow="drop-oldest")
    for i in range(40):
        producer.publish(b"%02d" % i + bytes(500_000), timeout=0)
    with producer.loan(500_000, timeout=0) as buffer:
        buffer[:2] = b"40"
    left = []
    while (message := consumer.take(timeout=0)) is not None:
        left.append(bytes(message.body[:2]))
        message.finish()
    assert left == [b"%02d" % i for i in range(41 - len(left), 41)]
    assert broker.channel_stats("t", "c").dropped_oldest == 41 - len(left) > 0


def test_drop_newest_leaves_the_channel_as_it_is(open_broker: Open) -> None:
    broker = open_broker()
    producer, consumer = limited(broker, max_messages=3, overflow="drop-newest")
    broker.create_channel("t", "all")
    for i in range(5):
        producer.publish(b"%d" % i)
    assert broker.channel_stats("t", "c").dropped == 2
    assert [m.body for m in consumer.take_many(9, timeout=5)] == [b"0", b"1", b"2"]
    assert broker.channel_depth("t", "all") == 5


def test_a_limit_of_bytes_counts_bodies(open_broker: Open) -> None:
    broker = open_broker()
    producer, consumer = limited(broker, max_bytes=1000, overflow="reject")
    producer.publish_many([b"x" * 250] * 4)
    with pytest.raises(Rejected, match="its max_bytes is 1000"):
        producer.publish(b"y")
    with pytest.raises(MessageTooBig, match="max_bytes"):
        producer.publish(b"x" * 1001)
    consumer.take_many(2, timeout=5)
    producer.publish(b"x" * 500)
    with pytest.raises(Rejected):
        producer.publish(b"y")
    broker.configure("t", "c", max_bytes=None, max_messages=10)
    producer.publish(b"y")
    broker.configure("t", "c", max_bytes=1100)  # counted again
    producer.publish(b"x" * 99)
    with pytest.raises(Rejected):
        producer.publish(b"y")


def test_a_backlog_fills_its_channels_as_far_as_they_allow(open_broker: Open) -> None:
    broker = open_broker()
    producer = broker.producer("t")
    broker.pause_topic("t")
    producer.publish_many([b"%d" % i for i in range(6)])
    for name, overflow in (
        ("b", "block"),
        ("r", "reject"),
        ("o", "drop-oldest"),
        ("n", "drop-newest"),
    ):
        broker.configure("t", name, max_messages=2, overflow=overflow)
    broker.unpause_topic("t")
    consumers = {name: broker.consumer("t", name) for name in "brno"}
    eventually(lambda: broker.channel_depth("t", "b") == broker.channel_depth("t", "r") == 2)
    received = {name: [] for name in "br"}  # type: dict[str, list[bytes]]
    while any(len(bodies) < 6 for bodies in received.values()):
        for name, bodies in received.items():
            message = consumers[name].take(timeout=0.05)
            if message is not None:
                bodies.append(message.body)
                message.finish()
    assert received == {name: [b"%d" % i for i in range(6)] for name in "br"}
    assert broker.channel_stats("t", "r").rejected == 0
    latest = [m.body for m in consumers["o"].take_many(9, timeout=5)]
    assert latest == [b"4", b"5"]
    dropped = broker.channel_stats("t", "n").dropped
    assert len(consumers["n"].take_many(9, timeout=5)) == 6 - dropped


def test_a_broker_without_a_disk(instance: str) -> None:
    with shmq.Broker(instance=instance, disk=False, mem_queue_size=300) as broker:
        made = broker.data_path
        assert made is not None
        assert made.is_dir()
        assert made.parent == Path("/dev/shm")
        producer = broker.producer("t")
        fill(lambda: producer.publish(b"x", timeout=0))
        assert broker.stats().topic("t").depth == 300
        broker.create_channel("t", "c")
        assert broker.settings("t", "c") == Settings(overflow="block")
        broker.configure("u", "c", overflow="drop-newest", max_messages=1)
        found = broker.channel_stats("t", "c")
        assert (found.depth, found.spilled) == (300, 0)
    assert not made.exists()
    with shmq.Broker(instance=instance, disk=False) as broker:
        assert broker.stats().topics == []
    with pytest.raises(ValueError, match="leave"):
        shmq.Broker("/tmp/somewhere", disk=False)
