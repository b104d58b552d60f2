"""How `shmq serve` starts and stops: long starts, names that were removed, keep, drain, refuse."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.deliveries import take_bodies
from support.other_users import RUN
from support.processes import Child, eventually, say
from support.service_manager import Manager

import shmq
from shmq import layout, shm

# ---- a long start and stop ----

CHATTY = "from shmq.supervisor import progress; progress._EVERY = 0.0"
LISTED = """
look = os.listdir
def listdir(path="."):
    if str(path) == {path!r}:
        os.write(1, b"listed\\n")
    return look(path)
os.listdir = listdir
"""


def test_a_long_start_or_stop_says_how_far_it_has_come(
    manager: Manager, service: Callable[..., Child], attach: Callable[[], shmq.Broker]
) -> None:
    def serve_on(*words: str) -> Child:
        server = service(*words, before=CHATTY, env={"NOTIFY_SOCKET": manager.address})
        manager.wait("READY", after=len(manager.messages))
        return server

    def steps(server: Child, what: str) -> list[str]:
        return re.findall(rf" {what}: (.*)", server.errors)

    first = serve_on("--on-stop=keep")
    broker = attach()
    for channel in "abc":
        broker.create_channel("t", channel)
    broker.producer("t").publish(b"x")
    assert first.kill(signal.SIGTERM) == 0
    each = [f"{done} of 3 queues" for done in (1, 2, 3)]
    assert steps(first, "keeping") == each

    count = len(manager.messages)
    second = serve_on()
    assert steps(second, "adopting") == each
    told = manager.wait("STATUS", "^adopting: 3 of 3 queues$", after=count)
    assert told["EXTEND_TIMEOUT_USEC"] == "30000000"
    assert second.kill(signal.SIGTERM) == 0
    flushed = steps(second, "flushing to disk")
    assert [line for line in flushed if ";" not in line] == each
    assert "0 of 3 queues; t:a: 1 messages" in flushed

    count = len(manager.messages)
    third = serve_on()
    assert steps(third, "making what was there") == each
    manager.wait("STATUS", "^making what was there: 3 of 3 queues$", after=count)


def test_a_start_does_not_read_the_data_path_for_each_queue(
    service: Callable[..., Child], instance: str, data_path: Path
) -> None:
    before, channels = LISTED.format(path=str(data_path)), 40

    def starts() -> Child:
        server = service(before=before)
        eventually(lambda: processes.answers(instance, server.pid))
        return server

    server = starts()
    with shmq.attach(instance) as broker:
        for number in range(channels):
            broker.create_channel("t", f"c{number}")
        broker.producer("t").publish(b"x")
        assert server.kill(signal.SIGTERM) == 0
    server = starts()  # all from files
    with shmq.attach(instance) as broker:
        broker.producer("t").publish(b"y")
        server.kill()
    adopts = starts()
    with shmq.attach(instance) as broker:
        assert (
            sum(len(take_bodies(broker.consumer("t", f"c{n}"), 2)) for n in range(channels)) == 80
        )
    for each in (server, adopts):
        eventually(lambda each=each: each.lines.count("listed"))  # its lines are read by a thread
        assert each.lines.count("listed") < channels / 2


# ---- a name that was removed ----


def test_an_instance_whose_name_was_removed_is_flushed_and_begun_anew(
    service: Callable[..., Child], serve: Callable[..., Child], instance: str
) -> None:
    server = service("--on-stop=keep")
    with shmq.attach(instance, timeout=processes.WATCHDOG) as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish_many([b"%d" % number for number in range(50)])
        for item in shm.list_objects(instance):  # logind at a logout
            item.unlink()
        assert server.wait() == 1, "systemd starts it again"
    assert "RemoveIPC" in server.errors
    assert shm.list_objects(instance) == []
    serve()
    with shmq.attach(instance) as broker:
        consumer = broker.consumer("t", "c")
        assert take_bodies(consumer, 50) == [b"%d" % number for number in range(50)]


def test_a_name_that_has_become_anothers_is_left_to_it(
    service: Callable[..., Child], instance: str, tmp_path: Path, keep: Callable[[Any], Any]
) -> None:
    first = service()
    eventually(lambda: processes.answers(instance, first.pid))
    first.stop()
    for item in shm.list_objects(instance):
        item.unlink()
    (tmp_path / "other").mkdir()
    second = keep(processes.serve(instance, tmp_path / "other"))
    first.go_on()
    assert first.wait() == 1
    assert processes.answers(instance, second.pid)


# ---- keep, drain, refuse ----


def take_two(instance: str) -> None:
    consumer = shmq.attach(instance).consumer("t", "c")
    for _ in range(2):
        say("waiting")
        message = consumer.take(timeout=60)
        say("took", message.body.decode())
        message.finish()


def test_keep_leaves_the_segments_and_clients_that_wait_go_on(
    serve: Callable[..., Child],
    instance: str,
    attach: Callable[[], shmq.Broker],
    child: Callable[..., Child],
) -> None:
    first = serve(on_stop="keep")
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    waiting = child(take_two, instance)
    waiting.said("waiting")
    before = {item.name for item in shm.list_objects(instance)}
    assert first.kill(signal.SIGTERM) == 0
    assert "kept for the next supervisor" in first.errors
    assert before - {item.name for item in shm.list_objects(instance)} == set()
    producer.publish(b"between")
    waiting.said("took between")
    waiting.said("waiting", times=2)
    serve(on_stop="keep")
    producer.publish(b"after")
    waiting.said("took after")
    assert waiting.wait() == 0
    broker.create_channel("t", "new")  # the new one serves requests
    assert broker.supervisor_alive()


def serve_drain(instance: str, data_path: Path) -> Child:
    words = [f"--instance={instance}", f"--data-path={data_path}", "--drain"]
    return Child([sys.executable, "-c", f"import sys; {RUN}", "serve", *words])


def test_limits_that_adopted_queues_do_not_follow_are_said(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker]
) -> None:
    server = serve(mem_queue_size=300, arena_size=8 << 20)
    with attach() as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish(b"kept")
    server.kill()
    server = serve(mem_queue_size=5000, arena_size=8 << 20)
    eventually(lambda: ": running, pid" in server.errors)
    told = [line for line in server.errors.splitlines() if "adopted queues:" in line]
    assert len(told) == 1, server.errors
    assert "adopted queues: 1 keep mem_queue_size=300, and new ones get 5000" in told[0]
    assert server.kill(signal.SIGTERM) == 0  # what it says to do
    server = serve(mem_queue_size=5000, arena_size=8 << 20)
    eventually(lambda: ": running, pid" in server.errors)
    assert "adopted queues:" not in server.errors
    with attach() as broker:
        message = broker.consumer("t", "c").take(processes.WATCHDOG)
        assert message is not None
        assert message.body == b"kept"


def test_drain_writes_what_was_left_to_disk_and_ends(
    serve: Callable[..., Child], instance: str, data_path: Path, keep: Callable[[Any], Any]
) -> None:
    server = serve()
    with shmq.attach(instance) as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish_many([b"%d" % number for number in range(100)])
        held = broker.consumer("t", "c")
        assert held.take(timeout=5) is not None  # in flight with a client that goes on living
        refused = keep(serve_drain(instance, data_path))
        assert refused.wait() == 1
        assert "in use by another instance" in refused.errors
        server.kill()
        drained = keep(serve_drain(instance, data_path))
        assert drained.wait() == 0, drained.errors
        assert shm.list_objects(instance) == []
    again = keep(serve_drain(instance, data_path))
    assert again.wait() == 0
    assert "nothing is left in shared memory" in again.errors
    serve()
    with shmq.attach(instance) as broker:
        found = take_bodies(broker.consumer("t", "c"), 100)
    assert found == [b"%d" % number for number in range(100)]


@pytest.mark.parametrize("drain", [False, True])
def test_another_layout_version_is_refused_and_nothing_is_touched(
    drain: bool,
    serve: Callable[..., Child],
    service: Callable[..., Child],
    instance: str,
) -> None:
    server = serve()
    with shmq.attach(instance) as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish(b"precious")
    server.kill()
    at = layout.dtype("segment").fields["layout_version"][1]  # type: ignore[index]
    path = Path(shm.directory_path(instance))

    def set_version(version: int) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(version.to_bytes(4, "little"))

    set_version(layout.LAYOUT_VERSION + 1)
    before = shm.list_objects(instance)
    refused = service("--drain") if drain else service()
    assert refused.wait() == 1
    assert f"layout version {layout.LAYOUT_VERSION + 1}" in refused.errors
    assert f"{layout.LAYOUT_VERSION}: " in refused.errors
    assert "--drain" in refused.errors
    assert shm.list_objects(instance) == before
    set_version(layout.LAYOUT_VERSION)
    serve()
    with shmq.attach(instance) as broker:
        assert take_bodies(broker.consumer("t", "c"), 1) == [b"precious"]
