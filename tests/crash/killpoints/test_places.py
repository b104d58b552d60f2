"""The places of clients: a process that dies anywhere in attaching or detaching costs none, while
the supervisor goes on."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import Child, arm, eventually, say, stop_process, vanish

import shmq
from shmq import shm, sources

#: Short processes of the storm, of which a tenth is killed.
MANY = int(os.environ.get("SHMQ_TEST_SHORT_PROCESSES", "400"))


def places(instance: str) -> tuple[int, int]:
    """(free permits, free entries), read while nobody moves."""
    permits = shm.Permits(instance)
    try:
        return permits.free, sources.open_readonly(instance).directory.free_clients
    finally:
        permits.close()


def check_all_free(instance: str, free: int) -> None:
    """Wait until as many permits are free as at first, and as many entries."""
    eventually(lambda: places(instance) == (free, free), what=f"{places(instance)} are {free}")


def die_at_each_line(instance, first):
    """Fork children that attach, if `first` is "attach", and detach. The k-th dies at the k-th line
    of the modules that do this; it ends when one was not killed."""
    from shmq import attachment, semaphore

    shmq.attach(instance).close()
    files = {attachment.__file__, shmq.shm.__file__, semaphore.__file__}
    for count in itertools.count(1):
        pid = os.fork()
        if not pid:
            left = count

            def trace(frame, event, _argument):
                nonlocal left
                if frame.f_code.co_filename not in files:
                    return None
                if event == "line":
                    left -= 1
                    if not left:
                        vanish()
                return trace

            broker = None if first == "attach" else shmq.attach(instance)
            sys.settrace(trace)
            broker = broker or shmq.attach(instance)
            broker.close()
            sys.settrace(None)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if status != signal.SIGKILL:
            say("ended", status, count)
            return


@pytest.mark.parametrize(("first", "least"), [("attach", 60), ("detach", 20)])
def test_a_death_at_any_line_costs_no_place(
    serve: Callable[..., Child],
    child: Callable[..., Child],
    instance: str,
    first: str,
    least: int,
) -> None:
    serve()
    free = places(instance)[1]
    _, status, count = child(die_at_each_line, instance, first).said("ended").split()
    assert status == "0"
    assert int(count) > least
    check_all_free(instance, free)


def die_at(instance, point):
    broker = None
    if point.startswith("reap"):
        broker = shmq.attach(instance)
        held = broker.consumer("t", "c").take(60)
        say("holds", held.body)
    arm(point)
    (broker or shmq.attach(instance)).close()


@pytest.mark.parametrize(
    "point", ["attach.generation", "attach.filled", "attach.live", "reap.queue", "reap.entry"]
)
def test_a_death_at_a_step_of_the_core_costs_no_place(
    killpoints: Path,
    serve: Callable[..., Child],
    child: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    instance: str,
    point: str,
) -> None:
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"x")
    free = places(instance)[1]
    child(die_at, instance, point, killpoints=True).die()
    check_all_free(instance, free)


def stop_before_the_entry(instance):
    from shmq import shm

    take = shm.Permits.take

    def slowly(self, reserve=0):
        take(self, reserve)
        say("has a permit")
        sys.stdin.readline()

    shm.Permits.take = slowly
    broker = shmq.attach(instance)
    say("attached")
    sys.stdin.readline()
    broker.close()
    say("detached")


def die_before_the_entry(instance):
    from shmq import shm

    take = shm.Permits.take
    shm.Permits.take = lambda self, reserve=0: (take(self, reserve), vanish())
    shmq.attach(instance)


def test_a_stopped_client_keeps_its_permit(
    serve: Callable[..., Child], child: Callable[..., Child], instance: str
) -> None:
    """The supervisor cannot tell what is missing while it stands between its permit and its entry;
    when it goes on, the permits of those that died meanwhile come back."""
    serve()
    free = places(instance)[1]
    stopped = child(stop_before_the_entry, instance)
    stopped.said("has a permit")
    stop_process(stopped.pid)
    for _ in range(3):
        child(die_before_the_entry, instance).die()
    assert places(instance) == (free - 4, free)
    stopped.go_on()
    stopped.tell()
    stopped.said("attached")
    check_all_free(instance, free - 1)
    stopped.tell()
    stopped.said("detached")
    check_all_free(instance, free)


def storm(instance, many):
    """`many` short processes, eight at a time; each tenth is killed at some instant of its life.
    They are forked from a process that has all modules and an attachment, which some of them
    use."""
    import gc
    import traceback

    def attach_for_a_moment(number):
        broker = inherited if number % 3 == 0 else shmq.attach(instance)
        broker.producer("t").publish(b"x")  # a child takes a place of its own at its first call
        if number % 4:
            broker.close()  # else its end, or that of the process, gives the place back

    inherited = shmq.attach(instance)
    inherited.producer("t").publish(b"x")
    gc.freeze()
    rng, killed, statuses, alive = random.Random(many), 0, set(), []
    for number in range(many):
        doomed = number % 10 == 0
        pid = os.fork()
        if not pid:
            try:
                attach_for_a_moment(number)
                while doomed:
                    attach_for_a_moment(rng.choice([1, 2, 4, 5]))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        alive.append((pid, doomed))
        if len(alive) == 8:
            pid, doomed = alive.pop(0)
            if doomed:
                time.sleep(rng.random() * 0.01)
                os.kill(pid, signal.SIGKILL)
                killed += 1
            statuses.add(os.waitpid(pid, 0)[1])
    for pid, _ in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    inherited.close()
    say("ended", killed, *sorted(statuses))


@pytest.mark.timeout(3600)
def test_short_processes_cost_no_place(
    serve: Callable[..., Child], child: Callable[..., Child], instance: str
) -> None:
    serve(topics="t: overflow=drop-oldest max_messages=100")
    free = places(instance)[1]
    crowd = child(storm, instance, MANY)
    _, killed, *statuses = crowd.said("ended", watchdog=3600).split()
    assert statuses == ["0", "9"], crowd.errors  # no attach was refused
    assert int(killed) >= MANY // 10 - 1
    check_all_free(instance, free)
