"""A supervisor dies while it writes messages in front of those on disk.

They go over records that have been read, or into the file before. The position file is written
first. The supervisor dies then: before any of them is written, amid them, when all are written, or
when they are durable. The next one finds the memory, or a host that lost its power has only the
files: then each message that was on disk comes.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash.killpoints.test_supervisor_killpoints import check_whole, numbered
from support.deliveries import Delivered, take_all
from support.processes import WATCHDOG, Child, answers, eventually, serve
from support.recount import recount_all

import shmq
from shmq import shm

Keep = Callable[[Any], Any]

SMALL = {"mem_queue_size": 256, "in_flight_slots": 256, "max_bytes_per_file": 20_000}

#: Arguments: the point of the death.
DYING = """
import os, sys
from shmq.cli import main
from shmq.storage.data_files import DataFiles
from shmq.storage.diskqueue import DiskQueue
from shmq.supervisor import shutdown

real, write, flush = DiskQueue.prepend, DataFiles.write_at, shutdown.flush
where, stops = sys.argv.pop(1), []

def die(*args):
    os.kill(os.getpid(), 9)

def half(self, file, data, offset):
    write(self, file, data[: len(data) // 2], offset)
    die()

def stop(*args):
    stops.append(1)
    flush(*args)

def prepend(self, records, position, read_position):
    if not stops:
        return real(self, records, position, read_position)
    kind = "over" if position + len(records) == read_position else "before"
    os.write(1, f"prepends {kind}\\n".encode())
    if where == "before":
        die()
    elif where == "amid":
        DiskQueue.write_at = half
    elif where == "written":
        DiskQueue.fsync = die
    real(self, records, position, read_position)
    die()

DiskQueue.prepend, shutdown.flush = prepend, stop
main()
"""
POINTS = ["before", "amid", "written", "synced"]


class Stage:
    """An instance whose supervisor dies when it prepends."""

    def __init__(self, instance: str, data_path: Path, keep: Keep) -> None:
        self.instance, self.data_path, self.keep = instance, data_path, keep

    def doomed(self, point: str, **options: object) -> Child:
        options = SMALL | {"tcp_address": "", "http_address": ""} | options
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        words += [f"--instance={self.instance}", f"--data-path={self.data_path}"]
        child: Child = self.keep(Child([sys.executable, "-c", DYING, point, "serve", *words]))
        eventually(lambda: answers(self.instance, child.pid))
        return child

    def serve(self) -> Child:
        return self.keep(serve(self.instance, self.data_path, **SMALL))

    def attach(self) -> shmq.Broker:
        return self.keep(shmq.attach(self.instance, timeout=WATCHDOG))


@pytest.fixture
def stage(instance: str, data_path: Path, keep: Keep) -> Stage:
    return Stage(instance, data_path, keep)


def in_flight(stage: Stage, finished: int, point: str) -> tuple[Child, shmq.Broker, Delivered]:
    """It dies in a stop, while messages are in flight that came from disk."""
    server = stage.doomed(point)
    broker = stage.attach()
    broker.create_channel("t", "c")
    for first in range(0, 1500, 50):
        broker.producer("t").publish_many(numbered(50, first))
    came = Delivered()
    with broker.consumer("t", "c", max_in_flight=500) as consumer:
        while len(came.ids) < finished:
            some = consumer.take_many(min(50, finished - len(came.ids)), WATCHDOG)
            came.add(some)
            some.finish()
        consumer.take_many(60, WATCHDOG)
        server.process.send_signal(signal.SIGTERM)
        server.wait()
    return server, broker, came


def check_death(server: Child, data_path: Path) -> None:
    assert server.process.returncode == -signal.SIGKILL
    server.said("prepends")
    assert not list(data_path.glob("*.bad"))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("finished", [137, 400])
def test_with_the_memory_all_come_once(
    stage: Stage, data_path: Path, finished: int, point: str
) -> None:
    server, broker, came = in_flight(stage, finished, point)
    check_death(server, data_path)
    last = stage.serve()
    check_whole(take_all(broker, "t", "c", into=came), numbered(1500))
    recount_all(stage.instance)
    assert last.kill(signal.SIGTERM) == 0
    assert not list(data_path.glob("*.bad"))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("finished", [137, 400])
def test_without_the_memory_all_come_that_were_on_disk(
    stage: Stage, data_path: Path, finished: int, point: str
) -> None:
    """Those that were written in front of them may come too."""
    server, broker, _ = in_flight(stage, finished, point)
    check_death(server, data_path)
    depth = broker.stats().channel("t", "c").backend_depth
    assert depth > 500
    broker.close()
    for item in shm.list_objects(stage.instance):
        item.unlink()
    last = stage.serve()
    bodies = take_all(stage.attach(), "t", "c").bodies
    assert bodies == sorted(set(bodies))
    assert set(bodies) <= set(numbered(1500))
    first = int(bodies[-depth])
    assert bodies[-depth:] == numbered(depth, first)
    assert last.kill(signal.SIGTERM) == 0
    # half a record at the end of the file before, of a message that was in memory alone
    assert point == "amid" or not list(data_path.glob("*.bad"))
