"""The socket to which a job sends frames from its thread."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.processes import WATCHDOG

from shmq.gateway import outlet
from shmq.gateway.outlet import Outlet

PIECES = [random.Random(size).randbytes(size) for size in (8, 1, 300_000, 700_000, 17)]


@pytest.fixture
def ends(keep: Callable[[Any], Any]) -> Iterator[tuple[Outlet, socket.socket]]:
    """An outlet, and the client's end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.settimeout(WATCHDOG)
        found = Outlet(ours.fileno())
        keep(found)
        yield found, theirs


def received(client: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := client.recv(count - len(data))):
        data += more
    return data


def test_a_client_that_reads_gets_all(ends: tuple[Outlet, socket.socket]) -> None:
    ours, client = ends
    rest: list[bytes] = []

    def send() -> None:
        left: list[bytes] = [b"".join(PIECES)]
        while left[0]:  # on a busy machine the client may be slow
            left = [ours.send(left)]
        rest.append(ours.send([b"end"]))

    thread = threading.Thread(target=send)
    thread.start()
    wanted = b"".join(PIECES) + b"end"
    assert received(client, len(wanted)) == wanted
    thread.join()
    assert rest == [b""]


@pytest.mark.parametrize("places", [0, 1])
def test_the_rest_is_what_the_client_did_not_take(
    ends: tuple[Outlet, socket.socket], monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    monkeypatch.setattr(outlet, "_places", threading.Semaphore(places))
    ours, client = ends
    rest = ours.send(PIECES)
    wanted = b"".join(PIECES)
    assert 0 < len(rest) < len(wanted)
    assert wanted.endswith(rest)
    assert received(client, len(wanted) - len(rest)) == wanted[: -len(rest)]
    assert outlet._places.acquire(blocking=False) == bool(places)  # nobody keeps it


def test_a_connection_that_ended_takes_nothing(ends: tuple[Outlet, socket.socket]) -> None:
    ours, client = ends
    ours.end()
    assert client.recv(1) == b""
    assert ours.send(PIECES) == b"".join(PIECES)
