"""Looks at very many queues: which of them come first, and which are opened. Counted in ticks and
queues, not in time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.processes import eventually

import shmq
from shmq import sources
from shmq.page import detail, snapshot
from shmq.page.snapshot import COLUMNS, Snapshots, Tick

IDLE = 2000
FEW = 300


def rows(tick: Tick) -> dict[str, dict[str, Any]]:
    """The rows of a tick, by topic."""
    found = json.loads(tick.encoded())["rows"].values()
    named = (dict(zip(COLUMNS, row, strict=True)) for row in found)
    return {row["topic"]: row for row in named}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The serials of the queues whose views are asked for."""
    found: list[int] = []
    real = sources.ReadOnlySource.queue

    def queue(self: sources.ReadOnlySource, entry: Any) -> Any:
        found.append(entry.serial)
        return real(self, entry)

    monkeypatch.setattr(sources.ReadOnlySource, "queue", queue)
    return found


@pytest.fixture
def many(open_broker: Callable[..., shmq.Broker], request: pytest.FixtureRequest) -> shmq.Broker:
    """A broker with many channels: the fixture's parameter, or a few."""
    broker = open_broker(mem_queue_size=16, in_flight_slots=16)
    for number in range(getattr(request, "param", FEW)):
        broker.create_channel(f"topic-{number:04}", "channel")
    return broker


@pytest.fixture
def looks(many: shmq.Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Snapshots]:
    """Has looked at all channels; each further tick looks at the fewest that it may."""
    found = Snapshots(many.instance)
    monkeypatch.setattr(snapshot, "_FIRST_BUDGET", 600.0)
    found.tick()
    monkeypatch.setattr(snapshot, "_SHARE", 0.0)
    monkeypatch.setattr(snapshot, "_LEAST_BUDGET", 0.0)
    yield found
    found.close()


@pytest.mark.deep
@pytest.mark.parametrize("many", [IDLE], indirect=True)
def test_of_many_channels_the_busy_one_is_followed_and_no_other_starves(
    many: shmq.Broker, looks: Snapshots
) -> None:
    producer = many.producer("topic-1234")
    consumer = many.consumer("topic-1234", "channel")
    for number in range(20):
        producer.publish(b"one")
        found: dict[str, Any] = {}
        for _ in range(2):
            found |= rows(looks.tick())
        assert found["topic-1234"]["ready"] == 1, number
        # nothing tells of a take but the channel itself
        consumer.take(timeout=10).finish()
        found = {}
        for _ in range(2):
            found |= rows(looks.tick())
        assert found["topic-1234"]["ready"] == 0, number
        assert found["topic-1234"]["finished"] > 0
    # one that nobody publishes to is found in its turn, even while the other is busy
    many.pause_channel("topic-0777", "channel")
    for _ in range(2 * IDLE // snapshot._AT_ONCE):
        producer.publish(b"one")
        if "topic-0777" in (found := rows(looks.tick())):
            break
        consumer.take(timeout=10).finish()
    assert found["topic-0777"]["paused"]


def test_of_many_channels_only_those_are_opened_that_a_list_shows(
    many: shmq.Broker, looks: Snapshots, opened: list[int]
) -> None:
    many.configure("topic-0100", "channel", max_attempts=1)
    many.producer("topic-0100").publish(b"dies")
    many.consumer("topic-0100", "channel").take(timeout=10).reject("no such customer")
    holder = many.lease_holder("topic-0200", "channel", "reader")
    many.producer("topic-0200").publish(b"leased")
    lease = holder.lease(10, timeout=10)
    opened.clear()
    assert [each["topic"] for each in detail.leases(looks)] == ["topic-0200"]
    assert len(opened) == 1
    opened.clear()
    (group,) = detail.dead(looks)
    assert (group["source"], group["count"]) == ("topic-0100/channel", 1)
    assert len(opened) <= 2
    opened.clear()
    found = detail.processes(looks)
    assert sum(each["holds"] for each in found) == 0
    assert not opened
    many.producer("topic-0050").publish(b"held")
    held = many.consumer("topic-0050", "channel").take(timeout=10)
    found = detail.processes(looks)
    assert sum(each["holds"] for each in found) == 1
    assert len(opened) == 1
    held.finish()
    assert lease


def test_an_idle_channel_is_never_opened(
    many: shmq.Broker, opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    many.producer("topic-0005").publish(b"waits")
    found = Snapshots(many.instance)
    monkeypatch.setattr(snapshot, "_FIRST_BUDGET", 60.0)
    shown = rows(found.tick())
    assert len(shown) == FEW
    assert shown["topic-0005"]["ready"] == 1
    assert shown["topic-0006"]["consumers"] == 0
    assert len(set(opened)) == 1
    reader = many.consumer("topic-0006", "channel")
    with contextlib.closing(Snapshots(many.instance)) as again:
        assert rows(again.tick())["topic-0006"]["consumers"] == 1
    assert len(set(opened)) == 1
    reader.close()
    found.close()


def test_what_changed_is_told_to_those_who_watch_though_another_looks(
    many: shmq.Broker, looks: Snapshots
) -> None:
    (entry,) = (e for e in looks.source.directory.live_queues() if e.index == 7)
    many.producer("topic-0005").publish(b"one")
    many.delete_topic("topic-0007")
    assert detail.leases(looks) == []
    assert rows(looks.state(True))["topic-0005"]["ready"] == 1  # another browser comes
    tick = looks.tick()
    assert rows(tick)["topic-0005"]["ready"] == 1
    assert tick.went == [entry.serial]
    assert not looks.tick().went


def test_of_a_channel_that_went_nothing_stays_open(many: shmq.Broker) -> None:
    many.producer("topic-0005").publish(b"waits")
    found = Snapshots(many.instance)
    found.state(False)
    serial = many.stats().channel("topic-0005", "channel").serial
    (entry,) = (e for e in found.source.directory.live_queues() if e.serial == serial)
    view = weakref.ref(found.source.queue(entry))
    name = f"{many.instance}.{serial} (deleted)"

    def is_open() -> bool:
        links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        return any(os.readlink(link).endswith(name) for link in links if os.path.islink(link))

    many.delete_channel("topic-0005", "channel")
    assert view()
    found.tick()
    assert not view()
    eventually(lambda: not is_open(), what="no descriptor of it is left")
    found.close()


def test_a_low_limit_of_open_files_hides_no_channel(many: shmq.Broker) -> None:
    code = (
        "import resource, sys; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard));"
        "from shmq.cli.page import _raise_files; _raise_files();"
        "from shmq.page import snapshot; snapshot._FIRST_BUDGET = 600.0;"
        "print(len(snapshot.Snapshots(sys.argv[1]).tick().rows))"
    )
    argv = [sys.executable, "-c", code, many.instance]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert int(done.stdout) == FEW
