"""Wrong options, instances that are none, and full tables: each is an error that says so."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.in_process_broker import SECOND, World
from support.processes import HELPERS, TESTS, WATCHDOG, eventually

import shmq
from shmq import (
    Full,
    Gone,
    LayoutMismatch,
    NotRunning,
    ShmqError,
    TooManyClients,
    layout,
    shm,
    sources,
)
from shmq._native import LAYOUT_VERSION
from shmq.broker import attach_gateway

# ---- options ----


def test_an_unknown_option_is_named_with_what_may_be_meant() -> None:
    with pytest.raises(TypeError, match="no option 'mem_queue_sise': did you mean mem_queue_size"):
        shmq.Broker(mem_queue_sise=5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"in_flight_slots": 3}, "in_flight_slots must be from 16 to"),
        ({"mem_queue_size": -1}, "mem_queue_size must be from 0"),
        ({"mem_queue_size": 1 << 40}, "mem_queue_size must be"),
        ({"mem_queue_size": 1.5}, "mem_queue_size must be a whole number"),
        ({"msg_timeout": "abc"}, "'abc' is not a duration"),
        ({"msg_timeout": math.nan}, "msg_timeout must be seconds, not nan"),
        ({"node_id": 1024}, "node_id must be from 0 to 1023"),
        ({"on_stop": "burn"}, "on_stop must be one of flush, keep"),
        ({"max_msg_size": 1 << 20, "arena_size": 1 << 20}, "raise arena_size to 2097152"),
    ],
)
def test_options_out_of_bounds(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shmq.Broker(**options)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "/etc/passwd"])
def test_a_data_path_that_is_none(instance: str, path: str) -> None:
    with pytest.raises(ShmqError, match=path):
        shmq.Broker(path, instance=instance)
    assert not shm.list_objects(instance)


# ---- instances ----


def test_an_instance_that_does_not_run(instance: str) -> None:
    with pytest.raises(NotRunning, match=rf"no shmq instance '{instance}'.*shmq serve --instance"):
        shmq.attach(instance)
    with pytest.raises(NotRunning):
        shmq.attach(instance, timeout=0.05)
    for timeout in (-1, math.nan):
        with pytest.raises(ValueError, match="timeout must be"):
            shmq.attach(instance, timeout=timeout)


@pytest.fixture
def named(instance: str) -> Iterator[Callable[[bytes], None]]:
    """Makes a file where the instance's directory would be."""
    path = Path(shm.path_of(shm.directory_name(instance)))

    def make(content: bytes) -> None:
        path.write_bytes(content)

    yield make
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("content", [b"hello", b"x" * 100_000, b"\xff" * 5000])
def test_a_foreign_file_of_the_same_name(
    instance: str, named: Callable[[bytes], None], tmp_path: Path, content: bytes
) -> None:
    named(content)
    with pytest.raises(LayoutMismatch, match=r"not made by shmq|not finished"):
        shmq.attach(instance)
    with pytest.raises(ShmqError, match="not made by shmq"):
        shmq.Broker(tmp_path, instance=instance)
    path = Path(shm.path_of(shm.directory_name(instance)))
    assert path.read_bytes() == content, "a foreign file was touched"


def test_an_empty_file_of_the_same_name_is_a_directory_half_made(
    instance: str, named: Callable[[bytes], None], tmp_path: Path
) -> None:
    named(b"")
    with pytest.raises(LayoutMismatch, match="not finished; try again"):
        shmq.attach(instance)
    with shmq.Broker(tmp_path, instance=instance) as broker:
        broker.create_topic("t")


def test_an_attach_waits_for_a_directory_that_is_being_made(
    instance: str, named: Callable[[bytes], None], tmp_path: Path
) -> None:
    named(b"")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(shmq.attach, instance, timeout=WATCHDOG)
        eventually(waiting.running)
        with shmq.Broker(tmp_path, instance=instance) as broker, waiting.result() as attached:
            attached.create_topic("t")
            assert [topic.name for topic in broker.stats().topics] == ["t"]


def patched(world: World, offset: int, data: bytes) -> None:
    os.pwrite(world._directory_fd, data, offset)


def field(name: str) -> int:
    return layout.dtype("segment").fields[name][1]  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("layout_version", 99, rf"layout version 99, this shmq has {LAYOUT_VERSION}"),
        ("fingerprint", 99, "another build made it"),
        ("magic", 99, "magic number is missing"),
        ("kind", 2, "wrong kind of segment"),
        ("boot_id", 99, "before the last boot"),
        ("size", 99, "truncated"),
        ("ready", 0, "not ready: its creator is at work or died"),
    ],
)
def test_a_segment_of_another_kind_is_named(name: str, value: int, words: str) -> None:
    width = layout.dtype("segment").fields[name][0].itemsize  # type: ignore[index]
    width = min(width, 8)
    with World() as world:
        before = os.pread(world._directory_fd, width, field(name))
        patched(world, field(name), value.to_bytes(width, "little"))
        with pytest.raises(LayoutMismatch, match=words):
            world.attach_native()
        patched(world, field(name), before)
        world.attach_native().detach()


