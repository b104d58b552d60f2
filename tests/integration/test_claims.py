"""Topics and stores of a process tree go with the last process that has them, however it ends, and
so does the memory of brokers that nobody closed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import Child, eventually, say, wait_ended

import shmq
from shmq import claims

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


# ---- queues of a broker that was named ----


def make_there(instance, end):
    """Make queues without a name on a broker of another process; keep one; be killed."""
    with shmq.attach(instance) as broker:
        kinds = [shmq.Queue, shmq.SimpleQueue, shmq.JoinableQueue]
        kept = [kind(broker=broker) for kind in kinds]
        for queue in kept:
            queue.put(b"x" * 1000)
        named = shmq.Queue(broker=broker, name="jobs")
        named.put("stays")
        say("made", *[queue._place.topic for queue in kept])
        sys.stdin.readline()
        if end == "vanish":
            os.kill(os.getpid(), signal.SIGKILL)


def topics_of(instance: str) -> set[str]:
    with shmq.attach(instance) as broker:
        return {each.name for each in broker.stats().topics}


@pytest.mark.parametrize("end", ENDS)
def test_a_named_broker_keeps_no_queue_that_nobody_has(
    child: Spawn, serve: Callable[..., Child], instance: str, data_path: Path, end: str
) -> None:
    serve()
    program = child(make_there, instance, end)
    _, *made = program.said("made").split()
    assert topics_of(instance) == {*made, "jobs"}
    program.tell("go")
    program.wait()
    eventually(lambda: topics_of(instance) == {"jobs"})
    assert not list((data_path / claims.NAME).iterdir())


@pytest.mark.parametrize("when", ["stopped", "killed", "afterwards"])
def test_a_supervisor_that_comes_later_knows_the_claims_on_its_disk(
    child: Spawn, serve: Callable[..., Child], instance: str, data_path: Path, when: str
) -> None:
    """Its predecessor ended while the program lived, or only after the program's death."""
    server = serve()
    program = child(make_there, instance, "vanish")
    _, *made = program.said("made").split()
    if when != "afterwards":
        assert server.kill(signal.SIGTERM if when == "stopped" else signal.SIGKILL) in (0, -9)
        server = serve()
        assert topics_of(instance) == {*made, "jobs"}
    program.tell("go")
    program.wait()
    if when == "afterwards":
        server.process.send_signal(signal.SIGTERM)  # it may not have looked since
        assert server.wait() == 0
        assert not list(data_path.glob(f"{made[0]}*"))
        assert not (data_path / claims.NAME).exists()
        serve()
        assert topics_of(instance) == {"jobs"}
    eventually(lambda: topics_of(instance) == {"jobs"})


def make_in_mine(state):
    os.environ["XDG_STATE_HOME"] = state
    broker = shmq.Broker()
    queue = shmq.Queue(broker=broker)
    queue.put("x")
    say("at", broker.data_path, broker.supervisor_pid)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_program_leaves_no_queue_in_its_home(
    child: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instance: str
) -> None:
    program = child(make_in_mine, str(tmp_path))
    _, path, pid = program.said("at").split()
    program.wait()
    wait_ended(int(pid))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with shmq.Broker(instance=instance):  # removes the directories that hold no messages
        assert not Path(path).exists()


def test_a_claim_that_others_may_have_made_is_not_believed(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], instance: str, data_path: Path
) -> None:
    serve()
    broker = attach()
    broker.create_channel("precious", "c")
    place = data_path / claims.NAME
    place.mkdir()
    place.chmod(0o777)
    (place / "precious").write_text(json.dumps([["precious"], []]))
    queue = shmq.Queue(broker=broker)  # makes no claim there, and works
    queue.put(1)
    assert [each.name for each in place.iterdir()] == ["precious"]
    assert queue.get() == 1
    assert not list(claims.released(data_path))  # as the supervisor sees it
    place.chmod(0o700)
    eventually(lambda: "precious" not in topics_of(instance))


@pytest.mark.parametrize("what", ["file", "link", "nothing"])
def test_a_queue_needs_no_claims(
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    data_path: Path,
    tmp_path: Path,
    what: str,
) -> None:
    """Somebody has removed or replaced the directory."""
    server = serve()
    broker = attach()
    place = data_path / claims.NAME
    shmq.Queue(broker=broker)
    shutil.rmtree(place)
    if what == "file":
        place.touch()
    elif what == "link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    queue = shmq.Queue(broker=broker)
    queue.put(1)
    assert queue.get() == 1
    if what == "link":
        assert not list((tmp_path / "elsewhere").iterdir())
    assert server.kill(signal.SIGTERM) == 0


# ---- brokers in memory ----


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
