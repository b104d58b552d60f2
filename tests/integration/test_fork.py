"""Parents with handles that fork: both work on, and nobody returns what the other holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.deliveries import take_all
from support.processes import Child, eventually, say

import shmq

Spawn = Callable[..., Child]


def fork_and_work(instance, how):
    import multiprocessing

    broker = shmq.attach(instance)
    producer, consumer = broker.producer("t"), broker.consumer("t", "c", msg_timeout=60)
    mine = consumer.take(5)
    say("parent took", mine.body.decode())

    def work(end):
        producer.publish(b"from child")
        message = consumer.take(5)
        say("child took", message.body.decode())
        message.finish()
        held = consumer.take(5)
        say("child holds", held.body.decode())
        try:
            mine.finish()
        except shmq.NotInFlight:
            say("child cannot finish its parent's")
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)  # noqa: F821

    if how == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=work, args=("return",))
        process.start()
        process.join()
        say("child ended", process.exitcode)
    else:
        pid = os.fork()  # noqa: F821
        if pid == 0:
            status = 1
            try:
                work(how)
                status = 0
            finally:
                if how == "exit":
                    sys.exit(status)  # noqa: F821
                os._exit(status)  # noqa: F821
        say("child ended", os.waitpid(pid, 0)[1])  # noqa: F821
    producer.publish(b"from parent")
    while (other := consumer.take(5)).body != b"3":  # it comes when the reaper has seen the death
        other.requeue()
    say("parent takes", other.body.decode(), other.attempts)
    other.finish()
    mine.touch()
    mine.finish()
    say("parent finished its own")


@pytest.mark.parametrize("how", ["_exit", "exit", "kill", "multiprocessing"])
def test_parent_and_child_both_work_on_and_keep_their_own_messages(
    broker: shmq.Broker, child: Spawn, how: str
) -> None:
    broker.create_channel("t", "c")
    broker.producer("t").publish_many([b"1", b"2", b"3"])
    lines = child(fork_and_work, broker.instance, how).succeed()
    assert lines[:4] == [
        "parent took 1",
        "child took 2",
        "child holds 3",
        "child cannot finish its parent's",
    ]
    assert lines[4].startswith("child ended")
    assert lines[5:] == ["parent takes 3 2", "parent finished its own"]
    came = take_all(broker, "t", "c")
    assert sorted(came.bodies) == [b"from child", b"from parent"]
    eventually(lambda: len(broker.stats().clients) == 2)


def daemon_of_workers(instance, workers):
    """As pyspark's: a daemon with handles of its own forks a worker for each task."""
    broker = shmq.attach(instance)
    producer = broker.producer("results")
    consumer = broker.consumer("tasks", "c", max_in_flight=1, msg_timeout=60)
    first = consumer.take(5)
    first.finish()
    pids = []
    for k in range(workers):
        pid = os.fork()  # noqa: F821
        if pid == 0:
            while message := consumer.take(timeout=1.0):
                if k == 0:  # dies of its task
                    os.kill(os.getpid(), signal.SIGKILL)  # noqa: F821
                producer.publish(message.body)
                message.finish()
            os._exit(0)  # noqa: F821
        pids.append(pid)
        if k == 0:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: F821
    say("ended", *(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))  # noqa: F821


def test_workers_forked_by_a_daemon_share_the_tasks_and_the_death_of_one_loses_none(
    broker: shmq.Broker, child: Spawn
) -> None:
    for topic in ("tasks", "results"):
        broker.create_channel(topic, "c")
    tasks = [b"%04d" % i for i in range(1, 500)]
    broker.producer("tasks").publish_many([b"0000", *tasks])
    daemon = child(daemon_of_workers, broker.instance, 4)
    assert daemon.succeed() == ["ended -9 0 0 0"]
    assert sorted(take_all(broker, "results", "c").bodies) == tasks
    assert take_all(broker, "tasks", "c").bodies == []


def fork_with_an_embedded_broker(instance, data_path):
    with shmq.Broker(data_path=data_path, instance=instance) as broker:
        broker.create_channel("t", "c")
        producer = broker.producer("t")
        pid = os.fork()  # noqa: F821
        if pid == 0:
            with broker:  # closes it in the child
                producer.publish(b"child")
            sys.exit(0)  # noqa: F821
        say("child", os.waitpid(pid, 0)[1])  # noqa: F821
        say("alive", broker.supervisor_alive())
        producer.publish(b"parent")
        consumer = broker.consumer("t", "c")
        say(*(consumer.take(5).body.decode() for _ in range(2)))


def test_a_forked_child_that_closes_the_broker_does_not_stop_the_parents(
    child: Spawn, instance: str, data_path: object
) -> None:
    lines = child(fork_with_an_embedded_broker, instance, str(data_path)).succeed()
    assert lines == ["child 0", "alive True", "child parent"]


def fork_while_threads_work(instance):
    broker = shmq.attach(instance)
    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    done = threading.Event()  # noqa: F821

    def work():
        while not done.is_set():
            producer.publish(b"thread")
            for message in consumer.take_many(10, 0):
                message.finish()

    threads = [threading.Thread(target=work) for _ in range(3)]  # noqa: F821
    for thread in threads:
        thread.start()
    for _ in range(30):
        pid = os.fork()  # noqa: F821
        if pid == 0:
            producer.publish(b"child")
            consumer.take(5).finish()
            os._exit(0)  # noqa: F821
        assert os.waitpid(pid, 0)[1] == 0  # noqa: F821
    done.set()
    for thread in threads:
        thread.join()
    say("done")


def test_a_fork_in_the_middle_of_other_threads_calls_harms_nobody(
    broker: shmq.Broker, child: Spawn
) -> None:
    broker.create_channel("t", "c")
    assert child(fork_while_threads_work, broker.instance).succeed(watchdog=60) == ["done"]
    take_all(broker, "t", "c")
    eventually(lambda: len(broker.stats().clients) == 2)
