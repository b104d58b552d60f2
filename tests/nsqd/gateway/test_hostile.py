"""Clients that mean no good: bounded memory, an answer or an end, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from support.nsq_client import ERROR, OK, Client, Server, mpub, sized
from support.processes import WATCHDOG, eventually

import shmq
from shmq.gateway import http, http_messages
from shmq.gateway.protocol import frame
from shmq.gateway.tokens import Tokens
from shmq.options import Options

Start = Callable[..., Server]

ATTEMPTS = int(os.environ.get("SHMQ_TEST_ATTEMPTS", "4000"))  # to connect, one after the other
IDLE = int(os.environ.get("SHMQ_TEST_IDLE", "10000"))  # connections at the same time
_POST = b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours."""
    return "shmq"


def worker(server: Server) -> psutil.Process:
    """The gateway process."""
    found = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "shmq.gateway.worker" in child.cmdline()
    ]
    assert len(found) == 1
    return found[0]


@pytest.fixture
def honest(server: Server, topic: str) -> Iterator[Callable[[], None]]:
    """`honest()`: another client publishes, takes and finishes as if nothing were."""
    client = server.connect()
    client.sub(topic, "honest", 1)

    def work() -> None:
        client.pub(topic, b"x")
        client.finish(client.delivery())

    yield work
    client.close()


def takes(client: Client, data: bytes, times: int) -> bool:
    """Whether the server takes all of it."""
    try:
        for _ in range(times):
            client.send(data)
    except OSError:
        return False
    return True


def test_declared_sizes_cost_nothing(server: Server, honest: Callable[[], None]) -> None:
    process = worker(server)
    before = process.memory_info().rss
    clients = [server.connect() for _ in range(100)]
    for client in clients:
        client.send(b"MPUB t\n" + struct.pack(">iii", 5 << 20, 5, 1 << 20) + b"x" * 100)
    honest()
    assert process.memory_info().rss - before < 30 << 20
    for client in clients:
        client.close()


def test_endless_lines_end(server: Server, honest: Callable[[], None]) -> None:
    client = server.connect()
    assert not takes(client, b"A" * 65536, 100)
    honest()
    client = server.connect(magic=b"")
    client.send(b"\0" * 4)
    assert client.frame() == (ERROR, b"E_BAD_PROTOCOL")


def test_who_does_not_read_is_cut_off(server: Server, honest: Callable[[], None]) -> None:
    producer, client = server.connect(), server.connect()
    bodies = [b"x" * 100000] * 40
    for _ in range(10):
        assert producer.ask(mpub(b"unread", bodies)) == OK
    process = worker(server)
    before = process.memory_info().rss
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    assert client.identify(heartbeat_interval=1000) == OK
    client.sub("unread", "c", 2500)
    eventually(lambda: server.channel("unread", "c")["in_flight_count"] > 0)
    honest()
    eventually(lambda: server.channel("unread", "c")["client_count"] == 0)
    assert process.memory_info().rss - before < 30 << 20
    assert server.channel("unread", "c")["depth"] == 400  # all of it was given back
    server.post("/topic/delete", topic="unread")


def test_a_part_of_a_lease_that_nobody_reads(
    server: Server, honest: Callable[[], None], topic: str
) -> None:
    with shmq.attach(server.instance) as local:
        local.create_channel(topic, "c")
        for _ in range(40):
            local.producer(topic).publish_many([b"x" * 100_000] * 10)
        holder = local.lease_holder(topic, "c", "me", secret="k" * 16)
        lease = holder.lease(400)
        assert lease is not None
        process, client = worker(server), server.connect()
        before = process.memory_info().rss
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.identify(feature_negotiation=True, leases=True, heartbeat_interval=1000)
        wish = b'{"lease":%d,"bytes":1048576,"credit":67108864,"secret":"%b"}' % (
            lease.id,
            b"k" * 16,
        )
        client.send(f"LREAD {topic} c\n".encode() + sized(wish))
        honest()
        mine = client.sock.getsockname()
        eventually(lambda: all(found.raddr != mine for found in process.net_connections()))
        assert process.memory_info().rss - before < 20 << 20
        honest()
        holder.finish_lease(lease.id)


