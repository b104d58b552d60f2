"""The page that the gateway serves: who sees it and its bodies, and a gateway that starts again."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.browser import Page, Tab
from support.nsq_client import Server
from support.page import login
from support.processes import WATCHDOG, eventually
from support.secrets import write_secret

TOKEN = "a-token-that-nobody-can-guess-0123456789"
BODY = b'{"secret": "of a customer"}'

Browse = Callable[[Callable[[Tab], Awaitable[None]]], Page]
Serve = Callable[..., Server]


@pytest.fixture
def gateway(tmp_path: Path, instance: str, keep: Callable[[Any], Any]) -> Serve:
    """`gateway(*flags)`: a server with a gateway, and the channel `orders/pack` with a message."""

    def start(*words: str) -> Server:
        server: Server = keep(Server("shmq", tmp_path, instance, *words))
        path = "/channel/create?topic=orders&channel=pack"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert server.http("POST", "/topic/create?topic=orders", **headers).status == 200
        assert server.http("POST", path, **headers).status == 200
        assert server.http("POST", "/pub?topic=orders", BODY, **headers).status == 200
        return server

    return start


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    write_secret(path, TOKEN)
    path.chmod(0o600)
    return path


def address(server: Server, query: str = "") -> str:
    return f"http://127.0.0.1:{server.port('http')}/page/{query}"


def messages(server: Server, **headers: str) -> Any:
    reply = server.http("GET", "/page/messages?topic=orders&channel=pack", **headers)
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


def test_whoever_may_read_stats_sees_the_page_without_bodies(
    gateway: Serve, browse: Browse
) -> None:
    server = gateway()

    async def person(tab: Tab) -> None:
        await tab.go(address(server))
        await tab.shows(server.instance, "OK", "orders/pack")
        await tab.run("location.hash = '#/channel/orders/pack'")
        await tab.shows("Who holds what", "hidden: bodies are shown to those who have the token")
        assert await tab.run("[...document.querySelectorAll('button.act')].every((b) => b.hidden)")

    assert not browse(person).errors
    processes = json.loads(server.http("GET", "/page/processes").body)
    assert {process["command"] for process in processes} == {""}
    [found] = messages(server)
    assert found["body"]["length"] == len(BODY)
    for path in ("messages", "channel", "message", "dead"):
        query = f"?topic=orders&channel=pack&id={found['id']}"
        reply = server.http("GET", f"/page/{path}{query}")
        assert reply.status == 200
        assert b"customer" not in reply.body
        assert "default-src 'none'" in reply.headers["Content-Security-Policy"]


def test_a_browser_with_the_token_sees_bodies_and_the_log_does_not_have_it(
    gateway: Serve, token_file: Path, browse: Browse
) -> None:
    server = gateway(f"--http-token-file={token_file}", "--http-open-reads=false")
    for path in ("state", "ticks", "login", "rights", f"state?token={TOKEN}"):
        for headers in ({}, {"X-Shmq-Page": TOKEN}, {"Cookie": f"shmq_page={TOKEN}"}):
            reply = server.http("GET", f"/page/{path}", **headers)
            assert reply.status == 401, path
            assert b"token" in reply.body
            assert "Set-Cookie" not in reply.headers
    assert b"customer" in json.dumps(messages(server, Authorization=f"Bearer {TOKEN}")).encode()

    async def person(tab: Tab) -> None:
        for sign in "#?":  # an address of before, too
            await tab.go(address(server, f"{sign}token={TOKEN}"))
            await tab.shows(server.instance, "OK", "orders/pack")
            assert "token" not in await tab.run("location.href")
            assert TOKEN not in await tab.run("JSON.stringify(sessionStorage)")
            assert await tab.run("document.cookie + JSON.stringify(localStorage)") == "{}"
        await tab.run("location.hash = '#/channel/orders/pack'")
        await tab.shows("of a customer")

    assert not browse(person).errors
    assert TOKEN not in server.log


def test_the_pass_is_not_the_token_and_opens_nothing_but_the_page(
    gateway: Serve, token_file: Path
) -> None:
    server = gateway(f"--http-token-file={token_file}", "--http-open-reads=false")
    _, header = login(address(server, f"#token={TOKEN}"))
    (given,) = header.values()
    assert TOKEN not in given
    assert b"customer" in json.dumps(messages(server, **header)).encode()
    for more in (header, {"Authorization": f"Bearer {given}"}, {"Cookie": f"shmq_page={given}"}):
        for path in ("/stats", "/metrics", "/debug/pprof/"):
            assert server.http("GET", path, **more).status == 401
        assert server.http("POST", "/pub?topic=orders", b"x", **more).status == 401
    token_file.write_text(TOKEN[::-1])
    server.process.send_signal(1)
    eventually(
        lambda: server.http("GET", "/page/state", **header).status == 401,
        what="the pass of a token that is none any more is refused",
    )


def test_nothing_is_changed_through_the_gateways_page(gateway: Serve) -> None:
    server = gateway()
    for method in ("POST", "PUT", "DELETE"):
        for path in ("", "act", "state", "channel"):
            reply = server.http(method, f"/page/{path}", b'{"action": "delete_topic"}')
            assert reply.status == 405, (method, path)
    assert json.loads(server.http("GET", "/page/rights").body)["admin"] is False
    assert server.http("GET", "/page/nothing").status == 404
    assert server.http("GET", "/page/state", Host="evil.example").status == 403


def test_the_page_comes_back_when_the_gateway_does(gateway: Serve, browse: Browse) -> None:
    server = gateway()

    def worker() -> psutil.Process | None:
        for child in psutil.Process(server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "shmq.gateway.worker" in child.cmdline():
                    return child
        return None

    async def person(tab: Tab) -> None:
        await tab.go(address(server))
        await tab.shows("OK", "orders/pack")
        await tab.run("window.opened = 1; 0")
        first = worker()
        assert first is not None
        first.kill()
        await tab.until("document.getElementById('health').textContent.includes('connection')")

        def is_back() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return server.http("POST", "/topic/create?topic=later").status == 200
            return False

        eventually(is_back, what="the gateway is there again")
        server.post("/channel/create", topic="later", channel="all")
        await tab.shows("OK", "later/all")
        assert await tab.run("window.opened") == 1  # no reload

    browse(person)


def test_a_gateway_whose_page_nobody_opens_does_not_load_it() -> None:
    code = (
        "import sys, shmq.gateway.http; "
        "print([name for name in sys.modules if name.startswith('shmq.page')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_token_with_signs_of_a_query_opens_the_page(gateway: Serve, tmp_path: Path) -> None:
    token = "with+signs/of&a=query%20" + "0" * 8
    path = tmp_path / "signs"
    write_secret(path, f"{TOKEN}\n{token}\n")
    path.chmod(0o600)
    server = gateway(f"--http-token-file={path}")
    login(address(server, f"#token={urllib.parse.quote(token)}"))


def test_the_server_of_another_port_gets_nothing(
    gateway: Serve, token_file: Path, browse: Browse
) -> None:
    server = gateway(f"--http-token-file={token_file}", "--http-open-reads=false")
    got: list[str] = []

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(f"{self.requestline}\n{self.headers}")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<p>hello</p>")

        def log_message(self, *args: Any) -> None:
            pass

    other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=other.serve_forever)
    thread.start()

    async def person(tab: Tab) -> None:
        await tab.go(address(server, f"#token={TOKEN}"))
        await tab.shows("OK", "orders/pack")
        given = await tab.run("JSON.stringify(sessionStorage)")
        await tab.go(f"http://127.0.0.1:{other.server_port}/page/state")
        await tab.shows("hello")
        assert await tab.run("document.cookie + JSON.stringify(sessionStorage)") == "{}"
        assert given not in ("", "{}")
        for text in got:
            assert TOKEN not in text
            assert "cookie" not in text.lower()
            assert given.split('"')[3] not in text

    try:
        browse(person)
    finally:
        other.shutdown()
        thread.join()
        other.server_close()
    assert got


def test_who_has_a_token_always_has_a_place_to_watch(gateway: Serve, token_file: Path) -> None:
    server = gateway(f"--http-token-file={token_file}")
    _, header = login(address(server, f"#token={TOKEN}"))
    held = []

    def watch(source: str, **headers: str) -> int:
        connection = http.client.HTTPConnection(
            "127.0.0.1", server.port("http"), WATCHDOG, (source, 0)
        )
        held.append(connection)
        connection.request("GET", "/page/ticks", headers=headers)
        return connection.getresponse().status

    try:
        statuses = [watch(f"127.0.0.{n}") for n in range(2, 6) for _ in range(55)]
        assert statuses.count(200) == 150  # three quarters of 200
        assert statuses[:55].count(200) == 50  # one address has a quarter
        for _ in range(60):
            assert watch("127.0.0.1", **header) == 200
        assert watch("127.0.0.9") == 503
    finally:
        for connection in held:
            connection.close()
