"""Sequences that a real nsqd was seen to answer (28 of them, numbered as they were written down),
said to it and to shmq: the same answers, but where shmq promises more."""

from __future__ import annotations

import http.server
import json
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.external_programs import peer
from support.fake_auth_server import Authority, reply, rule
from support.fake_lookupd import Lookupd
from support.nsq_client import ERROR, OK, RESPONSE, Client, Server, mpub, sized
from support.processes import WATCHDOG, eventually

Connect = Callable[..., Client]
Start = Callable[..., Server]


# ---- lines and states ----


@pytest.mark.parametrize("magic", [b"  V3", b"  V1", b"GET ", b"\0\0\0\0"])
def test_01_another_magic(connect: Connect, magic: bytes) -> None:
    client = connect(magic=magic)
    assert client.frame() == (ERROR, b"E_BAD_PROTOCOL")
    assert client.ended()


def test_02_the_longest_line(client: Client) -> None:
    """16384 bytes with the newline."""
    client.send(b"NOP " + b"A" * 16379 + b"\n")
    client.pub("longest", b"x")  # whose answer is the first


def test_03_a_longer_line(client: Client) -> None:
    client.send(b"NOP " + b"A" * 16380 + b"\n")
    assert client.ended()


def test_04_identify_until_sub(client: Client, topic: str) -> None:
    assert client.identify() == OK
    assert client.identify() == OK
    client.sub(topic, "c")
    assert client.identify() == (ERROR, b"E_INVALID cannot IDENTIFY in current state")
    assert client.ended()


def test_05_names_of_64_and_65_bytes(connect: Connect, topic: str) -> None:
    longest = topic.ljust(64, "t")
    connect().sub(longest, "c")
    text = f'E_BAD_TOPIC SUB topic name "{longest}t" is not valid'
    client = connect()
    assert client.ask(f"SUB {longest}t c\n".encode()) == (ERROR, text.encode())
    assert client.ended()


def test_06_rdy_without_a_number(client: Client, server: Server, topic: str) -> None:
    """No parameter is 1, an empty one 0."""
    client.sub(topic, "c", 5)

    def ready() -> int:
        return int(server.channel(topic, "c")["clients"][0]["ready_count"])

    client.send(b"RDY\n")
    eventually(lambda: ready() == 1)
    client.send(b"RDY \n")
    eventually(lambda: ready() == 0)
    client.pub(topic, b"still here")


def test_07_after_cls(client: Client, topic: str) -> None:
    client.sub(topic, "c", 1)
    assert client.ask(b"CLS\n") == (RESPONSE, b"CLOSE_WAIT")
    error = (ERROR, b"E_INVALID cannot CLS in current state")
    assert client.ask(b"RDY 99999\nCLS\n") == error  # RDY is ignored, with any count
    assert client.ended()


def test_08_the_message_of_another(connect: Connect, topic: str) -> None:
    owner, other = connect(), connect()
    owner.pub(topic, b"x")
    owner.sub(topic, "c", 1)
    name = owner.delivery().id
    other.sub(topic, "c")
    for command, tail in ((b"FIN", b""), (b"TOUCH", b""), (b"REQ", b" 0")):
        text = b"E_%b_FAILED %b %b failed client does not own message" % (command, command, name)
        assert other.ask(b"%b %b%b\n" % (command, name, tail)) == (ERROR, text)
    other.pub(topic, b"still here")
    owner.send(b"FIN %b\n" % name)
    assert owner.delivery().body == b"still here"


# ---- publishing ----


def test_09_the_longest_body(connect: Connect, server: Server, topic: str) -> None:
    client = connect()
    client.pub(topic, b"x" * 1048576)
    text = b"E_BAD_MESSAGE PUB message too big 1048577 > 1048576"
    line = f"PUB {topic}\n".encode()
    assert client.ask(line + struct.pack(">i", 1048577)) == (ERROR, text)
    assert client.ended()
    assert server.topic(topic)["message_count"] == 1


