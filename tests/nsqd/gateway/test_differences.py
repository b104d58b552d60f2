"""Where shmq differs from nsqd: each row of the README's table, as nsqd does it and as shmq does.

Elsewhere: client certificates are `test_values.test_tls_auth_require` and
`test_services.test_a_required_certificate_is_verified`, order and delays over a stop
`test_appendix.test_21...`, pauses in nsqd.dat `test_values.test_pause_metadata`, requests that come
by halves `test_hostile.test_a_request_has_its_time`, commands that stall
`test_session.test_a_command_has_its_time`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import marshal
import resource
import signal
import socket
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.external_programs import peer
from support.fake_auth_server import Authority
from support.nsq_client import ERROR, OK, Client, Server, drop_in, mpub, sized
from support.processes import WATCHDOG, eventually, stop_process

from shmq.layout import constant

Start = Callable[..., Server]

EPOCH = constant("EPOCH_NS") / 1e9


def test_what_a_lost_consumer_held(start: Start, kind: str) -> None:
    """P4: at once, not after its timeout."""
    server = start("--msg-timeout=3s" if kind == "nsqd" else "--msg-timeout=10m")
    first, second = server.connect(), server.connect()
    first.sub("t", "c", 1)
    first.pub("t", b"x")
    message = first.delivery()
    first.close()
    second.sub("t", "c", 1)
    again = second.delivery()
    assert (again.id, again.attempts) == (message.id, 2)
    assert server.channel("t", "c")["timeout_count"] == (1 if kind == "nsqd" else 0)


def test_order_through_the_disk(start: Start, kind: str) -> None:
    """P7."""
    server = start("--mem-queue-size=300")
    client = server.connect()
    client.sub("t", "c")
    bodies = [b"%06d" % i for i in range(3000)]
    for first in range(0, 3000, 200):
        assert client.ask(mpub(b"t", bodies[first : first + 200])) == OK
    eventually(lambda: server.channel("t", "c")["depth"] == 3000)
    assert server.channel("t", "c")["backend_depth"] > 0
    client.send(b"RDY 100\n")
    got = []
    for _ in bodies:
        message = client.delivery()
        client.finish(message)
        got.append(message.body)
    assert sorted(got) == bodies
    assert (got == bodies) == (kind == "shmq")


def test_a_delay_on_disk(start: Start, kind: str) -> None:
    """P8."""
    server = start("--mem-queue-size=0")
    client = server.connect()
    assert client.ask(b"DPUB t 600000\n" + sized(b"x")) == OK
    eventually(lambda: server.topic("t")["message_count"] == 1)
    client.sub("t", "c", 1)
    if kind == "nsqd":
        assert client.delivery().body == b"x"
    else:
        eventually(lambda: server.channel("t", "c")["deferred_count"] == 1)
        assert client.quiet()


def test_what_a_killed_server_had(start: Start, kind: str) -> None:
    """P1, P9: memory outlives it."""
    server = start()
    client = server.connect()
    client.sub("t", "c", 1)
    client.pub("t", b"x")
    message = client.delivery()
    for _ in range(9):
        client.pub("t", b"x")
    eventually(lambda: server.channel("t", "c")["depth"] == 9)
    eventually(lambda: b'"c"' in (server.data_path / "nsqd.dat").read_bytes())
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    server = start(again=server)
    client = server.connect()
    client.sub("t", "c", 1)
    if kind == "nsqd":
        assert server.channel("t", "c")["depth"] == 0
        assert client.quiet()
        return
    first = client.delivery()
    assert (first.id, first.attempts) == (message.id, 2)
    client.finish(first)
    for _ in range(9):
        client.finish(client.delivery())


def test_a_hangup(start: Start, kind: str) -> None:
    """It ends nsqd, without a flush; it has shmq read its files again."""
    server = start()
    client = server.connect()
    client.sub("t", "c")
    client.pub("t", b"x")
    if kind == "nsqd":
        assert server.stop(signal.SIGHUP) == -signal.SIGHUP
        return
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: "gateway 0: reloaded" in server.log)
    client.send(b"RDY 1\n")
    client.finish(client.delivery())


def test_a_publish_that_finds_no_room(start: Start, kind: str) -> None:
    """Nobody moves messages to disk while shmq's supervisor is stopped; nsqd's publisher does."""
    server = start("--mem-queue-size=300")
    if kind == "shmq":
        server.connect().pub("other", b"made")
        server.connect().pub("t", b"made")
        stop_process(server.process.pid)
    waiting, other = server.connect(), server.connect()
    waiting.send((b"PUB t\n" + sized(b"x")) * 3000)
    answered = 0
    waiting.sock.settimeout(1.0 if kind == "shmq" else WATCHDOG)
    try:
        for _ in range(3000):
            assert waiting.frame() == OK
            answered += 1
    except TimeoutError:
        pass
    other.pub("other", b"goes on")
    assert (answered == 3000) == (kind == "nsqd")
    if kind == "shmq":
        server.process.send_signal(signal.SIGCONT)
        waiting.sock.settimeout(WATCHDOG)
        for _ in range(answered, 3000):
            assert waiting.frame() == OK
    eventually(lambda: server.topic("t")["depth"] == 3000 + (kind == "shmq"))


def test_a_batch_that_fails(start: Start, kind: str) -> None:
    """The disk refuses: a directory is where a topic's file should be."""
    server = start("--mem-queue-size=300")
    client = server.connect()
    assert client.ask(mpub(b"t", [b"x"] * 200)) == OK
    for number in range(4):
        (server.data_path / f"t.diskqueue.{number:06d}.dat").mkdir()
    answer = client.ask(mpub(b"t", [b"x"] * 200))
    assert answer is not None
    assert answer[0] == ERROR
    assert answer[1].startswith(b"E_MPUB_FAILED MPUB failed ")
    assert client.ended()
    assert server.topic("t")["depth"] == (300 if kind == "nsqd" else 200)
    for path in server.data_path.glob("t.diskqueue.*"):
        path.rmdir()


