"""A gateway without descriptors or threads answers each request, and says so in one line."""

from __future__ import annotations

import asyncio
import errno
import http.client
import os
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.nsq_client import Server
from support.processes import WATCHDOG, eventually

from shmq.door import shortage as module
from shmq.door.shortage import shortage
from shmq.gateway.pools import Pool

Start = Callable[..., Server]

#: A method, a path, and the path that loads what answers it while there are descriptors.
PATHS = (
    ("POST", "/pub?topic=NEW", "/ping"),
    ("POST", "/pub?topic=there", "/ping"),
    ("POST", "/mpub?topic=NEW", "/ping"),
    ("POST", "/topic/create?topic=NEW", "/ping"),
    ("POST", "/topic/empty?topic=there", "/ping"),
    ("POST", "/channel/create?topic=there&channel=NEW", "/ping"),
    ("POST", "/channel/empty?topic=there&channel=c", "/ping"),
    ("GET", "/stats", "/ping"),
    ("GET", "/stats?format=json", "/stats"),
    ("GET", "/stats?format=json&topic=there", "/ping"),
    ("GET", "/metrics", "/ping"),
    ("GET", "/metrics", "/metrics"),
    ("GET", "/info", "/ping"),
    ("GET", "/debug/pprof/", "/ping"),
    ("GET", "/debug/pprof/profile?seconds=1", "/ping"),
    ("GET", "/debug/pprof/heap", "/ping"),
    ("GET", "/debug/pprof/goroutine?debug=1", "/ping"),
    ("GET", "/page/", "/ping"),
    ("GET", "/page/", "/page/"),
    ("GET", "/page/state", "/ping"),
    ("GET", "/page/state", "/page/state"),
    ("GET", "/page/state", "/page/"),
    ("GET", "/page/ticks", "/page/"),
    ("GET", "/page/topic?topic=there", "/page/state"),
    ("GET", "/page/channel?topic=there&channel=c", "/page/state"),
    ("GET", "/page/heat?topic=there&channel=c", "/page/state"),
    ("GET", "/page/messages?topic=there&channel=c", "/page/state"),
    ("GET", "/page/dead", "/page/state"),
    ("GET", "/page/leases", "/page/state"),
    ("GET", "/page/processes", "/page/state"),
    ("GET", "/page/results", "/page/state"),
    ("GET", "/page/history", "/page/state"),
    ("GET", "/page/deaths", "/page/state"),
)


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours."""
    return "shmq"


def worker(server: Server) -> psutil.Process:
    (found,) = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "shmq.gateway.worker" in child.cmdline()
    ]
    return found


def ask(connection: http.client.HTTPConnection, method: str, path: str) -> int:
    connection.request(method, path, body=b"x" if method == "POST" else None)
    answer = connection.getresponse()
    if "event-stream" not in answer.headers.get("Content-Type", ""):
        answer.read()
    return answer.status


@pytest.fixture
def server(start: Start) -> Server:
    server = start()
    assert server.post("/topic/create", topic="there").status == 200
    assert server.post("/channel/create", topic="there", channel="c").status == 200
    return server


def test_each_path_is_answered_without_descriptors(server: Server) -> None:
    process = worker(server)
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    short = []
    for number, (method, path, first) in enumerate(PATHS):
        connection = http.client.HTTPConnection("127.0.0.1", server.port("http"), WATCHDOG)
        assert ask(connection, "GET", first) == 200
        process.rlimit(psutil.RLIMIT_NOFILE, (3, hard))  # what is open stays open
        status = ask(connection, method, path.replace("NEW", f"new-{number}"))
        process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
        assert status in (200, 503), (path, status, server.log)
        if status == 503:
            short.append(path)
        connection.close()
        assert "Traceback" not in server.log, path
        assert "crashed" not in server.log, path
    assert len(short) >= 8, short
    assert server.log.count("cannot go on: Too many open files") >= 5
    for number, (method, path, _) in enumerate(PATHS):  # it goes on as if nothing had been
        connection = http.client.HTTPConnection("127.0.0.1", server.port("http"), WATCHDOG)
        assert ask(connection, method, path.replace("NEW", f"more-{number}")) == 200, path
        connection.close()


def test_who_watches_gets_the_next_tick(server: Server) -> None:
    """A tick for which there is no descriptor is left out, and no task dies of it."""
    process = worker(server)
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    connection = http.client.HTTPConnection("127.0.0.1", server.port("http"), WATCHDOG)
    connection.request("GET", "/page/ticks")
    answer = connection.getresponse()
    assert b"event: state" in answer.readline()
    for number in range(3):
        assert server.post("/topic/create", topic=f"new-{number}").status == 200
    process.rlimit(psutil.RLIMIT_NOFILE, (3, hard))
    eventually(lambda: "no tick for who watches the page: Too many open files" in server.log)
    process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    assert server.post("/channel/create", topic="there", channel="later").status == 200
    for line in iter(answer.readline, b""):
        if b'"later"' in line:
            break
    else:
        raise AssertionError("the ticks have ended")
    assert "Traceback" not in server.log
    connection.close()


def test_a_pool_without_threads_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that no thread can make fails at once, and takes no share of the pool."""

    async def run() -> None:
        pool = Pool("test", 1, 1)
        calls: list[int] = []
        begin = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        for number in range(3):
            with pytest.raises(OSError, match="can't start new thread") as caught:
                await asyncio.wait_for(pool.ask("key", lambda n=number: calls.append(n)), WATCHDOG)
            assert shortage(caught.value)
        monkeypatch.setattr(threading.Thread, "start", begin)
        await asyncio.wait_for(pool.ask("key", lambda: calls.append(9)), WATCHDOG)
        assert calls == [9]
        pool.close()
        with pytest.raises(RuntimeError, match="shutdown"):
            pool.ask("key", lambda: None)

    asyncio.run(run())


def test_who_logs_a_traceback_asks_for_a_shortage_first() -> None:
    package = Path(module.__file__).parents[1]
    found = [
        str(file)
        for part in ("door", "gateway", "page")
        for file in (package / part).glob("*.py")
        if (text := file.read_text()) and "shortage(" not in text and file.name != "seldom.py"
        if "exc_info=" in text or "_log.exception(" in text
    ]
    assert not found


def test_what_is_a_shortage() -> None:
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT):
        assert shortage(OSError(number, "x")) == os.strerror(number)
    assert shortage(MemoryError()) == "Cannot allocate memory"
    assert shortage(RuntimeError("can't start new thread"))
    assert shortage(ImportError("x.so: cannot open: Too many open files")) == "Too many open files"
    for error in (OSError(errno.EACCES, "x"), RuntimeError("x"), ImportError("x"), KeyError("x")):
        assert shortage(error) == ""
