"""nsqd's HTTP interface: the same said to a real nsqd and to shmq, the same answered."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import urllib.parse
from collections.abc import Callable

import pytest
from support.nsq_client import Client, Server, mpub
from support.processes import WATCHDOG, eventually

#: method, path with {topic} for one that exists, body -> status, message
ERRORS = [
    ("POST", "/pub?topic={topic}", b"", 400, "MSG_EMPTY"),
    ("POST", "/pub", b"x", 400, "MISSING_ARG_TOPIC"),
    ("POST", "/pub?topic=a!", b"x", 400, "INVALID_TOPIC"),
    ("POST", "/pub?topic=", b"x", 400, "INVALID_TOPIC"),
    ("POST", "/pub?topic={topic}&defer=", b"x", 400, "INVALID_DEFER"),
    ("POST", "/pub?topic={topic}&defer=-1", b"x", 400, "INVALID_DEFER"),
    ("POST", "/pub?topic={topic}&defer=3600001", b"x", 400, "INVALID_DEFER"),
    ("POST", "/pub?topic={topic}&defer=abc", b"x", 400, "INVALID_DEFER"),
    ("POST", "/pub?topic={topic}", b"x" * 1048577, 413, "MSG_TOO_BIG"),
    ("POST", "/pub?topic=%zz", b"x", 400, "INVALID_REQUEST"),
    ("POST", "/pub?topic=a;b=c", b"x", 400, "INVALID_REQUEST"),
    ("POST", "/mpub", b"x", 400, "MISSING_ARG_TOPIC"),
    ("POST", "/mpub?topic={topic}", b"x" * 5242881, 413, "BODY_TOO_BIG"),
    ("POST", "/mpub?topic={topic}", b"x" * 1048577, 413, "MSG_TOO_BIG"),
    ("POST", "/mpub?topic={topic}&binary=true", b"\0\0", 413, "BAD_BODY"),
    ("POST", "/mpub?topic={topic}&binary=1", b"\0\0\0\2\0\0\0\1x", 413, "BAD_MESSAGE"),
    ("POST", "/topic/create", b"", 400, "MISSING_ARG_TOPIC"),
    ("POST", "/topic/create?topic=$", b"", 400, "INVALID_TOPIC"),
    ("POST", "/topic/empty?topic=$", b"", 400, "INVALID_TOPIC"),
    ("POST", "/topic/empty?topic=none", b"", 404, "TOPIC_NOT_FOUND"),
    ("POST", "/topic/delete", b"", 400, "MISSING_ARG_TOPIC"),
    ("POST", "/topic/delete?topic=none", b"", 404, "TOPIC_NOT_FOUND"),
    ("POST", "/topic/pause?topic=$", b"", 404, "TOPIC_NOT_FOUND"),
    ("POST", "/channel/create", b"", 400, "MISSING_ARG_TOPIC"),
    ("POST", "/channel/create?topic=$", b"", 400, "INVALID_ARG_TOPIC"),
    ("POST", "/channel/create?topic={topic}", b"", 400, "MISSING_ARG_CHANNEL"),
    ("POST", "/channel/create?topic={topic}&channel=$", b"", 400, "INVALID_ARG_CHANNEL"),
    ("POST", "/channel/create?topic=none&channel=c", b"", 404, "TOPIC_NOT_FOUND"),
    ("POST", "/channel/delete?topic={topic}&channel=c", b"", 404, "CHANNEL_NOT_FOUND"),
    ("POST", "/channel/pause?topic={topic}&channel=c", b"", 404, "CHANNEL_NOT_FOUND"),
    ("GET", "/config/none", b"", 400, "INVALID_OPTION"),
    ("PUT", "/config/log_level", b"", 413, "INVALID_VALUE"),
    ("PUT", "/config/log_level", b"loud", 400, "INVALID_VALUE"),
    ("PUT", "/config/nsqlookupd_tcp_addresses", b"x", 400, "INVALID_VALUE"),
    ("PUT", "/config/mem_queue_size", b"5", 400, "INVALID_OPTION"),
    ("GET", "/put", b"", 404, "NOT_FOUND"),
    ("GET", "/debug/pprof/mutex", b"", 404, "NOT_FOUND"),
    ("GET", "/pub", b"", 405, "METHOD_NOT_ALLOWED"),
    ("HEAD", "/stats", b"", 405, ""),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    ERRORS,
    ids=[f"{method} {path} {message}" for method, path, _, _, message in ERRORS],
)
def test_an_error_is_told(
    server: Server, topic: str, method: str, path: str, body: bytes, status: int, message: str
) -> None:
    assert server.post("/topic/create", topic=topic).status == 200
    try:
        reply = server.http(method, path.replace("{topic}", topic), body)
    except (BrokenPipeError, ConnectionResetError):
        assert status == 413  # refused by its declared length, before it was sent
        return
    assert reply.status == status
    assert not message or reply.message == message
    assert reply.headers["X-Nsq-Content-Type"] == "nsq; version=1.0"
    assert reply.headers["Content-Type"] == "application/json; charset=utf-8"


@pytest.mark.parametrize(
    ("method", "path", "status", "header", "value"),
    [
        ("OPTIONS", "/pub", 200, "Allow", "OPTIONS, POST"),
        ("DELETE", "/config/log_level", 405, "Allow", "GET, OPTIONS, PUT"),
        ("GET", "/PING", 301, "Location", "/ping"),
        ("GET", "/stats/?format=json", 301, "Location", "/stats?format=json"),
        ("POST", "/Pub", 307, "Location", "/pub"),
        ("GET", "/debug/pprof", 301, "Location", "/debug/pprof/"),
        ("GET", "/x/..//ping", 301, "Location", "/ping"),
        ("POST", "//pub?topic=t", 307, "Location", "/pub?topic=t"),
        ("GET", "http://proxied/ping", 200, "Content-Length", "2"),
        ("POST", "//ping", 404, "Content-Length", "23"),
        ("GET", "//pub", 404, "Content-Length", "23"),
        ("DELETE", "/Stats", 404, "Content-Length", "23"),
        ("OPTIONS", "//stats", 404, "Content-Length", "23"),
        ("PUT", "/config/log_level/", 307, "Location", "/config/log_level"),
        ("OPTIONS", "*", 200, "Content-Length", "0"),
        ("PROPFIND", "/pub", 405, "Allow", "OPTIONS, POST"),
    ],
)
def test_routes(
    server: Server, method: str, path: str, status: int, header: str, value: str
) -> None:
    reply = server.http(method, path)
    assert (reply.status, reply.headers[header]) == (status, value)


@pytest.mark.parametrize(
    ("line", "headers", "answer"),
    [
        ("GET /ping HTTP/1.1", "", "HTTP/1.1 400 Bad Request: missing required Host header"),
        ("GET /ping HTTP/1.0", "", "HTTP/1.0 200 OK"),
        (
            "GET /ping HTTP/2.0",
            "Host: localhost\r\n",
            "HTTP/1.1 505 HTTP Version Not Supported: unsupported protocol version",
        ),
        ("GET /ping HTTP/1.x", "Host: localhost\r\n", "HTTP/1.1 400 Bad Request"),
        ("G(T /ping HTTP/1.1", "Host: localhost\r\n", "HTTP/1.1 400 Bad Request"),
        ("hello", "", "HTTP/1.1 400 Bad Request"),
    ],
)
def test_what_is_no_request(server: Server, line: str, headers: str, answer: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port("http")), WATCHDOG) as sock:
        sock.sendall(f"{line}\r\n{headers}\r\n".encode())
        with sock.makefile("rb") as file:
            head, _, body = file.read().decode().partition("\r\n\r\n")
    assert head.split("\r\n")[0] == answer
    if " 200 " not in answer:
        assert "Content-Type: text/plain; charset=utf-8\r\nConnection: close" in head
        assert body == answer.partition(" ")[2]


def test_a_long_answer_comes_in_chunks(server: Server, topic: str) -> None:
    """As Go's server sends what is above 2 KiB."""
    for number in range(30):
        server.post("/topic/create", topic=f"{topic}-{number}")
    for path in ("/stats", "/stats?format=json"):
        headers = server.http("GET", path).headers
        assert headers["Transfer-Encoding"] == "chunked"
        assert "Content-Length" not in headers
    for path in ("/info", "/ping", "/none"):
        assert "Content-Length" in server.http("GET", path).headers


