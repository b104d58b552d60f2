"""Queues between processes, however these are started and whoever dies: nothing waits for ever, no
item that was not done is lost, and nothing is left in shared memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import processes
from support.processes import Child, eventually
from support.queue_programs import METHODS, broker_of, left_of


def finish(child: Child) -> list[str]:
    """Its lines, when it has ended and left nothing."""
    lines = child.succeed()
    instance = broker_of(child)
    assert not left_of(instance)
    assert not processes.supervisors(instance)
    assert not child.errors
    return lines


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "program",
    ["swap_items", "kill_putters", "kill_getters", "inherit_without_fork", "drop_in_parent"],
)
def test_children_use_the_queues_of_their_parent(
    queue_program: Callable[..., Child], program: str, method: str
) -> None:
    assert len(finish(queue_program(program, method))) == 1


@pytest.mark.parametrize("method", METHODS)
def test_an_item_of_a_killed_worker_comes_back_first(
    queue_program: Callable[..., Child], method: str
) -> None:
    assert len(finish(queue_program("kill_holders", method))) == 10


@pytest.mark.parametrize("method", METHODS)
def test_the_death_of_the_root_ends_every_wait(
    queue_program: Callable[..., Child], method: str
) -> None:
    root = queue_program("block_in_children", method)
    instance = broker_of(root)
    pids = [int(root.said(f"waits {side}").split()[2]) for side in ("get", "put", "join")]
    root.kill()
    assert {line for line in root.lines if line.startswith("gone")} == {
        "gone get",
        "gone put",
        "gone join",
    }
    for pid in pids:
        processes.wait_ended(pid)
    eventually(lambda: not processes.supervisors(instance), what="the supervisor ended")
    assert not left_of(instance)


@pytest.mark.parametrize("method", METHODS)
def test_daemon_threads_that_wait_end_in_silence(
    queue_program: Callable[..., Child], method: str
) -> None:
    finish(queue_program("leave_daemon_threads", method))
