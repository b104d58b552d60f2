"""Messages that fail too often or are rejected go to a dead topic, once, and may come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import Child, eventually, say, vanish

import shmq

Open = Callable[..., shmq.Broker]
Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]


@pytest.fixture
def broker(open_broker: Open) -> shmq.Broker:
    return open_broker()


def letters(broker: shmq.Broker, count: int, channel: str = "c") -> list[shmq.DeadLetter]:
    """The dead letters of t/CHANNEL, once there are so many."""
    dead = broker.dead("t", channel)
    eventually(lambda: len(dead.peek(count + 1)) >= count, what=f"{count} dead letters")
    return dead.peek(count + 1)


# ---- the goal ----


def work(instance: str, poison: str) -> None:
    """Takes batches of 200 until nothing is left, and dies of the poison message."""
    with shmq.attach(instance) as broker, broker.consumer("t", "c", 500) as consumer:
        while True:
            batch = consumer.take_many(200, 0.5)
            if not batch:
                if broker.channel_depth("t", "c") == 0:
                    break
                continue
            for message in batch:
                if message.body == poison.encode():
                    vanish()
            batch.finish()
            say("finished", *(message.body.decode() for message in batch))


@pytest.mark.parametrize("most", [1, 3])
def test_a_poison_message_convicts_itself_alone(
    serve: Serve, attach: Attach, child: Callable[..., Child], instance: str, most: int
) -> None:
    """One of 10 000 messages kills everybody who takes it, in batches of 200. It is dead after
    max_attempts deaths; all the others are finished, once, and none of them is dead."""
    serve()
    broker = attach()
    broker.configure("t", "c", max_attempts=most)
    bodies = [b"%05d" % i for i in range(10_000)]
    producer = broker.producer("t")
    for first in range(0, len(bodies), 1000):
        producer.publish_many(bodies[first : first + 1000])
    deaths, finished = 0, []
    while True:
        worker = child(work, instance, "04242")
        status = worker.wait()
        for line in worker.lines:
            finished += line.split()[1:]
        if status == 0:
            break
        assert status == -signal.SIGKILL, worker.errors
        deaths += 1
    # A death in company convicts nobody, so with a single attempt it takes one more.
    assert deaths == max(most, 2)
    (letter,) = letters(broker, 1)
    assert letter.body == b"04242"
    assert (letter.reason, letter.source, letter.failures) == ("attempts", "t/c", most)
    assert letter.attempts == deaths
    assert letter.pid is not None
    assert letter.when is not None
    assert sorted(finished) == sorted(body.decode() for body in bodies if body != b"04242")
    assert broker.channel_stats("t", "c").dead_lettered == 1


def hold(instance: str, count: int) -> None:
    """Takes messages and says so; never finishes one."""
    broker = shmq.attach(instance)
    consumer = broker.consumer("t", "c", 500)
    batch = consumer.take_many(count, 20)
    say("holds", *(message.body.decode() for message in batch))
    time.sleep(1000)


def test_a_client_that_holds_messages_lets_others_have_the_suspect(
    serve: Serve, attach: Attach, child: Callable[..., Child], instance: str
) -> None:
    """It sleeps while a suspect is next, wakes when it has finished its own, and the suspect is
    given to whoever holds nothing."""
    serve()
    broker = attach()
    broker.configure("t", "c", max_attempts=5)
    producer = broker.producer("t")
    producer.publish_many([b"a", b"b", b"c"])
    mine = broker.consumer("t", "c", 10)
    held = mine.take(20)
    assert held.body == b"a"
    victim = child(hold, instance, 1)
    assert victim.said("holds") == "holds b"
    victim.kill()
    eventually(lambda: broker.channel_stats("t", "c").returned == 1)
    assert mine.take(0) is None
    other = child(hold, instance, 1)
    assert other.said("holds") == "holds b"
    message = mine.take(20)
    assert message.body == b"c"
    other.kill()
    eventually(lambda: broker.channel_stats("t", "c").returned == 2)
    assert mine.take(0) is None
    message.finish()
    held.finish()
    message = mine.take(20)
    assert message.body == b"b"
    message.finish()


# ---- rejections, requeues, delays ----


def test_a_rejected_message_keeps_its_error(broker: shmq.Broker) -> None:
    broker.producer("t").publish(b"x", properties={"key": "k"})
    consumer = broker.consumer("t", "c")
    message = consumer.take(20)
    message.reject("no such customer: ä" + "!" * 2000)
    (letter,) = broker.dead("t", "c").peek()  # without waiting: it moved before reject returned
    assert (letter.reason, letter.source, letter.pid) == ("rejected", "t/c", os.getpid())
    assert letter.error is not None
    assert letter.error.startswith("no such customer: ä!!!")
    assert len(letter.error.encode()) == 1024
    assert (letter.id, letter.body) == (message.id, b"x")
    assert letter.properties == {"key": b"k"}
    with pytest.raises(shmq.NotInFlight, match=r"reject message .* of 't/c'"):
        message.reject()


def test_a_batch_is_rejected_under_one_lock(broker: shmq.Broker) -> None:
    broker.producer("t").publish_many([b"a", b"b", b"c"])
    consumer = broker.consumer("t", "c")
    batch = consumer.take_many(3, 20)
    batch[1].finish()
    batch.reject(error="both")
    assert [letter.body for letter in letters(broker, 2)] == [b"a", b"c"]
    assert {letter.error for letter in letters(broker, 2)} == {"both"}


def test_the_error_must_be_text(broker: shmq.Broker) -> None:
    broker.producer("t").publish(b"x")
    message = broker.consumer("t", "c").take(20)
    with pytest.raises(TypeError, match="error must be a str or None"):
        message.reject(ValueError("x"))  # type: ignore[arg-type]
    message.finish()


def test_requeues_count_but_not_those_that_are_no_failure(broker: shmq.Broker) -> None:
    broker.configure("t", "c", max_attempts=2)
    broker.producer("t").publish(b"x")
    consumer = broker.consumer("t", "c")
    for _ in range(3):
        consumer.take(20).requeue(failed=False)
    consumer.take(20).requeue()
    (peeked,) = broker.peek("t", "c")
    assert (peeked.failures, peeked.attempts) == (1, 4)
    with pytest.raises(RuntimeError), consumer.take(20):
        raise RuntimeError("a block that raises is a failure")
    (letter,) = letters(broker, 1)
    assert (letter.reason, letter.failures, letter.attempts) == ("attempts", 2, 5)
    assert consumer.take(0) is None


def test_a_retry_waits_longer_each_time(broker: shmq.Broker) -> None:
    broker.configure("t", "c", retry_delay=(0.2, 0.4))
    broker.producer("t").publish(b"x")
    consumer = broker.consumer("t", "c")
    for least in (0.18, 0.36, 0.36):
        began = time.monotonic()
        consumer.take(20).requeue()
        message = consumer.take(20)
        assert time.monotonic() - began >= least
        message.requeue(0, failed=False)
    consumer.take(20).requeue(delay=0)  # what is given wins
    assert consumer.take(0) is not None


def test_the_dead_topic_may_be_another_one(broker: shmq.Broker) -> None:
    for channel in ("c", "d"):
        broker.configure("t", channel, dead_letter="graves", max_attempts=1)
    broker.producer("t").publish(b"x")
    for channel in ("c", "d"):
        broker.consumer("t", channel).take(20).requeue()
        assert len(letters(broker, 1, channel)) == 1
    assert broker.channel_depth("graves", "dead") == 2
    assert broker.dead("t", "c").drop() == 1
    assert len(letters(broker, 1, "d")) == 1


def test_a_long_name_is_refused_by_configure_and_reject(broker: shmq.Broker) -> None:
    channel = "c" * 60
    with pytest.raises(shmq.BadName, match="dead_letter"):
        broker.configure("t", channel, max_attempts=3)
    broker.create_channel("t", channel)
    broker.producer("t").publish(b"x")
    message = broker.consumer("t", channel).take(20)
    with pytest.raises(shmq.BadName, match="dead_letter"):
        message.reject()
    message.finish()  # it is in flight still


def test_dead_letters_do_not_go_round_in_circles(broker: shmq.Broker) -> None:
    broker.configure("a", "c", max_attempts=1, dead_letter="b")
    with pytest.raises(shmq.BadArgument, match="has dead letters of its own"):
        broker.configure("b", "c", max_attempts=1, dead_letter="a")
    broker.configure("x", "c", max_attempts=1)
    with pytest.raises(shmq.BadArgument, match="holds the dead letters of x/c"):
        broker.configure("x.c.dead", "dead", max_attempts=1, dead_letter="elsewhere")
    with pytest.raises(shmq.BadArgument, match="has dead letters of its own"):
        broker.configure("y", "c", max_attempts=1, dead_letter="x")
    with pytest.raises(shmq.BadName, match="is the topic itself"):
        broker.configure("z", "c", max_attempts=1, dead_letter="z")
    broker.producer("x").publish(b"x")
    broker.consumer("x", "c").take(20).reject()
    with pytest.raises(shmq.BadArgument, match="holds dead letters"):
        broker.configure("x.c.dead", "dead", max_messages=1, overflow="drop-newest")
    with pytest.raises(shmq.BadArgument, match="redrive"):
        broker.consumer("x.c.dead", "dead").take(20).reject()


@pytest.mark.parametrize("wrong", [-1, 65536, 1.5, "many"])
def test_max_attempts_must_make_sense(broker: shmq.Broker, wrong: Any) -> None:
    with pytest.raises(shmq.BadArgument, match="max_attempts"):
        broker.configure("t", "c", max_attempts=wrong)


# ---- dead letters ----


def reject_all(broker: shmq.Broker, errors: dict[bytes, str | None]) -> None:
    broker.create_channel("t", "c")
    broker.producer("t").publish_many(list(errors))
    consumer = broker.consumer("t", "c")
    for _ in errors:
        message = consumer.take(20)
        message.reject(errors[message.body])
    consumer.close()


def test_they_are_listed_by_reason_and_error(broker: shmq.Broker) -> None:
    reject_all(broker, {b"1": "bad", b"2": "worse", b"3": "bad", b"4": None})
    dead = broker.dead("t", "c")
    groups = dead.ls()
    assert next((group.reason, group.error, group.count) for group in groups) == (
        "rejected",
        "bad",
        2,
    )
    assert sum(group.count for group in groups) == dead.depth == 4
    assert [letter.body for letter in dead.peek(error="worse")] == [b"2"]
    assert dead.peek(reason="attempts") == []
    with pytest.raises(ValueError, match="reason must be one of"):
        dead.peek(reason="boredom")


def test_redriven_ones_keep_id_and_body_and_have_not_failed(broker: shmq.Broker) -> None:
    broker.configure("t", "c", max_attempts=1)
    broker.producer("t").publish_many([b"%d" % i for i in range(5)])
    consumer = broker.consumer("t", "c")
    ids = {}
    for _ in range(5):
        message = consumer.take(20)
        ids[message.body] = message.id
        if message.body == b"3":
            message.reject("special")
        else:
            message.requeue()
    assert len(letters(broker, 5)) == 5
    dead = broker.dead("t", "c")
    assert dead.redrive(error="special") == 1
    message = consumer.take(20)
    assert (message.body, message.id) == (b"3", ids[b"3"])
    assert dict(message.properties) == {}
    message.finish()
    assert dead.redrive(2) == 2
    assert dead.depth == 2
    assert dead.redrive() == 2
    back = [consumer.take(20) for _ in range(4)]
    assert {message.body: message.id for message in back} == {
        body: id for body, id in ids.items() if body != b"3"
    }
    assert consumer.take(0) is None
    assert dead.redrive() == 0


def the_letter(broker: shmq.Broker) -> tuple[shmq.Consumer, shmq.Message, tuple[int, int]]:
    """A consumer of the dead topic of t/c, its letter in flight, and where that came from."""
    taker = broker.consumer("t.c.dead", "dead", 1)
    native = broker.native()
    found = native.find_topic("t")
    assert found is not None
    queue = native.find_queue(found[0], "c")
    assert queue is not None
    return taker, taker.take(20), queue


@pytest.mark.parametrize("one", [True, False])
def test_what_has_no_room_stays_in_flight_and_can_be_tried_again(
    broker: shmq.Broker, one: bool
) -> None:
    broker.configure("t", "c", max_messages=1, overflow="reject")
    reject_all(broker, {b"dead": "bad"})
    broker.producer("t").publish(b"in the way")
    taker, letter, queue = the_letter(broker)
    if not one:
        letter.requeue(0, failed=False)
        (letter,) = taker.take_many(1, 20)
    with letter:
        with pytest.raises(shmq.Full):
            taker.redrive(letter, *queue)
        assert taker.in_flight == 1
        letter.touch()
        broker.consumer("t", "c").take(20).finish()
        taker.redrive(letter, *queue)
    assert taker.in_flight == 0
    assert broker.consumer("t", "c").take(20).body == b"dead"


def test_the_end_of_the_block_finishes_what_could_not_be_sent_back(broker: shmq.Broker) -> None:
    reject_all(broker, {b"dead": "bad"})
    broker.configure("t", "c", max_bytes=2, overflow="reject")
    taker, letter, queue = the_letter(broker)
    with letter, pytest.raises(shmq.MessageTooBig):
        taker.redrive(letter, *queue)
    assert taker.in_flight == 0
    assert broker.dead("t", "c").depth == 0


def test_they_survive_a_restart_with_reason_and_error(open_broker: Open, data_path: Path) -> None:
    broker = open_broker(data_path=data_path)
    reject_all(broker, {b"1": "bad"})
    broker.close()
    again = open_broker(data_path=data_path)
    dead = again.dead("t", "c")
    # It is read from disk when somebody wants it.
    assert dead.depth == 1
    assert dead.redrive(error="bad") == 1
    assert again.consumer("t", "c").take(20).body == b"1"


def test_failures_survive_a_restart(open_broker: Open, data_path: Path) -> None:
    broker = open_broker(data_path=data_path)
    broker.configure("t", "c", max_attempts=2)
    broker.producer("t").publish(b"x")
    broker.consumer("t", "c").take(20).requeue()
    broker.close()
    again = open_broker(data_path=data_path)
    assert again.settings("t", "c").max_attempts == 2
    again.consumer("t", "c").take(20).requeue()
    (letter,) = letters(again, 1)
    assert letter.failures == 2


def test_nothing_is_dead_yet(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    dead = broker.dead("t", "c")
    assert (dead.ls(), dead.peek(), dead.redrive(), dead.drop(), dead.depth) == ([], [], 0, 0, 0)
    assert repr(dead) == "<shmq.DeadLetters of 't/c' in 't.c.dead'>"
    with pytest.raises(shmq.Gone):
        broker.dead("t", "nowhere")
