"""Requests that nobody should send, to every path of both HTTP servers: none crashes, none fills
the log, and a token that is put into the wrong place never reaches it."""

from __future__ import annotations

import ast
import itertools
import re
import socket
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.nsq_client import Server
from support.page import login
from support.processes import ROOT, WATCHDOG, Child

import shmq
from shmq.door import target, wishes

TOKEN = "a-token-that-nobody-can-guess-0123456789"
MARK = "mark-of-a-token-in-a-wrong-place-4711"
#: Other spellings of a part of it that a log must not have either.
MARKS = (MARK, "wrong-place-4711", "wrong%2dplace", "wrong%2Dplace")

GATEWAY_PATHS = (
    *("/ping", "/info", "/stats", "/metrics", "/pub", "/mpub", "/nothing", "/", "*"),
    *("/topic/create", "/topic/delete", "/topic/empty", "/topic/pause", "/topic/unpause"),
    *("/channel/create", "/channel/delete", "/channel/empty", "/channel/pause"),
    *("/config/log_level", "/config/nsqlookupd_tcp_addresses", "/config/no_such_option"),
    *("/debug/pprof/", "/debug/pprof/cmdline", "/page", "/page/", "/page/login"),
)
PAGE_PATHS = (
    *("/", "/page", "/page/", "/page/state", "/page/ticks", "/page/login", "/page/rights"),
    *("/page/topic", "/page/channel", "/page/heat", "/page/messages", "/page/message"),
    *("/page/dead", "/page/leases", "/page/processes", "/page/results", "/page/history"),
    *("/page/deaths", "/page/act", "/page/static/main.js", "/page/nothing"),
)
HEADERS = (
    b"Cookie: shmq_page=\xff",
    b"Cookie: \xff\xfe=\xfd; ;;=;",
    b"Authorization: Bearer \xff\xfe",
    b"Authorization: \xff",
    b"Authorization: Basic !!!",
    b"X-Shmq-Page: \xff\xfe",
    b"Origin: http://[::1",
    b"Origin: \xff",
    b"Content-Type: application/json; charset=no-such",
    b"Content-Encoding: gzip",
    b"Transfer-Encoding: chunked\r\nContent-Length: 4",
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: \xb2",
    b"Expect: 200-maybe",
    b"X-Forwarded-For: \xff",
    b"Accept-Encoding: \xff",
    b"Range: bytes=\xff",
    b"If-None-Match: \xff",
)
QUERIES = (
    *("?%", "?%zz", "?topic=%ff", "?topic=%00&channel=%ff", "?topic=a&topic=b", "?;", "?=&=", "??"),
    *("?topic=" + "x" * 3000, "?n=%D9%A1", "?since=1e999", "?id=%ff", "?state=%ff", "?period=%00"),
    *("?n=99999999999999999999&topic=orders&channel=pack", "?defer=1e9&topic=orders"),
    *("?format=%ff", "?seconds=nan", "?seconds=-1", "?debug=%ff"),
)
BODIES = (
    *(b"", b"\xff\xfe", b"null", b"[]", b"7", b'"x"', b"{", b"[" * 50_000, b'{"a":' * 20_000),
    *(b'{"action":["a"]}', b'{"action":{}}', b'{"action":1e999}', b'{"action":"\\ud800"}'),
    b'{"action":"delete_channel","topic":["orders"],"channel":"pack"}',
    b'{"action":"delete_channel","topic":"\\ud800","channel":"pack"}',
    b'{"action":"delete_channel","topic":"orders","channel":{"a":1}}',
    b'{"action":"configure","topic":"orders","channel":"pack","settings":{"max_attempts":[1]}}',
    b'{"action":"configure","topic":"orders","channel":"pack","settings":{"max_attempts":1e400}}',
    b'{"action":"configure","topic":"orders","channel":"pack","settings":{"topic":"other"}}',
    b'{"action":"configure","topic":"orders","channel":"pack","settings":{"":1}}',
    b'{"action":"configure","topic":"orders","channel":"pack","settings":{"self":{"a":{}}}}',
    b'{"action":"finish_message","topic":"orders","channel":"pack","id":"0","pid":1e5}',
    b'{"action":"finish_message","topic":"orders","channel":"pack","id":"0","pid":'
    + b"9" * 400
    + b"}",
    b'{"action":"finish_message","topic":"orders","channel":"pack","id":["0"],"pid":true}',
    b'{"action":"redrive","topic":"orders","channel":"pack","reason":7,"exact":"yes"}',
    b'{"action":"drop","topic":"orders","channel":"pack","via":["a"],"error":{}}',
    '{"action":"pause_channel"}'.encode("utf-16"),
    b'["' + b"127.0.0.1:1" * 2000 + b'"]',
)


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours."""
    return "shmq"


class Door:
    """One of the two servers."""

    def __init__(self, address: tuple[str, int], right: bytes, log: Callable[[], str]) -> None:
        self.address = address
        self.right = right
        self.log = log

    def answers(self, data: bytes, patience: float = 0.2) -> bytes:
        """Send bytes, and what comes until the server has nothing more to say."""
        found = b""
        with socket.create_connection(self.address, WATCHDOG) as sock:
            sock.sendall(data)
            sock.settimeout(WATCHDOG)
            try:
                while part := sock.recv(65536):
                    found += part
                    sock.settimeout(patience)
            except (TimeoutError, ConnectionResetError):
                pass
        return found

    def status(self, data: bytes) -> int:
        """The status of the first answer."""
        found = re.match(rb"HTTP/1\.[01] (\d{3})", self.answers(data, 0.001))
        assert found is not None, data[:200]
        return int(found[1])


@pytest.fixture(params=["gateway", "page"])
def door(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    instance: str,
    keep: Callable[[Any], Any],
) -> Door:
    """A server of each kind, with the channel `orders/pack`."""
    if request.param == "gateway":
        token = tmp_path / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        words = (f"--http-token-file={token}", "--log-level=debug", "--http-debug=true")
        server: Server = keep(Server("shmq", tmp_path, instance, *words))
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        for path in ("/topic/create?topic=orders", "/channel/create?topic=orders&channel=pack"):
            assert server.http("POST", path, **bearer).status == 200
        right = f"Authorization: Bearer {TOKEN}".encode()
        return Door(("127.0.0.1", server.port("http")), right, lambda: server.log)
    broker = keep(shmq.Broker(tmp_path / "shop", instance))
    broker.create_channel("orders", "pack")
    argv = [sys.executable, "-m", "shmq", "page", f"--instance={instance}", "--port=0", "--admin"]
    child: Child = keep(Child(argv))
    base, header = login(child.said("instance").split()[-1])
    port = urllib.parse.urlsplit(base).port
    assert port is not None
    right = f"X-Shmq-Page: {header['X-Shmq-Page']}".encode()
    return Door(("127.0.0.1", port), right, lambda: child.errors)


def odd_requests(door: Door) -> Iterator[bytes]:
    """All of them."""
    host = b"Host: 127.0.0.1:%d\r\n" % door.address[1]
    paths = [path.encode() for path in dict.fromkeys(GATEWAY_PATHS + PAGE_PATHS)]
    methods = itertools.cycle((b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"BREW"))
    headers, queries = itertools.cycle(HEADERS), itertools.cycle(QUERIES)
    for path in paths:
        for _ in range(2):
            yield b"%s %s HTTP/1.1\r\n%s%s\r\n\r\n" % (next(methods), path, host, next(headers))
            line = b"%s %s%s HTTP/1.1\r\n" % (next(methods), path, next(queries).encode())
            yield line + host + door.right + b"\r\n\r\n"
            yield b"GET %s%s HTTP/1.1\r\n%s%s\r\n\r\n" % (
                path, next(queries).encode(), host, door.right
            )  # fmt: skip
    for path in (b"/page/act", b"/config/log_level", b"/config/nsqlookupd_tcp_addresses", b"/mpub"):
        for body in BODIES:
            head = b"%s %s?topic=orders HTTP/1.1\r\n" % (
                b"PUT" if b"config" in path else b"POST", path
            )  # fmt: skip
            kind = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            yield (
                head
                + host
                + door.right
                + b"\r\n"
                + b"X-Shmq-Page: 1\r\n" * (b"Page" not in door.right)
                + kind
                + body
            )
    for line in (b"GET", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9", b"GET http:// HTTP/1.1",
                 b"GET http://[::1/ HTTP/1.1", b"GET \xff HTTP/1.1", b"\xff \xff HTTP/1.1",
                 b"GET //[ HTTP/1.1", b"GET /page/../../x HTTP/1.1", b"PRI * HTTP/2"):  # fmt: skip
        yield line + b"\r\n" + host + b"\r\n"


def test_no_odd_request_crashes_a_server_or_fills_its_log(door: Door) -> None:
    requests = list(odd_requests(door))
    statuses = []
    for data in requests:
        try:
            statuses.append(door.status(data))
        except AssertionError:
            if b"Content-Length: 4" in data or b"ticks" in data:
                continue  # a body that does not come
            raise
        if statuses[-1] in (500, 501, 502) and b"/debug/" not in data:
            raise AssertionError((statuses[-1], data[:300], door.log()[-3000:]))
    assert len(statuses) > 250
    log = door.log()
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
    assert "crashed" not in log
    refused = [line for line in log.splitlines() if "bad request" in line or "refused:" in line]
    assert len(refused) < 100
    assert all(len(line) < 1500 for line in log.splitlines())


def positions() -> Iterator[bytes]:
    """Heads of requests with the mark at every place where somebody may put a token."""
    spelled = MARK.replace("-", "%2d")
    for path in (
        *(
            "/ping",
            "/stats",
            "/pub",
            "/nothing",
            "/topic/create",
            "/config/log_level",
            "/debug/pprof/",
        ),
        *("/page", "/page/", "/page/state", "/page/act", "/page/login", "/page/static/main.js"),
        *("//page/", "/PAGE/", "/Stats", "//stats", "/./pub"),
    ):
        for query in (
            f"?token={MARK}", f"?%74oken={MARK}", f"?topic=orders&key={spelled}", f"?{MARK}",
            f"?topic=orders;token={MARK}", f"?a=b&&auth={MARK}", f"?token={MARK}&topic=x&defer=1",
            f"%3Ftoken={MARK}", f"%253ftoken%3d{spelled}", f";token={MARK}", f"#token={MARK}",
            f"?topic=x%26token={MARK}", f"?topic=x%3Btoken%3D{spelled}",
        ):  # fmt: skip
            for method in ("GET", "POST"):
                yield f"{method} {path}{query} HTTP/1.1\r\nHost: HOST\r\n".encode()
    for method, path in (("GET", "/stats"), ("POST", "/pub?topic=x"), ("GET", "/page/state"),
                         ("PUT", "/config/log_level"), ("BREW", "/"), ("GET", "/no")):  # fmt: skip
        start = f"{method} {path} HTTP/1.1\r\n"
        for more in (
            f"Host: HOST\r\nX-Token: {MARK}\r\n",
            f"Host: HOST\r\nX-Shmq-Page: {MARK}\r\n",
            f"Host: HOST\r\nCookie: shmq_page={MARK}\r\n",
            f"Host: HOST\r\nReferer: http://HOST/page/?token={MARK}\r\n",
            f"Host: HOST\r\nOrigin: http://user:{MARK}@evil.example/?token={MARK}\r\n",
            f"Host: user:{MARK}@evil.example\r\n",
            f"Host: evil.example?token={MARK}\r\n",
            f"Host: HOST\r\nAuthorization: Bearer{MARK}\r\n",
            f"Host: HOST\r\nAuthorization: Basic {MARK}\r\n",
            f"Host: HOST\r\n{MARK}\r\n",
            f"Host: HOST\r\n{MARK} : x\r\n",
            f"Host: HOST\r\nContent-Length: {MARK}\r\n",
            f"Host: HOST\r\nTransfer-Encoding: {MARK}\r\n",
            f"Host: HOST\r\nExpect: {MARK}\r\n",
        ):
            yield (start + more).encode()
        yield f"{method} http://user:{MARK}@HOST{path} HTTP/1.1\r\nHost: HOST\r\n".encode()
        yield f"{method} http://{MARK}@HOST/page/?token={MARK} HTTP/1.1\r\nHost: HOST\r\n".encode()
        yield f"{MARK} {path} HTTP/1.1\r\nHost: HOST\r\n".encode()
        yield f"{method} {path} {MARK}\r\nHost: HOST\r\n".encode()


def test_a_token_in_a_wrong_place_never_reaches_the_log(door: Door) -> None:
    host = b"127.0.0.1:%d" % door.address[1]
    located = []
    for number, head in enumerate(positions()):
        with_right = b"" if number % 2 or b"Authorization" in head else door.right + b"\r\n"
        answer = door.answers(head.replace(b"HOST", host) + with_right + b"\r\n", 0.0005)
        located += re.findall(rb"(?im)^(?:location|set-cookie): .*", answer)
    assert not [line for line in located if b"4711" in line]
    door.status(b"GET /page/nothing HTTP/1.1\r\nHost: %s\r\n\r\n" % host)
    time.sleep(0)
    log = door.log()
    for mark in MARKS:
        lines = [line for line in log.splitlines() if mark.lower() in line.lower()]
        assert not lines, lines[:5]


def test_the_path_of_a_target_is_shown_without_secrets() -> None:
    assert target.shown("/stats?format=json&topic=orders") == "/stats?format=json&topic=orders"
    assert target.shown("/page/?token=x&topic=orders") == "/page/?***&topic=orders"
    assert target.shown("http://user:secret@host/pub?topic=t") == "/pub?topic=t"
    assert target.shown("/a%3Ftoken=x") == "/a***"
    assert target.shown("/a\x1b[2J\n") == "/a?[2J?"
    assert target.kept("a=b&topic=t&token=x&format=json") == "topic=t&format=json"
    assert len(target.shown("/" + "x" * 10_000)) < 300


@pytest.mark.parametrize(
    "body", [b"[" * 30 + b"]" * 30, b"\xff", b"{", b"NaN", b'{"a":1e999}', b"9" * 9000]
)
def test_a_body_that_makes_no_sense_is_said_so(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"body|number"):
        wishes.parsed(body)


def test_a_body_has_the_types_that_were_asked_for() -> None:
    fields: dict[str, Any] = {"name": str, "count": int, "on": bool, "more": dict}
    body = b'{"name": "x", "count": null, "on": true, "more": {"a": 1}}'
    assert wishes.typed(body, fields) == {"name": "x", "on": True, "more": {"a": 1}}
    for wrong in (
        b'{"name": 1}',
        b'{"count": true}',
        b'{"on": 1}',
        b'{"more": []}',
        b'{"x": 1}',
        b"[]",
    ):
        with pytest.raises(ValueError, match=r" is |no field"):
            wishes.typed(wrong, fields)


LOGS = {
    *("debug", "info", "warning", "error", "critical", "exception", "log", "note", "noted"),
    *("_failed", "_refused", "bad", "crashes"),
}
#: Attributes of a request that may hold a token.
SECRET = {
    *("raw_path", "path_qs", "rel_url", "url", "query_string", "query", "headers", "cookies"),
    *("message", "host", "path"),
}


def test_no_line_of_the_log_has_a_target_that_did_not_go_through_one_function() -> None:
    found = []
    for folder in ("gateway", "page", "door"):
        for path in sorted((ROOT / "shmq" / folder).glob("*.py")):
            if "aiohttp" not in path.read_text() and "request" not in path.read_text():
                continue
            for call in ast.walk(ast.parse(path.read_text())):
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                    continue
                if call.func.attr not in LOGS:
                    continue
                for value in (*call.args, *(word.value for word in call.keywords)):
                    found += [f"{path.name}:{call.lineno}" for _ in _of_requests(value, path)]
    assert not found, f"{found}: pass a request's target through shmq.door.target"


def _of_requests(value: ast.AST, file: Path) -> Iterator[ast.AST]:
    """The parts of an expression that come from a request and did not go through `target`."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).startswith("target."):
        return
    of_request = isinstance(value, ast.Attribute) and "request" in ast.unparse(value.value)
    if of_request and getattr(value, "attr", "") in SECRET:
        yield value
    names = ("raw", "path", "query", "whole")
    if isinstance(value, ast.Name) and value.id in names and "aiohttp" in file.read_text():
        yield value
    for child in ast.iter_child_nodes(value):
        yield from _of_requests(child, file)
