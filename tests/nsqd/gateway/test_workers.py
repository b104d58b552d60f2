"""Several gateway processes on one port: one broker for every client."""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from itertools import count

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.nsq_client import ERROR, OK, Client, Server, mpub
from support.processes import WATCHDOG, eventually, stop_process

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours has more than one process."""
    return "shmq"


class Pair:
    """A server of two gateway processes, and clients of the one and of the other."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def workers(self) -> list[psutil.Process]:
        """Those that live, the elder first."""
        found = []
        for child in psutil.Process(self.server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one too
                if "shmq.gateway.worker" in child.cmdline():
                    found.append(child)
        return sorted(found, key=lambda one: one.create_time())

    def clients(self) -> list[Client]:
        """One of each process, in the order of `workers`; which it is decides the kernel."""
        workers = eventually(lambda: len(self.workers()) == 2 and self.workers())
        found: dict[int, Client] = {}
        for _ in range(200):
            client = self.server.connect()
            port = client.sock.getsockname()[1]
            client.identify(client_id=str(port))  # answered: it was accepted
            for index, worker in enumerate(workers):
                if any(item.raddr and item.raddr.port == port for item in worker.net_connections()):
                    found.setdefault(index, client)
            if len(found) == 2:
                return [found[0], found[1]]
        raise AssertionError("200 connections went to one process")


def one_each(clients: list[Client]) -> None:
    """Each gets a message; none is finished before: a consumer that has finished one might get the
    next too."""
    deliveries = [client.delivery() for client in clients]
    for client, delivery in zip(clients, deliveries, strict=True):
        client.finish(delivery)


@pytest.fixture
def pair(start: Start) -> Pair:
    return Pair(start("--gateway-workers=2", "--msg-timeout=10m"))


def test_stats_are_of_all(pair: Pair) -> None:
    clients = pair.clients()
    names = {client.sock.getsockname()[1] for client in clients}
    for client, ready in zip(clients, (1, 2), strict=True):
        client.pub("t", b"x")
        client.pub("t", b"y")
        client.sub("t", "c", ready)
    for client, ready in zip(clients, (1, 2), strict=True):
        for _ in range(ready):
            client.delivery()
    for _ in range(10):  # whichever process answers
        channel = pair.server.channel("t", "c")
        assert (channel["in_flight_count"], channel["depth"]) == (3, 1)
        assert {int(client["client_id"]) for client in channel["clients"]} == names
        found = {client["ready_count"]: client["in_flight_count"] for client in channel["clients"]}
        assert found == {1: 1, 2: 2}
        producers = pair.server.stats()["producers"]
        assert sum(one["pub_counts"][0]["count"] for one in producers) == 4


def test_ready_is_each_clients_own(pair: Pair) -> None:
    first, second = pair.clients()
    first.sub("t", "c", 3)
    second.sub("t", "c", 5)
    assert first.ask(mpub(b"t", [b"%d" % number for number in range(20)])) == OK
    taken = [[first.delivery() for _ in range(3)], [second.delivery() for _ in range(5)]]
    channel = pair.server.channel("t", "c")
    assert (channel["in_flight_count"], channel["depth"]) == (8, 12)
    # what is not its own a client cannot finish, whichever process serves the owner
    answer = second.ask(b"FIN " + taken[0][0].id + b"\n")
    reason = b"E_FIN_FAILED FIN " + taken[0][0].id + b" failed client does not own message"
    assert answer == (ERROR, reason)
    first.finish(taken[0][0])
    taken[0].append(first.delivery())
    bodies = [int(one.body) for one in taken[0] + taken[1]]
    assert sorted(bodies) == list(range(9))
    assert [int(one.body) for one in taken[0]] == sorted(int(one.body) for one in taken[0])


def test_a_pause_is_everybodys(pair: Pair) -> None:
    clients = pair.clients()
    for client in clients:
        client.sub("t", "c", 1)
    numbers = count()
    for _ in range(3):  # the requests go to either process
        assert pair.server.post("/channel/pause", topic="t", channel="c").status == 200
        for _ in range(2):
            pair.server.post("/pub", b"%d" % next(numbers), topic="t")
        for client in clients:
            client.sock.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.delivery()
            client.sock.settimeout(WATCHDOG)
        assert pair.server.post("/channel/unpause", topic="t", channel="c").status == 200
        one_each(clients)
    eventually(lambda: pair.server.channel("t", "c")["depth"] == 0)


def test_a_deleted_topic_is_made_anew_by_either(pair: Pair) -> None:
    clients = pair.clients()
    for _ in range(3):
        for client in clients:
            client.pub("t", b"x")
        assert pair.server.topic("t")["message_count"] == 2
        assert pair.server.post("/topic/delete", topic="t").status == 200


def test_options_change_in_all(pair: Pair) -> None:
    assert pair.server.http("PUT", "/config/log_level", b"debug").status == 200
    levels = {pair.server.http("GET", "/config/log_level").body for _ in range(20)}
    assert levels == {b"1"}


def levels(server: Server) -> set[bytes]:
    """As several connections see it, whichever processes they go to."""
    return {server.http("GET", "/config/log_level").body for _ in range(20)}


def test_one_that_starts_has_what_was_changed(pair: Pair) -> None:
    """It was told nothing: it was not there."""
    killed, kept = eventually(lambda: len(pair.workers()) == 2 and pair.workers())
    os.kill(killed.pid, signal.SIGKILL)
    value = b'["127.0.0.1:1"]'
    eventually(lambda: pair.server.http("PUT", "/config/log_level", b"error").status == 200)
    path = "/config/nsqlookupd_tcp_addresses"
    eventually(lambda: pair.server.http("PUT", path, value).status == 200)
    eventually(lambda: len(pair.workers()) == 2)
    pair.clients()  # both answer
    assert levels(pair.server) == {b"4"}
    assert {pair.server.http("GET", path).body for _ in range(20)} == {value}
    os.kill(kept.pid, signal.SIGKILL)  # neither has heard of it from the one that was asked
    eventually(lambda: kept not in pair.workers() and len(pair.workers()) == 2)
    pair.clients()
    assert levels(pair.server) == {b"4"}


def test_a_change_waits_for_one_that_is_slow(pair: Pair) -> None:
    """It answers nothing for longer than a question waits; then it is there and has the change."""
    slow, _ = eventually(lambda: len(pair.workers()) == 2 and pair.workers())
    pair.clients()
    replies: list[int] = []

    def change() -> None:
        with contextlib.suppress(TimeoutError):
            replies.append(pair.server.http("PUT", "/config/log_level", b"error").status)

    changing = [threading.Thread(target=change) for _ in range(8)]
    stop_process(slow.pid)
    try:
        for one in changing:
            one.start()
        time.sleep(3)  # one who asks gives up after 2 s
        answered = list(replies)
    finally:
        os.kill(slow.pid, signal.SIGCONT)
    for one in changing:
        one.join()
    assert answered == []
    assert replies == [200] * 8
    assert levels(pair.server) == {b"4"}


def test_many_changes_under_load(start: Start) -> None:
    """Each is in all processes when it is confirmed, while they publish and one is killed now and
    then."""
    pair = Pair(start("--gateway-workers=3"))
    server = pair.server
    eventually(lambda: len(pair.workers()) == 3)
    done = threading.Event()

    def publish() -> None:
        client = server.connect()
        while not done.is_set():
            try:
                if client.ask(mpub(b"t", [b"x"] * 50)) != OK:
                    client = server.connect()
            except OSError:
                client = server.connect()

    publishers = [threading.Thread(target=publish, daemon=True) for _ in range(3)]
    for one in publishers:
        one.start()
    names = (b"debug", b"info", b"warn", b"error")
    try:
        for number in range(60):
            if number % 15 == 7:
                os.kill(pair.workers()[0].pid, signal.SIGKILL)
            level = number % len(names)
            eventually(lambda level=level: _confirmed(server, names[level]))
            seen = {body for body in (_level(server) for _ in range(10)) if body}
            assert seen == {b"%d" % (level + 1)}
    finally:
        done.set()
        for one in publishers:
            one.join()


def _confirmed(server: Server, level: bytes) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return server.http("PUT", "/config/log_level", level).status == 200
    return False


def _level(server: Server) -> bytes:
    """Empty if the process that was asked has been killed."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return server.http("GET", "/config/log_level").body
    return b""


def test_the_limit_of_consumers_counts_all(start: Start) -> None:
    pair = Pair(start("--gateway-workers=2", "--max-channel-consumers=1"))
    first, second = pair.clients()
    first.sub("t", "c")
    text = b"E_SUB_FAILED SUB failed consumers for t:c exceeds limit of 1"
    assert second.ask(b"SUB t c\n") == (ERROR, text)


def samples(server: Server) -> dict[str, float]:
    """Of topic `t` on the page for Prometheus, whichever process answers."""
    reply = server.http("GET", "/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return {
        f"{sample.name}/{sample.labels.get('channel')}": sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
        if sample.labels.get("topic") == "t" and sample.name.endswith("_total")
    }


def test_a_data_path_in_trouble_is_on_the_page_for_prometheus(start: Start) -> None:
    server = start()

    def gauges() -> dict[str, tuple[float, dict[str, str]]]:
        page = server.http("GET", "/metrics").body.decode()
        return {
            sample.name: (sample.value, sample.labels)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if "disk" in sample.name or "data_path" in sample.name or "shm_" in sample.name
        }

    found = gauges()
    assert found["shmq_disk_trouble"][0] == 0
    assert found["shmq_disk_trouble"][1]["reason"] == ""
    assert found["shmq_data_path_free_bytes"][0] > 0
    assert 0 < found["shmq_shm_free_bytes"][0] <= found["shmq_shm_bytes"][0]
    shutil.rmtree(server.data_path)
    server.http("POST", "/topic/create?topic=t")  # whose name cannot be written
    eventually(lambda: gauges()["shmq_disk_trouble"][0] == 1)
    found = gauges()
    assert found["shmq_disk_trouble"][1]["reason"] == "ENOENT"
    assert math.isnan(found["shmq_data_path_free_bytes"][0])
    server.data_path.mkdir()
    eventually(lambda: gauges()["shmq_disk_trouble"][0] == 0)


def test_counters_for_prometheus_outlive_gateways_and_supervisor(start: Start) -> None:
    server = start("--gateway-workers=2")
    pair = Pair(server)
    clients = pair.clients()
    for client in clients:
        client.pub("t", b"x")
        client.sub("t", "c", 1)
    one_each(clients)
    eventually(lambda: samples(server)["shmq_messages_finished_total/c"] == 2)
    before = samples(server)
    assert before["shmq_messages_published_total/None"] == 2
    for worker in pair.workers():
        os.kill(worker.pid, signal.SIGKILL)
    eventually(lambda: len(pair.workers()) == 2)
    after = samples(server)
    assert after.keys() == before.keys()
    assert all(after[name] >= before[name] for name in before)
    server.stop(signal.SIGKILL)
    again = start("--gateway-workers=2", again=server)
    last = samples(again)
    assert all(last[name] >= after[name] for name in after)
    again.connect().pub("t", b"x")
    assert samples(again)["shmq_messages_published_total/None"] == 3


def test_a_killed_one_gives_back_and_the_other_goes_on(pair: Pair) -> None:
    killed, kept = pair.clients()
    doomed, other = pair.workers()
    killed.pub("t", b"first")
    killed.sub("t", "c", 1)
    first = killed.delivery()
    kept.pub("t", b"second")
    kept.sub("t", "c", 2)
    second = kept.delivery()
    os.kill(doomed.pid, signal.SIGKILL)
    again = kept.delivery()  # its timeout is ten minutes away
    assert (again.id, again.attempts) == (first.id, 2)
    assert killed.ended()
    kept.finish(second)  # still its own
    kept.finish(again)
    eventually(lambda: pair.server.channel("t", "c")["in_flight_count"] == 0)
    assert pair.server.channel("t", "c")["depth"] == 0
    workers = eventually(lambda: len(pair.workers()) == 2 and pair.workers())
    assert workers[0] == other
    kept.pub("t", b"third")
    kept.finish(kept.delivery())
    _, new = pair.clients()
    kept.send(b"RDY 0\n")
    new.sub("t", "c", 1)
    new.pub("t", b"fourth")
    assert new.delivery().body == b"fourth"
    assert pair.server.stop() == 0
