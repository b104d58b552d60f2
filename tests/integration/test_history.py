"""The history and the log of deaths of real brokers, as a reader without attachment sees them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import Child, eventually, say

import shmq
from shmq import chronicle, deaths, history, shm
from shmq.deaths import Death, Held, How, Lock
from shmq.errors import Gone
from shmq.history import Series

Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]


def channel(instance: str, topic: str, name: str | None) -> Series | None:
    """Its series by the second, if there is one."""
    return history.read(instance).channels.get((topic, name))


def counted(instance: str, column: str, name: str = "c") -> int:
    series = channel(instance, "t", name)
    return 0 if series is None else int(getattr(series, column).sum())


def deaths_of(instance: str, pid: int) -> list[Death]:
    return [death for death in deaths.read(instance) if death.pid == pid]


def path_of(instance: str) -> str:
    return shm.path_of(shm.history_name(instance))


def hold(instance: str, topics: list[str], count: int) -> None:
    broker = shmq.attach(instance)
    consumers = [broker.consumer(topic, "c", max_in_flight=100) for topic in topics]
    messages = [consumer.take(timeout=20) for consumer in consumers for _ in range(count)]
    say("holds", len(messages))
    sys.stdin.readline()
    word = sys.stdin.readline().strip()
    if word == "exec":
        os.execv("/bin/sleep", ["sleep", "60"])
    os._exit(3)


# ---- the history ----


def test_what_moves_is_in_the_totals_and_in_the_series_of_its_channel(
    serve: Serve, attach: Attach, instance: str
) -> None:
    serve()
    broker = attach()
    consumer = broker.consumer("t", "c", max_in_flight=10)
    broker.create_channel("t", "d")
    eventually(lambda: counted(instance, "consumers") > 0)
    producer = broker.producer("t")
    for _ in range(100):
        producer.publish(b"x" * 10)
    producer.publish(b"later", defer=60)
    for number in range(30):
        message = consumer.take(timeout=20)
        assert message is not None
        if number < 20:
            message.finish()
        elif number < 25:
            message.requeue()
    eventually(lambda: counted(instance, "delivered") == 30)
    eventually(lambda: (counted(instance, "finished"), counted(instance, "requeued")) == (20, 5))
    series = channel(instance, "t", "c")
    assert series is not None
    assert series.published.sum() == 101
    assert series.delivered.sum() == 30
    assert series.in_flight[-1] == 5
    assert series.deferred[-1] == 1
    assert series.depth[-1] == 75
    assert series.consumers[-1] == 1
    assert series.memory[-1] > 1000
    assert series.oldest[-1] > 0
    assert counted(instance, "published", "d") == 101
    totals = history.read(instance).totals
    assert totals.published.sum() == 202
    assert totals.depth[-1] == 175
    assert totals.rate("published").max() > 0
    assert (totals.span > 0).all()
    assert (totals.time[1:] > totals.time[:-1]).all()
    assert totals.oldest[-1] >= series.oldest[-1]
    message.finish()
    consumer.close()
    broker.close()


def test_the_numbers_are_those_of_stat(serve: Serve, attach: Attach, instance: str) -> None:
    serve()
    broker = attach()
    producer = broker.producer("t")
    broker.create_channel("t", "c")
    for _ in range(7):
        producer.publish(b"x")
    eventually(lambda: counted(instance, "published") == 7)
    eventually(lambda: history.read(instance).totals.depth[-1] == 7)
    found = history.read(instance).channels["t", "c"]
    stats = broker.stats().channel("t", "c")
    assert (found.ready[-1], found.on_disk[-1]) == (stats.depth, stats.backend_depth)
    assert abs(int(found.memory[-1]) - stats.memory_bytes) < 1024 + stats.memory_bytes // 1000


def test_a_deleted_channel_stays_in_the_history(
    serve: Serve, attach: Attach, instance: str
) -> None:
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"x")
    eventually(lambda: counted(instance, "published") == 1)
    broker.delete_topic("t")
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"y")
    eventually(lambda: counted(instance, "published") == 2)
    eventually(lambda: history.read(instance).queues[-1] == 1)


def test_a_backlog_and_the_channel_that_it_becomes(
    serve: Serve, attach: Attach, instance: str
) -> None:
    serve()
    broker = attach()
    broker.producer("t").publish(b"x")
    eventually(lambda: channel(instance, "t", None) is not None)
    broker.create_channel("t", "c")
    eventually(lambda: counted(instance, "published") == 1)  # one queue: its name is the new one
    assert channel(instance, "t", None) is None


def test_more_channels_than_there_is_room_for(serve: Serve, attach: Attach, instance: str) -> None:
    serve(history_bytes=2 << 20)
    with chronicle.open_readonly(instance) as source:
        room = source.plan.second_rows
    broker = attach()
    for number in range(room + 20):
        broker.create_channel("t", f"c{number}")
    busy = broker.consumer("t", "c3", max_in_flight=1)
    producer = broker.producer("t")
    for _ in range(20):
        producer.publish(b"x")
        message = busy.take(timeout=20)
        assert message is not None
        message.finish()
    total = 20 * (room + 20)
    eventually(lambda: history.read(instance).totals.published.sum() == total)
    eventually(lambda: counted(instance, "finished", "c3") > 0)
    found = history.read(instance)
    assert found.queues[-1] == room + 20
    last = found.totals.time[-1]
    assert sum(last in series.time for series in found.channels.values()) <= room


def test_the_next_supervisor_goes_on(
    serve: Serve, attach: Attach, instance: str, data_path: Path
) -> None:
    first = serve()
    broker = attach()
    broker.create_channel("t", "c")
    for _ in range(9):
        broker.producer("t").publish(b"x")
    eventually(lambda: counted(instance, "published") == 9)
    before = history.read(instance).totals
    first.kill()
    assert history.read(instance).totals.time[0] == before.time[0]  # nobody needs to live
    second = serve()
    eventually(lambda: history.read(instance).totals.time[-1] > time.time_ns() - 1_500_000_000)
    eventually(lambda: len(history.read(instance).totals) >= len(before) + 2)
    after = history.read(instance).totals
    assert after.time[0] == before.time[0]
    assert after.published.sum() == 9  # the counters that were adopted are not counted again
    assert after.depth[-1] == 9

    (death,) = eventually(lambda: deaths_of(instance, first.pid))
    assert death.kind == "supervisor"
    assert death.repair > 0
    eventually(lambda: sources_clients(broker) == 2)
    assert len(deaths_of(instance, first.pid)) == 1  # and its client entry was returned
    assert second.process.poll() is None


def sources_clients(broker: shmq.Broker) -> int:
    return len(broker.stats().clients)


@pytest.mark.parametrize("damage", ["cut", "garbage", "removed"])
def test_the_next_supervisor_replaces_a_damaged_one(
    serve: Serve, instance: str, damage: str
) -> None:
    first = serve()
    eventually(lambda: len(history.read(instance).totals) > 0)
    path = path_of(instance)
    first.stop()  # it does not write meanwhile
    if damage == "cut":
        os.truncate(path, 0)
    elif damage == "removed":
        os.unlink(path)
    else:
        with open(path, "r+b") as file:
            file.write(os.urandom(4 << 20))
    first.kill()
    second = serve()
    eventually(lambda: "running, pid" in second.errors)
    eventually(lambda: len(history.read(instance).totals) > 0)
    assert [death.pid for death in deaths.read(instance)] == [first.pid]


def test_a_supervisor_survives_a_history_that_is_cut_short(
    serve: Serve, attach: Attach, instance: str
) -> None:
    server = serve()
    eventually(lambda: len(history.read(instance).totals) > 0)
    os.truncate(path_of(instance), 0)
    eventually(lambda: os.stat(path_of(instance)).st_size > 0)  # the next record
    broker = attach()
    broker.producer("t").publish(b"x", timeout=20)
    assert server.process.poll() is None


def test_without_history_there_is_nothing(
    serve: Serve, attach: Attach, instance: str, child: Callable[..., Child]
) -> None:
    first = serve()
    eventually(lambda: "running, pid" in first.errors)
    threads = len(os.listdir(f"/proc/{first.pid}/task"))
    assert os.path.exists(path_of(instance))
    first.kill()
    server = serve(history_bytes=0)
    eventually(lambda: not os.path.exists(path_of(instance)))  # that of the one before
    eventually(lambda: "running, pid" in server.errors)
    assert len(os.listdir(f"/proc/{server.pid}/task")) == threads - 1
    broker = attach()
    for _ in range(3):
        broker.producer("t").publish(b"x")
    broker.create_channel("t", "c")
    holder = child(hold, instance, ["t"], 3)
    holder.said("holds 3")
    holder.kill()
    eventually(lambda: broker.stats().reaped >= 1)
    eventually(lambda: broker.stats().channel("t", "c").depth == 3)
    assert not os.path.exists(path_of(instance))
    with pytest.raises(Gone, match="history-bytes"):
        deaths.read(instance)
    done = command("deaths", f"--instance={instance}")
    assert done.returncode == 1
    assert b"--history-bytes" in done.stderr


@pytest.mark.parametrize("on_stop", ["flush", "keep"])
def test_it_goes_and_stays_with_the_memory(serve: Serve, instance: str, on_stop: str) -> None:
    server = serve(on_stop=on_stop)
    eventually(lambda: len(history.read(instance).totals) > 0)
    server.process.terminate()
    assert server.wait() == 0
    assert os.path.exists(path_of(instance)) == (on_stop == "keep")
    serve(on_stop="flush")
    assert deaths.read(instance) == []  # an orderly end is no death
    eventually(lambda: len(history.read(instance).totals) > 0)


def test_an_embedded_broker_leaves_nothing(open_broker: Callable[..., shmq.Broker]) -> None:
    broker = open_broker()
    assert os.path.exists(path_of(broker.instance))
    broker.close()
    assert not os.path.exists(path_of(broker.instance))


# ---- the log of deaths ----


def command(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "shmq", *words], capture_output=True, timeout=60)


def holding(
    serve: Serve, attach: Attach, instance: str, child: Callable[..., Child], count: int
) -> Child:
    """A process that holds `count` messages of each of two channels."""
    serve()
    broker = attach()
    for topic in ("t", "u"):
        broker.create_channel(topic, "c")
        for _ in range(count):
            broker.producer(topic).publish(b"x")
    holder = child(hold, instance, ["t", "u"], count)
    holder.said(f"holds {2 * count}")
    return holder


def test_a_killed_consumer_is_logged_with_what_it_held(
    serve: Serve, attach: Attach, instance: str, child: Callable[..., Child]
) -> None:
    holder = holding(serve, attach, instance, child, 4)
    began = time.time_ns()
    holder.process.send_signal(signal.SIGKILL)
    (death,) = eventually(lambda: deaths_of(instance, holder.pid))
    assert death.kind == "client"
    assert death.messages == 8
    assert set(death.held) == {Held("t", "c", 4), Held("u", "c", 4)}
    assert death.uid == os.geteuid()
    assert death.how in (How.KILLED, How.DIED)  # its parent may reap it first
    assert death.status == (signal.SIGKILL if death.how == How.KILLED else 0)
    assert death.locks == Lock(0)
    assert death.rebuilt == 0
    assert 0 < death.repair < (time.time_ns() - began) / 1e9
    assert began <= death.time <= time.time_ns()
    assert death.program.startswith("python")
    again: dict[str, Any] = json.loads(
        command("deaths", "--json", f"--instance={instance}").stdout.splitlines()[-1]
    )
    assert {"v": 1, **death.to_json()} == again
    table = command("deaths", f"--instance={instance}").stdout.decode().splitlines()
    assert "HELD" in table[0]
    assert str(holder.pid) in table[-1]
    assert "t/c:4" in table[-1]
    assert len(table) == 2


@pytest.mark.parametrize("word", ["exec", "exit"])
def test_how_it_ended(
    serve: Serve, attach: Attach, instance: str, child: Callable[..., Child], word: str
) -> None:
    holder = holding(serve, attach, instance, child, 1)
    holder.tell()
    holder.tell(word)
    (death,) = eventually(lambda: deaths_of(instance, holder.pid))
    assert death.messages == 2
    if word == "exec":
        assert death.how == How.EXEC
    else:
        assert (death.how, death.status) in ((How.EXITED, 3), (How.DIED, 0))


def test_a_process_that_detaches_is_not_logged(serve: Serve, attach: Attach, instance: str) -> None:
    serve()
    code = f"import shmq; shmq.attach({instance!r}).producer('t').publish(b'x')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    broker = attach()
    eventually(lambda: sources_clients(broker) == 2)
    assert deaths.read(instance) == []
