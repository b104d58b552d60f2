"""SIGKILL at random instants: producers, consumers, supervisors. Nothing that returned is lost."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import socket
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.deliveries import Background, Delivered, Drain, take_all
from support.processes import Child, eventually, say, supervisor_pid, vanish, wait_ended
from support.recount import recount, recount_all

import shmq
from shmq.errors import NotInFlight

Open = Callable[..., shmq.Broker]
Spawn = Callable[..., Child]


def record(property_: Callable[[str, object], None], name: str, value: object) -> None:
    """A figure for the report: in the junit file, and with -s on the terminal."""
    property_(name, value)
    print(f"{name}: {value}")


# ---- P1, P2: producers and the supervisor ----


def publish_for_ever(instance, name):
    broker = shmq.attach(instance)
    producer = broker.producer("t")
    choice = random.Random(name)
    for i in itertools.count():  # noqa: F821
        head = f"{name}:{i}"
        kind = choice.random()
        if kind < 0.7:
            producer.publish(f"{head}:1/1:".encode() + bytes(choice.randrange(300)))
        elif kind < 0.95:
            n = choice.randrange(2, 30)
            producer.publish_many([f"{head}:{k}/{n}:".encode() for k in range(n)])
        elif kind < 0.98:
            producer.publish(f"{head}:1/1:".encode() + bytes(choice.randrange(66_000, 200_000)))
        else:
            n = choice.randrange(2, 4)
            producer.publish_many([f"{head}:{k}/{n}:".encode() + bytes(70_000) for k in range(n)])
        say(head)


def test_what_producers_published_before_they_were_killed_is_on_every_channel(
    open_broker: Open, child: Spawn, keep: Any, record_property: Any
) -> None:
    broker = open_broker(mem_queue_size=1000)
    channels = ["a", "b", "c"]
    drains = [keep(Drain(broker, "t", channel)) for channel in channels]
    choice, dead, kills = random.Random(5), [], Counter()
    alive = [child(publish_for_ever, broker.instance, f"p{k}") for k in range(3)]
    for publisher in alive:
        publisher.said("p")
    for round_ in range(36):
        time.sleep(choice.uniform(0.002, 0.06))  # the instant of the kill
        victim = alive.pop(0)
        victim.kill()
        kills["producer"] += 1
        dead.append(victim)
        alive.append(child(publish_for_ever, broker.instance, f"q{round_}"))
        alive[0].said(f"{'pq'[round_ > 1]}")
        if round_ % 9 == 4:
            with contextlib.suppress(ProcessLookupError):  # the next one is not up yet
                os.kill(supervisor_pid(broker.instance), signal.SIGKILL)
                kills["supervisor"] += 1
    for publisher in alive:
        publisher.said("q")
        publisher.kill()
        kills["producer"] += 1
        dead.append(publisher)
    eventually(broker.supervisor_alive)
    returned = [line for publisher in dead for line in publisher.lines]
    for drain in drains:
        drain.close()
    came = [
        take_all(broker, "t", channel, into=drain.delivered)
        for channel, drain in zip(channels, drains, strict=True)
    ]
    heads = [[body.split(b":", 3)[:3] for body in delivered.bodies] for delivered in came]
    for delivered, found in zip(came, heads, strict=True):
        assert delivered.twice == []
        assert sorted(found) == sorted(heads[0])
        assert not set(returned) - {f"{a.decode()}:{b.decode()}" for a, b, _ in found}
    whole = defaultdict(list)
    for name, number, part in heads[0]:
        whole[name, number].append(part)
    for parts in whole.values():
        assert len(parts) == int(parts[0].split(b"/")[1])
    recount_all(broker.instance)
    record(record_property, "kills", dict(kills))
    record(record_property, "messages", len(heads[0]))


# ---- P9: the supervisor ----


def another_pid(broker: shmq.Broker, killed: set[int]) -> int:
    """The supervisor's, or 0 while it is one of the killed."""
    pid = supervisor_pid(broker.instance)
    return 0 if pid in killed else pid


def test_clients_go_on_while_supervisors_are_killed_and_nothing_is_lost_or_doubled(
    open_broker: Open, keep: Any, record_property: Any
) -> None:
    broker = open_broker(mem_queue_size=500)
    drain = keep(Drain(broker, "t", "c"))
    producer = broker.producer("t")
    published = 0
    killed: set[int] = set()
    while len(killed) < 6:
        producer.publish_many([b"%07d" % i for i in range(published, published + 50)])
        published += 50
        pid = supervisor_pid(broker.instance)
        if pid not in killed and broker.supervisor_alive() and published % 1000 == 0:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    eventually(lambda: processes.answers(broker.instance, another_pid(broker, killed)))
    broker.create_channel("t", "new")  # and it does its work
    drain.close()
    came = take_all(broker, "t", "c", into=drain.delivered)
    assert came.bodies == [b"%07d" % i for i in range(published)]
    record(record_property, "supervisors killed", len(killed))
    record(record_property, "messages", published)


