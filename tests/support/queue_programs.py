"""Programs with queues, for tests: `python -m support.queue_programs PROGRAM METHOD`.

They are a module of their own because children that are not forked import their functions. Each
talks by lines on its stdout, and goes on when it gets a line.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np

import shmq
from shmq import objects
from shmq.queues import tree
from support.processes import WATCHDOG, Child, eventually

METHODS = ("fork", "spawn", "forkserver")


def left_of(instance: str) -> list[str]:
    """Names in /dev/shm that belong to the broker of a tree."""
    pid = instance.split("-")[1]
    return [
        name
        for name in os.listdir("/dev/shm")
        if instance in name or name.startswith(f"shmq-memory-{pid}-")
    ]


def broker_of(child: Child) -> str:
    """The broker that a program has told of."""
    return child.said("broker").split()[1]


PROGRAMS: dict[str, Callable[[Any], None]] = {}


def program(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Make a function one of the programs."""
    PROGRAMS[function.__name__] = function
    return function


def say(*words: object) -> None:
    """One line, at once, also from a child that is killed afterwards."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def start(context: Any, function: Callable[..., None], *args: Any) -> Any:
    """A process of this context that runs the function."""
    process = context.Process(target=function, args=args)
    process.start()
    return process


def start_worker(context: Any, function: Callable[..., None], *args: Any) -> Any:
    """A process that the end of this one ends, also if that fails."""
    process = context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


# ---- the broker of a tree ----


def tell_broker(depth: int) -> None:
    say("broker", tree.broker().instance)
    if depth:
        child = start(multiprocessing.get_context(), tell_broker, depth - 1)
        child.join()


@program
def share(context: BaseContext) -> None:
    """Root, child and grandchild use one broker."""
    tell_broker(0)
    multiprocessing.set_start_method(context.get_start_method(), force=True)
    start(context, tell_broker, 1).join()


def use_later(told: Connection) -> None:
    producer = tree.broker().producer("late")
    say("child", os.getpid())
    told.recv()
    producer.publish(b"late")
    say("published")


@program
def leave_first(context: BaseContext) -> None:
    """The root comes to its end while a child still needs the broker."""
    tell_broker(0)
    told, tell = context.Pipe(duplex=False)
    start(context, use_later, told)
    threading.Thread(target=lambda: tell.send(sys.stdin.readline()), daemon=True).start()
    say("leaving")


@program
def drop_rights(context: BaseContext) -> None:
    """A service makes a queue as root, and becomes another user's."""
    from support.other_users import STRANGER, turn_into

    before = shmq.Queue()
    before.put(1)
    turn_into(STRANGER)
    before.put(2)
    say("before", before.get(timeout=WATCHDOG), before.get(timeout=WATCHDOG))
    after = shmq.Queue()
    start(context, after.put, 3).join()
    with shmq.Executor(1, context) as pool:
        say("after", after.get(timeout=WATCHDOG), pool.submit(os.getuid).result(WATCHDOG))
    say("broker", tree.broker().instance)


def wait_for_ever() -> None:
    consumer = tree.broker().consumer("never", "c")
    say("child", os.getpid())
    try:
        consumer.take()
    except shmq.Gone:
        say("gone")


@program
def wait_in_child(context: BaseContext) -> None:
    """A child waits for a message that nobody publishes."""
    tell_broker(0)
    start(context, wait_for_ever)
    sys.stdin.readline()


# ---- queues ----


def swap(questions: Any, answers: Any) -> None:
    while (item := questions.get()) is not None:
        answers.put((os.getpid(), item))


@program
def swap_items(context: BaseContext) -> None:
    """Two workers answer; the queues were made before they started."""
    questions, answers = shmq.Queue(10), shmq.SimpleQueue()
    workers = [start_worker(context, swap, questions, answers) for _ in range(2)]
    items: list[Any] = [*range(500), np.arange(50_000)]
    answered = []
    feeder = threading.Thread(target=lambda: [questions.put(item) for item in items])
    feeder.start()
    for _ in items:
        pid, item = answers.get()
        assert pid in [worker.pid for worker in workers]
        answered.append(int(item.sum()) if isinstance(item, np.ndarray) else item)
    feeder.join()
    for _ in workers:
        questions.put(None)
    for worker in workers:
        worker.join()
    assert sorted(answered) == [*range(500), int(np.arange(50_000).sum())]
    say("broker", tree.broker().instance)


def hold(questions: Any, holding: Any, how: str) -> None:
    if how == "item":
        with questions.item() as job:
            holding.put((os.getpid(), job))
            wait()
    elif how == "ack":
        item = questions.get(ack=True)
        holding.put((os.getpid(), item.value))
    else:
        holding.put((os.getpid(), questions.get()))
    wait()


def wait() -> None:
    while True:
        time.sleep(60)


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@program
def kill_holders(context: BaseContext) -> None:
    """Workers die while they hold an item; each item is got again, before those that wait."""
    for how, kind in (("item", shmq.Queue), ("ack", shmq.Queue), ("get", shmq.JoinableQueue)):
        questions, holding = kind(), shmq.Queue()
        questions.put("job")
        questions.put(np.ones(50_000))
        for attempt in range(3):
            worker = start_worker(context, hold, questions, holding, how)
            assert holding.get() == (worker.pid, "job")
            assert questions.qsize() == 1
            kill(worker)
            eventually(lambda: questions.qsize() == 2)  # noqa: B023
            say("killed", how, attempt)
        assert questions.get() == "job"
        assert questions.get().sum() == 50_000
        if kind is shmq.JoinableQueue:
            questions.task_done()
            questions.task_done()
            questions.join()
    say("broker", tree.broker().instance)