@pytest.mark.parametrize("seed", range(4))
def test_lease_requests_of_any_numbers(
    server: Server, honest: Callable[[], None], topic: str, seed: int
) -> None:
    """Each is answered, and the connection is kept, or ended after an error."""
    random_ = random.Random(seed)
    with shmq.attach(server.instance) as local:
        local.create_channel(topic, "c")
        local.producer(topic).publish_many([b"x" * 50] * 100)
        holder = local.lease_holder(topic, "c", "me", secret="k" * 16)
        holder.lease(50)
        identity = local.channel_identity(topic, "c")
    numbers = (0, 1, 2, 31, 63, 64, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, 1.5)
    keys = ("lease", "part", "from", "rows", "bytes", "credit", "through", "n", "max_bytes")
    keys += ("parent", "after", "epoch", "at")
    commands = ("LINFO", "LHOLD", "LKEEP", "LEASE", "LWAIT", "LLIST", "LLOOK", "LREAD", "LFIN")
    client: Client | None = None
    kept = 0
    for _ in range(150):
        if client is None:
            client = server.connect()
            client.identify(feature_negotiation=True, leases=True)
        wish: dict[str, Any] = {key: random_.choice(numbers) for key in random_.sample(keys, 6)}
        wish["lease"] = random_.choice((1, 1, *numbers))
        wish |= {
            "n": random_.choice((1, 2**32 - 1)),
            "name": random_.choice(("me", "you", "x" * 79)),
        }
        entry, bits = holder.incarnation
        proof = random_.choice((bits, bits, *numbers[:9]))
        wish["holder"] = random_.choice(([entry, f"{proof:016x}"], [entry, proof], [proof, "x"]))
        wish["secret"] = random_.choice(("k" * 16, "other" * 4, "short", None, 7))
        wish["identity"] = random_.choice((identity, identity, "", "0-0", "x", None))
        wish |= {"replay": True, "properties": random_.random() < 0.5}
        line = f"{random_.choice((*commands, 'LRET', 'LCLOSE'))} {topic} c\n".encode()
        frame = client.ask(line + sized(json.dumps(wish).encode()))
        while frame is not None and frame[0] == 3:
            frame = client.frame()
        assert frame is not None
        if frame[0] == ERROR and frame[1].startswith((b"E_INVALID", b"E_BAD_BODY")):
            assert client.ended()
            client = None
        else:
            kept += 1
    assert kept > 20
    honest()


def test_replies_that_nobody_reads_do_not_pile_up(
    server: Server, honest: Callable[[], None]
) -> None:
    client = server.connect()
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.identify(heartbeat_interval=1000)
    client.sub("replies", "c")
    process = worker(server)
    before = process.memory_info().rss
    client.sock.settimeout(0.5)
    nonsense = b"FIN 0123456789ABCDEF\n" * 1000
    assert not takes(client, nonsense, 3000)  # it is not read any more, or was ended
    honest()
    assert process.memory_info().rss - before < 30 << 20


