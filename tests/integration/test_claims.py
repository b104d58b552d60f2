"""Topics and stores of a process tree go with the last process that has them, however it ends, and
so does the memory of brokers that nobody closed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import Child, eventually, say

import shmq

Spawn = Callable[..., Child]

ENDS = ["leave", "vanish"]


def make(what, end):
    """Fork children that each make something and end, one after the other; then say what is left
    of it, and that the root can still make some."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    first = shmq.Queue()
    broker = shmq.queues.tree.broker()

    def made():
        if what == "executor":
            executor = shmq.Executor(1, context)
            assert executor.submit(pow, 2, 3).result() == 8
            return executor
        queue = getattr(shmq, what)()
        queue.put(bytes(100_000))
        return queue

    def child():
        kept = made()
        if end == "vanish":
            os.kill(os.getpid(), signal.SIGKILL)
        del kept

    made_here = made()
    site = made_here._site.place if what == "executor" else made_here._place
    mine = (first._place.topic, site.topic)

    def left():
        names = [each.name for each in broker.stats().topics] + broker.results_names()
        return [name for name in names if not name.startswith(mine)]

    for _ in range(4):
        process = context.Process(target=child)
        process.start()
        process.join()
    deadline = time.monotonic() + 60
    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    say("left", *left())
    if what == "executor":
        say("works", made_here.submit(pow, 2, 10).result())
    else:
        say("works", len(made_here.get()))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("what", ["Queue", "SimpleQueue", "JoinableQueue", "executor"])
def test_dead_makers_leave_no_topics_and_stores(child: Spawn, what: str, end: str) -> None:
    lines = child(make, what, end).succeed()
    assert lines[0] == "left"
    assert lines[1] in ("works 1024", "works 100000")


def pass_on():
    """A child makes a queue, starts another child with it and is killed: the queue stays for that
    one, which only then uses it."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    first = shmq.Queue()
    broker = shmq.queues.tree.broker()
    answers, go = shmq.Queue(), shmq.Queue()

    def user(queue):
        go.get()
        queue.put("still here")
        answers.put(queue.get())

    def maker():
        queue = shmq.Queue()
        pid = os.fork()
        if not pid:
            user(queue)
            os._exit(0)
        first.put(queue._place.topic)
        os.kill(os.getpid(), signal.SIGKILL)

    process = context.Process(target=maker)
    process.start()
    topic = first.get()
    process.join()
    time.sleep(1.5)  # the supervisor looks meanwhile
    go.put(1)
    say(answers.get())
    while (
        broker.find_topic(topic)
        if hasattr(broker, "find_topic")
        else any(each.name == topic for each in broker.stats().topics)
    ):
        time.sleep(0.01)
    say("gone")


def test_a_queue_stays_for_who_still_has_it(child: Spawn) -> None:
    assert child(pass_on).succeed() == ["still here", "gone"]


def restart():
    """The supervisor is killed between the deaths of makers: the next one knows what they had."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    kept = shmq.Queue()
    broker = shmq.queues.tree.broker()

    def child():
        queue = shmq.Queue()
        queue.put(1)
        os.kill(os.getpid(), signal.SIGKILL)

    os.kill(broker.supervisor_pid, signal.SIGKILL)
    while broker.supervisor_alive():
        time.sleep(0.001)
    while not broker.supervisor_alive():
        time.sleep(0.001)
    process = context.Process(target=child)
    process.start()
    process.join()
    os.kill(broker.supervisor_pid, signal.SIGKILL)
    while broker.supervisor_alive():
        time.sleep(0.001)
    while len(broker.stats().topics) != 1:
        time.sleep(0.01)
    kept.put("works")
    say(kept.get())


def test_a_new_supervisor_knows_the_claims(child: Spawn) -> None:
    assert child(restart).succeed() == ["works"]


def leave_open(end):
    broker = shmq.Broker(disk=False)
    producer = broker.producer("t")
    for _ in range(20):
        producer.publish(bytes(1_000_000))
    say("pid", broker.supervisor_pid, broker.instance, broker.directory().data_path)
    if end == "forget":
        import gc

        del broker, producer
        gc.collect()
        sys.stdin.readline()
    if end == "exit":
        os._exit(0)
    if end == "vanish":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("end", ["run out", "forget", "exit", "vanish"])
def test_a_broker_in_memory_that_nobody_closed_leaves_nothing(child: Spawn, end: str) -> None:
    program = child(leave_open, end)
    _, _, instance, path = program.said("pid").split()
    assert path.startswith("/dev/shm/shmq-memory-")
    if end != "forget":
        program.wait()
    eventually(lambda: not Path(path).exists(), what=f"{path} is gone")
    eventually(lambda: not [name for name in os.listdir("/dev/shm") if instance in name])


def test_a_supervisor_in_memory_that_somebody_stops_loses_nothing(child: Spawn) -> None:
    """SIGTERM is not this program's word: another supervisor goes on with what was there."""
    with shmq.Broker(disk=False) as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish(b"x")
        pid = broker.supervisor_pid
        os.kill(pid, signal.SIGTERM)
        instance = broker.instance
        eventually(lambda: _another(instance, pid))
        with shmq.attach(instance) as again:
            message = again.consumer("t", "c").take(60)
            assert message is not None
            assert message.body == b"x"
            message.finish()


def _another(instance: str, pid: int) -> bool:
    try:
        with shmq.attach(instance) as broker:
            return broker.supervisor_alive() and broker.supervisor_pid != pid
    except shmq.ShmqError:
        return False