def test_in_memory_a_dead_supervisor_is_not_missed(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], instance: str
) -> None:
    server = serve()
    broker = attach()
    consumer, producer = broker.consumer("t", "c"), broker.producer("t")
    server.kill()
    assert not broker.supervisor_alive()
    for i in range(500):
        producer.publish(b"%d" % i, timeout=0)
        message = consumer.take(timeout=0)
        assert message is not None
        assert message.body == b"%d" % i
        message.finish()
    held = producer.publish(b"held")
    assert consumer.take(timeout=0) is not None
    with pytest.raises(shmq.NotRunning, match="supervisor"):
        broker.create_topic("other")
    serve()
    broker.create_topic("other")
    consumer.close()
    assert take_all(broker, "t", "c").ids == [held]
    eventually(lambda: len(broker.stats().clients) == 2)  # the dead one is reaped soon


# ---- P4: consumers ----


def hold(instance, timeout, count):
    consumer = shmq.attach(instance).consumer("t", "c", msg_timeout=timeout)
    say("holds", len(consumer.take_many(count, 10)))
    sys.stdin.readline()  # noqa: F821


def test_what_a_killed_consumer_held_comes_again_long_before_its_timeout(
    broker: shmq.Broker, child: Spawn, record_property: Any
) -> None:
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    delays = []
    for round_ in range(8):
        ids = producer.publish_many([b"%d" % i for i in range(100)])
        holder = child(hold, broker.instance, 60, 100)
        holder.said("holds 100")
        with broker.consumer("t", "c") as consumer:
            assert len(consumer.take_many(100, timeout=0)) == 0
            os.kill(holder.pid, signal.SIGKILL)
            began = time.monotonic()
            batch = consumer.take_many(100, timeout=30)  # the watchdog
            delays.append(time.monotonic() - began)
            assert batch.ids.tolist() == list(ids), round_
            assert set(batch.attempts.tolist()) == {2}
            batch.finish()
        holder.wait()
    recount(broker.instance, "t", "c")
    record(record_property, "redelivery median ms", round(statistics.median(delays) * 1e3, 1))
    record(record_property, "redelivery max ms", round(max(delays) * 1e3, 1))


def test_what_a_living_consumer_holds_comes_again_at_its_timeout_and_not_before(
    broker: shmq.Broker, child: Spawn
) -> None:
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"x")
    began = time.monotonic()
    holder = child(hold, broker.instance, 1.0, 1)
    holder.said("holds 1")
    with broker.consumer("t", "c") as consumer:
        message = consumer.take(timeout=30)
        assert message is not None
        assert message.attempts == 2
        assert time.monotonic() - began >= 1.0
        message.finish()
    holder.tell()
    holder.succeed()


def test_without_a_timeout_a_stopped_consumer_keeps_what_it_holds_until_it_dies(
    broker: shmq.Broker, child: Spawn
) -> None:
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    kept = producer.publish(b"kept")
    holder = child(hold, broker.instance, None, 1)
    holder.said("holds 1")
    holder.stop()
    producer.publish(b"short")
    with broker.consumer("t", "c", msg_timeout=0.05) as consumer:
        for attempts in range(1, 5):  # each shows that a scan has come by
            message = consumer.take(timeout=30)
            assert message is not None
            assert (message.body, message.attempts) == (b"short", attempts)
        message.finish()
        assert consumer.take(timeout=0) is None
        holder.kill()
        message = consumer.take(timeout=30)
        assert message is not None
        assert (message.id, message.attempts) == (kept, 2)


def test_a_thread_that_attached_may_end_and_its_process_keeps_what_it_holds(
    broker: shmq.Broker, child: Spawn
) -> None:
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"x")
    holder = child(attach_in_a_thread, broker.instance)
    holder.said("holds")
    eventually(lambda: sum(broker.views().directory.clients["orphan"]) == 1)
    with broker.consumer("t", "c") as consumer:
        assert consumer.take(timeout=0) is None
        holder.tell()
        assert holder.said("finished")
        assert holder.wait() == -signal.SIGKILL
        eventually(lambda: len(broker.stats().clients) == 2)
        assert consumer.take(timeout=0) is None


