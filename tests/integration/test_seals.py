"""Nothing is unpickled that no process put which may attach: what others got into a channel, a file
in the data path or the results becomes a dead letter, or an error, with the reason.

In front of a gateway: tests/nsqd/gateway/test_sealed.py.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import other_users, pool_tasks, traps
from support.other_users import STRANGER
from support.processes import WATCHDOG, Child, eventually

import shmq
from shmq.seal import REASON
from shmq.storage import key_file

STOP = b"stop".ljust(20, b"-")


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Path]:
    """A directory that is there after somebody has unpickled a trap."""
    made = tmp_path / "unpickled"
    yield made
    assert not made.exists(), "something was unpickled"


@pytest.fixture
def data_path(tmp_path: Path) -> Path:
    made = tmp_path / "kept"
    made.mkdir()
    return made


@pytest.fixture
def broker(open_broker: Callable[..., shmq.Broker], data_path: Path) -> shmq.Broker:
    return open_broker(data_path=data_path)


def refused(broker: shmq.Broker, topic: str, channel: str) -> list[bytes]:
    """The bodies of the dead letters that were not sealed."""
    with contextlib.suppress(shmq.Gone):
        found = broker.dead(topic, channel).peek(n=100)
        assert {(each.reason, each.error) for each in found} <= {("rejected", REASON)}
        return [each.body for each in found]
    return []


# ---- pools ----


def test_a_worker_refuses_what_is_not_sealed_and_goes_on(broker: shmq.Broker, trace: Path) -> None:
    broker.create_channel("jobs", "pool")
    broker.producer("jobs").publish_many([traps.task(trace), STOP, b"x", traps.task(trace)])
    with broker.producer("jobs").loan(100_000) as buffer:
        buffer[:] = b"A" * 100_000
    with shmq.Executor(1, broker=broker, topic="jobs", attempts=1) as pool:
        first = pool.submit(os.getpid)
        assert pool.submit(pool_tasks.add, 1, 2).result(WATCHDOG) == 3
        assert pool.submit(os.getpid).result(WATCHDOG) == first.result(WATCHDOG), "it has ended"
        eventually(lambda: len(refused(broker, "jobs", "pool")) == 5)
    assert broker.channel_stats("jobs", "pool").dead_lettered == 5


def test_cancelling_all_tasks_forges_no_outcome(broker: shmq.Broker, trace: Path) -> None:
    broker.create_channel("jobs", "pool")
    broker.producer("jobs").publish(traps.task(trace))
    pool = shmq.Executor(broker=broker, topic="jobs")
    task = pool.submit(pool_tasks.same, 1)
    pool.shutdown(cancel_futures=True)
    assert task.cancelled()
    assert not list(broker.results("jobs").keys())
    eventually(lambda: refused(broker, "jobs", "pool") == [traps.task(trace)])


def test_a_forged_dead_letter_is_no_outcome_and_stays(broker: shmq.Broker) -> None:
    pool = shmq.Executor(1, broker=broker, topic="jobs", attempts=1)
    slow = pool.submit(time.sleep, 1.0)
    broker.create_channel("jobs.pool.dead", "dead")
    letters = broker.producer("jobs.pool.dead")
    forged = {"dead-pid": "1", "dead-reason": "attempts"}
    with pytest.raises(shmq.NotSealed):
        letters.publish(slow.id.encode(), properties=forged)
    broker.configure("jobs.pool.dead", sealed=False)  # a mistake of the operator's
    letters.publish(slow.id.encode(), properties=forged)
    # the crew looks at its letters once a worker has died
    with pytest.raises(shmq.WorkerDied):
        pool.submit(pool_tasks.die).result(WATCHDOG)
    assert slow.result(WATCHDOG) is None
    pool.shutdown()
    eventually(lambda: broker.channel_depth("jobs.pool.dead", "dead") == 1)


def test_a_forged_mark_cancels_no_task(
    broker: shmq.Broker, trace: Path, open_broker: Callable[..., shmq.Broker]
) -> None:
    pool = shmq.Executor(broker=broker, topic="jobs")
    task = pool.submit(pool_tasks.same, 5)
    broker.results("jobs.signs").set(task.id.encode(), b"cancelled")
    workers = shmq.Executor(1, broker=broker, topic="jobs")
    with workers:
        workers.submit(pool_tasks.same, 1).result(WATCHDOG)
        assert task.result(WATCHDOG) == 5


@pytest.mark.parametrize("kind", [b"v", b"e\0\0\0\0"])
def test_an_outcome_without_the_seal_is_an_error(
    broker: shmq.Broker, trace: Path, kind: bytes
) -> None:
    pool = shmq.Executor(broker=broker, topic="jobs")
    task = pool.submit(pool_tasks.same, 5)
    for seal in (b"", bytes(16), b"v" * 16):
        broker.results("jobs").set(task.id.encode(), seal + kind + traps.item(trace))
        with pytest.raises(shmq.NotSealed, match="submit the task again"):
            pool.future(task.id).result(WATCHDOG)


# ---- queues ----


@pytest.fixture
def stranger(broker: shmq.Broker) -> shmq.Producer:
    """A producer that seals nothing, as a gateway's."""
    shmq.Queue(broker=broker, name="work")
    return broker.producer("work")