def test_10_the_longest_delay(client: Client, server: Server, topic: str) -> None:
    assert client.ask(f"DPUB {topic} 3600000\n".encode() + sized(b"later")) == OK
    assert client.ask(f"DPUB {topic} 0\n".encode() + sized(b"now")) == OK
    text = b"E_INVALID DPUB timeout 3600001 out of range 0-3600000"
    assert client.ask(f"DPUB {topic} 3600001\n".encode() + sized(b"x")) == (ERROR, text)
    assert client.ended()
    assert server.topic(topic)["message_count"] == 2


def test_11_the_largest_count(connect: Connect) -> None:
    for count in (1048576, -1):
        client = connect()
        text = b"E_BAD_BODY MPUB invalid message count %d" % count
        assert client.ask(b"MPUB t\n" + struct.pack(">ii", 100, count)) == (ERROR, text)
        assert client.ended()
    client = connect()
    client.send(b"MPUB t\n" + struct.pack(">iii", 100, 1048575, 0))  # a count that may be
    assert client.frame() == (ERROR, b"E_BAD_MESSAGE MPUB invalid message(0) body size 0")


def test_12_mpub_goes_by_the_sizes_inside(client: Client, server: Server, topic: str) -> None:
    assert client.ask(mpub(topic.encode(), [b"a", b"bc"], size=1)) == OK
    assert client.ask(mpub(topic.encode(), [b"d"] * 3000)) == OK
    found = server.topic(topic)
    assert (found["depth"], found["message_count"], found["message_bytes"]) == (3002, 3002, 3003)


# ---- topics and channels ----


def test_13_the_first_channel_gets_the_backlog(client: Client, server: Server, topic: str) -> None:
    client.pub(topic, b"a")
    client.pub(topic, b"b")
    for channel in ("c1", "c2"):
        assert server.post("/channel/create", topic=topic, channel=channel).status == 200
        if channel == "c1":
            eventually(lambda: server.channel(topic, "c1")["depth"] == 2)
    client.pub(topic, b"c")
    eventually(lambda: server.channel(topic, "c2")["depth"] == 1)
    eventually(lambda: server.channel(topic, "c1")["depth"] == 3)
    assert server.topic(topic)["depth"] == 0


def test_14_a_paused_topic_keeps_messages(client: Client, server: Server, topic: str) -> None:
    assert server.post("/topic/create", topic=topic).status == 200
    assert server.post("/channel/create", topic=topic, channel="c").status == 200
    assert server.post("/topic/pause", topic=topic).status == 200
    client.pub(topic, b"x")
    found = server.topic(topic)
    assert (found["paused"], found["depth"]) == (True, 1)
    assert server.post("/topic/unpause", topic=topic).status == 200
    eventually(lambda: server.channel(topic, "c")["depth"] == 1)
    found = server.topic(topic)
    assert (found["paused"], found["depth"]) == (False, 0)


def test_15_emptying_drops_what_is_in_flight(client: Client, server: Server, topic: str) -> None:
    assert client.ask(mpub(topic.encode(), [b"x"] * 25)) == OK
    client.sub(topic, "c", 1)
    name = client.delivery().id
    assert client.ask(f"DPUB {topic} 60000\n".encode() + sized(b"later")) == OK
    eventually(lambda: server.channel(topic, "c")["deferred_count"] == 1)
    assert server.post("/channel/empty", topic=topic, channel="c").status == 200
    found = server.channel(topic, "c")
    counts = ("depth", "in_flight_count", "deferred_count", "message_count")
    assert [found[name] for name in counts] == [0, 0, 0, 26]
    assert found["clients"][0]["in_flight_count"] == 0
    error = b"E_FIN_FAILED FIN %b failed ID not in flight" % name
    assert client.ask(b"FIN %b\n" % name) == (ERROR, error)
    client.pub(topic, b"y")
    assert client.delivery().body == b"y"


