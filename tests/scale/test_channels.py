"""Ten thousand channels: made from nsqd.dat, adopted, flushed; a timeout in any of them noticed."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import Child, answers, eventually
from support.resources import MIB, need_shared_memory
from support.terminal import Terminal

import shmq
from shmq import sources, views
from shmq.cli.status import OK
from shmq.storage import metadata
from shmq.storage.metadata import ChannelMeta, TopicMeta

TOPICS, CHANNELS = 100, 100
NAMES = {(f"topic-{t}", f"channel-{c}") for t in range(TOPICS) for c in range(CHANNELS)}
LONG = 120.0  # watchdog for what takes seconds on a machine that has time for it

TIMEOUT = 1.0
NOTICED = 0.250  # seconds within which a timeout is noticed
ROUNDS = 10


def choose(chosen: random.Random) -> list[tuple[str, str]]:
    """50 channels of 5 topics."""
    return [
        (f"topic-{topic}", f"channel-{channel}")
        for topic in chosen.sample(range(TOPICS), 5)
        for channel in chosen.sample(range(CHANNELS), 10)
    ]


class Watched:
    """Some channels, each with a message in flight that nobody will finish."""

    def __init__(self, broker: shmq.Broker, chosen: list[tuple[str, str]]) -> None:
        source = sources.open_readonly(broker.instance)
        self._before: dict[views.QueueView, int] = {}
        self._due: dict[views.QueueView, float] = {}
        self._consumers = []
        for topic in {topic for topic, _ in chosen}:
            broker.producer(topic).publish(b"x", timeout=LONG)
        for topic, channel in chosen:
            place = source.directory.find_topic(topic)
            assert place is not None
            entry = source.directory.find_queue(place.index, channel)
            assert entry is not None
            view = source.queue(entry)
            self._before[view] = view.read("requeue_tail")
            self._consumers.append(broker.consumer(topic, channel, msg_timeout=TIMEOUT))
            assert self._consumers[-1].take(timeout=LONG) is not None
            self._due[view] = time.monotonic() + TIMEOUT

    def delays(self) -> list[float]:
        """How long after its time each came back (seconds), rising. Then they are finished."""
        left, found = dict(self._before), list[float]()

        def look() -> bool:
            for view in [view for view, tail in left.items() if view.read("requeue_tail") != tail]:
                found.append(time.monotonic() - self._due[view])
                del left[view]
            return not left

        eventually(look, LONG, "all timeouts are noticed")
        for consumer in self._consumers:
            message = consumer.take(timeout=LONG)
            assert message is not None
            assert message.attempts == 2
            message.finish()
            consumer.close()
        return sorted(found)


def test_ten_thousand_channels(
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    instance: str,
    data_path: Path,
    keep: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need_shared_memory(1280 * MIB)
    monkeypatch.setenv("TERM", "xterm")

    def tell(what: str, *seconds: float) -> None:
        with capsys.disabled():
            shown = ", ".join(f"{1000 * value:.0f} ms" for value in seconds)
            print(f"\n{len(NAMES)} channels: {what} {shown}", end=" ")

    def start(what: str) -> Child:
        began = time.monotonic()
        server = serve(wait=False)
        eventually(lambda: answers(instance, server.pid), LONG, "the supervisor answers")
        tell(what, time.monotonic() - began)
        return server

    def depths() -> dict[tuple[str, str], int]:
        return {
            (topic.name, channel.name or ""): channel.depth
            for topic in broker.stats().topics
            for channel in topic.channels
        }

    channels = tuple(ChannelMeta(f"channel-{number}") for number in range(CHANNELS))
    topics = [TopicMeta(f"topic-{number}", False, channels) for number in range(TOPICS)]
    metadata.store(data_path, topics)
    server = start("made from nsqd.dat in")
    broker = attach()
    assert depths() == dict.fromkeys(NAMES, 0)

    screen = keep(
        Terminal([sys.executable, "-m", "shmq", "stat", "--watch", f"--instance={instance}"])
    )
    screen.shows(rf"1-\d+ of {len(NAMES)} ", times=2, seconds=LONG)
    screen.type("q")
    assert screen.wait() == OK

    chosen, medians = random.Random(250), list[float]()
    while not medians or (min(medians) > NOTICED and len(medians) < ROUNDS):
        delays = Watched(broker, choose(chosen)).delays()
        medians.append(statistics.median(delays))
        tell("least, median and longest delay of 50 timeouts", delays[0], medians[-1], delays[-1])
    assert min(medians) <= NOTICED

    expected = depths()
    assert sum(expected.values()) == len(medians) * (5 * CHANNELS - 50)
    server.kill()
    server = start("adopted in")
    assert depths() == expected
    began = time.monotonic()
    server.process.terminate()
    assert server.wait(LONG) == 0
    tell("flushed in", time.monotonic() - began)
    broker.close()
    start("made from files in")
    broker = attach()
    assert depths() == expected