SIZES = (0, 5000, 100_000)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [shmq.Queue, shmq.JoinableQueue, shmq.SimpleQueue])
def test_get_goes_on_with_the_next_item(
    broker: shmq.Broker, stranger: shmq.Producer, trace: Path, kind: Any, size: int
) -> None:
    work = kind(broker=broker, name="work")
    broker.configure("work", sealed=False)
    for good in range(3):
        stranger.publish(traps.item(trace) + b"." * size)
        work.put(good)
    assert [work.get() for _ in range(3)] == [0, 1, 2]
    eventually(lambda: len(refused(broker, "work", "queue")) == 3)
    if kind is shmq.JoinableQueue:
        for _ in range(3):
            work.task_done()
        work.join()
    assert work.empty()


def test_a_get_with_a_timeout_ends_in_time(
    broker: shmq.Broker, stranger: shmq.Producer, trace: Path
) -> None:
    work = shmq.Queue(broker=broker, name="work")
    broker.configure("work", sealed=False)
    for block, timeout in ((False, None), (True, 0.2), (True, 0)):
        for ack in (False, True):
            stranger.publish_many([traps.item(trace)] * 3)
            with pytest.raises(queue.Empty):
                work.get(block, timeout, ack=ack)
    assert work.qsize() == 0
    eventually(lambda: len(refused(broker, "work", "queue")) == 18)


def test_an_item_that_is_held_is_sealed(
    broker: shmq.Broker, stranger: shmq.Producer, trace: Path
) -> None:
    work = shmq.Queue(broker=broker, name="work")
    broker.configure("work", sealed=False)
    stranger.publish(traps.item(trace))
    work.put("good")
    with work.item(WATCHDOG) as value:
        assert value == "good"
    eventually(lambda: len(refused(broker, "work", "queue")) == 1)


def test_an_older_queue_is_closed_when_it_is_opened_again(
    broker: shmq.Broker, stranger: shmq.Producer
) -> None:
    broker.configure("work", sealed=False)
    stranger.publish(b"still open")
    shmq.Queue(broker=broker, name="work")
    with pytest.raises(shmq.NotSealed):
        stranger.publish(b"closed")


# ---- the topic is closed ----

WAYS: dict[str, Callable[[Any], Any]] = {
    "publish": lambda p: p.publish(b"x"),
    "now": lambda p: p.publish(b"x", timeout=0),
    "deferred": lambda p: p.publish(b"x", defer=1.0),
    "with properties": lambda p: p.publish(b"x", properties={"key": "17"}, ttl=5),
    "large": lambda p: p.publish(b"x" * 100_000),
    "many": lambda p: p.publish_many([b"x", b"y"]),
    "many large": lambda p: p.publish_many([b"x", b"y" * 100_000]),
    "numpy": lambda p: p.publish_many(np.zeros((2, 3), np.uint8)),
    "a loan": lambda p: p.loan(10).__enter__(),
    "an object": lambda p: p.publish_object([_pickling()], 1),
    "framed": lambda p: p.publish_framed(struct.pack(">i", 1) + b"x", 0, 1, None, 0),
    "once": lambda p: p.publish_once(
        b"x", np.array([0, 1], np.int64), True, 0, 1, 1, 2, 0, 0, 1, 0.0
    ),
}


def _pickling() -> Any:
    from shmq.objects import pickling

    return pickling()


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_publishing_is_refused(broker: shmq.Broker, way: str) -> None:
    broker.create_channel("jobs", "pool")
    broker.configure("jobs", sealed=True)
    producer = broker.producer("jobs")
    with pytest.raises(shmq.NotSealed, match="'jobs'"):
        WAYS[way](producer)
    counts = broker.channel_stats("jobs", "pool")
    assert (counts.message_count, counts.depth, counts.deferred) == (0, 0, 0)
    producer.seal()
    WAYS[way](producer)


def test_a_loan_that_began_before_the_topic_was_closed_is_refused(broker: shmq.Broker) -> None:
    broker.create_channel("jobs", "pool")
    loan = broker.producer("jobs").loan(10)
    loan.__enter__()[:] = b"x" * 10
    broker.configure("jobs", sealed=True)
    with pytest.raises(shmq.NotSealed):
        loan.__exit__(None, None, None)
    assert broker.channel_depth("jobs", "pool") == 0


