"""An operator takes messages away from the consumers that hold them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from support.processes import Child, eventually

import shmq

SHMQ = [sys.executable, "-m", "shmq"]


def held(broker: shmq.Broker, count: int = 1) -> list[shmq.Message]:
    producer = broker.producer("jobs")
    consumer = broker.consumer("jobs", "work", max_in_flight=count)
    producer.publish_many([b"job %d" % number for number in range(count + 1)])
    return list(consumer.take_many(count, 10))


def test_the_former_holder_finds_what_it_finds_after_a_time_out(
    open_broker: Callable[..., shmq.Broker],
) -> None:
    broker = open_broker()
    first, second = held(broker, 2)
    with shmq.attach(broker.instance) as operator:
        operator.finish_message("jobs", "work", first.id, os.getpid())
        operator.requeue_message("jobs", "work", second.id)
    for message in (first, second):
        for call in (message.finish, message.requeue, message.touch):
            with pytest.raises(shmq.NotInFlight):
                call()
    counts = broker.stats().channel("jobs", "work")
    assert (counts.in_flight, counts.finished, counts.requeue_count) == (0, 1, 1)
    assert (counts.sessions[0].in_flight, counts.sessions[0].finished) == (0, 0)


def test_a_consumer_at_its_limit_gets_the_next_message_at_once(
    open_broker: Callable[..., shmq.Broker],
) -> None:
    broker = open_broker()
    (message,) = held(broker, 1)
    consumer = broker.consumer("jobs", "work", max_in_flight=1)
    taken = consumer.take(10)
    assert taken is not None
    assert taken.body == b"job 1"
    broker.finish_message("jobs", "work", taken.id)
    broker.requeue_message("jobs", "work", message.id)
    again = consumer.take(10)
    assert again is not None
    assert (again.id, again.attempts) == (message.id, 2)
    again.finish()


def test_a_requeue_counts_no_failure_and_may_be_later(
    open_broker: Callable[..., shmq.Broker],
) -> None:
    broker = open_broker()
    broker.configure("jobs", "work", max_attempts=1)
    (message,) = held(broker, 1)
    broker.requeue_message("jobs", "work", message.id, delay=1e12)
    (seen,) = broker.peek("jobs", "work", "deferred")
    assert (seen.id, seen.failures) == (message.id, 0)
    assert broker.stats().channel("jobs", "work").dead_lettered == 0


@pytest.mark.parametrize(
    ("id", "pid", "error"),
    [
        ("0123456789abcdef", None, shmq.NotInFlight),
        ("0123", None, shmq.BadArgument),
        ("0x23456789abcdef", None, shmq.BadArgument),
        ("0123456789abcdef", 0, shmq.BadArgument),
        ("0123456789abcdef", 2**31, shmq.BadArgument),
    ],
)
def test_what_is_not_held_is_refused(
    open_broker: Callable[..., shmq.Broker], id: str, pid: int | None, error: type[Exception]
) -> None:
    broker = open_broker()
    (message,) = held(broker)
    for call in (broker.finish_message, broker.requeue_message):
        with pytest.raises(error):
            call("jobs", "work", id, pid=pid)
        with pytest.raises(shmq.Gone):
            call("jobs", "play", id)
    for delay in (-1, float("nan")):
        with pytest.raises(ValueError, match="delay"):
            broker.requeue_message("jobs", "work", id, delay)
    message.finish()


def test_another_process_is_not_meant(open_broker: Callable[..., shmq.Broker]) -> None:
    broker = open_broker()
    (message,) = held(broker)
    with pytest.raises(shmq.NotInFlight, match=f"process {os.getppid()} does not hold it"):
        broker.finish_message("jobs", "work", message.id, os.getppid())
    message.finish()


def _hang(instance: str) -> None:
    with shmq.attach(instance) as broker:
        message = broker.consumer("jobs", "work").take(10)
        assert message is not None
        print(message.id, flush=True)
        sys.stdin.readline()
        try:
            message.finish()
        except shmq.NotInFlight:
            print("is told", flush=True)
        sys.stdin.read()


def test_the_commands_take_a_message_from_a_process_that_hangs(
    open_broker: Callable[..., shmq.Broker], child: Callable[..., Child]
) -> None:
    broker = open_broker()
    broker.create_channel("jobs", "work")
    broker.producer("jobs").publish(b"slow")
    hanging = child(_hang, broker.instance)
    eventually(lambda: broker.peek("jobs", "work", "in_flight"), what="it holds the message")
    (seen,) = broker.peek("jobs", "work", "in_flight")

    def shmq_message(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*SHMQ, "message", *words, f"--instance={broker.instance}"],
            capture_output=True,
            text=True,
            check=False,
        )

    wrong = shmq_message("requeue", "jobs", "work", seen.id, "--pid=1")
    assert (wrong.returncode, "process 1 does not hold it" in wrong.stderr) == (1, True)
    done = shmq_message("requeue", "jobs", "work", seen.id, f"--pid={hanging.pid}", "--json")
    found = json.loads(done.stdout)
    assert found == {"v": 1, "done": "requeue", "topic": "jobs", "channel": "work", "id": seen.id}
    taken = broker.consumer("jobs", "work").take(10)
    assert taken is not None
    done = shmq_message("finish", "jobs", "work", taken.id)
    assert done.stdout == f"message {taken.id} finished\n"
    with pytest.raises(shmq.NotInFlight):
        taken.finish()
    hanging.tell("go on")
    hanging.said("is told")
