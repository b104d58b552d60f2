"""`shmq forward` into a real nsqd: every message at least once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.processes import Child, eventually
from support.real_nsqd import Nsqd

import shmq

Forward = Callable[..., Child]


def publish(broker: shmq.Broker, count: int) -> list[bytes]:
    broker.create_channel("t", "c")
    bodies = [b"%06d" % number for number in range(count)]
    broker.producer("t").publish_many(bodies)
    return bodies


def listening(path: Path) -> Nsqd:
    """An nsqd with a topic `out` and its channel `all`."""
    path.mkdir()
    nsqd = Nsqd(path)
    nsqd.post("/topic/create?topic=out")
    nsqd.post("/channel/create?topic=out&channel=all")
    return nsqd


def test_a_forwarder_that_dies_loses_nothing(
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    forward: Forward,
    tmp_path: Path,
    keep: Callable[[Any], Any],
) -> None:
    serve()
    nsqd = keep(listening(tmp_path / "nsqd"))
    sent = publish(attach(), 500)
    target = f"nsq://127.0.0.1:{nsqd.tcp_port}/out"
    forward(target, "--batch=50", die="when nsqd got the batch").die()
    forward(target, "--batch=50", "--until-empty").succeed()
    bodies = nsqd.take_all("out", "all").bodies
    assert set(bodies) == set(sent)
    assert len(bodies) <= len(sent) + 50


def test_messages_wait_until_nsqd_is_there(
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    forward: Forward,
    tmp_path: Path,
    keep: Callable[[Any], Any],
) -> None:
    serve()
    away = keep(listening(tmp_path / "away"))
    broker = attach()
    running = forward(f"nsq://127.0.0.1:{away.tcp_port}/out")
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"first")
    eventually(lambda: away.stats()["out"]["message_count"] == 1)
    away.kill()
    sent = publish(broker, 10)
    eventually(lambda: "trying again" in running.errors)
    assert running.kill(signal.SIGTERM) == 0
    nsqd = keep(listening(tmp_path / "nsqd"))
    forward(f"nsq://127.0.0.1:{nsqd.tcp_port}/out", "--until-empty").succeed()
    assert set(sent) <= set(nsqd.take_all("out", "all").bodies)