def test_no_property_is_a_seal(broker: shmq.Broker) -> None:
    with pytest.raises(shmq.BadArgument, match="reserved"):
        broker.producer("jobs").publish(b"x", properties={"shmq-seal": bytes(16)})


# ---- files ----


def record(body: bytes) -> bytes:
    """A record of nsqd's, as anybody can write it."""
    head = struct.pack(">qH", time.time_ns(), 0) + b"0123456789abcdef"
    return struct.pack(">i", len(head) + len(body)) + head + body


def enveloped(body: bytes, seal: bytes) -> bytes:
    entry = bytes([9]) + b"shmq-seal" + struct.pack("<H", len(seal)) + seal
    return b"\xf5shmqp\x01\n" + struct.pack("<I", len(entry)) + entry + body


def test_a_planted_file_runs_nothing(
    open_broker: Callable[..., shmq.Broker], data_path: Path, trace: Path
) -> None:
    bodies = [traps.task(trace), STOP]
    records = [record(body) for body in bodies]
    records += [record(enveloped(traps.task(trace), seal)) for seal in (bytes(16), b"", b"x" * 16)]
    for name in ("jobs:pool", "work:queue"):
        (data_path / f"{name}.diskqueue.000000.dat").write_bytes(b"".join(records))
    broker = open_broker(data_path=data_path)
    with shmq.Executor(1, broker=broker, topic="jobs") as pool:
        assert pool.submit(pool_tasks.add, 1, 2).result(WATCHDOG) == 3
        eventually(lambda: len(refused(broker, "jobs", "pool")) == 5)
    work = shmq.Queue(broker=broker, name="work")
    work.put("good")
    assert work.get(timeout=WATCHDOG) == "good"
    eventually(lambda: len(refused(broker, "work", "queue")) == 5)


def test_what_was_put_before_there_were_seals_is_refused_after_a_restart(
    open_broker: Callable[..., shmq.Broker], data_path: Path, trace: Path
) -> None:
    """Also deferred tasks, which were in a chunk, and outcomes and marks, which were in a file."""
    with open_broker(data_path=data_path) as before:
        before.create_channel("jobs", "pool")
        before.producer("jobs").publish(traps.task(trace))
        before.producer("jobs").publish(traps.task(trace), defer=0.5)
        before.results("jobs").set(b"B" * 20, b"v" + traps.item(trace))
    broker = open_broker(data_path=data_path)
    with shmq.Executor(1, broker=broker, topic="jobs") as pool:
        with pytest.raises(shmq.NotSealed):
            pool.future("B" * 20).result(WATCHDOG)
        eventually(lambda: len(refused(broker, "jobs", "pool")) == 2)


def deferred_and_waiting(broker: shmq.Broker) -> list[str]:
    """Submit tasks that nobody does, one of them deferred."""
    pool = shmq.Executor(broker=broker, topic="jobs")
    ids = [pool.submit(pool_tasks.add, number, 0).id for number in range(400)]
    site = pool._site
    assert site is not None
    task = b"D" * 20 + shmq_pickle(pool_tasks.same, 5)
    site.producer.publish(task, 0.2)
    return ids


def shmq_pickle(function: Any, *arguments: Any) -> bytes:
    return pickle.dumps((function, arguments, {}), 5)


@pytest.mark.parametrize("fate", ["kept", "lost"])
def test_tasks_on_disk_keep_their_seals_as_long_as_the_key_is_there(
    open_broker: Callable[..., shmq.Broker], data_path: Path, fate: str
) -> None:
    with open_broker(data_path=data_path) as before:
        ids = deferred_and_waiting(before)
    key = data_path / key_file.NAME
    assert (stat.S_IMODE(key.stat().st_mode), key.stat().st_size) == (0o600, 32)
    if fate == "lost":
        key.unlink()
    broker = open_broker(data_path=data_path)
    with shmq.Executor(1, broker=broker, topic="jobs") as pool:
        if fate == "lost":
            assert pool.submit(pool_tasks.add, 1, 2).result(WATCHDOG) == 3
            eventually(lambda: broker.channel_depth("jobs.pool.dead", "dead") == 401)
            return
        for number, task in enumerate(ids):
            assert pool.future(task).result(WATCHDOG) == number
        assert pool.future("D" * 20).result(WATCHDOG) == 5