def test_nobody_says_what_it_was_made_with(server: Server) -> None:
    for method, path in (
        ("GET", "/ping"),
        ("GET", "/none"),
        ("POST", "/stats"),
        ("FOO", "/stats"),
        ("GET", "/debug/pprof/"),
        ("OPTIONS", "*"),
    ):
        assert "Server" not in server.http(method, path).headers


def test_ping_and_info(server: Server) -> None:
    ping = server.http("GET", "/ping")
    assert (ping.status, ping.body) == (200, b"OK")
    assert "X-Nsq-Content-Type" not in ping.headers
    info = json.loads(server.http("GET", "/info").body)
    expected = {
        "version": "1.3.0",
        "tcp_port": server.port(),
        "http_port": server.port("http"),
        "hostname": socket.gethostname(),
        "broadcast_address": socket.gethostname(),
        "max_heartbeat_interval": 60000000000,
        "max_output_buffer_size": 65536,
        "max_output_buffer_timeout": 30000000000,
        "max_deflate_level": 6,
    }
    assert {key: info[key] for key in expected} == expected
    assert isinstance(info["start_time"], int)


def test_what_is_not_http_gets_an_answer_that_is(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port("http")), WATCHDOG) as sock:
        sock.sendall(b"  V2IDENTIFY\n\0\0\0\2{}\r\n\r\n")
        data = b""
        while part := sock.recv(4096):
            data += part
    assert data.startswith(b"HTTP/1.")
    assert b" 400 " in data


