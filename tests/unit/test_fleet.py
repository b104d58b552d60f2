"""The sums of several hosts, and answers that cannot be trusted."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import click
import pytest
from support.processes import WATCHDOG, eventually

from shmq.cli import stat_fleet
from shmq.cli.stat_page import Frame
from shmq.cli.status import DEGRADED, NOT_RUNNING, OK
from shmq.diagnostics import fleet
from shmq.diagnostics.fleet import Counts, Fleet, Host

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


def channel(name: str = "c", **counts: Any) -> dict[str, Any]:
    """A channel in nsqd's answer."""
    numbers = dict.fromkeys(vars(Counts())) | {"paused": False}
    return {key: value or 0 for key, value in numbers.items()} | {
        "paused": False,
        "channel_name": name,
        **counts,
    }


def stats(*channels: Any, topic: str = "t", paused: bool = False, **more: Any) -> bytes:
    """The answer of a host with one topic."""
    own = {"topic_name": topic, "depth": 0, "backend_depth": 0, "message_count": 9}
    topics = [own | {"paused": paused, "channels": list(channels)}]
    document = {"version": "1.3.0", "health": "OK", "start_time": 1, "topics": topics, **more}
    return HEAD + json.dumps(document).encode()


class Hostile:
    """A server that answers every connection with the same bytes. endless: over and over."""

    def __init__(self) -> None:
        self.answer, self.endless = b"", False
        self.open = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.open += 1
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                sock.recv(65536)
                sock.sendall(self.answer)
                while self.endless:
                    sock.sendall(self.answer)
            except OSError:
                pass
        self.open -= 1

    def close(self) -> None:
        self.endless = False
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    server = Hostile()
    yield server
    server.close()


def error(address: str, timeout: float = WATCHDOG) -> str:
    """The reason why a host's answer is not shown."""
    (host,) = fleet.survey([], [address], timeout=timeout).hosts
    assert host.error is not None
    assert host.counts == {}
    return host.error


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "no answer: Remote end closed connection"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "it does not speak HTTP"),
        (b'HTTP/1.1 403 No\r\n\r\n{"message":"\x1b[2J"}', r'status 403: {"message":"\x1b[2J"}'),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "status 302"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "breaks off 7 bytes before its end"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "does not speak HTTP"),
        (HEAD + b"<html>", "it is not JSON"),
        (HEAD + b"[" * 200_000, "it is nested too deeply"),
        (HEAD + b"9" * 5000, "it is not JSON"),
        (HEAD + b"[]", "it is not an object"),
        (HEAD + b"{}", "version is not a string"),
        (stats(topics={}), "topics is not a list"),
        (stats(topics=[7]), "topics[0] is not an object"),
        (stats(topic="\x1b]0;"), "topics[0].topic_name is not a name"),
        (stats(channel("\ud800")), "topics[0].channels[0].channel_name is not a name"),
        (stats(channel(), channel(depth="7")), "topics[0].channels[1].depth is not a count"),
        (stats(channel(depth=True)), "depth is not a count"),
        (stats(channel(depth=-1)), "depth is not a count"),
        (stats(channel(depth=1.5)), "depth is not a count"),
        (stats(channel(depth=2**64)), "depth is not a count"),
        (stats(channel(paused=1)), "paused is not true or false"),
        (stats(channel(), channel()), "topics[0] has a name twice"),
    ],
)
def test_a_wrong_answer_is_told(hostile: Hostile, answer: bytes, words: str) -> None:
    hostile.answer = answer
    assert words in error(hostile.address)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({}, "its answer is not nsqlookupd's: producers is not a list"),
        ({"producers": [1]}, "1 of its hosts cannot be asked: producers[0] is not an object"),
        (
            {"producers": [{"broadcast_address": "/run/a.sock", "http_port": 1}]},
            "1 of its hosts cannot be asked: producers[0].broadcast_address is not the name of a "
            "host",
        ),
        (
            {"producers": [{"broadcast_address": "a", "http_port": 0}, {}]},
            "2 of its hosts cannot be asked: a has no HTTP port",
        ),
    ],
)
def test_a_wrong_answer_of_a_nsqlookupd_is_told(hostile: Hostile, answer: Any, words: str) -> None:
    """A right entry beside the wrong ones is used."""
    right = {"broadcast_address": "127.0.0.1", "http_port": 1}
    if "producers" in answer:
        answer["producers"].append(right)
    hostile.answer = HEAD + json.dumps(answer).encode()
    found = fleet.survey([hostile.address], [], timeout=WATCHDOG)
    assert found.trouble[0] == f"nsqlookupd {hostile.address}: {words}"
    assert [host.address for host in found.hosts] == ["127.0.0.1:1"] * ("producers" in answer)