@pytest.mark.parametrize("what", ["topic", "channel"])
def test_16_a_deletion_ends_its_consumers(
    client: Client, connect: Connect, server: Server, topic: str, what: str
) -> None:
    client.sub(topic, "c", 5)
    producer = connect()
    producer.pub(topic, b"x")
    client.delivery()
    params = {"topic": topic} if what == "topic" else {"topic": topic, "channel": "c"}
    assert server.post(f"/{what}/delete", **params).status == 200
    assert client.ended()
    producer.pub(topic, b"makes it anew")
    assert server.topic(topic)["channels"] == []


def test_17_an_ephemeral_channel_goes_with_its_last_client(
    connect: Connect, server: Server, topic: str
) -> None:
    """And an ephemeral topic with its last channel; what lasts, stays."""
    name = f"{topic}#ephemeral"
    one, two, lasting = connect(), connect(), connect()
    for client in (one, two):
        client.sub(name, "c#ephemeral")
    lasting.sub(topic, "c#ephemeral")
    one.close()
    eventually(lambda: server.channel(name, "c#ephemeral")["client_count"] == 1)
    two.close()
    lasting.close()
    eventually(lambda: server.stats(topic=name)["topics"] is None)
    eventually(lambda: server.topic(topic)["channels"] == [])


def test_18_too_many_consumers(start: Start) -> None:
    server = start("--max-channel-consumers=1")
    first = server.connect()
    first.sub("mc", "ch")
    second = server.connect()
    text = b"E_SUB_FAILED SUB failed consumers for mc:ch exceeds limit of 1"
    assert second.ask(b"SUB mc ch\n") == (ERROR, text)
    assert second.ended()
    server.connect().sub("mc", "other")
    first.close()

    def again() -> bool:
        client = server.connect()
        answer = client.ask(b"SUB mc ch\n")
        client.close()
        return answer == OK

    assert eventually(again)


# ---- the disk ----


