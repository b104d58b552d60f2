"""Those who guess the page's token, and connections to it that only wait."""

from __future__ import annotations

import contextlib
import http.client
import socket
import sys
import threading
import urllib.parse
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from support.page import login
from support.processes import WATCHDOG, Child, eventually

import shmq


@pytest.fixture
def page(shop: shmq.Broker, keep: Callable[[Any], Any]) -> tuple[Child, int, dict[str, str]]:
    """A page's process, its port and the header that opens it."""
    argv = [sys.executable, "-m", "shmq", "page", f"--instance={shop.instance}", "--port=0"]
    child: Child = keep(Child(argv))
    base, header = login(child.said("instance").split()[-1])
    port = urllib.parse.urlsplit(base).port
    assert port is not None
    return child, port, header


def status(port: int, headers: dict[str, str], source: str = "127.0.0.1") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, WATCHDOG, (source, 0))
    with contextlib.closing(connection):
        connection.request("GET", "/page/rights", headers=headers)
        return connection.getresponse().status


def test_wrong_passes_are_slowed(page: tuple[Child, int, dict[str, str]]) -> None:
    child, port, header = page
    ended: list[int] = []

    def guess(number: int) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            ended.append(status(port, {"X-Shmq-Page": f"guess-{number}"}))

    guess(1000)
    guess(1001)
    for number in range(60):
        threading.Thread(target=guess, args=(number,), daemon=True).start()
    eventually(lambda: ended.count(429) >= 40, what="most are refused unseen")
    assert ended.count(403) <= 2 + 16
    assert status(port, header, "127.0.0.2") == 200
    assert child.errors.count("refused unseen") <= 11
    assert "guess-" not in child.errors
    assert "Traceback" not in child.errors


def test_connections_that_wait_keep_nobody_out(page: tuple[Child, int, dict[str, str]]) -> None:
    child, port, header = page
    process = psutil.Process(child.pid)
    hard = process.rlimit(psutil.RLIMIT_NOFILE)[1]
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() * 2 + 100, hard))
    with contextlib.ExitStack() as stack:
        for number in range(300):
            source = (f"127.0.0.{2 + number % 50}", 0)
            with contextlib.suppress(OSError):
                sock = socket.create_connection(("127.0.0.1", port), WATCHDOG, source)
                stack.callback(sock.close)
        for _ in range(5):
            eventually(lambda: _answers(port, header), 20, "somebody else gets in")
    assert "Traceback" not in child.errors


def _answers(port: int, header: dict[str, str]) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return status(port, header) == 200
    return False
