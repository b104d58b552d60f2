"""A thousand processes attached at once: they work, some are killed, others take their places."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest
from support.processes import Child, eventually, say
from support.resources import MIB, need_memory

import shmq
from shmq import shm
from shmq.layout import constant

CROWD = 1000
KILLED = 200


def crowd(instance: str) -> None:
    """For each line `more N` on stdin: N forked processes, which say `holds PID BODY`; at its end
    all of them finish what they hold and end, and `ended STATUSES` is said."""
    import gc
    import traceback

    until_end, leave = os.pipe()
    attach = shmq.attach  # loads the package once, and not in each child
    gc.freeze()  # else the first collection of each child copies all that it has from its parent
    count = 0

    def live(number: int) -> None:
        os.close(leave)
        broker = attach(instance, timeout=60)
        producer = broker.producer("t")
        producer.publish(b"a%d" % number)
        consumer = broker.consumer("t", "c", max_in_flight=1)
        consumer.take(timeout=60).finish()
        producer.publish(b"b%d" % number)
        held = consumer.take(timeout=60)
        say("holds", os.getpid(), held.body.decode())
        os.read(until_end, 1)
        held.finish()
        broker.close()

    children = []
    for line in sys.stdin:
        for number in range(count, count + int(line.split()[1])):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    live(number)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            children.append(pid)
        count = len(children)
    os.close(leave)
    say("ended", *(os.waitpid(pid, 0)[1] for pid in children))


def test_a_thousand_processes(
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    child: Callable[..., Child],
    instance: str,
) -> None:
    need_memory(6144 * MIB)
    server = serve()
    broker = attach()
    broker.create_channel("t", "c")
    many = child(crowd, instance)

    def holding(count: int) -> dict[int, bytes]:
        many.said("holds", times=count, watchdog=240)
        lines = (line.split() for line in many.lines if line.startswith("holds"))
        return {int(pid): body.encode() for _, pid, body in lines}

    many.tell(f"more {CROWD}")
    held = holding(CROWD)
    assert len(held) == CROWD
    assert len({*held.values()}) == CROWD, "nobody holds what another has"
    assert len(broker.stats().clients) == CROWD + 2
    channel = broker.stats().channel("t", "c")
    assert (channel.depth, channel.in_flight, channel.finished) == (0, CROWD, CROWD)

    # the table is full a few later, with a sentence
    more = []
    for _ in range(constant("CLIENTS") - CROWD - 2 - shm.RESERVE):
        more.append(shmq.attach(instance))
    with pytest.raises(shmq.TooManyClients):
        shmq.attach(instance)
    for each in more:
        each.close()

    # what the killed held comes back, all of it and nothing else
    victims = [*held][:: CROWD // KILLED]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    with broker.consumer("t", "c") as consumer:
        back = []
        for _ in victims:
            message = consumer.take(timeout=60)
            assert message is not None
            back.append(message.body)
            message.finish()
        assert sorted(back) == sorted(held[pid] for pid in victims)
        assert consumer.take(timeout=0) is None
    eventually(lambda: len(broker.stats().clients) == CROWD - KILLED + 2)

    # others take their places
    many.tell(f"more {KILLED}")
    held = holding(CROWD + KILLED)
    assert len(broker.stats().clients) == CROWD + 2
    assert many.process.stdin is not None
    many.process.stdin.close()
    ends = many.said("ended", watchdog=240).split()[1:]
    assert ends.count("0") == CROWD
    assert ends.count(str(int(signal.SIGKILL))) == KILLED
    eventually(lambda: len(broker.stats().clients) == 2)
    channel = broker.stats().channel("t", "c")
    assert (channel.depth, channel.in_flight) == (0, 0)
    assert channel.finished == 2 * (CROWD + KILLED)
    eventually(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) < 100)