def test_too_many_hosts_are_not_all_asked(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "MOST_HOSTS", 1)
    producers = [{"broadcast_address": "127.0.0.1", "http_port": port} for port in (1, 2, 3)]
    hostile.answer = HEAD + json.dumps({"producers": producers}).encode()
    found = fleet.survey([hostile.address], [], timeout=WATCHDOG)
    assert [host.error for host in found.hosts] == [
        "no answer: Connection refused",
        *["is not asked: more than 1 hosts"] * 2,
    ]


@pytest.mark.parametrize("limit", ["MOST_BYTES", "MOST_BYTES_IN_ALL"])
def test_an_endless_answer_is_cut(
    hostile: Hostile, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, limit, 1 << 20)
    hostile.answer, hostile.endless = HEAD + b" " * 65536, True
    assert error(hostile.address).endswith("longer than 1 MiB")
    eventually(lambda: hostile.open == 0)


def test_headers_that_never_end_are_given_up(hostile: Hostile) -> None:
    """Each byte comes in time, so only the deadline of the whole ends it."""
    hostile.answer, hostile.endless = b"HTTP/1.1 100 Continue\r\n\r\n", True
    assert error(hostile.address, timeout=0.3) == "no answer within 0.3 s"
    eventually(lambda: hostile.open == 0)


def test_a_right_answer_beside_a_wrong_one(hostile: Hostile) -> None:
    """A channel of a paused topic is paused."""
    hostile.answer = stats(channel("c", depth=3, backend_depth=1), paused=True)
    found = fleet.survey([], [hostile.address, "127.0.0.1:1"], timeout=WATCHDOG)
    assert [host.error is None for host in found.hosts] == [False, True]
    assert found.answered[0].counts == {("t", "c"): Counts(depth=3, backend_depth=1, paused=True)}
    assert found.trouble == ["127.0.0.1:1: no answer: Connection refused"]


# ---- sums ----


def host(name: str, start: int = 1, at: float = 0.0, **channels: Counts) -> Host:
    counts = {("t", channel): found for channel, found in channels.items()}
    return Host(name, None, "1.3.0", "OK", start, counts, at)


def looks(
    monkeypatch: pytest.MonkeyPatch, *surveys: list[Host]
) -> tuple[list[stat_fleet.FleetLook], list[list[str]]]:
    """The looks that these answers give, and the hosts that each asked."""
    left, asked = list(surveys), []

    def survey(
        lookupds: list[str], nsqds: list[str], topic: str | None, tokens: dict[str, str]
    ) -> Fleet:
        asked.append(nsqds)
        return Fleet(left.pop(0), [])

    monkeypatch.setattr(fleet, "survey", survey)
    chosen = stat_fleet.Chosen(["l:1"], [], None, None, 1.0, None, "name")
    found = stat_fleet._looks(chosen)
    return [next(found) for _ in surveys], asked


def test_sums_stand_above_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    (look,), _ = looks(
        monkeypatch,
        [
            host("a", c=Counts(1, message_count=10), d=Counts(3)),
            host("b", c=Counts(4, message_count=5, paused=True)),
        ],
    )
    assert [(row.title, row.host, row.counts.depth) for row in look.rows("name")] == [
        ("t/c (paused)", "2 hosts", 5),
        ("t/c", "a", 1),
        ("t/c (paused)", "b", 4),
        ("t/d", "a", 3),
    ]
    assert [row.host for row in look.rows("in")][:1] == ["2 hosts"]
    assert look.rows("in")[0].count("message_count") == 15
    assert look.status == OK


def test_rates_begin_again_with_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was started again counts from zero; so does a channel made again."""
    (first, second), asked = looks(
        monkeypatch,
        [
            host("a", 1, 10.0, c=Counts(message_count=100)),
            host("b", 1, 10.0, c=Counts(message_count=100)),
            host("c", 1, 10.0, d=Counts(message_count=100)),
        ],
        [
            host("a", 1, 12.0, c=Counts(message_count=120)),
            host("b", 2, 12.0, c=Counts(message_count=900)),
            host("c", 1, 12.0, d=Counts(message_count=2)),
        ],
    )
    assert all(row.rates is None for row in first.rows("name"))
    total, of_a, of_b, again = second.rows("name")
    assert (total.count("message_count"), of_a.count("message_count")) == (10.0, 10.0)
    assert of_b.rates is again.rates is None
    assert asked == [[], ["a", "b", "c"]]  # those that were there are asked again


def test_the_status_is_that_of_the_worst_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Host("b", "no answer")
    found, _ = looks(monkeypatch, [host("a")], [host("a"), gone], [gone], [])
    assert [look.status for look in found] == [OK, DEGRADED, NOT_RUNNING, NOT_RUNNING]


def test_many_hosts_that_are_away_leave_room_for_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    (look,), _ = looks(monkeypatch, [host("a"), *(Host(f"h{n}", "no answer") for n in range(20))])
    assert len(look.above(Frame(80, False, "name"))) == 21
    lines = [click.unstyle(line) for line in look.above(Frame(80, True, "name"))]
    assert (len(lines), lines[-1]) == (10, "and 12 more: --json has all")
