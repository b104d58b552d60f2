"""HTTP clients without a secret, and pages of other sites: what they may not do, and what they must
not take from others."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.fake_auth_server import Authority
from support.nsq_client import Reply, Server, sized
from support.processes import WATCHDOG, eventually
from support.secrets import write_secret

import shmq
from shmq import _native, layout
from shmq.door.seldom import Seldom
from shmq.gateway.access import Access, Action, Listener, redacted
from shmq.gateway.tokens import tokens_of
from shmq.option_fields import MAX_TOPICS
from shmq.option_types import OptionError
from shmq.options import Options

Start = Callable[..., Server]

TOKEN = "0123456789abcdef"
EVIL = "http://evil.example"
NO_HOST = b"GET /x HTTP/1.1\r\n\r\n"


@pytest.fixture(scope="session")
def kind() -> str:
    """nsqd refuses nothing of this."""
    return "shmq"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    write_secret(path, f"{TOKEN}\n")
    path.chmod(0o600)
    return path


def raw(server: Server, data: bytes) -> bytes:
    """The bytes from the port until the connection ends."""
    with socket.create_connection(("127.0.0.1", server.port("http")), WATCHDOG) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(data)
        with sock.makefile("rb") as file:
            return file.read()


# ---- other sites' pages ----


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/stats"),
        ("GET", "/config/msg_timeout"),
        ("POST", "/topic/create?topic=t"),
        ("PUT", "/config/log_level"),
        ("GET", "/debug/pprof/"),
        ("GET", "/nothing"),
    ],
)
def test_a_name_made_to_point_here_is_refused(server: Server, method: str, path: str) -> None:
    """DNS rebinding: the browser believes that it talks to evil.example."""
    for name in ("evil.example", "evil.example:4151", "localhost.evil.example", "127.0.0.1.nip.io"):
        reply = server.http(method, path, b"debug", Host=name)
        assert (reply.status, reply.message) == (403, "HOST_NOT_ALLOWED"), name
    assert server.http("GET", "/ping", Host="evil.example").status == 200


def test_names_of_this_server_are_good(start: Start) -> None:
    server = start(
        "--broadcast-address=mq.example",
        "--http-allowed-hosts=proxied.example",
        "--http-allowed-hosts=other.example:8080",
    )
    port = server.port("http")
    for name in (
        "localhost",
        f"localhost:{port}",
        f"127.0.0.1:{port}",
        "[::1]:4151",
        "10.1.2.3",
        "LOCALHOST.",
        socket.gethostname(),
        "mq.example:1",
        "proxied.example",
        "other.example",
        "app.localhost",
    ):
        assert server.http("GET", "/stats", Host=name).status == 200, name
    assert server.http("GET", "/stats", Host="evil.example").status == 403
    assert raw(server, b"GET /info HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200 ")


def test_a_listener_for_others_has_names_that_nobody_knows(start: Start) -> None:
    """But /debug, and a listener whose names were given, are still for those."""
    server = start("--http-address=0.0.0.0:0")
    assert server.http("GET", "/stats", Host="mq.corp.example").status == 200
    assert server.post("/topic/create", topic="t").status == 200
    assert server.http("POST", "/topic/create?topic=t", Host="mq.corp.example").status == 200
    assert server.http("GET", "/debug/pprof/", Host="mq.corp.example").status == 403
    server = start("--http-address=0.0.0.0:0", "--http-allowed-hosts=mq.corp.example")
    assert server.http("GET", "/stats", Host="mq.corp.example").status == 200
    assert server.http("GET", "/stats", Host="evil.example").status == 403
    server = start("--http-allowed-hosts=*")
    assert server.http("GET", "/stats", Host="evil.example").status == 200


def test_a_unix_socket_is_no_browsers(start: Start) -> None:
    with tempfile.TemporaryDirectory() as directory:
        server = start(f"--http-address={directory}/http")
        for path in ("/stats", "/debug/pprof/"):
            assert server.http("GET", path, Host="any").status == 200


@pytest.mark.parametrize(
    "origin",
    [
        EVIL,
        "null",
        "http://127.0.0.1",
        "http://localhost:3000",
        "file://",
        "http://[",
        "https://127.0.0.1.evil.example",
    ],
)
def test_another_sites_page_may_not_write(server: Server, origin: str) -> None:
    for method, path in (
        ("POST", "/topic/create?topic=csrf"),
        ("POST", "/pub?topic=csrf"),
        ("PUT", "/config/log_level"),
        ("DELETE", "/stats"),
        ("GET", "/debug/pprof/"),
    ):
        reply = server.http(method, path, b"debug", Origin=origin)
        assert (reply.status, reply.message) == (403, "ORIGIN_NOT_ALLOWED")
    assert not server.stats(topic="csrf")["topics"]
    assert server.http("GET", "/stats", Origin=origin).status == 200  # it cannot read the answer


def test_an_image_of_another_sites_page_gets_no_profile(server: Server) -> None:
    how = {"Sec-Fetch-Site": "cross-site"}
    assert server.http("GET", "/debug/pprof/heap", **how).status == 403
    assert server.http("POST", "/topic/create?topic=t", **how).status == 403


def test_pages_of_this_server_may_write(start: Start) -> None:
    server = start("--http-allowed-hosts=board.example")
    here = f"127.0.0.1:{server.port('http')}"
    for origin in (f"http://{here}", "https://board.example", "http://board.example:8080"):
        assert server.http("POST", "/topic/create?topic=t", Origin=origin).status == 200
    reply = server.http(
        "POST",
        "/topic/create?topic=t",
        Origin="https://board.example",
        **{"Sec-Fetch-Site": "cross-site"},
    )
    assert reply.status == 200


def test_refusals_do_not_fill_the_log(start: Start) -> None:
    server = start()
    for _ in range(200):
        assert server.http("GET", "/none", Host="e").status == 403
    assert server.log.count("refused: Host 'e' (--http-allowed-hosts)") == 10


# ---- switches and the token ----


def test_writes_can_be_switched_off(start: Start) -> None:
    server = start("--http-writes=false")
    client = server.connect()
    client.pub("t", b"x")
    for path in (
        "/pub",
        "/mpub",
        "/topic/create",
        "/topic/delete",
        "/topic/empty",
        "/topic/pause",
        "/channel/create",
        "/channel/delete",
        "/channel/unpause",
    ):
        reply = server.post(path, b"x", topic="t", channel="c")
        assert (reply.status, reply.message) == (403, "WRITE_DISABLED"), path
        assert reply.headers["X-Nsq-Content-Type"] == "nsq; version=1.0"
    assert server.topic("t")["depth"] == 1
    assert server.http("PUT", "/config/log_level", b"info").status == 200


def test_configuration_can_be_switched_off(start: Start) -> None:
    server = start("--http-config=log_level")
    assert server.http("PUT", "/config/log_level", b"debug").status == 200
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.5)
        value = json.dumps([f"127.0.0.1:{listener.getsockname()[1]}"]).encode()
        reply = server.http("PUT", "/config/nsqlookupd_tcp_addresses", value)
        assert (reply.status, reply.message) == (403, "CONFIG_DISABLED")
        with pytest.raises(TimeoutError):
            listener.accept()
    server = start("--http-config=false")
    assert server.http("PUT", "/config/log_level", b"debug").status == 403
    assert server.http("GET", "/config/log_level").body == b"2"


def test_debug_is_for_this_host(start: Start) -> None:
    server = start()
    assert server.http("GET", "/debug/pprof/heap").status == 200
    for name in ("X-Forwarded-For", "Forwarded", "Via", "X-Real-Ip"):
        reply = server.http("GET", "/debug/pprof/heap", **{name: "192.0.2.1"})
        assert (reply.status, reply.message) == (403, "DEBUG_DISABLED")
    server = start("--http-debug=false")
    for method, path in (
        ("GET", "/debug/pprof/"),
        ("POST", "/debug/freememory"),
        ("GET", "/debug/pprof/cmdline"),
        ("PUT", "/debug/setblockrate"),
    ):
        assert server.http(method, path).status == 403


def allowed(peer: str, action: Action = Action.DEBUG, **options: object) -> bool:
    """Whether a peer may do that at an address that others reach."""
    access = Access(Options.from_keywords(**options), ())
    listener = Listener(secure=False, local=False, unix=False)
    return access.refusal(action, "log_level", {"Host": "10.0.0.1"}, peer, listener) is None


def test_debug_for_others() -> None:
    assert not allowed("192.0.2.1")
    assert not allowed("::ffff:192.0.2.1")
    assert allowed("::ffff:127.0.0.1")
    assert allowed("127.0.0.2")
    assert allowed("::1")
    assert allowed("192.0.2.1", http_debug="true")
    assert not allowed("127.0.0.1", http_debug="false")
    assert allowed("192.0.2.1", Action.WRITE)
    assert allowed("192.0.2.1", Action.CONFIG)


@pytest.mark.parametrize("from_file", [True, False])
def test_a_token_is_needed_to_write(
    start: Start, token_file: Path, from_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if from_file:
        server = start(f"--http-token-file={token_file}")
    else:
        monkeypatch.setenv("SHMQ_HTTP_TOKEN", TOKEN)
        server = start()

    def ask(method: str, path: str, how: str = "") -> Reply:
        return server.http(method, path, b"debug", **({"Authorization": how} if how else {}))

    requests = [
        ("POST", "/pub?topic=t"),
        ("POST", "/topic/create?topic=u"),
        ("POST", "/topic/delete?topic=u"),
        ("PUT", "/config/log_level"),
        ("GET", "/debug/pprof/"),
        ("GET", "/debug/pprof/cmdline"),
    ]
    for method, path in requests:
        for how in (
            "",
            f"Basic {TOKEN}",
            "Bearer",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN[:-1]}",
            f"Bearer x{TOKEN}",
            f"bearer {TOKEN.upper()}",
            "Bearer é",
        ):
            reply = ask(method, path, how)
            assert (reply.status, reply.message) == (401, "UNAUTHORIZED"), how
            assert reply.headers["WWW-Authenticate"].startswith('Bearer realm="shmq"')
        assert ask(method, path, f"Bearer {TOKEN}").status == 200
    assert not server.stats(topic="u")["topics"]
    for path in ("/ping", "/stats", "/info", "/metrics", "/config/http_token_file"):
        reply = ask("GET", path)
        assert reply.status == 200
        assert TOKEN.encode() not in reply.body
    for path in ("cmdline", "goroutine", "heap"):
        assert TOKEN.encode() not in ask("GET", f"/debug/pprof/{path}", f"Bearer {TOKEN}").body
    assert TOKEN not in server.log
    assert server.log.count("audit: action=login") == 8 * len(requests)
    assert " by=127.0.0.1:" in server.log


def test_reads_can_need_the_token_too(start: Start, token_file: Path) -> None:
    server = start(f"--http-token-file={token_file}", "--http-open-reads=false")
    assert server.http("GET", "/ping").status == 200
    for path in ("/stats", "/info", "/metrics", "/config/msg_timeout"):
        assert server.http("GET", path).status == 401
        assert server.http("GET", path, Authorization=f"Bearer {TOKEN}").status == 200


def test_any_line_of_the_file_is_a_token(token_file: Path) -> None:
    other = TOKEN[::-1]
    token_file.write_text(f"{TOKEN}\n\n  {other}  \n")
    options = Options(http_token_file=str(token_file))
    access = Access(options, tokens_of(options))
    where = Listener(secure=False, local=True, unix=False)
    for token, good in ((TOKEN, True), (other, True), (TOKEN + other, False)):
        headers = {"Authorization": f"Bearer {token}"}
        assert (access.refusal(Action.WRITE, "", headers, "", where) is None) == good


@pytest.mark.parametrize("text", ["", "\n\n", "short", "with a space in the token", "é" * 20])
def test_what_is_no_token_lets_nobody_in(tmp_path: Path, token_file: Path, text: str) -> None:
    """The start fails; an empty file is not a server that asks for nothing."""
    token_file.write_text(text)
    with pytest.raises(OptionError, match="token"):
        tokens_of(Options(http_token_file=str(token_file)))
    with pytest.raises(OptionError, match="SHMQ_HTTP_TOKEN"):
        tokens_of(Options(), {"SHMQ_HTTP_TOKEN": text})
    if text:
        return
    for path in (token_file, tmp_path / "none"):
        argv = [
            sys.executable,
            "-m",
            "shmq",
            "serve",
            f"--http-token-file={path}",
            f"--data-path={tmp_path}",
            "--tcp-address=",
            "--http-address=127.0.0.1:0",
        ]
        env = {**os.environ, "SHMQ_INSTANCE": f"token-{os.getpid()}"}
        done = subprocess.run(argv, env=env, capture_output=True, timeout=WATCHDOG)
        assert done.returncode == 1
        assert str(path).encode() in done.stderr
        assert b"Traceback" not in done.stderr


# ---- secrets ----


def test_passwords_are_not_shown(start: Start, authority: Authority) -> None:
    where = authority.flag.partition("=")[2]
    address = f"http://user:hunter2@{where}/auth?key=hunter3"
    server = start(f"--auth-http-address={address}")
    for path in ("/config/auth_http_addresses", "/debug/pprof/cmdline"):
        body = server.http("GET", path).body
        assert f"http://user:***@{where}/auth?key=***".encode() in body
        assert b"hunter" not in body


def test_redacting() -> None:
    for text, shown in (
        ("host:4180", "host:4180"),
        ("http://host/auth", "http://host/auth"),
        ("https://u:a@b@h:1/x?k=v&w=x#f", "https://u:***@h:1/x?k=***&w=***"),
        ("http://token@h", "http://***@h"),
        ("--auth-http-address=http://u:p@h/", "--auth-http-address=http://u:***@h/"),
        ("--auth-http-address=u:p@h:1", "--auth-http-address=u:***@h:1"),
        ("http://h/?secret", "http://h/?***"),
    ):
        assert redacted(text) == shown


# ---- what an address may be ----


@pytest.mark.parametrize(
    "address",
    [
        "x\n[nsqd] 2026/11/22 00:00:00.000000 FATAL: \x1b[31mforged:1",
        "a b:1",
        "x",
        ":4160",
        "x:0",
        "x:65536",
        "http://x:1",
        "x:1\n",
        "é:1",
        "x:" + "1" * 5000,
        "x" * 400 + ":1",
        "/run/x.sock",
    ],
)
def test_what_is_no_address_is_not_dialled(server: Server, address: str) -> None:
    path = "/config/nsqlookupd_tcp_addresses"
    for value in ([address], ["127.0.0.1:1", address]):
        reply = server.http("PUT", path, json.dumps(value).encode())
        assert (reply.status, reply.message) == (400, "INVALID_VALUE")
    assert server.http("GET", path).body == b"[]"
    assert "forged" not in server.log
    many = json.dumps(["127.0.0.1:1"] * 101).encode()
    assert server.http("PUT", path, many).status == 400


# ---- the log ----


def test_garbage_writes_few_lines(start: Start) -> None:
    server = start()
    before = server.log
    for _ in range(50):
        assert raw(server, b"GARBAGE\x1b[31m\r\n\r\n").startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert raw(server, NO_HOST).startswith(b"HTTP/1.1 400 Bad Request: missing required Host")
    said = server.log[len(before) :]
    assert len(said.splitlines()) <= 10
    assert "Traceback" not in said
    assert "a bad request of 127.0.0.1:" in said
    assert "\x1b" not in said


def test_a_body_that_is_none_writes_few_lines(start: Start) -> None:
    server = start()
    before = server.log
    head = b"POST /pub?topic=t HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n"
    for _ in range(100):
        said = raw(server, head + b"3\r\nabc\r\nzz\r\n")
        assert said.startswith((b"HTTP/1.1 500 ", b"HTTP/1.1 400 ")), said
    assert len(server.log[len(before) :].splitlines()) <= 30
    assert "Traceback" not in server.log


def test_an_embedded_broker_keeps_no_garbage() -> None:
    """Its supervisor writes to a file that the test does not show."""
    with shmq.Broker(http_address="127.0.0.1:0") as broker:
        server = broker._server
        assert server is not None
        process = server._process
        assert process is not None

        def port() -> int:
            family = [process.pid, *(p.pid for p in psutil.Process(process.pid).children())]
            for pid in family:
                for item in psutil.Process(pid).net_connections("tcp"):
                    if item.status == psutil.CONN_LISTEN:
                        return int(item.laddr.port)
            return 0

        number = eventually(port)

        def ask() -> bytes:
            with socket.create_connection(("127.0.0.1", number), WATCHDOG) as sock:
                sock.sendall(NO_HOST)
                with sock.makefile("rb") as file:
                    return file.read()

        assert b" 400 " in eventually(ask)
        before = os.fstat(server._said.fileno()).st_size
        for _ in range(100):
            assert b" 400 " in ask()
        assert os.fstat(server._said.fileno()).st_size == before


def test_who_hangs_up_leaves_no_traceback(start: Start, certificate: tuple[str, str]) -> None:
    server = start(f"--tls-cert={certificate[0]}", f"--tls-key={certificate[1]}")
    linger = struct.pack("ii", 1, 0)  # close with a reset
    for kind, data in (
        ("http", b"GET /stats HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        ("http", b"POST /pub?topic=t HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 9\r\n\r\nx"),
        ("https", b"\x16\x03\x01\x00\x05hello"),
        ("https", b"GET / HTTP/1.1"),
        ("https", b""),
    ):
        for _ in range(50):
            sock = socket.create_connection(("127.0.0.1", server.port(kind)), WATCHDOG)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            sock.sendall(data)
            sock.close()
    eventually(lambda: server.http("GET", "/ping").status == 200)
    assert "Traceback" not in server.log


def test_seldom_counts(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("shmq.door.seldom.time.monotonic", lambda: now[0])
    seldom = Seldom(logging.getLogger("seldom"), "sneezes")
    for number in range(25):
        seldom(logging.WARNING, "sneeze %d", number)
    assert len(caplog.messages) == 10
    now[0] += 10
    seldom(logging.WARNING, "sneeze %d", 25)
    assert caplog.messages[10:] == ["15 more sneezes since", "sneeze 25"]


# ---- one page of /debug takes little from others ----


def test_a_heap_is_counted_in_pieces() -> None:
    """Others are served in between; a tick is one of them."""
    import asyncio

    from shmq.gateway.http_debug import Debug

    held = [[number] for number in range(100_000)]

    async def ticks() -> tuple[int, str]:
        count = 0

        async def tick() -> None:
            nonlocal count
            while True:
                count += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        page = await Debug().heap()
        ticking.cancel()
        return count, page

    count, page = asyncio.run(ticks())
    assert count >= len(held) / 1000
    first = page.splitlines()[0].split()
    assert first[1] == "list"
    assert int(first[0]) >= len(held)


def test_one_page_at_a_time(start: Start) -> None:
    server = start("--gateway-workers=1")
    replies: list[Reply] = []

    def ask() -> bool:
        # the first page asked for below may come before this one, which is then the one refused
        replies.append(server.http("GET", "/debug/pprof/profile?seconds=12"))
        return replies[-1].status == 200

    asking = threading.Thread(target=lambda: eventually(ask))
    asking.start()
    for path in ("heap", "goroutine", "profile?seconds=0.01"):
        eventually(lambda path=path: server.http("GET", f"/debug/pprof/{path}").status == 500)
    assert server.post("/pub", b"x", topic="t").status == 200
    asking.join()
    assert replies[-1].status == 200
    assert server.http("GET", "/debug/pprof/heap").status == 200
    for seconds in ("nan", "-inf", "-1", "x"):
        sock = socket.create_connection(("127.0.0.1", server.port("http")), WATCHDOG)
        line = f"GET /debug/pprof/profile?seconds={seconds} HTTP/1.1\r\nHost: [::1]\r\n\r\n"
        sock.sendall(line.encode())
        sock.close()
        assert server.http("GET", "/ping").status == 200
    assert "Traceback" not in server.log


# ---- too many topics ----


def test_one_topic_too_many(start: Start) -> None:
    server = start("--max-topics=3")
    for number in range(3):
        assert server.post("/topic/create", topic=f"t{number}").status == 200
    for path in ("/topic/create", "/pub", "/mpub"):
        reply = server.post(path, b"x", topic="one-more")
        assert (reply.status, reply.message) == (503, "TOO_MANY_TOPICS")
        assert reply.headers["X-Nsq-Content-Type"] == "nsq; version=1.0"
    answer = server.connect().ask(b"PUB one-more\n" + sized(b"x"))
    assert answer is not None
    assert answer[1].startswith(b"E_PUB_FAILED PUB failed ")
    with shmq.attach(server.instance) as broker, pytest.raises(shmq.ShmqError, match="full"):
        broker.create_topic("one-more")
    assert server.post("/channel/create", topic="t0", channel="c").status == 200
    assert server.post("/pub", b"x", topic="t0").status == 200
    assert server.post("/topic/delete", topic="t1").status == 200
    assert server.post("/pub", b"x", topic="one-more").status == 200
    assert "Traceback" not in server.log
    assert "action=create_topic topic=one-more channel=- by=127.0.0.1" in server.log
    # existing topics are adopted even beyond the limit of now
    assert server.stop() == 0
    server = start("--max-topics=2", again=server)
    assert len(server.stats()["topics"]) == 3
    assert server.post("/topic/create", topic="two-more").status == 503


def test_the_table_of_topics() -> None:
    assert layout.constant("TOPICS") == MAX_TOPICS
    assert "table" in _native.STATUS["TABLE_FULL"][2]


# ---- as Go's server ----


def test_an_answer_with_an_unread_body_ends_the_connection(server: Server) -> None:
    """At once, and not by a reset that loses the answer."""
    head = b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n\r\n"
    for data in (head, head + b"x" * 1000, head + b"x" * 3000000):
        with socket.create_connection(("127.0.0.1", server.port("http")), WATCHDOG) as sock:
            sock.settimeout(5)  # shorter than the rest of the body is waited for
            sock.sendall(data)
            said = b""
            while part := sock.recv(65536):
                said += part
        assert said.startswith(b"HTTP/1.1 413 ")
        assert said.endswith(b'{"message":"MSG_TOO_BIG"}')
