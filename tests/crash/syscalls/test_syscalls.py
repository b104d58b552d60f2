"""A supervisor dies before any of its system calls that change a file or a segment.

Its work lies in Python and in the kernel: the files of what overflows, the metadata, the segments
it makes. `at_syscall.c` counts those calls and kills it before the n-th; the next
supervisor goes on; nothing may be lost, nothing may come twice. Each scenario is run once to the
end, to count, and then with a death at some of its calls: SHMQ_KILL_SYSCALLS of them, or `all`
(tools/dev kill).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crash.killpoints.test_supervisor_killpoints import check_whole, no_strangers, numbered
from integration.test_overwritten import overwrite
from support import processes
from support.deliveries import Background, Delivered, Drain, take_all
from support.processes import Child, answers, eventually
from support.recount import recount_all

import shmq
from shmq import shm, sources
from shmq.errors import Gone, LayoutMismatch, NotRunning
from shmq.storage import deferred

DEATHS = os.environ.get("SHMQ_KILL_SYSCALLS", "3")
SMALL = {"mem_queue_size": 256, "in_flight_slots": 256, "max_bytes_per_file": 20_000}


class Stage:
    """An instance whose supervisor is to die before its n-th call (0: it lives on)."""

    def __init__(self, instance: str, at_syscall: Path, where: Path, nth: int) -> None:
        self.instance = instance
        self.data_path = where / "data"
        self.data_path.mkdir(parents=True)
        self._log = where / "calls"
        self._at_syscall = at_syscall
        self._nth = nth
        self._things: list[Any] = []
        self.came = Delivered()

    def keep(self, thing: Any) -> Any:
        self._things.append(thing)
        return thing

    def close(self) -> None:
        for thing in reversed(self._things):
            thing.close()

    def serve(self, **options: Any) -> Child:
        """One that lives."""
        return self.keep(processes.serve(self.instance, self.data_path, **(SMALL | options)))

    def doomed(self, *, at_once: bool = False, **options: Any) -> Child:
        """One that is to die. at_once: its start counts too, and is not waited for."""
        options = SMALL | {"tcp_address": "", "http_address": ""} | options
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        words += [f"--instance={self.instance}", f"--data-path={self.data_path}"]
        nth = f"+{self._nth}" if at_once else str(self._nth)
        self._log.unlink(missing_ok=True)
        argv = [str(self._at_syscall), nth, str(self._log), str(self.data_path)]
        child = self.keep(Child([*argv, sys.executable, "-m", "shmq", "serve", *words]))
        eventually(lambda: has_ended(child) or answers(self.instance, child.pid))
        return child

    def arm(self, server: Child) -> None:
        """From now on its calls count."""
        server.process.send_signal(signal.SIGUSR2)
        eventually(lambda: "armed" in self.calls, what="the tracer counts")

    @property
    def calls(self) -> list[str]:
        """The counts, one line each."""
        return self._log.read_text().splitlines() if self._log.exists() else []

    def settle(self, server: Child) -> None:
        """Wait for the calls that it makes by itself in the end: until none has come for 0.4 s."""
        count, since = -1, 0.0

        def settled() -> bool:
            nonlocal count, since
            if count != len(self.calls):
                count, since = len(self.calls), time.monotonic()
            return has_ended(server) or time.monotonic() - since > 0.4

        eventually(settled)

    def attach(self) -> shmq.Broker:
        return self.keep(shmq.attach(self.instance, timeout=processes.WATCHDOG))


def has_ended(server: Child) -> bool:
    return server.process.poll() is not None


def fill(broker: shmq.Broker, count: int, start: int = 0, **how: Any) -> None:
    producer = broker.producer("t")
    for first in range(start, start + count, 50):
        producer.publish_many(numbered(50, first), **how)


# ---- the scenarios: what is done while it may die; then, with another one, what must be ----

Scenario = Iterator[Child]


def start(stage: Stage) -> Scenario:
    """An instance is made."""
    yield stage.doomed(at_once=True)
    stage.serve()
    broker = stage.attach()
    broker.producer("t").publish(b"x")
    check_whole(take_all(broker, "t", "c"), [b"x"])


def noted(data_path: Path) -> list[str]:
    """The topics in nsqd.dat."""
    file = data_path / "nsqd.dat"
    if not file.exists():
        return []
    return [topic["name"] for topic in json.loads(file.read_text())["topics"] or []]


def create_and_delete(stage: Stage) -> Scenario:
    """Topics and channels come and go."""
    server = stage.doomed()
    broker = stage.attach()
    stage.arm(server)

    def unless_dead(action: Callable[[], Any]) -> None:
        if not has_ended(server):
            try:
                action()
            except NotRunning:
                eventually(lambda: has_ended(server))

    unless_dead(lambda: broker.producer("t").publish(b"first"))
    unless_dead(lambda: broker.create_channel("t", "a"))
    unless_dead(lambda: broker.create_channel("t", "b"))
    unless_dead(lambda: broker.create_channel("d", "a"))
    unless_dead(lambda: broker.producer("d").publish(b"gone"))
    unless_dead(lambda: broker.pause_channel("t", "b"))
    unless_dead(lambda: broker.delete_channel("d", "a"))
    unless_dead(lambda: broker.delete_topic("d"))
    eventually(lambda: has_ended(server) or noted(stage.data_path) == ["t"])
    yield server
    stage.serve()
    broker.create_topic("d")
    broker.delete_topic("d")
    for channel in ("a", "b"):
        broker.create_channel("t", channel)
        broker.unpause_channel("t", channel)
    broker.producer("t").publish(b"both")
    for channel in ("a", "b"):
        came = take_all(broker, "t", channel)
        assert came.twice == []
        assert came.bodies in ([b"first", b"both"], [b"both"])
    assert [topic.name for topic in broker.stats().topics] == ["t"]
    eventually(lambda: no_strangers(stage.instance))


def overflow(stage: Stage) -> Scenario:
    """More is published than memory holds."""
    server = stage.doomed()
    broker = stage.attach()
    broker.create_channel("t", "c")
    stage.arm(server)
    publishing = stage.keep(Background(lambda: fill(broker, 1500)))
    eventually(lambda: not publishing.running or has_ended(server))
    yield server
    stage.serve()
    publishing.result()
    check_whole(take_all(broker, "t", "c"), numbered(1500))


def read_back(stage: Stage) -> Scenario:
    """It is consumed."""
    server = stage.doomed()
    broker = stage.attach()
    broker.create_channel("t", "c")
    fill(broker, 1500)
    stage.arm(server)
    with broker.consumer("t", "c", max_in_flight=500) as consumer:
        while len(stage.came.ids) < 1500 and not has_ended(server):
            batch = consumer.take_many(50, timeout=0.05)
            stage.came.add(batch)
            batch.finish()
    yield server
    stage.serve()
    check_whole(take_all(broker, "t", "c", into=stage.came), numbered(1500))


def flush(stage: Stage) -> Scenario:
    """It stops: memory goes to disk."""
    server = stage.doomed()
    broker = stage.attach()
    broker.create_channel("t", "c")
    fill(broker, 700)
    broker.create_channel("u", "c")
    producer = broker.producer("u")
    producer.publish_many(numbered(20), defer=600.0)
    broker.close()
    stage.arm(server)
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: has_ended(server))
    yield server
    stage.serve()
    broker = stage.attach()
    check_whole(take_all(broker, "t", "c"), numbered(700))
    later = broker.stats().topics[-1].channels[0]
    assert (later.depth, later.deferred) == (0, 20)


def start_with_files(stage: Stage) -> Scenario:
    """It starts on what another one has written."""
    before = stage.serve()
    broker = stage.attach()
    broker.create_channel("t", "c")
    fill(broker, 700)
    broker.close()
    before.kill(signal.SIGTERM)
    yield stage.doomed(at_once=True)
    stage.serve()
    check_whole(take_all(stage.attach(), "t", "c"), numbered(700))


def adopt(stage: Stage) -> Scenario:
    """It takes up what another one has left."""
    before = stage.serve()
    broker = stage.attach()
    broker.create_channel("t", "c")
    fill(broker, 700)
    before.kill()
    yield stage.doomed(at_once=True)
    stage.serve()
    check_whole(take_all(broker, "t", "c"), numbered(700))


def defer(stage: Stage) -> Scenario:
    """More is deferred than may be held; it comes back in time."""
    server = stage.doomed()
    broker = stage.attach()
    broker.create_channel("t", "c")
    stage.arm(server)
    due = time.time() + 2

    def publish() -> None:
        for first in range(0, 500, 20):
            broker.producer("t").publish_many(
                numbered(20, first), defer=max(due - time.time(), 0.1)
            )

    publishing = stage.keep(Background(publish))
    drain = stage.keep(Drain(broker, "t", "c"))
    eventually(lambda: has_ended(server) or len(drain.delivered.ids) == 500)
    yield server
    stage.serve()
    publishing.result()
    drain.close()
    came = take_all(broker, "t", "c", into=drain.delivered)
    assert came.twice == []
    assert sorted(came.bodies) == numbered(500)
    eventually(lambda: not deferred.existing(stage.data_path))


def make_room(stage: Stage) -> Scenario:
    """Messages that wait in memory go back in front of those on disk, so that deferred ones have
    room."""
    server = stage.doomed()
    broker = stage.attach()
    broker.create_channel("t", "c")
    with broker.consumer("t", "c", max_in_flight=500) as consumer:
        fill(broker, 50)
        held = consumer.take_many(40, timeout=processes.WATCHDOG)
        fill(broker, 200, start=50)
        eventually(lambda: broker.stats().channel("t", "c").restored)
        eventually(lambda: not broker.stats().channel("t", "c").backend_depth)
        fill(broker, 150, start=250)
        eventually(lambda: broker.stats().channel("t", "c").backend_depth)
        stage.arm(server)
        later = [b"later"] * 200
        publishing = stage.keep(
            Background(lambda: broker.producer("t").publish_many(later, defer=600.0))
        )
        eventually(lambda: not publishing.running or has_ended(server))
        yield server
        stage.serve()
        publishing.result()
        stage.came.add(held)
        held.finish()
    eventually(lambda: broker.stats().channel("t", "c").deferred == 200)
    with broker.consumer("t", "c", max_in_flight=500) as consumer:
        while len(stage.came.ids) < 400:
            batch = consumer.take_many(100, timeout=processes.WATCHDOG)
            assert batch, "all come"
            stage.came.add(batch)
            batch.finish()
    check_whole(stage.came, numbered(400))


def live_channel(instance: str, channel: str) -> int | None:
    """Serial number of its queue."""
    with sources.open_readonly(instance) as source:
        serials = [q.serial for q in source.directory.live_queues() if q.channel == channel]
    return serials[0] if serials else None


def is_usable(broker: shmq.Broker, topic: str, channel: str) -> bool:
    """Whether what was overwritten has been replaced."""
    try:
        broker.consumer(topic, channel).close()
    except (LayoutMismatch, Gone):
        return False
    return True


def delete_with_files(stage: Stage) -> Scenario:
    """A channel is emptied, and one deleted, that have files. Their position files are older than
    the messages that were finished last."""
    server = stage.doomed()
    broker = stage.attach()
    broker.create_channel("t", "c")
    broker.create_channel("t", "d")
    fill(broker, 700)
    with broker.consumer("t", "d", max_in_flight=500) as consumer:
        for _ in range(500):
            consumer.take(timeout=processes.WATCHDOG).finish()
    stage.arm(server)
    try:
        broker.empty_channel("t", "c")
        broker.delete_channel("t", "d")
    except (NotRunning, Gone):
        eventually(lambda: has_ended(server))
    else:
        eventually(lambda: has_ended(server) or not list(stage.data_path.glob("t:d.*.dat")))
    yield server
    assert stage.serve().kill(signal.SIGTERM) == 0
    stage.serve()
    broker = stage.attach()
    assert take_all(broker, "t", "d").bodies in ([], numbered(200, 500))
    broker.delete_channel("t", "d")
    broker.producer("t").publish(b"after")
    came = take_all(broker, "t", "c")
    assert came.twice == []
    assert came.bodies in ([b"after"], [*numbered(700), b"after"])
    eventually(lambda: no_strangers(stage.instance))


def replace(stage: Stage) -> Scenario:
    """A queue is overwritten that has messages in memory, deferred ones, and files."""
    server = stage.doomed(queue_scan_refresh_interval="200ms")
    broker = stage.attach()
    broker.create_channel("t", "c")
    broker.create_channel("t", "d")
    fill(broker, 700)
    broker.producer("t").publish_many(numbered(20, 700), defer=1.0)
    stage.arm(server)
    before = live_channel(stage.instance, "c")
    overwrite(stage.instance, "c")
    eventually(lambda: has_ended(server) or live_channel(stage.instance, "c") not in (before, None))
    yield server
    stage.serve()
    broker.create_channel("t", "c")
    eventually(lambda: is_usable(broker, "t", "c"))
    hit = take_all(broker, "t", "c")
    assert sorted(set(hit.bodies)) == numbered(720)
    beside = take_all(broker, "t", "d")
    assert (beside.twice, sorted(beside.bodies)) == ([], numbered(720))
    eventually(lambda: no_strangers(stage.instance))


def rescue(stage: Stage) -> Scenario:
    """It finds a directory that was cut short, and queues with files and deferred messages."""
    before = stage.serve()
    with stage.attach() as broker:
        for channel in ("c", "d"):
            broker.create_channel("t", channel)
        fill(broker, 700)
        broker.producer("t").publish_many(numbered(20, 700), defer=1.0)
    before.kill()
    os.truncate(shm.directory_path(stage.instance), 0)
    yield stage.doomed(at_once=True)
    stage.serve()
    broker = stage.attach()
    for channel in ("c", "d"):
        eventually(lambda channel=channel: is_usable(broker, "t", channel))
        assert sorted(set(take_all(broker, "t", channel).bodies)) == numbered(720)
    eventually(lambda: no_strangers(stage.instance))


SCENARIOS = [
    start,
    create_and_delete,
    overflow,
    read_back,
    flush,
    start_with_files,
    adopt,
    defer,
    delete_with_files,
    make_room,
    replace,
    rescue,
]


@pytest.fixture(scope="session")
def at_syscall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracer."""
    program = tmp_path_factory.mktemp("at_syscall") / "at_syscall"
    source = Path(__file__).with_name("at_syscall.c")
    words = [os.environ.get("CC", "cc"), "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*words, "-o", program, source], check=True)
    return program


def chosen(total: int) -> list[int]:
    """Which calls it dies before."""
    count = total if DEATHS == "all" else min(int(DEATHS), total)
    return [round((i + 0.5) * total / count + 0.5) for i in range(count)]


def run(scenario: Callable[[Stage], Scenario], stage: Stage) -> list[str]:
    """Act it out; its calls."""
    try:
        steps = scenario(stage)
        server = next(steps)
        stage.settle(server)
        calls = [line for line in stage.calls if line != "armed"]
        server.close()  # if it has not died: it does now
        for _ in steps:
            raise AssertionError("a scenario has one death")
        recount_all(stage.instance)
    finally:
        stage.close()
    return calls


@pytest.mark.timeout(0 if DEATHS == "all" else 900)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_supervisor_may_die_at_every_system_call(
    scenario: Callable[[Stage], Scenario],
    at_syscall: Path,
    new_instance: Callable[[], str],
    tmp_path: Path,
) -> None:
    total = len(run(scenario, Stage(new_instance(), at_syscall, tmp_path / "0", 0)))
    assert total
    deaths = 0
    for nth in chosen(total):
        stage = Stage(new_instance(), at_syscall, tmp_path / str(nth), nth)
        try:
            deaths += len(run(scenario, stage)) == nth
        except BaseException as error:
            last = stage.calls[-1:] or ["none"]
            error.add_note(f"{scenario.__name__}: killed before call {nth} of {total}: {last[0]}")
            raise
    print(f"{scenario.__name__}: {total} system calls, {deaths} deaths")
    assert deaths
