"""A data path that goes away, refuses writes or has no inodes left while the broker runs: what is
there is served, nothing is lost, it is said once, and all goes on when the disk is back.

The file systems are tiny ones, mounted in a mount namespace of the child's own.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import HELPERS, Child, say

import shmq

Spawn = Callable[..., Child]


def mounted(path: Path, words: str) -> list[str]:
    """Words before a command: run it with a tmpfs with these options at `path`."""
    script = f'mount -t tmpfs -o mode=700,{words} tmpfs "{path}" && exec "$@"'
    return ["unshare", "-Urm", "sh", "-c", script, "sh"]


def lose_the_place(instance, data_path, how):
    from pathlib import Path

    from support.deliveries import take_all
    from support.processes import eventually, serve

    def run(*words):
        assert os.spawnvp(os.P_WAIT, words[0], words) == 0, words

    away = data_path + ".away"
    if how == "unmounted":
        os.mkdir(away)
        run("mount", "--bind", data_path, away)
    small = {"mem_queue_size": 256, "in_flight_slots": 256, "max_bytes_per_file": 100_000}
    server = serve(instance, Path(data_path), **small)
    broker = shmq.attach(instance)
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    published = [*range(9000, 9500), *range(3000)]
    for number in published:
        producer.publish(b"%06d" % number + bytes(500), 15.0 if number >= 9000 else None)
    names = lambda: " ".join(os.listdir(data_path))  # noqa: E731
    eventually(lambda: "deferred" in names() and "00003.dat" in names(), what="messages on disk")
    if how == "unmounted":
        run("umount", "-l", data_path)
    else:
        os.rename(data_path, away)
    if how == "replaced":
        os.mkdir(data_path)
    came = []
    with broker.consumer("t", "c", max_in_flight=500) as consumer:
        while batch := consumer.take_many(500, 1):
            came += [int(body[:6]) for body in batch.bodies()]
            batch.finish()
    say(0 < len(came) < 3000)
    eventually(lambda: broker.stats().health != "OK", what="noticed")
    try:
        for number in range(3000, 6000):
            producer.publish(b"%06d" % number + bytes(500), timeout=5)
            published.append(number)
    except shmq.Full as exc:
        say("is not the directory that it was" in str(exc))
    say(broker.stats().health)
    doctor = f"{sys.executable} -m shmq doctor --instance {instance}"
    with os.popen(doctor) as output:
        say("is not the directory that it was" in output.read())
    say(os.path.isdir(data_path) and os.listdir(data_path))
    if how == "unmounted":
        run("mount", "--bind", away, data_path)
    else:
        if how == "replaced":
            os.rmdir(data_path)
        os.rename(away, data_path)
    eventually(lambda: broker.stats().health == "OK", what="healthy")
    came += [int(body[:6]) for body in take_all(broker, "t", "c").bodies]
    say(sorted(came) == sorted(published))
    say(server.errors.count("ERROR: disk trouble"), server.errors.count("lost"))
    broker.close()
    say(server.kill(signal.SIGTERM))
    server.close()


@pytest.mark.parametrize("how", ["moved", "replaced", "unmounted"])
def test_files_whose_directory_is_away_are_not_taken_for_lost(
    child: Spawn, instance: str, data_path: Path, how: str
) -> None:
    before = mounted(data_path, "size=64m") if how == "unmounted" else ()
    runner = child(lose_the_place, instance, str(data_path), how, before=before, env=HELPERS)
    assert runner.succeed(watchdog=300) == [
        "True",
        "True",
        f"NOK - the data path {data_path} is not the directory that it was (moved, or its file "
        "system unmounted)",
        "True",
        "False" if how == "moved" else "[]",
        "True",
        "1 0",
        "0",
    ]


def turn_read_only(instance, data_path):
    from pathlib import Path

    from support.deliveries import take_all
    from support.processes import eventually, serve

    def remount(words):
        argv = ["mount", "-o", f"remount,{words}", data_path]
        assert os.spawnvp(os.P_WAIT, "mount", argv) == 0, words

    server = serve(instance, Path(data_path), mem_queue_size=256)
    broker = shmq.attach(instance)
    broker.create_channel("t", "c")
    names = Path(data_path, "nsqd.dat")
    eventually(lambda: b'"c"' in names.read_bytes(), what="c in nsqd.dat")
    remount("ro")
    published = []

    def publish():
        producer = broker.producer("t")
        try:
            for number in range(len(published), len(published) + 5000):
                producer.publish(b"%06d" % number + bytes(500), timeout=5)
                published.append(number)
        except shmq.Full as exc:
            say("Read-only file system" in str(exc))

    publish()
    broker.create_channel("u", "x")  # goes on in memory
    say(broker.stats().health.endswith("cannot be written: Read-only file system"))
    say(server.errors.count("disk trouble"), "mount -o remount,rw" in server.errors)
    server.kill()
    server = serve(instance, Path(data_path), mem_queue_size=256)  # its clients live, so it starts
    with broker.consumer("t", "c", max_in_flight=500) as consumer:
        batch = consumer.take_many(100, 30)
        came = [int(body[:6]) for body in batch.bodies()]
        batch.finish()
    publish()
    say(server.kill(signal.SIGTERM))
    remount("rw")
    server = serve(instance, Path(data_path), mem_queue_size=256)
    broker = shmq.attach(instance)
    eventually(lambda: broker.stats().health == "OK", what="healthy")
    publish()
    came += [int(body[:6]) for body in take_all(broker, "t", "c").bodies]
    say(came == published, len(published) > 5000)
    eventually(lambda: b'"x"' in names.read_bytes(), what="x in nsqd.dat")
    broker.close()
    say(server.kill(signal.SIGTERM))


def test_a_disk_that_turns_read_only_keeps_what_memory_has(
    child: Spawn, instance: str, data_path: Path
) -> None:
    before = mounted(data_path, "size=64m")
    runner = child(turn_read_only, instance, str(data_path), before=before, env=HELPERS)
    assert runner.succeed(watchdog=300) == [
        "True",
        "True",
        "1 True",
        "True",
        "1",
        "True True",
        "0",
    ]


def run_out_of_inodes(instance, data_path):
    from pathlib import Path

    from support.deliveries import take_all
    from support.processes import eventually, serve

    server = serve(instance, Path(data_path), mem_queue_size=256)
    broker = shmq.attach(instance)
    published = {"t": 0, "u": 0}

    def publish(topic, count):
        producer = broker.producer(topic)
        for _ in range(count):
            producer.publish(b"%06d" % published[topic] + bytes(500), timeout=5)
            published[topic] += 1

    for topic in published:
        broker.create_channel(topic, "c")
    publish("t", 3000)
    eventually(lambda: broker.stats().channel("t", "c").backend_depth > 1000, what="on disk")
    ballast = []
    try:
        while True:
            name = os.path.join(data_path, f"ballast{len(ballast)}")
            open(name, "wb").close()
            ballast.append(name)
    except OSError as exc:
        say(exc.strerror)
    try:
        publish("u", 5000)
    except shmq.Full as exc:
        say("no inodes are left there: remove files" in str(exc))
    publish("t", 3000)  # its file is there and takes more
    try:
        publish("u", 5000)
    except shmq.Full:
        say(0 < published["u"] < 5000)
    say(broker.stats().health.endswith("No space left on device: no inodes are left there"))
    say(server.errors.count("disk trouble"), "the disk works again" in server.errors)
    for name in ballast:
        os.unlink(name)
    eventually(lambda: broker.stats().health == "OK", what="healthy")
    publish("u", 3000)
    for topic, count in published.items():
        bodies = take_all(broker, topic, "c").bodies
        say(sorted(int(body[:6]) for body in bodies) == [*range(count)])
    broker.close()
    say(server.kill(signal.SIGTERM))


def test_a_channel_without_an_inode_for_its_file_waits_alone_and_it_is_said_once(
    child: Spawn, instance: str, data_path: Path
) -> None:
    before = mounted(data_path, "size=64m,nr_inodes=64")
    runner = child(run_out_of_inodes, instance, str(data_path), before=before, env=HELPERS)
    assert runner.succeed(watchdog=300) == [
        "No space left on device",
        "True",
        "True",
        "True",
        "1 False",
        "True",
        "True",
        "0",
    ]
