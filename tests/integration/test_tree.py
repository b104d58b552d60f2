"""The broker of a process tree: who uses it, when it ends, and what deaths leave."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.other_users import STRANGER
from support.processes import HELPERS, Child, eventually
from support.queue_programs import METHODS, broker_of, left_of

import shmq
from shmq import shm


@pytest.mark.parametrize("method", METHODS)
def test_root_child_and_grandchild_share_one(
    queue_program: Callable[..., Child], method: str
) -> None:
    lines = queue_program("share", method).succeed()
    assert len(lines) == 3
    assert len(set(lines)) == 1
    instance = lines[0].split()[1]
    assert not left_of(instance)
    assert not processes.supervisors(instance)


@pytest.mark.parametrize("method", METHODS)
def test_it_lasts_until_the_children_of_an_ended_program_were_joined(
    queue_program: Callable[..., Child], method: str
) -> None:
    root = queue_program("leave_first", method)
    instance = broker_of(root)
    root.said("child")
    root.said("leaving")
    root.tell()
    assert root.succeed()[-1] == "published"
    assert not left_of(instance)


@pytest.mark.parametrize("method", METHODS)
def test_the_death_of_the_root_ends_it(queue_program: Callable[..., Child], method: str) -> None:
    root = queue_program("wait_in_child", method)
    instance = broker_of(root)
    child = int(root.said("child").split()[1])
    assert left_of(instance)
    root.kill()
    assert root.lines[-1] == "gone"
    processes.wait_ended(child)
    eventually(lambda: not processes.supervisors(instance), what="the supervisor ended")
    assert not left_of(instance)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_who_drops_rights_makes_new_queues_as_the_new_user(
    queue_program: Callable[..., Child], method: str
) -> None:
    root = queue_program("drop_rights", method)
    lines = root.succeed()
    assert lines[:2] == ["before 1 2", f"after 3 {STRANGER}"]
    # nobody may signal the first supervisor, which sees by itself that its parent has ended
    eventually(lambda: not left_of(broker_of(root)))


def test_the_death_of_the_supervisor_is_not_noticed(queue_program: Callable[..., Child]) -> None:
    root = queue_program("leave_first", "fork")
    instance = broker_of(root)
    root.said("leaving")
    root.said("child")
    first = processes.supervisor_pid(instance)
    os.kill(first, signal.SIGKILL)
    eventually(
        lambda: (
            processes.supervisor_pid(instance) != first
            and processes.answers(instance, processes.supervisor_pid(instance))
        ),
        what="another supervisor answers",
    )
    root.tell()
    assert root.succeed()[-1] == "published"
    assert not left_of(instance)


def test_the_death_of_root_and_supervisor_is_cleaned_up_by_the_next_root(
    queue_program: Callable[..., Child],
) -> None:
    root = queue_program("wait_in_child", "fork")
    instance = broker_of(root)
    child = int(root.said("child").split()[1])
    pids = [root.pid, processes.supervisor_pid(instance), child]
    processes.stop_process(root.pid)  # else it starts another supervisor
    for pid in reversed(pids):
        os.kill(pid, signal.SIGKILL)
    root.wait()
    for pid in pids:
        processes.wait_ended(pid)
    assert left_of(instance)
    queue_program("share", "fork").succeed()
    assert not left_of(instance)


def test_a_root_that_is_killed_while_it_starts_leaves_nothing(
    queue_program: Callable[..., Child],
) -> None:
    before = set(os.listdir(shm.SHM_DIRECTORY))
    root = queue_program("wait_in_child", "fork")

    def own() -> list[str]:
        return [name for name in os.listdir("/dev/shm") if f"-{root.pid}-" in name]

    eventually(own, what="the supervisor has begun")
    root.kill()
    eventually(lambda: not own(), what="all is gone")
    assert {name for name in os.listdir("/dev/shm") if f"-{root.pid}-" in name} <= before


def test_owned_needs_a_parent(keep: Callable[[Any], Any], tmp_path: Path) -> None:
    words = [f"--data-path={tmp_path}/d", "--instance=x", *processes.NO_GATEWAY, "--owned"]
    child = keep(Child([sys.executable, "-P", "-m", "shmq", "serve", *words]))
    assert child.wait() == 2
    assert "--parent-pid" in child.errors
    assert not (tmp_path / "d").exists()


def make_things_while_the_supervisor_is_away():
    """In the process that starts it again, and in children of each kind."""
    import multiprocessing

    from support import while_away

    from shmq.queues import tree

    shmq.Queue().put(1)
    for method in ("here", "fork", "spawn"):
        broker = tree.broker()
        os.kill(broker.supervisor_pid, signal.SIGKILL)
        while broker.supervisor_alive():
            time.sleep(0.001)
        if method == "here":
            while_away.make()
        else:
            process = multiprocessing.get_context(method).Process(target=while_away.make)
            process.start()
            process.join()
            say("exit", process.exitcode)  # noqa: F821


def test_what_is_made_while_the_supervisor_is_away_waits_for_the_next(
    child: Callable[..., Child],
) -> None:
    lines = child(make_things_while_the_supervisor_is_away, env=HELPERS).succeed()
    assert lines == ["made 1 8 1", "made 1 8 1", "exit 0", "made 1 8 1", "exit 0"]
