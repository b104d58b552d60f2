"""A start loses no message that is in the data path, whatever limits or names have changed."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.deliveries import take_all
from support.processes import WATCHDOG, Child, eventually

import shmq
from shmq import shm
from shmq.storage.diskqueue import DiskQueue
from shmq.storage.diskqueue_recovery import recover_positions
from shmq.storage.records import decode_records

Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]

BODIES = [b"message %02d........." % number for number in range(30)]
SMALL_FILES = {"max_bytes_per_file": 600}  # three files for BODIES
LARGE = {"max_msg_size": 4_000_000}


def publish(serve: Serve, attach: Attach, bodies: list[bytes], **options: object) -> None:
    """A run of a broker that leaves these messages on disk."""
    server = serve(**options)
    with attach() as broker:
        broker.create_channel("t", "c")
        for body in bodies:
            broker.producer("t").publish(body)
    assert server.kill(signal.SIGTERM) == 0


def take(broker: shmq.Broker, count: int) -> list[bytes]:
    """The bodies of so many messages, which are finished."""
    bodies: list[bytes] = []
    with broker.consumer("t", "c", max_in_flight=1000) as consumer:
        while len(bodies) < count:
            some = consumer.take_many(count - len(bodies), WATCHDOG)
            assert some
            bodies += some.bodies()
            some.finish()
    return bodies


def delivered(serve: Serve, attach: Attach, **options: object) -> tuple[list[bytes], Child]:
    """The bodies that a start with these options delivers, and its ended process."""
    server = serve(**options)
    with attach() as broker:
        bodies = take_all(broker, "t", "c").bodies
    server.kill(signal.SIGTERM)
    return bodies, server


@pytest.mark.parametrize("left", [0, 5])
def test_messages_that_a_cut_off_file_lacks_are_counted_in_the_log(
    serve: Serve, attach: Attach, data_path: Path, left: int
) -> None:
    """A file that ends between two messages is whole for all that can be seen in it."""
    publish(serve, attach, BODIES, **SMALL_FILES)
    first = data_path / "t:c.diskqueue.000001.dat"
    content = first.read_bytes()
    assert len(content) == 12 * (len(content) // 12)
    first.write_bytes(content[: left * (len(content) // 12)])
    bodies, server = delivered(serve, attach, **SMALL_FILES)
    assert bodies == BODIES[:left] + BODIES[12:]
    assert f"t:c: its files had {12 - left} messages fewer than were counted" in server.errors


@pytest.mark.parametrize("length", [b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\0\0\1\0"])
@pytest.mark.parametrize("which", [[0], [3], [10], [3, 4], [1, 5, 9]], ids=str)
def test_a_wrong_length_costs_its_own_message_alone(
    serve: Serve, attach: Attach, data_path: Path, which: list[int], length: bytes
) -> None:
    """The messages behind it are found again, and the piece that is left out is kept and named."""
    publish(serve, attach, BODIES, **SMALL_FILES)
    first = data_path / "t:c.diskqueue.000001.dat"
    content = bytearray(first.read_bytes())
    size = len(content) // 12
    for number in which:
        content[number * size : number * size + 4] = length
    first.write_bytes(content)
    bodies, server = delivered(serve, attach, **SMALL_FILES)
    kept = b"".join(path.read_bytes() for path in sorted(data_path.glob("*.bad*")))
    for number in set(range(24)) - set(which):
        if BODIES[number] not in bodies:  # a length that fits has swallowed it
            assert length == b"\0\0\1\0"
            assert BODIES[number] in kept or any(BODIES[number] in body for body in bodies)
    assert [body for body in bodies if body in BODIES] == sorted(set(bodies) & set(BODIES))
    assert server.errors.count("going on behind it") == len(list(data_path.glob("*.bad*"))) > 0
    assert delivered(serve, attach, **SMALL_FILES)[0] == []


def test_a_bad_file_that_gets_its_name_back_is_delivered(
    serve: Serve, attach: Attach, data_path: Path
) -> None:
    publish(serve, attach, BODIES, **SMALL_FILES)
    first = data_path / "t:c.diskqueue.000001.dat"
    content = first.read_bytes()
    first.write_bytes(b"\xff" * len(content))
    assert delivered(serve, attach, **SMALL_FILES)[0] == BODIES[12:]
    bad = first.with_name(first.name + ".bad")
    bad.rename(first)
    first.write_bytes(content)
    bodies, server = delivered(serve, attach, **SMALL_FILES)
    assert bodies == BODIES[:12]
    assert "t:c.diskqueue.000001.dat: below the read position" in server.errors
    assert delivered(serve, attach, **SMALL_FILES)[0] == []


def test_a_file_that_gets_its_name_back_while_memory_is_kept_is_set_aside_and_named(
    serve: Serve, attach: Attach, data_path: Path
) -> None:
    publish(serve, attach, BODIES, **SMALL_FILES)
    first = data_path / "t:c.diskqueue.000001.dat"
    content = first.read_bytes()
    first.write_bytes(b"\xff" * 600)
    server = serve(**SMALL_FILES)
    with attach() as broker:
        assert take_all(broker, "t", "c").bodies == BODIES[12:]
        broker.producer("t").publish(b"kept")
        meta = data_path / "t:c.diskqueue.meta.dat"
        eventually(lambda: not meta.read_bytes().split(b"\n")[1].startswith(b"1,"))
        server.kill()
    bad = first.with_name(first.name + ".bad")
    bad.unlink()
    first.write_bytes(content)
    bodies, server = delivered(serve, attach, **SMALL_FILES)
    assert bodies == [b"kept"]
    assert bad.read_bytes() == content
    assert f"set aside as {bad}" in server.errors
    bad.rename(first)
    assert delivered(serve, attach, **SMALL_FILES)[0] == BODIES[:12]


@pytest.mark.parametrize("taken", [0, 100, 199])
def test_the_file_in_front_of_those_on_disk_comes_once_after_a_death(
    serve: Serve, attach: Attach, data_path: Path, taken: int
) -> None:
    """Messages that go in front of the disk become the file before. A supervisor is killed then,
    and another when that file has been read. taken: messages finished before the first kill."""
    options: dict[str, object] = {"mem_queue_size": 256, "in_flight_slots": 256}
    bodies = [b"%07d" % number for number in range(500)]
    meta = data_path / "t:c.diskqueue.meta.dat"

    def files() -> list[int]:
        return [int(path.name[14:20]) for path in sorted(data_path.glob("t:c.diskqueue.0*.dat"))]

    def nothing_below() -> bool:
        """At one moment: the position file is the same before and after the look."""
        before, found = None, []
        while before is None or before != (meta.read_text() if meta.exists() else "0 0,0"):
            before = meta.read_text() if meta.exists() else "0 0,0"
            found = files()
        return all(number >= int(before.split()[1].split(",")[0]) for number in found)

    server = serve(**options)
    with attach() as broker:
        broker.create_channel("t", "c")
        producer = broker.producer("t")

        def stats() -> shmq.ChannelStats:
            return broker.channel_stats("t", "c")

        producer.publish_many(bodies[:200])
        eventually(lambda: stats().restored and not stats().backend_depth)
        producer.publish_many(bodies[200:400])
        eventually(lambda: stats().backend_depth)
        for _ in range(3):
            producer.publish_many([b"later"] * 200, defer=600)
        eventually(lambda: stats().deferred == 600)  # there is room for all: some went to disk
        assert nothing_below()
        producer.publish_many(bodies[400:])
        got = take(broker, taken)
        server.kill()
        assert nothing_below()
    serve(**options).kill()
    server = serve(**options)
    with attach() as broker:
        got += take(broker, len(bodies) - taken)
    assert sorted(got) == bodies
    assert server.kill(signal.SIGTERM) == 0
    last = serve(**options)
    with attach() as broker:
        left = broker.channel_stats("t", "c")
        assert (left.depth, left.backend_depth, left.deferred) == (0, 0, 600)
    last.kill()
    assert not list(data_path.glob("*.bad"))
    assert "below the read position" not in server.errors + last.errors


@pytest.mark.parametrize("on_stop", ["flush", "keep"])
def test_a_smaller_limit_costs_no_message(serve: Serve, attach: Attach, on_stop: str) -> None:
    bodies = [*BODIES[:10], b"B" * 3_000_000, *BODIES[10:20]]
    publish(serve, attach, bodies, on_stop=on_stop, **LARGE)
    assert delivered(serve, attach)[0] == bodies


def test_a_large_message_may_go_to_disk_again_under_a_smaller_limit(
    serve: Serve, attach: Attach
) -> None:
    bodies = [*BODIES[:10], b"B" * 3_000_000, *BODIES[10:20]]
    publish(serve, attach, bodies, **LARGE)
    server = serve()
    with attach() as broker, broker.consumer("t", "c") as consumer:
        held = [consumer.take(20) for _ in range(12)]
        assert [bytes(message.body) for message in held if message] == bodies[:12]
    assert server.kill(signal.SIGTERM) == 0
    assert sorted(delivered(serve, attach)[0]) == sorted(bodies)


@pytest.mark.parametrize("defer", [None, 0.5])
def test_a_message_that_never_fits_holds_up_no_other_and_the_log_says_how_it_comes_back(
    serve: Serve, attach: Attach, defer: float | None
) -> None:
    server = serve(**LARGE)
    large = b"L" * 2_000_000
    with attach() as broker:
        broker.create_channel("t", "c")
        producer = broker.producer("t")
        producer.publish(large, defer=defer)
        for body in BODIES:
            producer.publish(body, defer=None if defer is None else 2 * defer)
    assert server.kill(signal.SIGTERM) == 0
    server = serve(arena_size=1_000_000, max_msg_size=600_000)
    with attach() as broker, broker.consumer("t", "c") as consumer:
        got = []
        while len(got) < len(BODIES):
            message = consumer.take(20)
            assert message is not None
            got.append(bytes(message.body))
            message.finish()
        assert sorted(got) == BODIES
        stats = broker.channel_stats("t", "c")
        assert (stats.depth, stats.deferred) == (0, 0)
    assert server.kill(signal.SIGTERM) == 0
    found = re.search(
        r"can never fit.* stop the broker, (mv -n .*) \(or.*--arena-size=(\d+)", server.errors
    )
    assert found is not None, server.errors
    subprocess.run(shlex.split(found[1]), check=True)
    bodies, _ = delivered(serve, attach, arena_size=int(found[2]), max_msg_size=600_000)
    assert bodies == [large]


@pytest.mark.parametrize("count", [100, 3000])
def test_with_a_memory_of_0_what_waits_is_on_disk_until_it_is_finished(
    serve: Serve, attach: Attach, data_path: Path, tmp_path: Path, count: int
) -> None:
    """A copy of the data path has what a power loss would leave."""
    bodies = [b"%05d" % number for number in range(count)]
    server = serve(mem_queue_size=0, sync_timeout="50ms")
    with attach() as broker, broker.consumer("t", "c", max_in_flight=1000) as consumer:
        for number in range(0, count, 100):
            broker.producer("t").publish_many(bodies[number : number + 100])
        held = consumer.take_many(50, 20)
        held.finish()
        copies = itertools.count()

        def all_are_there() -> bool:
            copy = tmp_path / f"copy{next(copies)}"
            copy.mkdir()
            for name in ("t:c.diskqueue.meta.dat", "t:c.diskqueue.000001.dat"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copy(data_path / name, copy)
            with DiskQueue(copy, "t:c") as queue:
                meta = recover_positions(queue)
                run = queue.read(meta.read_position, meta.write_position, 1 << 30)
                found = [record.body for record in decode_records(bytes(run.data), 1 << 20)]
            # of those that were finished the last ones may come again
            return set(found) >= set(bodies) - set(held.bodies())

        eventually(all_are_there)
        taken = consumer.take_many(50, 20)
        assert taken
        for _ in range(3):
            assert all_are_there()
        taken.finish()
        rest = 50 + len(taken)
        while rest < count:
            batch = consumer.take_many(500, 20)
            assert batch
            rest += len(batch)
            batch.finish()
        meta = data_path / "t:c.diskqueue.meta.dat"
        eventually(lambda: meta.exists() and meta.read_text().startswith("0\n"))
    assert server.kill(signal.SIGTERM) == 0
    assert delivered(serve, attach)[0] == []


def test_what_was_read_back_comes_once_after_a_stop_in_order(serve: Serve, attach: Attach) -> None:
    """With a memory of 0 its files stay until then, and go with the stop."""
    options = {"mem_queue_size": 0, **SMALL_FILES}
    server = serve(**options)
    with attach() as broker:
        broker.create_channel("t", "c")
        for body in BODIES:
            broker.producer("t").publish(body)
        eventually(lambda: broker.stats().channel("t", "c").restored > 12)
    assert server.kill(signal.SIGTERM) == 0
    assert delivered(serve, attach, **options)[0] == BODIES


@pytest.mark.parametrize("memory", [0, 1])
def test_files_say_what_is_needed_when_the_memory_that_was_kept_is_lost(
    serve: Serve, attach: Attach, instance: str, memory: int
) -> None:
    """A finished message does not come again; with a memory of 0 every other does."""
    options = {"mem_queue_size": memory}
    bodies = [b"%06d" % number for number in range(2000)]
    server = serve(on_stop="keep", **options)
    with attach() as broker:
        consumer = broker.consumer("t", "c", max_in_flight=100)
        producer = broker.producer("t")
        for body in bodies:
            producer.publish(body)
        finished = []
        while len(finished) < 1500:
            batch = consumer.take_many(100, 20)
            finished += batch.bodies()
            batch.finish()
    assert server.kill(signal.SIGTERM) == 0
    shm.unlink_instance(instance)  # as after a start of the host
    came = delivered(serve, attach, **options)[0]
    assert finished == bodies[: len(finished)]
    assert not set(came) & set(finished)
    if memory == 0:
        assert came == bodies[len(finished) :]