def test_dead_letters_keep_their_seals_and_can_be_sent_back(broker: shmq.Broker) -> None:
    work = shmq.Queue(broker=broker, name="work")
    work.put("good")
    with broker.consumer("work", "queue") as consumer:
        consumer.take(WATCHDOG).reject("by hand")
    eventually(lambda: broker.channel_depth("work.queue.dead", "dead") == 1)
    assert broker.dead("work", "queue").redrive() == 1
    assert work.get(timeout=WATCHDOG) == "good"


def test_a_backlog_keeps_its_seals(broker: shmq.Broker) -> None:
    """An item that is put while the topic is paused waits in a queue of its own."""
    work = shmq.Queue(broker=broker, name="work")
    broker.pause_topic("work")
    work.put("good")
    broker.unpause_topic("work")
    assert work.get(timeout=WATCHDOG) == "good"


# ---- the key ----


def started(data_path: Path, instance: str) -> Any:
    return other_users.run(
        "serve",
        f"--instance={instance}",
        f"--data-path={data_path}",
        "--tcp-address=",
        "--http-address=",
    )


def write(key: Path, data: bytes, mode: int = 0o600) -> None:
    key.write_bytes(data)
    key.chmod(mode)


PLANTED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "short": (lambda key: write(key, b"x" * 31), "31 bytes"),
    "empty": (lambda key: write(key, b""), "0 bytes"),
    "long": (lambda key: write(key, b"x" * 33), "33 bytes"),
    "zeros": (lambda key: write(key, bytes(32)), "zeros"),
    "readable": (lambda key: write(key, b"x" * 32, 0o644), "mode 0644.*chmod 600"),
    "of a group": (lambda key: write(key, b"x" * 32, 0o640), "mode 0640"),
    "a FIFO": (lambda key: os.mkfifo(key, 0o600), "a FIFO"),
    "a directory": (lambda key: key.mkdir(), "a directory"),
    "a link": (lambda key: key.symlink_to(_elsewhere(key)), "a (symbolic )?link"),
    "a dangling link": (lambda key: key.symlink_to("nowhere"), "a (symbolic )?link"),
    "with two names": (lambda key: os.link(_elsewhere(key), key), "hard link"),
}


def _elsewhere(key: Path) -> Path:
    other = key.parent.parent / "another.key"
    write(other, b"x" * 32)
    return other


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_key_is_refused_with_the_remedy(
    instance: str, data_path: Path, what: str
) -> None:
    plant, said = PLANTED[what]
    key = data_path / key_file.NAME
    plant(key)
    with pytest.raises(OSError, match=f"{said}.*become dead letters") as caught:
        key_file.load_or_make(data_path)
    assert caught.value.filename == str(key)
    done = started(data_path, instance)
    assert done.returncode == 1
    assert f"{key}" in done.stderr
    assert "Traceback" not in done.stderr


@other_users.needed
def test_a_key_of_another_user_is_refused(instance: str, data_path: Path) -> None:
    key = data_path / key_file.NAME
    write(key, b"x" * 32)
    os.chown(key, STRANGER, STRANGER)
    done = started(data_path, instance)
    assert done.returncode == 1
    assert f"belongs to uid {STRANGER}" in done.stderr
    with pytest.raises(OSError, match=f"belongs to uid {STRANGER}.*rm {key}"):
        key_file.load(data_path)
    key.unlink()
    assert len(key_file.load_or_make(data_path)) == 32


def test_a_death_after_the_key_was_made_leaves_it(
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    data_path: Path,
    instance: str,
    child: Callable[..., Child],
) -> None:
    dying = child(die_at_the_directory, instance, str(data_path))
    dying.die()
    key = (data_path / key_file.NAME).read_bytes()
    serve()
    assert attach().directory().seal_key == key


def die_at_the_directory(instance: str, data_path: str) -> None:
    import os

    from shmq import _native
    from shmq.cli import main

    _native.create_directory = lambda *_, **__: os.kill(os.getpid(), 9)
    words = ["serve", f"--instance={instance}", f"--data-path={data_path}"]
    main([*words, "--tcp-address=", "--http-address="])


@pytest.mark.parametrize("end", ["kept", "killed"])
def test_memory_that_is_taken_over_keeps_its_key(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], data_path: Path, end: str
) -> None:
    server = serve(on_stop="keep")
    broker = attach()
    task = shmq.Executor(broker=broker, topic="jobs").submit(pool_tasks.same, 7).id
    key = data_path / key_file.NAME
    before = key.read_bytes()
    if end == "kept":
        server.process.terminate()
        server.wait()
    else:
        server.kill()
    key.unlink()
    serve()
    eventually(key.exists)
    assert key.read_bytes() == before == attach().directory().seal_key
    with shmq.Executor(1, broker=attach(), topic="jobs") as pool:
        assert pool.future(task).result(WATCHDOG) == 7
