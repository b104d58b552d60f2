"""Members of an instance's group can spoil what they share. The damage stays as small as it can,
and is reported."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support import processes
from support.deliveries import sorted_bodies
from support.other_users import GROUP, STRANGER, as_user, needed, run
from support.processes import Child, eventually

import shmq
from shmq import layout, shm, sources

pytestmark = needed


# ---- who the instance lets in ----


@pytest.fixture
def kept(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], instance: str
) -> Callable[..., Child]:
    """`kept()`: a supervisor of an instance with a group, killed, with messages in two channels of
    two topics."""

    def make() -> Child:
        server = serve(group=GROUP)
        with attach() as broker:
            for topic in ("one", "two"):
                broker.create_channel(topic, "c")
                broker.producer(topic).publish_many([b"%d" % number for number in range(20)])
        server.kill()
        return server

    return make


@pytest.fixture
def taken_up(serve: Callable[..., Child]) -> Callable[[], Child]:
    """`taken_up()`: the next supervisor, when it has adopted everything."""

    def start() -> Child:
        server = serve(group=GROUP)
        eventually(lambda: "running, pid" in server.errors)
        return server

    return start


ALL = [b"%d" % number for number in range(20)]


def test_a_lock_of_a_member_is_said(
    kept: Callable[..., Child],
    taken_up: Callable[[], Child],
    instance: str,
    data_path: Path,
    attach: Callable[[], shmq.Broker],
) -> None:
    dead = kept()
    path = shm.directory_path(instance)
    hold = subprocess.Popen(
        [
            "setpriv",
            f"--reuid={STRANGER}",
            f"--regid={GROUP}",
            "--clear-groups",
            "--",
            "flock",
            path,
            "sh",
            "-c",
            "echo locked; read x",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with hold:
        assert hold.stdout is not None
        assert hold.stdout.readline() == b"locked\n"
        done = run(
            "serve",
            f"--instance={instance}",
            f"--data-path={data_path}",
            f"--group={GROUP}",
            *processes.NO_GATEWAY,
        )
        assert done.returncode == 1
        assert f"pid {hold.pid} (flock, of uid {STRANGER})" in done.stderr
        assert f"kill {hold.pid}" in done.stderr
        assert str(dead.pid) not in done.stderr
        hold.communicate(b"\n")
    taken_up()
    with attach() as broker:
        assert sorted_bodies(broker, "one") == ALL


@pytest.mark.parametrize("size", [0, 4, 100, 5000, 200_000])
def test_a_directory_that_was_cut_short_costs_no_message(
    kept: Callable[..., Child],
    taken_up: Callable[[], Child],
    instance: str,
    size: int,
    attach: Callable[[], shmq.Broker],
) -> None:
    kept()
    as_user(STRANGER, "truncate", "-s", size, shm.directory_path(instance), gid=GROUP)
    server = taken_up()
    with attach() as broker:
        assert sorted_bodies(broker, "one") == ALL
        assert sorted_bodies(broker, "two") == ALL
    assert "20 messages of one:c are kept in its files" in server.errors


def test_doctor_removes_nothing_that_a_start_can_save(
    kept: Callable[..., Child],
    taken_up: Callable[[], Child],
    instance: str,
    attach: Callable[[], shmq.Broker],
) -> None:
    kept()
    as_user(STRANGER, "truncate", "-s", 0, shm.directory_path(instance), gid=GROUP)
    done = run("doctor", f"--instance={instance}", "--fix", "--yes")
    assert done.returncode == 4
    assert "2 of its queues are intact" in done.stdout
    assert "shmq serve writes what they hold to disk" in done.stdout
    taken_up()
    with attach() as broker:
        assert sorted_bodies(broker, "two") == ALL


def test_a_running_supervisor_says_why_it_ends(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], instance: str
) -> None:
    """By its own look at the size, or, if a loop touched what is gone before that, with the words
    of faulthandler."""
    server = serve(group=GROUP)
    with attach() as broker:
        broker.create_channel("one", "c")
        broker.producer("one").publish_many(ALL)
    as_user(STRANGER, "truncate", "-s", 0, shm.directory_path(instance), gid=GROUP)
    assert server.wait() in (1, -signal.SIGBUS)
    assert "is shorter than it was made" in server.errors or "Bus error" in server.errors
    serve(group=GROUP)
    with attach() as broker:
        assert sorted_bodies(broker, "one") == ALL


def test_a_queue_that_was_cut_short_costs_that_queue_only(
    kept: Callable[..., Child],
    taken_up: Callable[[], Child],
    instance: str,
    attach: Callable[[], shmq.Broker],
) -> None:
    kept()
    with sources.open_readonly(instance) as source:
        one = source.directory.find_topic("one")
        assert one is not None
        entry = source.directory.find_queue(one.index, "c")
    assert entry is not None
    path = shm.path_of(shm.queue_name(instance, entry.serial))
    as_user(STRANGER, "truncate", "-s", 0, path, gid=GROUP)
    taken_up()
    with attach() as broker:
        assert sorted_bodies(broker, "two") == ALL
        broker.producer("one").publish(b"5")
        assert sorted_bodies(broker, "one") == [b"5"]


def test_a_queue_cut_short_while_everything_runs_is_replaced(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], instance: str
) -> None:
    """Cut behind what anybody touches, so that nobody is ended by it."""
    server = serve(group=GROUP)
    broker = attach()
    broker.create_channel("one", "c")
    broker.producer("one").publish_many(ALL)
    with sources.open_readonly(instance) as source:
        (entry,) = source.directory.live_queues()
        size = source.queue(entry).nbytes
    path = shm.path_of(shm.queue_name(instance, entry.serial))
    as_user(STRANGER, "truncate", "-s", size - (1 << 20), path, gid=GROUP)
    eventually(lambda: shm.list_set_aside(instance))
    assert server.process.poll() is None
    assert "somebody has cut its segment short" in server.errors

    def again() -> list[bytes]:
        with contextlib.suppress(shmq.ShmqError):  # the old one is gone, the new one not there yet
            return sorted_bodies(broker, "one")
        return []

    assert eventually(again) == ALL


def write_name(instance: str, structure: str, index: int, name: bytes) -> None:
    """As a member does, into the directory."""
    with sources.open_readonly(instance) as source:
        table = {"topic": "topics_at", "entry": "queues_at"}[structure]
        kind = layout.dtype(structure)
        assert kind.fields is not None
        place = source.directory.read(table) + index * kind.itemsize + kind.fields["name"][1]
    command = [
        "setpriv",
        f"--reuid={STRANGER}",
        f"--regid={GROUP}",
        "--clear-groups",
        "--",
        "dd",
        f"of={shm.directory_path(instance)}",
        "bs=1",
        f"seek={place}",
        "conv=notrunc",
        "status=none",
    ]
    subprocess.run(command, input=name.ljust(80, b"\0"), check=True)


def index_of(instance: str, topic: str) -> int:
    with sources.open_readonly(instance) as source:
        found = source.directory.find_topic(topic)
    assert found is not None
    return found.index


@pytest.mark.parametrize(
    "name",
    [b"../../../etc/x", b"", b"\xff" * 80, b"two", b"other"],
    ids=["path", "empty", "bytes", "another's", "new"],
)
def test_a_topics_name_that_was_overwritten_is_mended(
    kept: Callable[..., Child],
    taken_up: Callable[[], Child],
    instance: str,
    name: bytes,
    attach: Callable[[], shmq.Broker],
) -> None:
    kept()
    write_name(instance, "topic", index_of(instance, "one"), name)
    server = taken_up()
    assert "something has overwritten the name of topic 'one'" in server.errors
    with attach() as broker:
        assert {topic.name for topic in broker.stats().topics} == {"one", "two"}
        assert sorted_bodies(broker, "one") == ALL
        assert sorted_bodies(broker, "two") == ALL


def test_a_channels_name_that_was_overwritten_is_mended(
    kept: Callable[..., Child],
    taken_up: Callable[[], Child],
    instance: str,
    attach: Callable[[], shmq.Broker],
) -> None:
    kept()
    index = index_of(instance, "one")
    with sources.open_readonly(instance) as source:
        entry = source.directory.find_queue(index, "c")
    assert entry is not None
    write_name(instance, "entry", entry.index, b"../c")
    taken_up()
    with attach() as broker:
        assert sorted_bodies(broker, "one") == ALL
        assert sorted_bodies(broker, "two") == ALL


def test_a_topic_whose_name_nothing_says_costs_itself_only(
    kept: Callable[..., Child],
    taken_up: Callable[[], Child],
    instance: str,
    attach: Callable[[], shmq.Broker],
) -> None:
    """Its queue's header was overwritten too: the segment is set aside, and the topic is recreated
    as nsqd.dat has it."""
    kept()
    index = index_of(instance, "one")
    with sources.open_readonly(instance) as source:
        entry = source.directory.find_queue(index, "c")
    assert entry is not None
    fields = layout.dtype("queue").fields
    assert fields is not None
    with open(shm.open_queue(instance, entry.serial), "r+b", buffering=0) as segment:
        segment.seek(fields["base"][1])
        segment.write(b"/" * 144)
    write_name(instance, "topic", index, b"/")
    server = taken_up()
    assert "nothing says" in server.errors
    with attach() as broker:
        assert sorted_bodies(broker, "two") == ALL
        broker.producer("one").publish(b"7")
        assert sorted_bodies(broker, "one") == [b"7"]
    assert len(shm.list_set_aside(instance)) == 1


def test_doctor_says_how_far_a_groups_trust_goes(
    serve: Callable[..., Child], instance: str
) -> None:
    serve(group=GROUP)
    done = run("doctor", f"--instance={instance}")
    (line,) = [line for line in done.stdout.splitlines() if " trust " in line]
    assert f"members of group gid {GROUP} may write its memory" in line
    assert "run code as" in line


def test_doctor_says_nothing_of_trust_without_a_group(
    serve: Callable[..., Child], instance: str
) -> None:
    serve()
    assert " trust " not in run("doctor", f"--instance={instance}").stdout