@pytest.fixture
def many_files() -> Iterator[int]:
    """This process may open as many files as it ever may; how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_idle_connections(
    start: Start, many_files: int, record_property: Callable[[str, object], None]
) -> None:
    """As many as the gateway may have files, and 10 000 if it may."""
    count = min(IDLE, many_files - 500)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 256  # other tests of this process have some open
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(few, soft), hard))  # serve raises it itself
    server = start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    process = worker(server)
    client = server.connect()
    client.sub("t", "c", 1)
    before = process.memory_info().rss
    for _ in range(count):
        server.connect()
    eventually(lambda: process.num_fds() > count)
    client.pub("t", b"x")
    client.finish(client.delivery())
    assert server.http("GET", "/ping").status == 200
    each = (process.memory_info().rss - before) // count
    record_property("bytes per connection", each)
    print(f"{count} idle connections: {each} bytes each")
    assert each < 20 << 10


def test_connection_attempts(server: Server, honest: Callable[[], None], many_files: int) -> None:
    """One after the other: closed, reset, with half a magic or another one."""
    process = worker(server)
    address = ("127.0.0.1", server.port())
    reset = struct.pack("ii", 1, 0)

    def attempt(number: int) -> None:
        with socket.create_connection(address, WATCHDOG) as sock:
            kind = number % 4
            if kind == 1:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            elif kind:
                sock.sendall((b" ", b"GET /")[kind - 2])

    for number in range(ATTEMPTS // 2):
        attempt(number)
    honest()
    before = process.memory_info().rss
    for number in range(ATTEMPTS // 2):
        attempt(number)
        if number % 1000 == 0:
            honest()
    eventually(lambda: process.num_fds() < 100)
    honest()
    grown = process.memory_info().rss - before
    print(f"{ATTEMPTS} attempts: {grown >> 10} KiB more in their second half")
    assert grown < 4 << 20


def test_more_connections_than_files(start: Start) -> None:
    """Connections beyond the limit are closed, the others go on; there is room again when some
    leave."""
    server = start()
    process = worker(server)
    client = server.connect()
    client.sub("t", "c", 1)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 50, many_of(process)))
    clients = [server.connect() for _ in range(200)]
    for _ in range(20):
        client.pub("t", b"x")
        client.finish(client.delivery())
    used = process.cpu_times().user + process.cpu_times().system
    time.sleep(0.5)
    spent = process.cpu_times().user + process.cpu_times().system - used
    assert spent < 0.25, "it turns round and round"
    for one in clients:
        one.close()

    def again() -> bool:
        with contextlib.suppress(OSError):
            return server.connect().ask(b"PUB u\n" + sized(b"x")) == OK
        return False

    eventually(again)
    assert len(server.log) < 100_000


def many_of(process: psutil.Process) -> int:
    """The hard limit of its files."""
    return int(process.rlimit(psutil.RLIMIT_NOFILE)[1])


SIZES = (-(2**31), -1, 0, 2**31 - 1)


@pytest.mark.parametrize("command", [b"PUB t", b"DPUB t 1", b"MPUB t", b"IDENTIFY", b"AUTH"])
def test_sizes_that_cannot_be(server: Server, honest: Callable[[], None], command: bytes) -> None:
    for size in SIZES:
        client = server.connect()
        answer = client.ask(command + b"\n" + struct.pack(">i", size))
        assert answer is not None
        assert answer[0] == ERROR
        assert answer[1].startswith((b"E_BAD_BODY", b"E_BAD_MESSAGE"))
        assert client.ended()
    honest()


def test_counts_and_inner_sizes_that_cannot_be(server: Server, honest: Callable[[], None]) -> None:
    for size in SIZES:
        for data in (struct.pack(">ii", 100, size), struct.pack(">iii", 100, 1, size)):
            client = server.connect()
            answer = client.ask(b"MPUB t\n" + data)
            assert answer is not None
            assert answer[0] == ERROR
            assert answer[1].startswith((b"E_BAD_BODY", b"E_BAD_MESSAGE"))
            assert client.ended()
    honest()


@pytest.mark.parametrize(
    ("half", "error"),
    [
        (b"PU", None),
        (b"PUB t\n\0\0\0\x64only this", b"E_BAD_MESSAGE PUB failed to read message body"),
        (b"MPUB t\n\0\0\0\x64\0\0", b"E_BAD_BODY MPUB failed to read message count"),
    ],
)
def test_what_comes_by_halves_ends(
    server: Server, honest: Callable[[], None], half: bytes, error: bytes | None
) -> None:
    """Two heartbeats for a command, however many of its bytes come in between."""
    client = server.connect()
    assert client.identify(heartbeat_interval=1000) == OK
    client.sock.settimeout(0.1)
    client.send(half)
    came = b""
    deadline = time.monotonic() + WATCHDOG
    while True:
        assert time.monotonic() < deadline
        try:
            data = client.sock.recv(4096)
        except TimeoutError:
            with contextlib.suppress(OSError):
                client.send(b"x" if half == b"PU" else b"")
            continue
        except ConnectionResetError:
            break
        if not data:
            break
        came += data
    honest()
    assert (error or b"") in came
    if error is None:
        assert came.replace(frame(0, b"_heartbeat_"), b"") == b""


def test_garbage_instead_of_tls(start: Start, certificate: tuple[str, str]) -> None:
    server = start(f"--tls-cert={certificate[0]}", f"--tls-key={certificate[1]}")
    process = worker(server)
    other = server.connect()
    other.pub("t", b"x")
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    random_ = random.Random(0)
    before = process.memory_info().rss
    for number in range(60):
        garbage = (b"", hello, b"\x16\x03\x01\xff\xff", hello + b"\x16" * 600)[number % 4]
        garbage += random_.randbytes(random_.choice((1, 40, 70_000)))
        client = server.connect()
        client.identify(feature_negotiation=True, tls_v1=True)
        with contextlib.suppress(OSError):  # it may have closed long before all was sent
            client.send(garbage)
            client.sock.shutdown(socket.SHUT_WR)
        assert ends(client.sock)
        sock = socket.create_connection(("127.0.0.1", server.port("https")), WATCHDOG)
        with sock:
            with contextlib.suppress(OSError):
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
            assert ends(sock)
    other.pub("t", b"x")
    eventually(lambda: process.num_fds() < 60)
    assert process.memory_info().rss - before < 20 << 20


def ends(sock: socket.socket) -> bool:
    """True if the server closes the connection, after any output."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while sock.recv(65536):
            pass
    return True