def test_a_batch_larger_than_a_body_may_be(start: Start, kind: str) -> None:
    server = start("--max-msg-size=1000", "--max-body-size=20000")
    client = server.connect()
    answer = client.ask(mpub(b"t", [b"x" * 1000] * 200, size=100))
    if kind == "nsqd":
        assert answer == OK
        assert server.topic("t")["message_count"] == 200
    else:
        assert answer is not None
        assert answer[1].startswith(b"E_BAD_BODY MPUB body too big ")
        assert answer[1].endswith(b" > 20000")
        assert server.topic("t")["message_count"] == 0


@pytest.fixture
def many_files() -> Iterator[None]:
    """More descriptors than a shell gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4000:
        pytest.skip(f"only {hard} descriptors are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_very_many_consumers(start: Start, kind: str) -> None:
    server = start()
    clients: list[Client] = []
    for _ in range(1024):
        clients.append(server.connect())
        clients[-1].sub("t", "c")
    answer = server.connect().ask(b"SUB t c\n")
    if kind == "nsqd":
        assert answer == OK
    else:
        assert answer is not None
        assert answer[0] == ERROR
        assert answer[1].startswith(b"E_SUB_FAILED SUB failed ")
    for client in clients:
        client.close()


NOWHERE = [f"--{kind}-address=127.0.0.1:0" for kind in ("tcp", "http", "https")]


@pytest.mark.parametrize(
    ("word", "nsqd"),
    [
        ("--statsd-interval=1s", 0),
        ("--msg-timeout=0", 0),
        ("--max-rdy-count=-1", 0),
        ("--sync-every=0", 0),
        ("surplus", 0),
        ("--node-id=1024", 1),
        ("--max-deflate-level=10", 1),
        ("--e2e-processing-latency-percentile=1.5", 1),
        ("--config=/nonexistent", 1),
    ],
)
def test_what_makes_no_sense_is_refused(
    start: Start, kind: str, word: str, nsqd: int, tmp_path: Path
) -> None:
    """With exit status 2, as any flag that cannot be; nsqd runs (0), or ends with 1."""
    if kind == "nsqd" and nsqd == 0:
        # nsqd listens before it handles signals, so it may end by the default action
        assert start(*NOWHERE, word).stop() in (0, -signal.SIGTERM)
        return
    program = peer("nsqd") if kind == "nsqd" else drop_in(tmp_path)
    argv = [program, f"--data-path={tmp_path}", *NOWHERE, word]
    done = subprocess.run(argv, capture_output=True, timeout=WATCHDOG)
    assert done.returncode == (nsqd if kind == "nsqd" else 2)
    assert done.stderr


def test_a_socket_that_a_killed_server_left(start: Start, kind: str, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        where = f"{directory}/tcp"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(where)
        if kind == "shmq":
            start(f"--tcp-address={where}").connect().pub("t", b"x")
            return
        argv = [peer("nsqd"), f"--data-path={tmp_path}", f"--tcp-address={where}"]
        done = subprocess.run(argv, capture_output=True, timeout=WATCHDOG)
        assert done.returncode == 1
        assert b"bind: address already in use" in done.stderr


def test_ids(client: Client, kind: str, topic: str) -> None:
    """When they were given: nsqd's in 1.048576 ms since 2012, shmq's in 64 ns since 2026."""
    names = []
    client.sub(topic, "c", 1)
    before = time.time()
    for _ in range(3):
        client.pub(topic, b"x")
        message = client.delivery()
        client.finish(message)
        names.append(int(message.id, 16))
    if kind == "nsqd":
        given = [((name >> 22) + 1288834974288 << 20) / 1e9 for name in names]
        nodes = {name >> 12 & 1023 for name in names}
    else:
        given = [(name >> 10) * 64e-9 + EPOCH for name in names]
        nodes = {name & 1023 for name in names}
    assert names == sorted(set(names))
    assert all(before - 1 < when < time.time() + 1 for when in given)
    assert nodes == {zlib.crc32(hashlib.md5(socket.gethostname().encode()).digest()) % 1024}


def test_the_window_of_latencies(start: Start, kind: str) -> None:
    server = start(
        "--e2e-processing-latency-percentile=0.5", "--e2e-processing-latency-window-time=1s"
    )
    client = server.connect()
    client.sub("t", "c", 1)
    client.pub("t", b"x")
    client.finish(client.delivery())

    def count() -> int:
        return int(server.channel("t", "c")["e2e_processing_latency"]["count"])

    eventually(lambda: count() == 1)
    if kind == "nsqd":
        eventually(lambda: count() == 0)
    else:
        time.sleep(1.5)
        assert count() == 1


def test_output_buffering(start: Start, kind: str) -> None:
    """TestOutputBuffering of nsqd: a message smaller than the buffer waits for the buffer's
    timeout. Not for others that are not there, here."""
    server = start("--max-output-buffer-timeout=1h")
    client = server.connect()
    began = time.monotonic()
    wait = 700 if kind == "nsqd" else 3_600_000
    wishes = {"output_buffer_size": 65536, "output_buffer_timeout": wait}
    assert client.identify(heartbeat_interval=60_000, **wishes) == OK
    client.pub("t", b"x")
    client.sub("t", "c", 10)
    client.delivery()
    assert time.monotonic() - began >= 0.65 or kind == "shmq"


def test_a_second_compression(client: Client, kind: str) -> None:
    client.identify(feature_negotiation=True, deflate=True)
    to, out = (zlib.compressobj(6, zlib.DEFLATED, -15), zlib.decompressobj(-15))
    words = b'{"feature_negotiation":true,"deflate":true}'
    client.send(to.compress(b"IDENTIFY\n" + sized(words)) + to.flush(zlib.Z_SYNC_FLUSH))
    text = b"E_INVALID cannot IDENTIFY with deflate in current state (already upgraded)"
    wanted = b'"deflate":true' if kind == "nsqd" else text
    plain = out.decompress(client.held())
    while wanted not in plain:
        data = client.sock.recv(65536)
        assert data, plain
        plain += out.decompress(data)


def test_long_names(server: Server, client: Client, topic: str, kind: str) -> None:
    client.identify(client_id="x" * 600)
    client.sub(topic, "c")
    shown = server.channel(topic, "c")["clients"][0]["client_id"]
    assert len(shown) == (600 if kind == "nsqd" else 512)


def test_plain_http_to_https(start: Start, certificate: tuple[str, str], kind: str) -> None:
    server = start(f"--tls-cert={certificate[0]}", f"--tls-key={certificate[1]}")
    with socket.create_connection(("127.0.0.1", server.port("https")), WATCHDOG) as sock:
        sock.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        with sock.makefile("rb") as file:
            said = file.read()
    assert said.startswith(b"HTTP/1.0 400 Bad Request") == (kind == "nsqd")
    assert bool(said) == (kind == "nsqd")


def test_profiles(server: Server, kind: str) -> None:
    body = server.http("GET", "/debug/pprof/profile?seconds=1").body
    if kind == "nsqd":
        assert gzip.decompress(body)
    else:
        assert isinstance(marshal.loads(body), dict)  # what pstats reads
    stacks = server.http("GET", "/debug/pprof/goroutine?debug=2").body
    assert (b"goroutine " if kind == "nsqd" else b"thread MainThread") in stacks
    memory = json.loads(server.http("GET", "/stats?format=json").body)["memory"]
    assert memory["heap_in_use_bytes"] > 0
    assert (memory["next_gc_bytes"] > 0) == (kind == "nsqd")


@pytest.mark.parametrize(
    ("method", "path", "header", "value"),
    [
        ("POST", "/topic/create?topic=t", "Origin", "http://evil.example"),
        ("GET", "/stats", "Host", "evil.example"),
        ("GET", "/debug/pprof/", "X-Forwarded-For", "192.0.2.1"),
    ],
)
def test_another_sites_page(
    server: Server, kind: str, method: str, path: str, header: str, value: str
) -> None:
    """And /debug, for a client on another host."""
    assert server.http(method, path, **{header: value}).status == (200 if kind == "nsqd" else 403)


def test_an_address_that_is_none(start: Start, kind: str) -> None:
    reply = start().http("PUT", "/config/nsqlookupd_tcp_addresses", b'["nowhere"]')
    assert reply.status == (200 if kind == "nsqd" else 400)


@pytest.mark.parametrize(("line", "status"), [("FOO /stats", 405), ("FOO /x", 404), ("GET *", 405)])
def test_a_method_that_nobody_knows(server: Server, kind: str, line: str, status: int) -> None:
    """Is answered alike; then nsqd goes on."""
    with socket.create_connection(("127.0.0.1", server.port("http")), WATCHDOG) as sock:
        sock.sendall(f"{line} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        with sock.makefile("rb") as file:
            assert file.readline().startswith(b"HTTP/1.1 %d " % status)
            headers = dict(iter(lambda: tuple(file.readline().strip().split(b": ", 1)), (b"",)))
            assert headers[b"Content-Type"] == b"application/json; charset=utf-8"
            assert headers.get(b"Allow") in (None, b"GET, OPTIONS", b"GET, OPTIONS, POST, PUT")
            assert (headers.get(b"Connection") == b"close") == (kind == "shmq")


def test_more_topics_than_there_may_be(start: Start, kind: str) -> None:
    server = start(*(["--max-topics=1"] if kind == "shmq" else []))
    assert server.post("/topic/create", topic="first").status == 200
    reply = server.post("/topic/create", topic="second")
    if kind == "nsqd":
        assert reply.status == 200
    else:
        assert (reply.status, reply.message) == (503, "TOO_MANY_TOPICS")


def test_passwords_of_urls(start: Start, authority: Authority, kind: str) -> None:
    where = authority.flag.partition("=")[2]
    server = start(f"--auth-http-address=http://user:password@{where}/auth")
    shown = server.http("GET", "/config/auth_http_addresses").body
    assert (b"password" in shown) == (kind == "nsqd")