def attach_in_a_thread(instance):
    made = []
    thread = threading.Thread(target=lambda: made.append(shmq.attach(instance)))  # noqa: F821
    thread.start()
    thread.join()
    message = made[0].consumer("t", "c", msg_timeout=60).take(5)
    say("holds", message.id)
    sys.stdin.readline()  # noqa: F821
    message.finish()
    say("finished")
    vanish()


# ---- P5: finish ----


def finish_until_killed(instance):
    consumer = shmq.attach(instance).consumer("t", "c", max_in_flight=100)
    while True:
        batch = consumer.take_many(7, 10)
        if not batch:
            break
        say("finishing", *(message.id for message in batch))
        batch.finish()
        say("finished", *(message.id for message in batch))
        time.sleep(0.0003)  # or nothing is left for the next one


def test_what_was_finished_never_comes_again_after_any_death_and_a_restart(
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    child: Spawn,
    instance: str,
    record_property: Any,
) -> None:
    server = serve(mem_queue_size=2000)
    broker = attach()
    broker.create_channel("t", "c")
    published = {
        f"{number:016x}"
        for _ in range(60)
        for number in broker.producer("t").publish_many([bytes(50)] * 500)
    }
    choice = random.Random(7)
    dead = []
    for round_ in range(12):
        victim = child(finish_until_killed, instance)
        victim.said("finished")
        time.sleep(choice.uniform(0, 0.02))  # the instant of the kill
        if round_ % 4 == 1:
            server.kill()
        victim.kill()
        dead.append(victim)
        if round_ % 4 == 1:
            server = serve(mem_queue_size=2000)
    broker.close()
    assert server.kill(signal.SIGTERM) == 0
    serve()
    broker = attach()
    came = take_all(broker, "t", "c")
    said: dict[str, set[str]] = {"finished": set(), "finishing": set()}
    for victim in dead:
        for line in victim.lines:
            said[line.split()[0]].update(line.split()[1:])
    assert not said["finished"] & set(came.ids)
    assert published - set(came.ids) <= said["finishing"]
    assert came.twice in ([], [bytes(50)])
    assert len(came.ids) == len(set(came.ids))
    record(record_property, "finished before deaths", len(said["finished"]))
    record(record_property, "came after the restart", len(came.ids))


def test_finish_after_its_consumer_was_closed_or_timed_out_says_so(broker: shmq.Broker) -> None:
    producer = broker.producer("t")
    with broker.consumer("t", "c", msg_timeout=0.05) as consumer:
        producer.publish(b"x")
        first = consumer.take(30)
        second = consumer.take(30)
        assert first is not None
        assert second is not None
        with pytest.raises(NotInFlight):
            first.finish()
        assert second.attempts == 2
    with pytest.raises(NotInFlight):
        second.finish()


# ---- P3: locks ----


def publish_batches(instance, name):
    producer = shmq.attach(instance).producer("t")
    bodies = [b"%s:%d" % (name.encode(), i) for i in range(2000)]
    for i in itertools.count():  # noqa: F821
        producer.publish_many([b"%d:%s" % (i, body) for body in bodies])
        say("ok", i)


def test_a_stopped_holder_is_waited_for_and_not_robbed(
    open_broker: Open, child: Spawn, keep: Any, record_property: Any
) -> None:
    broker = open_broker(mem_queue_size=20_000)
    drain = keep(Drain(broker, "t", "c"))
    producer = broker.producer("t")
    publisher = child(publish_batches, broker.instance, "child")
    publisher.said("ok")
    choice, stops, blocked, mine = random.Random(3), 0, 0, 0
    while stops < 15 or (blocked < 3 and stops < 3000):
        time.sleep(choice.uniform(0, 0.01))  # the instant of the stop
        publisher.stop()
        stops += 1
        probe = keep(Background(functools.partial(producer.publish, b"0:mine:%d" % mine)))
        mine += 1
        probe.wait(0.3)
        # the child holds P: our publish waits, however long, and nobody repairs anything
        blocked += probe.running
        publisher.go_on()
        probe.result()
    assert blocked
    publisher.kill()
    returned = len([line for line in publisher.lines if line.startswith("ok")])
    drain.close()
    came = take_all(broker, "t", "c", into=drain.delivered)
    assert came.twice == []
    names = Counter(body.split(b":")[1] for body in came.bodies)
    assert names[b"mine"] == mine
    assert names[b"child"] in (2000 * returned, 2000 * (returned + 1))
    record(record_property, "stops", stops)
    record(record_property, "of them while holding P", blocked)