def records(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Of a segment file: where each begins, its attempts, its body."""
    at = 0
    while at < len(data):
        size, _, attempts = struct.unpack_from(">iqH", data, at)
        yield at, attempts, data[at + 30 : at + 4 + size]
        at += 4 + size


def segments(server: Server, base: str) -> list[Path]:
    """The segment files of a queue, in their order."""
    return sorted(server.data_path.glob(f"{base}.diskqueue.[0-9]*.dat"))


def take(client: Client, count: int) -> list[tuple[bytes, int]]:
    """Take and finish this many messages; returns the body and the attempts of each."""
    found = []
    for _ in range(count):
        message = client.delivery()
        client.finish(message)
        found.append((message.body, message.attempts))
    return found


def test_19_a_kill_with_everything_on_disk(start: Start, kind: str) -> None:
    server = start("--mem-queue-size=0")
    client = server.connect()
    client.sub("durable", "c")
    bodies = [b"%d" % i for i in range(10)]
    for body in bodies:
        client.pub("durable", body)
    eventually(lambda: server.channel("durable", "c")["depth"] == 10)
    if kind == "nsqd":  # begins with the depth, up to 2 s late, and holds one in its hands
        meta = server.data_path / "durable:c.diskqueue.meta.dat"
        eventually(lambda: meta.exists() and int(meta.read_text().split()[0]) >= 9)
    server.process.kill()
    server.process.wait()
    server = start("--mem-queue-size=0", again=server)
    client = server.connect()
    client.sub("durable", "c", 100)
    assert {body for body, _ in take(client, 10)} == set(bodies)


def test_20_a_damaged_record(start: Start, kind: str) -> None:
    """nsqd sets its file aside, with what it had behind, and shmq the record alone."""
    words = ("--mem-queue-size=0", "--max-bytes-per-file=120")  # three records of 40 bytes
    server = start(*words)
    client = server.connect()
    client.sub("cut", "c")
    bodies = [b"%010d" % i for i in range(9)]
    for body in bodies:
        client.pub("cut", body)
    eventually(lambda: server.channel("cut", "c")["depth"] == 9)
    assert server.stop() == 0
    files = segments(server, "cut:c")
    held = [[body for _, _, body in records(path.read_bytes())] for path in files]
    assert [body for some in held for body in some] == bodies
    damaged = next(i for i, some in enumerate(held) if len(some) > 1)
    data = bytearray(files[damaged].read_bytes())
    _, begin, end = ([at for at, _, _ in records(bytes(data))] + [len(data)])[:3]
    data[begin : begin + 4] = b"\x7f\xff\xff\xff"
    files[damaged].write_bytes(data)
    lost = held[damaged][1:2] if kind == "shmq" else held[damaged][1:]
    assert lost
    assert bodies[-1] not in lost
    server = start(*words, again=server)
    client = server.connect()
    client.sub("cut", "c", 1)
    kept = [body for body in bodies if body not in lost]
    assert [body for body, _ in take(client, len(kept))] == kept
    assert client.quiet()
    aside = [path.read_bytes() for path in server.data_path.glob("cut:c.*.bad")]
    assert aside == [data[begin:end] if kind == "shmq" else data]
    client.pub("cut", b"goes on")
    assert take(client, 1) == [(b"goes on", 1)]


def test_21_a_clean_stop(start: Start, kind: str) -> None:
    """A in flight, B queued, C deferred. nsqd forgets order and delay, shmq (P7, P8) does not."""
    server = start()
    client = server.connect()
    client.sub("stopped", "c", 1)
    client.pub("stopped", b"A")
    client.delivery()
    client.pub("stopped", b"B")
    assert client.ask(b"DPUB stopped 600000\n" + sized(b"C")) == OK
    eventually(lambda: server.channel("stopped", "c")["depth"] == 1)
    eventually(lambda: server.channel("stopped", "c")["deferred_count"] == 1)
    assert server.stop() == 0
    assert client.ended()
    data = b"".join(path.read_bytes() for path in segments(server, "stopped:c"))
    on_disk = [(body, attempts) for _, attempts, body in records(data)]
    server = start(again=server)
    client = server.connect()
    client.sub("stopped", "c", 1)
    if kind == "nsqd":
        assert on_disk == [(b"B", 0), (b"A", 1), (b"C", 0)]
        assert take(client, 3) == [(b"B", 1), (b"A", 2), (b"C", 1)]
    else:
        assert on_disk == [(b"A", 1), (b"B", 0)]
        assert take(client, 2) == [(b"A", 2), (b"B", 1)]
        assert server.channel("stopped", "c")["deferred_count"] == 1
        assert client.quiet()


# ---- HTTP ----


def test_22_pub_of_nothing_to_nowhere(server: Server) -> None:
    answer = server.http("POST", "/pub", b"")
    assert (answer.status, answer.message) == (400, "MSG_EMPTY")


def test_23_mpub_of_lines(server: Server, client: Client, topic: str) -> None:
    answer = server.post("/mpub", b"a\nb\n\nc\n", topic=topic)
    assert (answer.status, answer.body) == (200, b"OK")
    assert server.topic(topic)["message_count"] == 3
    client.sub(topic, "c", 1)
    assert sorted(take(client, 3)) == [(b"a", 1), (b"b", 1), (b"c", 1)]


def test_24_stats_of_no_topic(server: Server) -> None:
    answer = server.http("GET", "/stats?format=json&topic=nope")
    assert b'"topics":null' in answer.body


def test_25_the_log_level_is_changed(start: Start) -> None:
    server = start()
    for word, number in ((b"debug", b"1"), (b"WARN", b"3"), (b"info", b"2")):
        assert server.http("PUT", "/config/log_level", word).body == number
        assert server.http("GET", "/config/log_level").body == number


# ---- what is around it ----


@pytest.mark.deep
def test_26_what_a_nsqlookupd_is_told(start: Start, noting_lookupd: Lookupd) -> None:
    server = start(noting_lookupd.flag, "--broadcast-address=127.0.0.1")
    told = noting_lookupd.told
    eventually(lambda: noting_lookupd.identities)
    identity = noting_lookupd.identities[0]
    assert {key: identity[key] for key in ("broadcast_address", "version")} == {
        "broadcast_address": "127.0.0.1",
        "version": "1.3.0",
    }
    assert identity["tcp_port"] == server.port()
    assert identity["http_port"] == server.port("http")
    expected = ["connected"]
    for path, channel, line in (
        ("/topic/create", None, "REGISTER T"),
        ("/channel/create", "C", "REGISTER T C"),
        ("/channel/create", "E#ephemeral", "REGISTER T E#ephemeral"),
        ("/channel/delete", "C", "UNREGISTER T C"),
    ):
        params = {"topic": "T"} if channel is None else {"topic": "T", "channel": channel}
        assert server.post(path, **params).status == 200
        expected.append(line)
        eventually(lambda: told == expected)
    assert server.post("/topic/delete", topic="T").status == 200
    eventually(lambda: len(told) == len(expected) + 2)
    assert sorted(told[-2:]) == ["UNREGISTER T", "UNREGISTER T E#ephemeral"]
    before = len(noting_lookupd.pings)
    eventually(lambda: len(noting_lookupd.pings) > before, 25.0)  # one in 15 s


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (201, reply(1, rule()), b"E_AUTH_FAILED AUTH failed"),
        (500, b"", b"E_AUTH_FAILED AUTH failed"),
        (200, b"nonsense", b"E_AUTH_FAILED AUTH failed"),
        (200, reply(0, rule()), b"E_AUTH_FAILED AUTH failed"),
        (200, reply(-1, rule()), b"E_AUTH_FAILED AUTH failed"),
        (200, reply(1, rule(permissions=["all"])), b"E_AUTH_FAILED AUTH failed"),
        (200, reply(1, rule(topic="(")), b"E_AUTH_FAILED AUTH failed"),
        (200, reply(1), b"E_UNAUTHORIZED AUTH no authorizations found"),
    ],
)
def test_27_bad_replies_of_an_authorisation_server(
    authorised: Server, authority: Authority, status: int, body: bytes, error: bytes
) -> None:
    authority.reply = status, body
    client = authorised.connect()
    assert client.ask(b"AUTH\n" + sized(b"secret")) == (ERROR, error)
    assert client.ended()


@pytest.fixture
def authorised(start: Start, authority: Authority) -> Server:
    """A server that asks `authority`."""
    return start(authority.flag)


class Relay(http.server.ThreadingHTTPServer):
    """The server's HTTP interface, without some of its fields."""

    def __init__(self, server: Server, without: str) -> None:
        super().__init__(("127.0.0.1", 0), _Relayed)
        self.origin = server
        self.without = without

    def cut(self, document: Any) -> Any:
        """The document, without the field wherever it is."""
        if isinstance(document, list):
            return [self.cut(item) for item in document]
        if not isinstance(document, dict):
            return document
        return {key: self.cut(item) for key, item in document.items() if key != self.without}


class _Relayed(http.server.BaseHTTPRequestHandler):
    server: Relay

    def do_GET(self) -> None:
        document = json.loads(self.server.origin.http("GET", self.path).body)
        if self.path == "/info":
            document |= {"broadcast_address": "127.0.0.1", "http_port": self.server.server_port}
        body = json.dumps(self.server.cut(document)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("without", ["", "e2e_processing_latency"])
def test_28_nsq_stat_needs_the_latencies(server: Server, topic: str, without: str) -> None:
    """So a server must always have them: nsq_stat dies when `/stats` lacks them."""
    assert server.post("/topic/create", topic=topic).status == 200
    assert server.post("/channel/create", topic=topic, channel="c").status == 200
    with Relay(server, without) as relay:
        thread = threading.Thread(target=relay.serve_forever)
        thread.start()
        address = f"--nsqd-http-address=127.0.0.1:{relay.server_port}"
        argv = [peer("nsq_stat"), address, f"--topic={topic}", "--channel=c", "--count=1"]
        try:
            done = subprocess.run(
                [*argv, "--interval=100ms"], capture_output=True, timeout=WATCHDOG
            )
        finally:
            relay.shutdown()
            thread.join()
    assert done.returncode == (2 if without else 0), done.stderr
    assert (b"nil pointer dereference" in done.stderr) == bool(without)
