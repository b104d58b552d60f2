"""The scenes of test_leaks: each calls functions of the extension, in success and in failure."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.in_process_broker import World

from shmq import BadArgument, ShmqError, _native
from shmq.client import Batch, Consumer, Producer
from shmq.client.properties import pack

#: The names of what a scene calls -> the scene.
SCENES: dict[str, Callable[[Scene], Any]] = {}
SLOW: set[str] = set()


class Made(NamedTuple):
    """A results store with its segment."""

    handle: _native.Store
    serial: int
    fd: int


class Scene:
    """A world with a topic, a channel, a producer and a consumer."""

    def __init__(self) -> None:
        self.world = World()
        self.supervisor = self.world.supervisor
        self.topic, self.generation = self.world.create_topic("t")
        self.queue, self.serial = self.world.create_channel("t", "c")
        self.broker = self.world.attach_native()
        self.producer = self.make_producer()
        self.consumer = self.make_consumer()
        self.number = 0

    def make_producer(self) -> Producer:
        return Producer(self.broker, self.topic, self.generation, "t", nothing, nothing)  # type: ignore[arg-type]

    def make_consumer(self) -> Consumer:
        return Consumer(
            self.broker,
            self.queue,
            self.serial,
            "t",
            "c",
            100,
            0,
            Batch,
            nothing,  # type: ignore[arg-type]
        )

    def message(self, size: int = 10) -> Any:
        self.producer.publish(b"x" * size, timeout=0)
        message = self.consumer.take(0)
        assert message is not None
        return message

    def batch(self, count: int = 5) -> Any:
        self.producer.publish_many([b"x" * 10] * count, timeout=0)
        return self.consumer.take_many(count, 0)

    def make_store(self) -> Made:
        """A results store `r`, opened by the supervisor."""
        place, serial = self.supervisor.reserve_store()
        fd = self.world.new_file(serial)
        self.supervisor.create_store(fd, place, serial, "r", 100, 1 << 20)
        self.supervisor.enter_store(place, serial, "r", 100, 1 << 20)
        return Made(_native.Store(self.supervisor, place, serial, "r"), serial, fd)

    def remove_store(self, store: _native.Store) -> None:
        """Remove it, so that the scene can be played again."""
        store.retire()
        found = self.supervisor.find_store(store.name)
        assert found is not None
        self.supervisor.remove_store(*found)
        self.world.drop_file(found[1])

    def close(self) -> None:
        self.broker.detach()
        self.world.close()


def nothing() -> None:
    raise AssertionError("not here")


def scene(*covers: str, slow: bool = False) -> Callable[[Callable[[Scene], Any]], Any]:
    """The names of the functions it calls, as in the stub."""

    def register(function: Callable[[Scene], Any]) -> Callable[[Scene], Any]:
        name = " ".join(covers) or function.__name__
        SCENES[name] = function
        if slow:
            SLOW.add(name)
        return function

    return register


# ---- the module ----

for _name in ("now", "realtime", "fork_generation", "fingerprint", "directory_bytes"):
    SCENES[_name] = lambda s, name=_name: getattr(_native, name)()  # type: ignore[misc]


LIMITS = {"arena_size": 1 << 20, "mem_queue_size": 100, "in_flight_slots": 100}


@scene(
    "name_valid", "queue_bytes", "scan_records", "leasable_records", "decode_records", "has_pages"
)
def pure(s: Scene) -> None:
    _native.name_valid("topic")
    _native.name_valid("not valid")
    _native.queue_bytes(**LIMITS)
    _native.scan_records(b"\0" * 100, 100)
    _native.leasable_records(b"\0" * 100, 100, True)
    assert _native.has_pages(b"\0" * 100, 50, 50)
    assert not _native.has_pages(b"\0" * 100, 50, 51)
    record = b"\0\0\0\x1b" + bytes(10) + b"0" * 16 + b"x"
    assert _native.decode_records(record * 2, 2)[-1] == b"xx"
    for records, number in ((record, 2), (record, 0), (record[:-1], 1)):
        with pytest.raises((ShmqError, ValueError)):
            _native.decode_records(records, number)
    for call in (
        lambda: _native.name_valid(5),  # type: ignore[arg-type]
        lambda: _native.queue_bytes(arena_size=1),  # type: ignore[call-arg]
        lambda: _native.scan_records("text", 100),
        lambda: _native.leasable_records("text", 100, True),
        lambda: _native.decode_records("text", 1),
        lambda: _native.has_pages("text", 0, 1),
        lambda: _native.scan_records(b"", 1, 2, 3),  # type: ignore[call-arg]
    ):
        with contextlib.suppress(TypeError):
            call()
            raise AssertionError


@scene(
    "pack_properties",
    "unpack_properties",
    "record_properties",
    "split_body",
    "encode_slot",
    "Broker.lease_properties",
    "Batch.blocks",
    "Message.properties",
)
def properties(s: Scene) -> None:
    some: dict[str, Any] = {"key": "17", "raw": b"\0", "other": bytearray(b"x")}
    block = _native.pack_properties(some)
    assert _native.unpack_properties(block)["key"] == b"17"
    s.producer.publish(b"one", timeout=0, properties=some)
    s.producer.publish_list([b"two", b"three"], None, 0, [block, b""])
    s.producer.publish_fixed(b"ab", 2, 1, None, 0, block)
    with s.producer.loan(3, properties=some):
        pass
    with s.consumer.take(0) as message:
        assert message.properties is message.properties
    batch = s.consumer.take_many(10, 0)
    assert batch.blocks() == [block, b"", block, block, block]
    assert [len(message.properties) for message in batch] == [3, 0, 3, 3, 3]
    batch.finish()
    s.producer.publish(b"leased", timeout=0, properties=some)
    view = s.world.queue_view(s.queue)
    slot = view.slots[int(view.ready[0])]
    record = _native.encode_slot(slot.tobytes(), block + b"leased", "t", bytes(32))
    assert _native.split_body(record[30:]) == (block, b"leased")
    assert _native.record_properties(record, 1)[1] == block
    holder = s.broker.lease_holder_open(s.queue, s.serial, "me", 10**12, 10**12)
    lease = s.broker.lease_take(holder, 0, 5, 1000, 1)
    assert lease is not None
    cursor = s.broker.lease_open(s.queue, s.serial, lease[0], 0)
    assert s.broker.lease_properties(cursor, 1)[1] == block
    s.broker.lease_finish(holder, lease[0])
    for call in (
        lambda: _native.pack_properties({"K": "x"}),
        lambda: _native.pack_properties({"k": 5}),  # type: ignore[dict-item]
        lambda: _native.pack_properties({5: "x"}),  # type: ignore[dict-item]
        lambda: _native.pack_properties({"k": "x" * 5000}),
        lambda: _native.pack_properties([1]),  # type: ignore[arg-type]
        lambda: _native.unpack_properties(block[:-1]),
        lambda: _native.unpack_properties("text"),
        lambda: _native.record_properties(record[:-1], 1),
        lambda: _native.record_properties("text", 1),
        lambda: _native.split_body("text"),
        lambda: _native.encode_slot(b"", b"", "t", None),
        lambda: _native.encode_slot("text", b"", "t", None),
        lambda: _native.encode_slot(b"", "text", "t", None),
        lambda: _native.encode_slot(b"", b"", "t", b"short"),
        lambda: _native.encode_slot(b"", b"", 5, None),  # type: ignore[arg-type]
        lambda: s.broker.lease_properties(cursor, 1),
        lambda: s.broker.lease_properties((1,), 1),
        lambda: s.producer.publish(b"x", properties={"k": 5}),  # type: ignore[dict-item]
        lambda: s.producer.publish_list([b"x"], None, 0, [b"", b""]),
        lambda: s.producer.publish_list([b"x"], None, 0, [5]),  # type: ignore[list-item]
        lambda: s.producer.publish_list([b"x"], None, 0, b"\1k"),
        lambda: s.producer.publish_fixed(b"x", 1, 1, None, 0, 5),  # type: ignore[arg-type]
        lambda: s.producer.loan(1, properties={"K": "x"}),
    ):
        with pytest.raises((TypeError, ValueError, ShmqError)):
            call()
    s.broker.empty(s.queue, s.serial)


@scene("scan_bodies", "Producer.publish_framed", "Producer.publish_run")
def framed(s: Scene) -> None:
    data = bytearray(b"\0\0\0\1a\0\0\0\2bc\0\0\0\0")
    assert _native.scan_bodies(data, 0, 15, 3, 100) == (11, 2, 0)
    assert _native.scan_bodies(data, 0, 11, 3, 1) == (5, 1, 2)
    assert _native.scan_bodies(data, 0, 8, 2, 9) == (5, 1, None)
    assert s.producer.publish_framed(data, 0, 2, None, 0) == 11
    line = b"PUB t\n"
    run = line + data[:5] + line + data[5:11] + line + data[11:]
    assert s.producer.publish_run(run, 0, len(run), b"M" + line, 100, 100) == (23, 2, 2)
    assert s.producer.publish_run(run, 0, len(run), b"MPUB u\n", 100, 100) == (0, 0, 0)
    batch = b"M" + line + b"\0\0\0\x0f\0\0\0\2" + data[:11]
    assert s.producer.publish_run(batch, 0, 26, b"M" + line, 100, 100) == (26, 2, 1)
    assert s.producer.publish_run(batch, 0, 25, b"M" + line, 100, 100) == (0, 0, 0)
    for call in (
        lambda: s.producer.publish_run(run, 5, 4, line, 9, 9),
        lambda: s.producer.publish_run(run, 0, 4, b"", 9, 9),
        lambda: _native.scan_bodies(data, 5, 4, 1, 9),
        lambda: s.producer.publish_framed(data, 5, 2, None, 0),
        lambda: s.producer.publish_framed(data, 500, 1),
    ):
        with pytest.raises(ValueError):
            call()
    s.consumer.take_many(6, 0).finish()


@scene(
    "Intake.begin",
    "Intake.buffer_updated",
    "Intake.close",
    "Intake.end",
    "Intake.get_buffer",
    "Intake.publishes",
)
def intake(s: Scene) -> None:
    room, said = memoryview(bytearray(100)), []
    ours, theirs = socket.socketpair()
    intake = _native.Intake(lambda hint: room[:hint], said.append, said.append)
    assert len(intake.get_buffer(7)) == 7
    assert not intake.publishes(14)
    command = b"PUB t\n\0\0\0\1a"
    room[:14] = command + b"PUB"
    intake.begin(ours.fileno(), room, s.producer, b"MPUB t\n", 100, 100)
    assert intake.get_buffer(7) is room
    intake.buffer_updated(11)
    intake.buffer_updated(14)
    assert theirs.recv(100) == b"\0\0\0\6\0\0\0\0OK"
    assert intake.end()[0] == 1
    intake.begin(-1, room, s.producer, b"MPUB t\n", 100, 100)
    assert intake.publishes(11)
    assert said == [14, b"\0\0\0\6\0\0\0\0OK"]
    with pytest.raises(TypeError):
        intake.begin(0, room, None, b"MPUB t\n", 100, 100)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        intake.publishes("")  # type: ignore[arg-type]
    intake.close()
    with pytest.raises(ShmqError):
        intake.publishes(1)
    waiter = _native.Waiter(s.broker)
    intake = _native.Intake(lambda hint: room[:hint], said.append, said.append, waiter, said.append)
    s.consumer.take_many(2, 0).finish()
    assert not waiter.announce(s.consumer)
    intake.begin(ours.fileno(), room, s.producer, b"MPUB t\n", 100, 100)
    assert intake.publishes(11)
    assert said[2:] == [[s.queue]]
    with pytest.raises(TypeError):
        _native.Intake(said.append, said.append, said.append, waiter)
    waiter.close()
    for sock in (ours, theirs):
        sock.close()
    s.consumer.take_many(6, 0).finish()


@scene(
    "Window.take",
    "Window.finish_run",
    "Window.finish",
    "Window.requeue",
    "Window.touch",
    "Consumer.limit",
    "Consumer.session",
)
def window(s: Scene) -> None:
    consumer = s.make_consumer()
    window = _native.Window(consumer)
    assert consumer.session is not None
    assert window.take(1, 100) is None
    s.producer.publish_many([b"x" * 10] * 12, timeout=0)
    consumer.limit(11)
    taken = window.take(100, 10_000)
    assert taken is not None
    frames, count = taken
    assert (len(frames), count) == (44 * 11, 11)
    ids = [frames[18 + 44 * i : 34 + 44 * i] for i in range(count)]
    assert window.touch(ids[0])
    assert window.requeue(ids[0], 0)
    assert not window.requeue(ids[0], 0)
    assert window.finish(ids[1])
    assert not window.finish(b"nonsense")
    lines = bytearray(b"".join(b"FIN %b\n" % item for item in ids[1:]) + b"FIN half")
    assert window.finish_run(lines, 0, len(lines)) == (10 * 21, 9, [ids[1]])
    with pytest.raises(ValueError):
        window.finish_run(lines, 5, 5000)
    consumer.limit(100)
    while rest := window.take(100, 10_000, 99):
        window.finish(rest[0][18:34])
        if rest[1] > 1:
            window.finish(rest[0][62:78])
    consumer.close()
    assert consumer.session is None
    with pytest.raises(ShmqError):
        window.take(1, 1)


@scene("create_directory", slow=True)
def create_directory(s: Scene) -> None:
    fd = os.memfd_create("x")
    try:
        _native.create_directory(fd, bytes(32), **s.world.limits)
        with pytest.raises(ShmqError):
            _native.create_directory(fd, **s.world.limits | {"in_flight_slots": 1})
        with pytest.raises(TypeError):
            _native.create_directory(fd, 5)  # type: ignore[call-arg, misc]
        with pytest.raises(ValueError, match="32 bytes"):
            _native.create_directory(fd, b"short", **s.world.limits)
    finally:
        os.close(fd)


# ---- Broker ----


@scene("Broker.detach", slow=True)
def attach(s: Scene) -> None:
    broker = s.world.attach_native()
    producer = Producer(broker, s.topic, s.generation, "t", nothing, nothing)  # type: ignore[arg-type]
    consumer = Consumer(broker, s.queue, s.serial, "t", "c", 9, 0, Batch, nothing)  # type: ignore[arg-type]
    producer.publish(b"x" * 5000, timeout=0)
    message = consumer.take(0)
    assert message is not None
    message.view.release()
    view, loan = message.view, producer.loan(10)
    loan.__enter__()
    broker.detach()
    broker.detach()
    view.release()
    with pytest.raises(ShmqError):
        loan.__exit__(None, None, None)
    s.supervisor.empty(s.queue, s.serial)
    s.world.attach_native()  # dropped without detach
    with pytest.raises(ShmqError):
        _native.Broker(s.world._segments[s.serial], nothing)  # type: ignore[arg-type]


@scene(
    "Broker.client",
    "Broker.forked",
    "Broker.closed",
    "Broker.stopped",
    "Broker.supervisor_alive",
    "Broker.find_topic",
    "Broker.find_queue",
    "Broker.view",
)
def look(s: Scene) -> None:
    assert (s.broker.forked, s.broker.closed, s.broker.supervisor_alive()) == (False, False, True)
    assert not s.broker.stopped
    assert s.broker.client > 0
    s.broker.find_topic("t")
    s.broker.find_topic("nothing")
    s.broker.find_queue(s.topic, "c")
    s.broker.find_queue(s.topic, None)
    np.frombuffer(s.broker.view(), np.uint8, 100)
    s.broker.view(s.queue).release()
    with pytest.raises(ShmqError):
        s.broker.view(1000)


@scene("Broker.request", "Broker.next_request", "Broker.answer")
def request(s: Scene) -> None:
    with pytest.raises(ShmqError, match="not answered"):
        s.broker.request(1, "topic", None, 0)
    s.supervisor.next_request()
    with pytest.raises(ShmqError):
        s.broker.request(1, "not valid", "c", 0)
    with pytest.raises(ShmqError):
        s.broker.request(2, "topic", "channel", 0)
    assert s.supervisor.next_request() is None
    s.supervisor.answer(5, 0)


@scene("Broker.sweep")
def sweep(s: Scene) -> None:
    s.producer.publish(b"x", ttl=0.000001)
    while not s.broker.sweep(s.queue):  # its time may not be over yet
        pass
    with contextlib.suppress(ValueError):
        s.producer.publish(b"x", ttl=0)


@scene("Broker.configure", "Broker.configure_topic", "Broker.settings", "Broker.topic_settings")
def configure(s: Scene) -> None:
    words = (5, 6, 7, 8, 9, 10, 2, 1, "dead")
    s.broker.configure(s.queue, s.serial, words)
    assert s.broker.settings(s.queue, s.serial) == words
    s.broker.configure_topic(s.topic, s.generation, words)
    assert s.broker.topic_settings(s.topic, s.generation) == words
    for wrong in ((0, 0, -1, 0, 0, 0, 0, 0, ""), (0,) * 8, (0, 0, 0, 0, 0, 0, 0, 0, "x" * 99)):
        with contextlib.suppress(BadArgument, TypeError, ValueError):
            s.broker.configure(s.queue, s.serial, wrong)  # type: ignore[arg-type]
    none = (0, 0, 0, 0, 0, 0, 0, 0, "")
    s.broker.configure(s.queue, s.serial, none)
    s.broker.configure_topic(s.topic, s.generation, none)


@scene("Broker.pause_topic", "Broker.pause_channel", "Broker.empty")
def pause(s: Scene) -> None:
    for paused in (True, False):
        s.broker.pause_topic(s.topic, s.generation, paused)
        s.broker.pause_channel(s.queue, s.serial, paused)
    s.producer.publish(b"x", timeout=0)
    s.broker.empty(s.queue, s.serial)
    with pytest.raises(ShmqError):
        s.broker.empty(900, 900)


@scene(
    "Batch.reject",
    "Message.reject",
    "Consumer.redrive",
    "Broker.dead_topic",
    "Broker.dead_move",
    "Broker.dead_waiting",
    "Broker.dead_postpone",
)
def messages_die(s: Scene) -> None:
    name = s.broker.dead_topic(s.queue, s.serial)
    found = s.broker.find_topic(name)
    if found is None:
        found = s.world.create_topic(name)
        s.world.create_channel(name, "dead")
    place = s.broker.find_queue(found[0], "dead")
    assert place is not None
    graves = Consumer(s.broker, *place, name, "dead", 100, 0, Batch, nothing)  # type: ignore[arg-type]
    s.message().reject("an error")
    s.batch().reject()
    letters = [graves.take(0) for _ in range(6)]
    graves.redrive(letters[0], s.queue, s.serial)
    with pytest.raises(ShmqError):
        graves.redrive(letters[0], s.queue, s.serial)
    with pytest.raises(ShmqError):
        letters[1].reject()
    for wrong in (5, b"x"):
        with pytest.raises(TypeError):
            s.message().reject(wrong)
        with pytest.raises(TypeError):
            graves.redrive(wrong, s.queue, s.serial)
    for letter in letters[1:]:
        letter.finish()
    graves.close()
    assert s.supervisor.dead_move(s.queue, s.serial, *found, 5) == 0
    assert not s.supervisor.dead_waiting(s.queue)
    assert s.supervisor.dead_postpone(s.queue, 5, 5) == 0
    with pytest.raises(ShmqError):
        s.supervisor.dead_move(s.queue, s.serial, s.topic, s.generation, 5)
    with pytest.raises(ShmqError):
        s.broker.dead_topic(s.queue, 12345)
    s.broker.empty(s.queue, s.serial)


@scene(
    "Waiter.wait",
    "Waiter.wake",
    "Waiter.pass_on",
    "Waiter.announce",
    "Waiter.withdraw",
    "Waiter.close",
)
def wait(s: Scene) -> None:
    waiter = _native.Waiter(s.broker)
    other = s.make_consumer()
    assert waiter.wait([s.consumer, other], 0) == []
    waiter.wake()
    assert waiter.wait([s.consumer], _native.now() + 10**9) == []
    s.producer.publish(b"x", timeout=0)
    assert waiter.wait([s.consumer, other], _native.now() + 10**9)
    waiter.pass_on(s.consumer)
    assert waiter.announce(s.consumer)
    assert waiter.withdraw(s.consumer)
    with pytest.raises(TypeError):
        waiter.announce(None)  # type: ignore[arg-type]
    for wrong in (None, [5], "ab"):
        with pytest.raises((TypeError, ShmqError)):
            waiter.wait(wrong, 0)  # type: ignore[arg-type]
    waiter.close()
    with pytest.raises(ShmqError):
        waiter.wait([s.consumer], 0)
    with pytest.raises(ShmqError):
        waiter.withdraw(s.consumer)
    _native.Waiter(s.broker)  # dropped
    other.close()
    s.broker.empty(s.queue, s.serial)


@scene(
    "Broker.lease_holder_open",
    "Broker.lease_holder_touch",
    "Broker.lease_holder_adopt",
    "Broker.lease_holder_close",
    "Broker.lease_holder_leave",
    "Broker.lease_take",
    "Broker.lease_look",
    "Broker.lease_list",
    "Broker.lease_finish",
    "Broker.lease_return",
    "Broker.lease_end",
    "Broker.lease_wait",
    "Broker.lease_open",
    "Broker.lease_read",
)
def leases(s: Scene) -> None:
    holder = s.broker.lease_holder_open(s.queue, s.serial, "me", 10**12, 10**12)
    s.broker.lease_holder_touch(holder)
    s.broker.lease_holder_adopt(holder)
    assert s.broker.lease_take(holder, 0, 5, 1000, 1) is None
    assert not s.broker.lease_wait(holder, 0)
    s.producer.publish_many([b"x" * 10] * 6, timeout=0)
    taken = [s.broker.lease_take(holder, 0, 2, 1000, 2) for _ in range(3)]
    first, second, third = (lease[0] for lease in taken if lease)
    assert len(s.broker.lease_list(holder)) == 3
    assert s.broker.lease_look(holder, first, True)[-2:] == (1, 0)
    cursor = s.broker.lease_open(s.queue, s.serial, first, 1)
    cursor, count, *columns = s.broker.lease_read(cursor, 10, 1000)
    assert (cursor[-1], count, columns[-1]) == (0, 1, b"x" * 10)
    assert s.broker.lease_return(holder, third) == 2
    assert s.broker.lease_end(s.queue, s.serial, second, True) == 2
    assert s.broker.lease_finish(holder, first) == 2
    for wrong in (
        lambda: s.broker.lease_look(holder, first),
        lambda: s.broker.lease_return(holder, first),
        lambda: s.broker.lease_finish(holder, third),
        lambda: s.broker.lease_end(s.queue, s.serial, first, False),
        lambda: s.broker.lease_open(s.queue, s.serial, first, 0),
        lambda: s.broker.lease_read(cursor, 1, 1),
        lambda: s.broker.lease_take(holder, 0, 0, 1, 1),
        lambda: s.broker.lease_take(5, 0, 1, 1, 1),  # type: ignore[arg-type]
        lambda: s.broker.lease_read((1, 2), 1, 1),
        lambda: s.broker.lease_take(holder, 0, 1, 1, 1, (0, 0, 0, 0, b"")),
        lambda: s.broker.lease_take(holder, 0, 1, 1, 1, (0, 9, 9, 1, b"x")),
        lambda: s.broker.lease_take(holder, 0, 1, 1, 1, (0, 9, 9)),  # type: ignore[arg-type]
        lambda: s.broker.lease_holder_open(s.queue, s.serial, ""),
        lambda: s.broker.lease_holder_touch((s.queue, s.serial, 5, 5)),
        lambda: s.broker.lease_holder_adopt((s.queue, s.serial, 5, 5)),
    ):
        with pytest.raises((ShmqError, TypeError, ValueError)):
            wrong()
    assert s.broker.lease_take(holder, 0, 1, 1, 1, (5, 9, 9, 1, bytes(8))) is None
    s.broker.lease_holder_leave(holder)
    s.broker.lease_holder_close(holder)
    s.broker.empty(s.queue, s.serial)


@scene("Producer.publish_once", "Producer.mark")
def marks(s: Scene) -> None:
    offsets = np.array([0, 1, 2], np.int32)
    s.number += 1
    arguments = (b"ab", offsets, False, 0, 2, 1, 2, s.number, 0, 2, 0)
    assert s.producer.publish_once(*arguments)
    assert s.producer.publish_once(*arguments) is None
    assert s.producer.mark(1, 2) == (s.number + 1, 2)
    s.number += 1
    more = (*arguments[:7], s.number, 0, 2, 0)
    assert s.producer.publish_once(*more, [pack({"a": b"b"}), b""], 5)
    with pytest.raises(ValueError):
        s.producer.publish_once(*more, [b""])
    with pytest.raises(ValueError):
        s.producer.publish_once(b"a", *arguments[1:])
    with pytest.raises(ShmqError):
        s.producer.publish_once(*arguments[:7], s.number + 1, 5, 7, 0)
    s.broker.empty(s.queue, s.serial)
