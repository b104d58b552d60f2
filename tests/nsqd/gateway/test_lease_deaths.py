"""Leases and commits over TCP, while gateway processes die and connections are cut: every message
once, in its first attempt."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable

import psutil
import pytest
from support.cutting_proxy import CuttingProxy
from support.nsq_client import Server
from support.processes import WATCHDOG

import shmq

EPOCHS, ROWS = 60, 2000
#: Both connections are one client's.
SECRET = "0123456789abcdef"


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours has leases."""
    return "shmq"


def kill_now_and_then(server: Server, done: threading.Event, killed: list[int]) -> None:
    """SIGKILL a gateway process every half second or so, until `done`: a few, because the pause
    before the next one starts doubles each time."""
    random_ = random.Random(1)
    while len(killed) < 8 and not done.wait(random_.uniform(0.1, 0.8)):
        found = []
        for child in psutil.Process(server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "shmq.gateway.worker" in child.cmdline():
                    found.append(child)
        with contextlib.suppress(psutil.Error):
            if found:
                random_.choice(found).kill()
                killed.append(1)


def write(remote: shmq.RemoteBroker) -> None:
    """Stage and commit epochs, each commit twice."""
    for epoch in range(EPOCHS):
        rows = [b"%d " % k + b"x" * (k % 300) for k in range(epoch * ROWS, (epoch + 1) * ROWS)]
        staged = remote.stage("t", "writer", epoch, rows)
        assert staged
        for _ in range(2):
            remote.commit("t", "writer", epoch, [staged])


@pytest.mark.deep
def test_each_message_once_whatever_dies(start: Callable[..., Server]) -> None:
    server = start("--gateway-workers=2")
    seen: Counter[int] = Counter()
    attempts: Counter[int] = Counter()
    done, killed = threading.Event(), list[int]()
    with (
        CuttingProxy(server.port(), 700_000) as proxy,
        shmq.connect(f"127.0.0.1:{proxy.port}", timeout=WATCHDOG, secret=SECRET) as cut,
        shmq.connect(f"127.0.0.1:{server.port()}", timeout=WATCHDOG, secret=SECRET) as whole,
    ):
        cut.create_channel("t", "c")
        writer = threading.Thread(target=write, args=(whole,))
        killer = threading.Thread(target=kill_now_and_then, args=(server, done, killed))
        writer.start()
        killer.start()
        holder = cut.lease_holder("t", "c", "me", keepalive=True)
        parent = 0
        while writer.is_alive() or whole.channel_depth("t", "c"):
            lease = holder.lease(7000, parts=3, parent=parent, timeout=1)
            if lease is None:
                continue
            for part in range(lease.parts):
                first, again = (
                    [
                        row
                        for batch in source.read_lease("t", "c", lease.id, part)
                        for row in zip(batch.bodies(), batch.attempts.tolist(), strict=True)
                    ]
                    for source in (cut, whole)
                )
                assert first == again
                seen.update(int(body.partition(b" ")[0]) for body, _ in first)
                attempts.update(attempt for _, attempt in first)
            assert holder.finish_lease(lease.id) in (0, lease.count)  # 0: it was asked twice
            parent = lease.id
        done.set()
        killer.join()
        writer.join()
        holder.close()
    assert seen == Counter(range(EPOCHS * ROWS))
    assert set(attempts) == {1}
    assert proxy.cuts
    assert killed
