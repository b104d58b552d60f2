"""Channels with settings, on a disk that fails: each scene returns what came and what must have
come."""

from __future__ import annotations

import contextlib
import time

from rig import Rig, again, ended, heal, typed

from shmq.client import Batch
from shmq.errors import Full
from shmq.settings import NONE
from shmq.storage import metadata
from shmq.supervisor import book

COUNT = 400  # more than memory holds


def limits(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """One topic: c goes to disk, `narrow` holds up its publisher and never goes there, `fresh`
    drops its oldest messages, which are dead letters then."""
    rig.consumer("t", "c").close()
    narrow = rig.configure("t", "narrow", overflow="block", max_messages=20)
    rig.configure("t", "fresh", overflow="drop-oldest", max_messages=30, overflow_to_dead=True)
    rig.consumer("t.fresh.dead", "dead").close()
    producer, taker = rig.producer("t"), rig.consumer("t", "narrow")
    through: list[int] = []
    for number in range(COUNT):
        for _ in range(2000):
            try:
                producer.publish(b"%06d" % number + bytes(200), None, 0)
                break
            except Full:
                batch = taker.take_many(5, 0)
                through += numbers(batch)
                batch.finish()
                if not len(batch):
                    rig.advance()
        else:
            raise AssertionError(f"there is never room for {number}")
        if number % 50 == 0:
            rig.scan()
            rig.round()
    assert narrow.view.read("disk_depth") == narrow.view.read("spilled") == 0
    taker.close()
    rig.scan()
    rig.round()
    rig = ended(rig)
    rig.scan()
    through += rig.drain("t", "narrow", COUNT - len(through))
    latest = rig.drain("t", "fresh", 30)
    assert latest == sorted(latest), latest
    rig.scan()
    dropped = rig.drain("t.fresh.dead", "dead", COUNT - len(latest))
    came = rig.drain("t", "c", COUNT)
    return rig, came + through + sorted(dropped + latest), [*range(COUNT)] * 3


def dead(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """Messages that fail, that are rejected and that are finished: more letters than memory
    holds."""
    rig.configure("t", "c", max_attempts=1)
    rig.consumer("t.c.dead", "dead").close()
    rig.publish(rig.producer("t"), range(COUNT + 200))
    taker, finished, idle = rig.consumer("t", "c"), list[int](), 0
    while idle < 30:
        batch = taker.take_many(60, 0)
        for number, message in zip(numbers(batch), batch, strict=True):
            if number % 9 == 0:
                message.finish()
                finished.append(number)
            elif number % 2:
                message.reject(f"number {number}")
            else:
                message.requeue()
        idle = 0 if len(batch) else idle + 1
        rig.scan()
        rig.round()
    taker.close()
    rig = ended(rig)
    for _ in range(3):
        rig.scan()  # those that had to wait
        rig.round()
    return rig, sorted(finished + letters(rig, COUNT + 200)), list(range(COUNT + 200))


def letters(rig: Rig, most: int) -> list[int]:
    """The numbers of all dead letters of t/c, each with its reason."""
    came, idle, taker = list[int](), 0, rig.consumer("t.c.dead", "dead")
    while idle < 30 and len(came) < most:
        batch = taker.take_many(100, 0)
        for number, properties in zip(numbers(batch), batch.properties, strict=True):
            reason = {b"rejected"} if number % 2 else {b"attempts"}
            assert properties["dead-reason"] in reason | {b"expired"}, (number, dict(properties))
            assert properties["dead-from"] == b"t/c", (number, dict(properties))
            if properties["dead-reason"] == b"rejected":
                assert properties["dead-error"] == b"number %d" % number
            came.append(number)
        batch.finish()
        idle = 0 if len(batch) else idle + 1
        rig.advance()
    taker.close()
    return came


def expiry(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """Every other message has a short life, and is a dead letter after it, wherever it waited."""
    rig.configure("t", "c", expired_to_dead=True)
    rig.consumer("t.c.dead", "dead").close()
    producer, life = rig.producer("t"), 0.02
    for number in range(COUNT):
        for _ in range(2000):
            try:
                producer.publish(
                    b"%06d" % number + bytes(200), None, 0, None, life if number % 2 else None
                )
                break
            except Full:
                rig.advance()
        else:
            raise AssertionError(f"there is never room for {number}")
    over = time.time() + life
    rig.round()
    while time.time() <= over:
        rig.scan()
    rig = ended(rig)
    for _ in range(3):
        rig.scan()
        rig.round()
    came = rig.drain("t", "c", COUNT)
    assert came == list(range(0, COUNT, 2)), [number for number in came if number % 2][:5]
    for _ in range(3):
        rig.scan()  # what expired on disk has come to memory
        rig.round()
    return rig, sorted(came + letters(rig, COUNT)), list(range(COUNT))


def settings(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """shmq.dat has old or new settings, whole: new ones after a flush that returned. Those that
    hold survive a stop and a death."""
    writer, attempts = rig.supervisor._metadata_writer, range(1, 6)
    for number in attempts:
        rig.configure("t", f"c{number}", max_attempts=number, retry_delay=(1, number))
        rig.configure("t", "c", max_attempts=number)
        written = False
        with contextlib.suppress(OSError):
            writer.flush()
            written = True
        try:
            saved = book.from_document(rig.path, metadata.load_settings(rig.path))
        except OSError as exc:  # the disk does not read either
            typed(exc)
            continue
        if written:
            assert saved["t"][1]["c"].max_attempts == number, saved
        for _, channels in saved.values():
            for name, found in channels.items():
                if name != "c":
                    assert found == NONE.changed(
                        {"max_attempts": int(name[1:]), "retry_delay": (1, int(name[1:]))}
                    ), (name, found)
    rig = ended(rig)
    heal()
    held = [held_by(rig, f"c{number}") for number in attempts]
    rig.supervisor._metadata_writer.flush()
    rig = again(rig)
    return rig, [*held, held_by(rig, "c")], [*attempts, 5]


def held_by(rig: Rig, channel: str) -> int:
    """Its max_attempts."""
    topic = rig.supervisor._registry.topic("t")
    assert topic is not None
    found = topic.queues[channel].view.settings
    assert found is not None
    return found.max_attempts or 0


def properties(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """Messages with properties, out and in again; some without, and some whose body looks like an
    envelope."""
    rig.consumer("t", "c").close()
    producer = rig.producer("t")
    for number in range(COUNT):
        for _ in range(2000):
            try:
                producer.publish(body_of(number), None, 0, properties_of(number) or None)
                break
            except Full:
                rig.advance()
        else:
            raise AssertionError(f"there is never room for {number}")
    rig.round()
    rig = ended(rig)
    came, idle, taker = list[int](), 0, rig.consumer("t", "c")
    while idle < 30 and len(came) < COUNT:
        batch = taker.take_many(100, 0)
        for body, found in zip(batch.bodies(), batch.properties, strict=True):
            number = int(bytes(body).removeprefix(MAGIC)[:6])
            assert bytes(body) == body_of(number), number
            assert dict(found) == properties_of(number), (number, dict(found))
            came.append(number)
        batch.finish()
        idle = 0 if len(batch) else idle + 1
        rig.advance()
    taker.close()
    return rig, came, list(range(COUNT))


MAGIC = b"\xf5shmqp\1\n"


def body_of(number: int) -> bytes:
    return (MAGIC if number % 7 == 0 else b"") + b"%06d" % number + bytes(150)


def properties_of(number: int) -> dict[str, bytes]:
    if number % 3 == 0:
        return {}
    return {"key": b"%d" % number, "blob": bytes([number % 256]) * (number % 5 * 40)}


def numbers(batch: Batch) -> list[int]:
    return [int(bytes(body[:6])) for body in batch.bodies()]