def requeue_batches(instance):
    consumer = shmq.attach(instance).consumer("t", "c", max_in_flight=10_000)
    while True:
        batch = consumer.take_many(10_000, 1)
        say("took", len(batch))
        batch.requeue()


def test_a_stop_waits_for_a_stopped_process_that_holds_a_channel(
    new_instance: Callable[[], str], child: Spawn, keep: Any, tmp_path: Path, record_property: Any
) -> None:
    instance, choice, blocked, stops = new_instance(), random.Random(4), 0, 0
    bodies = [b"%d" % i for i in range(10_000)]
    while blocked < 2 and stops < 60:
        server = keep(processes.serve(instance, tmp_path, mem_queue_size=20_000))
        broker = keep(shmq.attach(instance))
        if not stops:
            broker.create_channel("t", "c")
            broker.producer("t").publish_many(bodies)
        taker = child(requeue_batches, instance)
        taker.said("took")
        time.sleep(choice.uniform(0, 0.01))  # the instant of the stop
        taker.stop()
        stops += 1
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            server.wait(1)
        blocked += server.process.poll() is None
        taker.go_on()
        assert server.wait() == 0
        assert "cannot be flushed" not in server.errors
        taker.kill()
        broker.close()
    assert blocked
    keep(processes.serve(instance, tmp_path, mem_queue_size=20_000))
    came = take_all(keep(shmq.attach(instance)), "t", "c")
    assert came.twice == []
    assert sorted(came.bodies) == sorted(bodies)
    record(record_property, "stops", stops)
    record(record_property, "of them while holding D", blocked)


def die_holding(instance, point):
    from shmq import _native

    broker = shmq.attach(instance)
    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    say("ready")
    _native.killpoint(point, 1)
    producer.publish(b"x")
    consumer.take(5).finish()


@pytest.mark.parametrize(
    "point", ["publish.prepared", "publish.committed", "take.state", "finish.state"]
)
def test_a_lock_holder_that_dies_blocks_nobody_also_without_a_supervisor(
    killpoints: object,
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    child: Spawn,
    instance: str,
    point: str,
) -> None:
    server = serve(killpoints=True)
    broker = attach()
    producer = broker.producer("t")
    waiting = broker.consumer("t", "c")
    victim = child(die_holding, instance, point, killpoints=True)
    victim.said("ready")
    server.kill()
    victim.die()
    last = producer.publish(b"last", timeout=20)
    found = []
    while not found or found[-1] != last:
        message = waiting.take(timeout=20)
        assert message is not None
        found.append(message.id)
        message.finish()
    assert len(found) <= 2
    serve()
    eventually(lambda: len(broker.stats().clients) == 2)
    left = take_all(broker, "t", "c")
    if point == "take.state":
        # the supervisor may have seen the death just before its own
        assert len(found[:-1]) + len(left.ids) == 1
    else:
        assert not left.ids
    recount(instance, "t", "c")


def test_a_process_that_is_killed_while_it_waits_takes_nothing_with_it(
    broker: shmq.Broker, child: Spawn
) -> None:
    broker.create_channel("t", "c")
    for _ in range(5):
        waiter = child(wait_for_ever, broker.instance)
        waiter.said("waits")
        pid = waiter.pid
        waiter.kill()
        wait_ended(pid)
    with broker.consumer("t", "c") as consumer:
        taking = Background(lambda: consumer.take(timeout=30))
        broker.producer("t").publish(b"x")
        assert taking.result() is not None


def wait_for_ever(instance):
    consumer = shmq.attach(instance).consumer("t", "c")
    say("waits")
    consumer.take()


def test_delivered_is_what_it_says() -> None:
    assert Delivered(bodies=[b"a", b"b", b"a"]).twice == [b"a"]


@pytest.mark.parametrize("kind", ["port", "path"])
def test_the_next_supervisor_gets_the_gateway_s_address_of_one_that_was_killed(
    serve: Callable[..., Child], data_path: Path, kind: str
) -> None:
    pytest.importorskip("aiohttp")
    address = str(data_path / "nsqd.sock")
    if kind == "port":
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{sock.getsockname()[1]}"
    for _ in range(3):
        server = serve(tcp_address=address)
        eventually(lambda address=address: accepts(address))
        server.kill()


def accepts(address: str) -> bool:
    """Does a gateway process answer there? (The kernel accepts before there is one.)"""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET if host else socket.AF_UNIX
    with socket.socket(family) as sock, contextlib.suppress(OSError):
        sock.settimeout(processes.WATCHDOG)
        sock.connect((host, int(port)) if host else address)
        sock.sendall(b"  V2NOP\nFIN x\n")
        return bool(sock.recv(1))
    return False