def test_half_requests(server: Server, honest: Callable[[], None]) -> None:
    process = worker(server)
    address = ("127.0.0.1", server.port("http"))
    before = process.memory_info().rss
    halves = (
        b"G",
        b"POST /pub?topic=t HTTP/1.1\r\nContent-Length: 100\r\nX: ",
        _POST + b"Content-Length: 1000000\r\n\r\n" + b"x" * 100,
        _POST + b"Transfer-Encoding: chunked\r\n\r\nfffff\r\nx",
    )
    socks = []
    for number in range(500):
        sock = socket.create_connection(address, WATCHDOG)
        sock.sendall(halves[number % len(halves)])
        socks.append(sock)
    honest()
    assert server.http("GET", "/ping").status == 200
    assert (process.memory_info().rss - before) / len(socks) < 100 << 10
    for line in (b"GET /" + b"x" * 100000, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10000):
        with socket.create_connection(address, WATCHDOG) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(line)
            assert sock.recv(100).startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    for sock in socks:
        sock.close()


@pytest.mark.parametrize(
    ("half", "answer"),
    [
        (b"", b""),
        (b"POST /pub?topic=t HTTP/1.1\r\nContent-Length: 9", b""),
        (_POST + b"Content-Length: 9\r\n\r\nx", b"HTTP/1.1 408 "),
    ],
)
def test_a_request_has_its_time(
    half: bytes, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_messages, "REQUEST_SECONDS", 0.2)

    async def ask() -> bytes:
        options = Options()
        pages = http.Http(cast(Any, SimpleNamespace(options=options)), Tokens(options))
        serving = pages.server(False)
        listening = await asyncio.get_running_loop().create_server(serving, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(half)
        async with asyncio.timeout(WATCHDOG):
            said = await reader.readline()
        writer.close()
        listening.close()
        await serving.shutdown(0.01)
        return said

    said = asyncio.run(ask())
    assert said.startswith(answer)
    assert bool(said) == bool(answer)


def test_compression_bombs_stay_small(start: Start, tmp_path: Path) -> None:
    server = start()
    process = worker(server)
    client = server.connect()
    client.identify(feature_negotiation=True, deflate=True)
    before = process.memory_info().rss
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = packer.compress(b"NOP\n" * (2 << 20)) + packer.flush(zlib.Z_SYNC_FLUSH)
    client.send(bomb)
    other = server.connect()
    time.sleep(0.2)
    other.pub("t", b"x")
    assert process.memory_info().rss - before < 40 << 20
    line = zlib.compressobj(9, zlib.DEFLATED, -15)
    client = server.connect()
    client.identify(feature_negotiation=True, deflate=True)
    client.send(line.compress(b"A" * (256 << 20)) + line.flush(zlib.Z_SYNC_FLUSH))
    data = b"x"
    while data:
        try:
            data = client.sock.recv(4096)
        except ConnectionResetError:
            break
    assert other.ask(b"PUB t\n" + sized(b"y")) == OK
    assert process.memory_info().rss - before < 60 << 20


def packer() -> zlib._Compress:
    """Of a client that speaks deflate."""
    return zlib.compressobj(9, zlib.DEFLATED, -15)


def packed(server: Server) -> Client:
    """A connection that speaks deflate; what is read from it must be unpacked."""
    client = server.connect()
    client.identify(feature_negotiation=True, deflate=True)
    return client


@pytest.mark.parametrize("wish", ["deflate", "snappy"])
def test_a_second_compression_is_refused(server: Server, wish: str) -> None:
    client = packed(server)
    out, to = zlib.decompressobj(-15), packer()
    words = b'{"feature_negotiation":true,"%b":true}' % wish.encode()
    data = to.compress(b"IDENTIFY\n" + sized(words)) + to.flush(zlib.Z_SYNC_FLUSH)
    client.send(data)
    said = client.held()
    while data := client.sock.recv(65536):
        said += data
    plain = out.decompress(said)
    assert plain.startswith(frame(0, b"OK"))
    error = f"cannot IDENTIFY with {wish} in current state (already upgraded)"
    assert plain.endswith(frame(1, b"E_INVALID " + error.encode()))


def test_a_repeated_plain_identify_is_answered(server: Server) -> None:
    client = server.connect()
    for level in (1000, 2000):
        answer = client.identify(feature_negotiation=True, msg_timeout=level)
        assert answer["msg_timeout"] == level


def spent(process: psutil.Process) -> float:
    """Seconds that it has computed."""
    times = process.cpu_times()
    return times.user + times.system


def is_idle(process: psutil.Process) -> bool:
    """Whether it does next to nothing for a while."""
    before = spent(process)
    time.sleep(0.3)
    return spent(process) - before < 0.05


@pytest.mark.parametrize("reset", [False, True])
def test_who_has_gone_is_not_worked_for(
    server: Server, honest: Callable[[], None], reset: bool
) -> None:
    """The client has sent many seconds of commands and leaves: its connection ends."""
    process = worker(server)
    files = process.num_fds()
    client = packed(server)
    assert client.held() or client.sock.recv(100)  # so that it closes without a reset
    to = packer()
    block = to.compress(b"NOP\n" * (1 << 18)) + to.flush(zlib.Z_FULL_FLUSH)  # may be repeated
    client.sock.settimeout(0.5)
    assert not takes(client, block * 64, 1 << 10)  # it is not read any more
    honest()
    if reset:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    before = spent(process)
    client.close()
    eventually(lambda: process.num_fds() <= files)
    eventually(lambda: is_idle(process))
    assert spent(process) - before < 6


def test_half_closed_while_it_is_behind(server: Server, topic: str) -> None:
    """A client that has only said that it sends no more gets all its answers."""
    client = packed(server)
    to = packer()
    count = 30_000
    commands = b"".join(
        b"PUB %b-%d\n" % (topic.encode(), number % 2) + sized(b"x") for number in range(count)
    )
    client.send(to.compress(commands) + to.flush(zlib.Z_SYNC_FLUSH))
    client.sock.shutdown(socket.SHUT_WR)
    out, said = zlib.decompressobj(-15), client.held()
    while data := client.sock.recv(65536):
        said += data
    plain = out.decompress(said).replace(frame(0, b"_heartbeat_"), b"")
    assert plain == frame(0, b"OK") * (count + 1)


def test_bytes_behind_the_end_of_a_stream_end_the_connection(
    server: Server, honest: Callable[[], None]
) -> None:
    process = worker(server)
    before = process.memory_info().rss
    client = packed(server)
    to = packer()
    client.send(to.compress(b"NOP\n") + to.flush(zlib.Z_FINISH))
    assert not takes(client, b"x" * 65536, 1600)
    honest()
    assert process.memory_info().rss - before < 20 << 20


def test_no_name_blinds_who_watches(server: Server, honest: Callable[[], None], topic: str) -> None:
    """Invalid UTF-8 is shown as Go's decoder shows it, and no client's name fills the page."""
    client = server.connect()
    names = ("client_id", "hostname", "user_agent", "topology_region", "topology_zone")
    assert client.identify(**dict.fromkeys(names, "\ud800" + "x" * 900_000)) == OK
    client.sub(topic, "watched")
    assert client.ask(b"PUB " + topic.encode() + b"\n" + sized(b"x")) == OK
    (shown,) = server.channel(topic, "watched")["clients"]
    assert {shown[name] for name in names} == {"\ufffd" + "x" * 511}
    assert server.http("GET", "/stats").status == 200
    assert server.http("GET", "/metrics").status == 200
    client.close()