@pytest.mark.parametrize(
    ("params", "body", "bodies"),
    [
        ({}, b"", []),
        ({"binary": "false"}, b"a\r\nb", [b"a\r", b"b"]),
        ({"binary": "true"}, struct.pack(">ii", 1, 3) + b"a\nb" + b"trailing", [b"a\nb"]),
        ({"binary": "maybe"}, struct.pack(">iibib", 2, 1, 120, 1, 121), [b"x", b"y"]),
    ],
)
def test_mpub(
    server: Server,
    client: Client,
    topic: str,
    params: dict[str, str],
    body: bytes,
    bodies: list[bytes],
) -> None:
    reply = server.post("/mpub", body, topic=topic, **params)
    assert (reply.status, reply.body) == (200, b"OK")
    assert server.topic(topic)["depth"] == len(bodies)
    client.sub(topic, "c", 1)
    for expected in bodies:
        message = client.delivery()
        assert message.body == expected
        client.finish(message)


def test_pub_and_defer(server: Server, client: Client, topic: str) -> None:
    client.sub(topic, "c", 1)
    assert server.post("/pub", b"a\nb", topic=topic).body == b"OK"
    message = client.delivery()
    assert message.body == b"a\nb"
    client.finish(message)
    assert server.post("/pub", b"later", topic=topic, defer="60000").status == 200
    eventually(lambda: server.channel(topic, "c")["deferred_count"] == 1)


def test_a_compressed_body_is_published_as_it_is(
    server: Server, client: Client, topic: str
) -> None:
    body = gzip.compress(b"x" * 1000)
    path = f"/pub?{urllib.parse.urlencode({'topic': topic})}"
    assert server.http("POST", path, body, **{"Content-Encoding": "gzip"}).status == 200
    client.sub(topic, "c", 1)
    assert client.delivery().body == body


def test_chunked_bodies(server: Server, topic: str) -> None:
    path = f"/pub?{urllib.parse.urlencode({'topic': topic})}"
    with socket.create_connection(("127.0.0.1", server.port("http")), WATCHDOG) as sock:
        sock.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            "Connection: close\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n".encode()
        )
        data = b""
        while part := sock.recv(4096):
            data += part
    assert data.startswith(b"HTTP/1.1 200")
    assert server.topic(topic)["message_bytes"] == 5