def test_a_closed_directory_is_gone() -> None:
    with World() as world:
        world.supervisor.close_directory()
        with pytest.raises(Gone):
            world.attach_native()


def test_a_running_instance_of_another_layout_is_refused(
    broker: shmq.Broker, instance: str
) -> None:
    """The directory of a running instance, copied under another name with another version."""
    name = shm.directory_name(instance)
    original = shm.open_directory(broker.instance)
    permits = shm.Permits.create(instance, 10, 0o600)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, original)
        stack.callback(shm.unlink_instance, instance)
        stack.callback(permits.close)
        fd = shm.create_segment(name, 0o600)
        stack.callback(os.close, fd)
        size = os.fstat(original).st_size
        os.ftruncate(fd, size)
        os.pwrite(fd, os.pread(original, 4096, 0), 0)
        os.pwrite(fd, (7).to_bytes(4, "little"), field("layout_version"))
        words = rf"layout version 7, this shmq has {LAYOUT_VERSION}: .*--drain"
        with pytest.raises(LayoutMismatch, match=words):
            shmq.attach(instance)
        assert permits.free == 10
        with pytest.raises(LayoutMismatch, match=rf"layout version 7.* {LAYOUT_VERSION}"):
            sources.open_readonly(instance)


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_garbage_in_segments_crashes_nobody() -> None:
    """Every word of both headers, noise, and segments cut short; see `corrupt_segments`."""
    done = subprocess.run(
        [sys.executable, TESTS / "support" / "corrupt_segments.py"],
        env={**os.environ, **HELPERS},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    *crashes, last = done.stdout.splitlines() or [""]
    assert not crashes, "\n".join(crashes)
    assert last.endswith(" cases"), done.stderr


# ---- a full table ----


def test_a_full_table_of_clients_is_an_error_and_frees_when_they_leave() -> None:
    with World() as world:
        clients = [world.attach_native() for _ in range(layout.constant("CLIENTS") - 1)]
        with pytest.raises(TooManyClients, match="every client entry is taken; close brokers"):
            world.attach_native()
        clients.pop(500).detach()
        clients.append(world.attach_native())
        with pytest.raises(TooManyClients):
            world.attach_native()
        for client in clients:
            client.detach()
        assert world.directory.free_clients == layout.constant("CLIENTS") - 1


def test_without_a_permit_nobody_attaches(broker: shmq.Broker) -> None:
    permits = shm.Permits(broker.instance)
    free = permits.free
    with permits.moving():  # as a client does that has not got to its entry yet
        for _ in range(free):
            permits.take()
        with pytest.raises(TooManyClients, match=r"all 1024 client entries but 8 .* are taken"):
            shmq.attach(broker.instance)
        for _ in range(free):
            permits.give()
    shmq.attach(broker.instance).close()
    eventually(lambda: permits.free == free)
    permits.close()


def test_who_takes_all_entries_does_not_lock_the_administrator_out(broker: shmq.Broker) -> None:
    """The last ones are for the gateway and for commands that administer."""

    def command(*words: str) -> int:
        argv = [sys.executable, "-m", "shmq", *words, f"--instance={broker.instance}"]
        return subprocess.run(argv, capture_output=True, check=False).returncode

    taken = []
    try:
        permits = shm.Permits(broker.instance)
        while permits.free > shm.RESERVE:
            taken.append(shmq.attach(broker.instance))
        permits.close()
        with pytest.raises(TooManyClients, match="all 1024 client entries but 8 for the gateway"):
            shmq.attach(broker.instance)
        assert command("pub", "t", "x") == 1
        assert command("topic", "create", "t") == 0
        gateway = attach_gateway(broker.instance, 1.0)
        assert command("channel", "create", "t", "c") == 0
        gateway.close()
        taken.pop().close()
        assert command("pub", "t", "x") == 0
    finally:
        for client in taken:
            client.close()


def test_a_full_table_of_consumers_is_an_error_and_frees_when_they_close() -> None:
    with World() as world:
        client = world.attach()
        consumers = [client.consumer("t", "c") for _ in range(layout.constant("SESSIONS"))]
        with pytest.raises(ShmqError, match="the channel has 1024 consumers already"):
            client.consumer("t", "c")
        consumers.pop().close()
        client.consumer("t", "c").close()


# ---- full queues ----


def test_a_full_queue_without_a_supervisor_says_so() -> None:
    with World() as world:
        client = world.attach()
        producer = client.producer("t")
        client.consumer("t", "c")
        producer.publish_many([b"x"] * 256)
        before = time.monotonic_ns()
        with pytest.raises(Full, match="no room in memory"):
            producer.publish(b"x", timeout=0.05)
        assert time.monotonic_ns() - before >= 0.05 * SECOND
        with pytest.raises(Full, match="or raise the limit, mem_queue_size or arena_size"):
            producer.publish_many([b"x", b"y"], timeout=0)
        with pytest.raises(Full), producer.loan(5, timeout=0):
            pass
