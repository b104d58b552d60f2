"""A call that waits for room for more than five seconds says so once, by every way in."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Child, eventually, say
from support.small_memory import mounted

import shmq
from shmq.forward.origin import Portion
from shmq.forward.receiver import Receiver

STILL = "still waiting for room after 5 s: "


def loan(broker: shmq.Broker, topic: str) -> None:
    with broker.producer(topic).loan(4) as room:
        room[:] = b"more"


def once(broker: shmq.Broker, topic: str) -> None:
    """As the commit of a job on this host."""
    ends = np.array([0, 4], np.int64)
    producer: Any = broker.producer(topic)
    producer.publish_once(b"more", ends, True, 0, 1, 1, 2, 3, 0, 1, None)


def item(broker: shmq.Broker, topic: str, timeout: float | None = None) -> None:
    queue: Any = shmq.Queue(1, broker=broker, name=topic)
    queue.put("more", timeout=timeout)


class Stream:
    """An origin with one message."""

    def __init__(self) -> None:
        self._left = [Portion("lane", [1], [b"more"])]

    def open(self, reached: object) -> None: ...

    def take(self, most: int, timeout: float) -> list[Portion]:
        taken, self._left = self._left, []
        return taken

    def done(self, portions: object) -> None: ...

    def drained(self) -> bool:
        return True

    def idle(self) -> None: ...

    def close(self) -> None: ...


def received(broker: shmq.Broker, topic: str) -> None:
    Receiver(broker, topic, Stream()).run(True, print)


#: Every way in that waits in this process: the call, which ends when there is room.
HERE: dict[str, Callable[[shmq.Broker, str], Any]] = {
    "publish": lambda broker, topic: broker.producer(topic).publish(b"more"),
    "timeout": lambda broker, topic: broker.producer(topic).publish(b"more", timeout=600),
    "large": lambda broker, topic: broker.producer(topic).publish(bytes(1 << 19)),
    "many": lambda broker, topic: broker.producer(topic).publish_many([b"more"]),
    "rows": lambda broker, topic: broker.producer(topic).publish_many(np.ones((1, 4), np.uint8)),
    "loan": loan,
    "once": once,
    "async": lambda broker, topic: asyncio.run(broker.producer(topic).publish_async(b"more")),
    "many-async": lambda broker, topic: asyncio.run(
        broker.producer(topic).publish_many_async([b"more"])
    ),
    "put": item,
    "put-timeout": lambda broker, topic: item(broker, topic, 600),
    "forwarder": received,
}


def remote_commit(path: str, topic: str) -> None:
    with shmq.connect(path) as there:
        staged = there.stage(topic, "writer", 1, [b"more"])
        while True:
            with contextlib.suppress(shmq.Full):
                there.commit(topic, "writer", 1, [staged] if staged else [])
                return


def remote_publish(path: str, topic: str) -> None:
    with shmq.connect(path) as there:
        there.producer(topic).publish(b"more", timeout=600)


#: Those that wait for a gateway's answer. Both say so: here without the limit.
THERE = {"remote": remote_publish, "commit": remote_commit}


def pub(path: Path, topic: str) -> None:
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(str(path))
        there.sendall(f"  V2PUB {topic}\n".encode() + b"\0\0\0\4more")
        assert there.recv(100) == b"\0\0\0\6\0\0\0\0OK"


def mpub(path: Path, topic: str) -> None:
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(str(path))
        there.sendall(f"  V2MPUB {topic}\n".encode() + b"\0\0\0\x0c\0\0\0\1\0\0\0\4more")
        assert there.recv(100) == b"\0\0\0\6\0\0\0\0OK"


def post(path: Path, what: str) -> None:
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(str(path))
        there.sendall(f"POST {what} HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nmore".encode())
        assert b" 200 " in there.recv(1000)


class Lines(logging.Handler):
    """The lines of the logger `shmq`, by topic."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert (record.name, record.levelno) == ("shmq", logging.WARNING)
        self.said.append(record.getMessage())

    def of(self, topic: str) -> list[str]:
        return [line for line in self.said if topic in line]


@pytest.fixture
def log() -> Iterator[Lines]:
    """The logger's lines."""
    handler = Lines()
    logging.getLogger("shmq").addHandler(handler)
    yield handler
    logging.getLogger("shmq").removeHandler(handler)


def full(broker: shmq.Broker, topic: str) -> str:
    """Make a topic whose only channel has no room. Returns the channel's name."""
    if topic.startswith("put"):
        shmq.Queue(1, broker=broker, name=topic).put("first")
        return "queue"
    broker.configure(topic, "c", max_messages=1, overflow="block")
    broker.producer(topic).publish(b"first")
    return "c"