class Deadly:
    """Kills the process that pickles it, or the one that unpickles it."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __getstate__(self) -> str:
        if self.where == "pickling":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.where

    def __setstate__(self, where: str) -> None:
        if where == "unpickling":
            os.kill(os.getpid(), signal.SIGKILL)
        self.where = where


def die_putting(questions: Any, where: str) -> None:
    questions.put("before")
    if where == "pickling":
        questions.put((np.ones(50_000), Deadly(where)))
    elif where == "publishing":  # after pickling, before the item is in the queue

        def write(packed: Any, buffer: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        objects.Packed.write = write  # type: ignore[method-assign]
        questions.put(np.ones(50_000))
    wait()


@program
def kill_putters(context: BaseContext) -> None:
    """A process dies in `put`: the item is not there, and the queue works on."""
    for where in ("pickling", "publishing"):
        questions = shmq.JoinableQueue(3)
        worker = start_worker(context, die_putting, questions, where)
        worker.join()
        assert worker.exitcode == -signal.SIGKILL
        assert questions.get() == "before"
        questions.task_done()
        questions.join()
        for number in range(3):
            questions.put(number)
        assert [questions.get() for _ in range(3)] == [0, 1, 2]
    say("broker", tree.broker().instance)


def get_one(questions: Any, how: str) -> None:
    if how == "item":
        with questions.item() as job:
            say("got", job)
    else:
        say("got", questions.get())


@program
def kill_getters(context: BaseContext) -> None:
    """A process dies while it unpickles: the item is lost after a plain `get`, as with the standard
    library, and comes back with `item()`."""
    questions = shmq.Queue()
    for how in ("get", "item"):
        questions.put(Deadly("unpickling"))
        questions.put("next")
        worker = start_worker(context, get_one, questions, how)
        worker.join()
        assert worker.exitcode == -signal.SIGKILL
        if how == "item":
            eventually(lambda: questions.qsize() == 2)
            held = questions.get(ack=True)
            assert held.attempts == 2
            held.done()
        assert questions.get() == "next"
        assert questions.empty()
    say("broker", tree.broker().instance)


def blocked_for_ever(empty: Any, full: Any, side: str) -> None:
    say("waits", side, os.getpid())
    try:
        if side == "get":
            empty.get()
        elif side == "put":
            full.put(2)
        elif side == "join":
            full.join()
        else:
            with full.item():
                say("held")
                empty.get()
    except (shmq.Gone, shmq.NotRunning):  # the second if it was not attached yet
        say("gone", side)


@program
def block_in_children(context: BaseContext) -> None:
    """Children wait in all ways there are, until the root is killed."""
    empty, full = shmq.Queue(), shmq.JoinableQueue(1)
    full.put(1)
    say("broker", tree.broker().instance)
    for side in ("get", "put", "join"):
        start_worker(context, blocked_for_ever, empty, full, side)
    sys.stdin.readline()


def pass_on(made: Any, other: Any) -> None:
    made.put(other.get())


@program
def drop_in_parent(context: BaseContext) -> None:
    """A queue lasts as long as one process has it, and no longer."""
    last = shmq.SimpleQueue()
    first, second = shmq.Queue(), shmq.Queue()
    later = second.name
    names = {first.name, later}

    def left() -> set[str]:
        shmq.SimpleQueue()  # deletes what can be deleted
        return names & {topic.name for topic in tree.broker().stats().topics}

    worker = start_worker(context, pass_on, last, first)
    first.put("passed on")
    del first
    assert left() == names
    assert last.get() == "passed on"
    worker.join()
    eventually(lambda: left() == {later})
    worker = start_worker(context, hold, second, last, "item")
    second.put("held")
    del second
    assert last.get() == (worker.pid, "held")
    assert len(left()) == 1
    kill(worker)
    eventually(lambda: not left())
    say("broker", tree.broker().instance)


def wait_in_a_thread(made: shmq.Queue, instance: str) -> None:
    consumer = shmq.attach(instance).consumer("t", "c")
    for call in (made.get, consumer.take):
        threading.Thread(target=call, daemon=True).start()
    made.put("they wait")


@program
def leave_daemon_threads(context: BaseContext) -> None:
    """The program and a child end while daemon threads wait; nothing is printed."""
    made = shmq.Queue()
    worker = start(context, wait_in_a_thread, made, tree.broker().instance)
    worker.join()
    for _ in range(3):
        threading.Thread(target=made.get, daemon=True).start()
    array = np.ones(50_000)
    made.put(array)
    say("broker", tree.broker().instance)


@program
def inherit_without_fork(context: BaseContext) -> None:
    """Only a child that is being started gets a queue without a name."""
    made = shmq.Queue()
    with contextlib.suppress(RuntimeError):
        made.put(made)
        say("it was pickled")
    worker = start_worker(context, swap, made, made)
    made.put(None)
    worker.join()
    assert worker.exitcode == 0
    say("broker", tree.broker().instance)


if __name__ == "__main__":
    name, method = sys.argv[1:]
    from support import queue_programs

    queue_programs.PROGRAMS[name](multiprocessing.get_context(method))