def test_who_expects_to_be_told_to_go_on_is(server: Server, topic: str) -> None:
    """As curl does before a large body."""
    with socket.create_connection(("127.0.0.1", server.port("http")), WATCHDOG) as sock:
        line = f"POST /pub?topic={topic} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        sock.sendall(line.encode() + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        with sock.makefile("rb") as file:
            assert file.readline() == b"HTTP/1.1 100 Continue\r\n"
            assert file.readline() == b"\r\n"
            sock.sendall(b"abc")
            assert file.readline() == b"HTTP/1.1 200 OK\r\n"
            assert file.read().endswith(b"\r\n\r\nOK")
    assert server.topic(topic)["message_bytes"] == 3


def test_creation_is_idempotent_and_deletion_is_not(server: Server, topic: str) -> None:
    for _ in range(2):
        assert server.post("/topic/create", topic=topic).status == 200
        assert server.post("/channel/create", topic=topic, channel="c").status == 200
    reply = server.post("/channel/delete", topic=topic, channel="c")
    assert (reply.status, reply.body) == (200, b"")
    assert server.post("/channel/delete", topic=topic, channel="c").status == 404
    assert server.post("/topic/delete", topic=topic).status == 200
    assert server.post("/topic/delete", topic=topic).status == 404


def test_emptying_a_topic(server: Server, client: Client, topic: str) -> None:
    assert client.ask(mpub(topic.encode(), [b"x"] * 50)) is not None
    assert server.topic(topic)["depth"] == 50
    assert server.post("/topic/empty", topic=topic).status == 200
    found = server.topic(topic)
    assert (found["depth"], found["message_count"]) == (0, 50)


def one_consumer(port: int) -> dict[str, object]:
    """The fields of `/stats` for the consumer of the next test."""
    return {
        "client_id": "cid",
        "hostname": "chost",
        "version": "V2",
        "state": 3,
        "ready_count": 3,
        "remote_address": f"127.0.0.1:{port}",
        "in_flight_count": 1,
        "message_count": 1,
        "finish_count": 0,
        "requeue_count": 0,
        "sample_rate": 0,
        "deflate": False,
        "snappy": False,
        "user_agent": "agent/1.0",
        "tls": False,
        "tls_cipher_suite": "",
        "tls_version": "",
        "tls_negotiated_protocol": "",
        "tls_negotiated_protocol_is_mutual": False,
    }


def test_stats_name_clients_and_producers(
    server: Server, connect: Callable[..., Client], topic: str
) -> None:
    producer, consumer = connect(), connect()
    producer.identify(client_id="p", hostname="phost", user_agent="pa/2", feature_negotiation=True)
    producer.pub(topic, b"hello")
    consumer.identify(client_id="cid", hostname="chost", user_agent="agent/1.0")
    consumer.sub(topic, "c", 3)
    consumer.delivery()
    found = server.stats(topic=topic)
    assert len(found["topics"]) == 1
    one = found["topics"][0]
    expected = {
        "topic_name": topic,
        "depth": 0,
        "backend_depth": 0,
        "message_count": 1,
        "message_bytes": 5,
        "paused": False,
        "e2e_processing_latency": {"count": 0, "percentiles": None},
    }
    assert {key: one[key] for key in expected} == expected
    channel = one["channels"][0]
    expected = {
        "channel_name": "c",
        "depth": 0,
        "backend_depth": 0,
        "in_flight_count": 1,
        "deferred_count": 0,
        "message_count": 1,
        "requeue_count": 0,
        "timeout_count": 0,
        "client_count": 1,
        "paused": False,
        "e2e_processing_latency": {"count": 0, "percentiles": None},
    }
    assert {key: channel[key] for key in expected} == expected
    client = channel["clients"][0]
    port = consumer.sock.getsockname()[1]
    expected = one_consumer(port)
    assert {key: client[key] for key in expected} == expected
    mine = next(item for item in found["producers"] if item["client_id"] == "p")
    assert mine["pub_counts"] == [{"topic": topic, "count": 1}]
    assert (mine["state"], mine["hostname"], mine["user_agent"]) == (0, "phost", "pa/2")

    assert server.stats(topic=topic, channel="none")["topics"] == []
    found = server.stats(topic=topic, include_clients="false", include_mem="false")
    assert found["producers"] is None
    assert found["topics"][0]["channels"][0]["clients"] is None
    assert found["topics"][0]["channels"][0]["client_count"] == 1
    assert "memory" not in found

    text = server.http("GET", f"/stats?topic={topic}&include_mem=0").body.decode()
    assert "\nHealth: OK\n\nTopics:\n" in text
    assert f"   [{topic:<15}] depth: 0     be-depth: 0     msgs: 1        e2e%: \n" in text
    assert (
        "      [c                        ] depth: 0     be-depth: 0     inflt: 1    def: 0    "
        "re-q: 0     timeout: 0     msgs: 1        e2e%: \n" in text
    )
    who = f"chost:{port} agent/1.0"
    assert f"        [V2 {who:<21}] state: 3 inflt: 1    rdy: 3    fin: 0        re-q: 0 " in text
    assert f"topics: {topic}=1 connected: " in text