def test_every_wait_for_room_is_said_once(
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    tmp_path: Path,
    log: Lines,
) -> None:
    tcp, http = tmp_path / "tcp", tmp_path / "http"
    server, broker = serve(tcp_address=tcp, http_address=http), attach()
    calls: dict[str, Callable[[], Any]] = {}
    channels = {}
    for name, call in HERE.items():
        calls[name] = functools.partial(call, broker, name)
    for name, far in THERE.items():
        calls[name] = functools.partial(far, str(tcp), name)
    calls["tcp-pub"] = lambda: pub(tcp, "tcp-pub")
    calls["tcp-mpub"] = lambda: mpub(tcp, "tcp-mpub")
    calls["http-pub"] = lambda: post(http, "/pub?topic=http-pub")
    calls["http-mpub"] = lambda: post(http, "/mpub?topic=http-mpub")
    done: list[str] = []

    def run(name: str) -> None:
        calls[name]()
        done.append(name)

    for name in calls:
        channels[name] = full(broker, name)
        threading.Thread(target=run, args=(name,), daemon=True).start()
    outside = ("remote", "tcp-pub", "tcp-mpub", "http-pub", "http-mpub")
    for name in HERE.keys() | THERE.keys():
        eventually(lambda: log.of(f"{name!r}") or log.of(f"to {name}:"), what=name)  # noqa: B023
    for name in outside:
        eventually(lambda: f"{STILL}publish to {name!r}" in server.errors, what=name)  # noqa: B023
    assert not done
    for name, channel in channels.items():
        if channel == "queue":
            assert shmq.Queue(1, broker=broker, name=name).get() == "first"
        else:
            broker.consumer(name, channel).take().finish()
    eventually(lambda: not calls.keys() - set(done), what=str(done))

    for name in HERE:
        [line] = log.of(f"{name!r}")
        assert line.startswith(STILL), line
        assert f"{name}/{channels[name]} has 1 waiting; its max_messages is 1; add cons" in line
    for name in THERE:
        [line] = log.of(f"to {name}:")
        assert line.startswith(STILL)
        assert "add consumers there, or raise the limit" in line
    for name in outside:
        [line] = re.findall(f"{STILL}publish to {name!r}.*", server.errors)
        assert f"{name}/c has 1 waiting; its max_messages is 1; add consumers" in line


def put_all(producer: shmq.Producer, count: int) -> None:
    for _ in range(count):
        producer.publish(b"one", timeout=0)


def test_memory_that_is_full_is_named_with_its_limits(
    open_broker: Callable[..., shmq.Broker], log: Lines
) -> None:
    broker = open_broker(data_path=None, disk=False, mem_queue_size=300)
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    limits = r"t/c holds all that mem_queue_size \(300\) and arena_size \(67108864\) allow; add"
    with pytest.raises(shmq.Full, match=limits):
        put_all(producer, 400)
    waiting = threading.Thread(target=producer.publish, args=(b"one",), daemon=True)
    waiting.start()
    eventually(lambda: log.said)
    assert re.search(limits, log.said[0])
    broker.consumer("t", "c", 1000).take_many(1000).finish()
    waiting.join()


def a_handler_that_waits_too():
    import logging

    class Puts(logging.Handler):
        def emit(self, record):
            say("told")
            producer.publish(record.getMessage().encode(), timeout=11)

    logging.getLogger("shmq").addHandler(Puts())
    with shmq.Broker(disk=False) as broker:
        broker.configure("t", "c", max_messages=1)
        producer = broker.producer("t")
        producer.publish(b"first")
        try:
            producer.publish(b"second", timeout=6)
        except shmq.Full as exc:
            say(type(exc).__name__)


def test_a_handler_of_the_log_that_waits_for_room_is_told_once(
    child: Callable[..., Child],
) -> None:
    """Its own wait raises Full into the first call, as any error of a handler that it does not
    handle does."""
    assert child(a_handler_that_waits_too).succeed() == ["told", "Full"]


def a_long_line_of_tasks():
    import multiprocessing

    gate = multiprocessing.Pipe()
    with shmq.Executor(1, multiprocessing.get_context("fork")) as executor:
        executor.submit(gate[0].recv)
        tasks = [executor.submit(len, bytes(1 << 20)) for _ in range(100)]
        say("submitted")
        input()
        gate[1].send(1)
        say(sum(task.result() for task in tasks) >> 20)


def test_the_feeder_of_a_pool_says_it_once(child: Callable[..., Child]) -> None:
    """The tasks together are larger than /dev/shm."""
    waiting = child(a_long_line_of_tasks, before=mounted("64m"))
    waiting.said("submitted")
    eventually(lambda: STILL in waiting.errors)
    waiting.tell()
    assert waiting.succeed(300)[-1] == "100"
    assert waiting.errors.count(STILL) == 1


def outcomes_that_nobody_collects():
    with shmq.Executor(1) as executor:
        tasks = [executor.submit(bytes, 1 << 20) for _ in range(100)]
        say("submitted")
        input()
        say(sum(len(task.result()) for task in tasks) >> 20)


def test_a_worker_whose_outcome_has_no_room_says_it_once(child: Callable[..., Child]) -> None:
    waiting = child(outcomes_that_nobody_collects, before=mounted("64m"))
    waiting.said("submitted")
    eventually(lambda: STILL in waiting.errors)
    waiting.tell()
    assert waiting.succeed(300)[-1] == "100"
    assert waiting.errors.count(STILL) == 1, waiting.errors


@pytest.mark.parametrize("limit", ["slots", "bytes"])
def test_a_get_that_waits_for_items_to_be_done_says_so(
    open_broker: Callable[..., shmq.Broker], log: Lines, limit: str
) -> None:
    size = 1 << 17
    options = {"arena_size": 8 * size} if limit == "bytes" else {"in_flight_slots": 64}
    broker = open_broker(data_path=None, disk=False, max_msg_size=2 * size, **options)
    queue: Any = shmq.JoinableQueue(broker=broker, name="held")
    got = []

    def get_all() -> None:
        while len(got) < 80:
            got.append(queue.get())

    for _ in range(7 if limit == "bytes" else 80):
        queue.put(np.ones(size, np.uint8) if limit == "bytes" else "item")
    getter = threading.Thread(target=get_all, daemon=True)
    getter.start()
    eventually(lambda: log.said)
    assert re.search(r"get from .*held.*items wait.*in_flight_slots.*task_done", log.said[0])
    held = len(got)
    for _ in range(held):
        queue.task_done()
    eventually(lambda: len(got) > held)
    while len(got) < 80:
        queue.put("last")