def test_percentiles(start: Callable[..., Server]) -> None:
    server = start(
        "--e2e-processing-latency-percentile=0.95", "--e2e-processing-latency-percentile=0.99"
    )
    client = server.connect()
    client.pub("t", b"x")
    client.sub("t", "c", 1)
    client.finish(client.delivery())
    found = eventually(
        lambda: [
            item
            for item in [server.channel("t", "c")["e2e_processing_latency"]]
            if item["count"] == 1
        ]
    )[0]
    assert [item["quantile"] for item in found["percentiles"]] == [0.99, 0.95]
    assert all(0 < item["value"] < 60 * 10**9 for item in found["percentiles"])
    topic = server.topic("t")["e2e_processing_latency"]
    assert [item["quantile"] for item in topic["percentiles"]] == [0.99, 0.95]


def test_config(start: Callable[..., Server]) -> None:
    server = start("--statsd-prefix=a.%s", "--broadcast-address=1.2.3.4")
    port = server.port("http")
    expected = {
        "mem_queue_size": b"10000",
        "id": None,
        "msg_timeout": b"60000000000",
        "nsqlookupd_tcp_addresses": b"[]",
        "log_level": b"2",
        "tls_required": b"0",
        "snappy": b"true",
        "statsd_prefix": f"a.1_2_3_4_{port}.".encode(),
        "tls_cert": b"",
        "broadcast_address": b"1.2.3.4",
        "max_deflate_level": b"6",
        "tls_min_version": b"769",
    }
    for key, value in expected.items():
        reply = server.http("GET", f"/config/{key}")
        assert reply.status == 200
        assert value is None or reply.body == value, key
    value = b'["127.0.0.1:1"]'
    assert server.http("PUT", "/config/nsqlookupd_tcp_addresses", value).body == value
    assert server.http("GET", "/config/nsqlookupd_tcp_addresses").body == value


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/debug/pprof/", 200),
        ("GET", "/debug/pprof/cmdline", 200),
        ("GET", "/debug/pprof/symbol", 200),
        ("GET", "/debug/pprof/heap", 200),
        ("GET", "/debug/pprof/goroutine", 200),
        ("GET", "/debug/pprof/profile?seconds=1", 200),
        ("POST", "/debug/freememory", 500),
        ("PUT", "/debug/setblockrate?rate=0", 500),
        ("PUT", "/debug/setblockrate", 400),
    ],
)
def test_debug_pages(server: Server, method: str, path: str, status: int) -> None:
    reply = server.http(method, path)
    assert reply.status == status
    if status == 500:
        assert reply.message == "INTERNAL_ERROR"
    if status == 400:
        assert reply.body == b'invalid block rate : strconv.Atoi: parsing "": invalid syntax'
