"""Assertions of nsqd's own tests, run against a real nsqd and against shmq. Each test names the one
of nsqd.

Elsewhere: TestHTTPerrors and TestHTTPV1TopicChannel are `test_http.test_an_error_is_told`,
TestDeleteTopic `test_http.test_creation_is_idempotent_and_deletion_is_not`, TestEmptyTopic
`test_http.test_emptying_a_topic`, TestEmptyChannel `test_appendix.test_15...`, TestHTTPconfig
`test_http.test_config`, TestInfo `test_http.test_ping_and_info`, TestCluster
`test_services.test_topics_and_channels_are_registered`.
"""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.fake_lookupd import Lookupd
from support.nsq_client import ERROR, OK, Client, Server, mpub, sized
from support.processes import eventually

Connect = Callable[..., Client]
Start = Callable[..., Server]
Pair = tuple[str, str]


# ---- sizes and ranges ----


def test_size_limits(start: Start) -> None:
    """TestSizeLimits."""
    server = start("--max-msg-size=100", "--max-body-size=1000")
    steps: list[tuple[bytes, tuple[int, bytes]]] = [
        (b"PUB t\n" + sized(b"x" * 95), OK),
        (b"PUB t\n" + sized(b"x" * 105), (ERROR, b"E_BAD_MESSAGE PUB message too big 105 > 100")),
        (b"PUB t\n" + sized(b""), (ERROR, b"E_BAD_MESSAGE PUB invalid message body size 0")),
        (mpub(b"t", [b"x" * 95] * 5), OK),
        (mpub(b"t", [b"x" * 100] * 11), (ERROR, b"E_BAD_BODY MPUB body too big 1148 > 1000")),
        (
            mpub(b"t", [b"x" * 5] * 5 + [b""]),
            (ERROR, b"E_BAD_MESSAGE MPUB invalid message(5) body size 0"),
        ),
        (mpub(b"t", [b"x" * 101]), (ERROR, b"E_BAD_MESSAGE MPUB message too big 101 > 100")),
        (
            b"DPUB t 1000\n" + sized(b"x" * 105),
            (ERROR, b"E_BAD_MESSAGE DPUB message too big 105 > 100"),
        ),
    ]
    for sent, answer in steps:
        client = server.connect()
        assert client.ask(sent) == answer
        assert answer == OK or client.ended()
        client.close()
    assert server.topic("t")["message_count"] == 6


def test_dpub(client: Client, server: Server, topic: str) -> None:
    """TestDPUB."""
    client.sub(topic, "c", 1)
    assert client.ask(f"DPUB {topic} 3600000\n".encode() + sized(b"x")) == OK
    found = eventually(
        lambda: [c for c in [server.channel(topic, "c")] if c["deferred_count"] == 1]
    )[0]
    assert (found["message_count"], found["depth"]) == (1, 0)
    text = b"E_INVALID DPUB timeout 3600100 out of range 0-3600000"
    assert client.ask(f"DPUB {topic} 3600100\n".encode() + sized(b"x")) == (ERROR, text)
    assert client.ended()


def test_max_rdy_count(start: Start) -> None:
    """TestMaxRdyCount."""
    server = start("--max-rdy-count=50")
    client = server.connect()
    assert client.identify(feature_negotiation=True)["max_rdy_count"] == 50
    client.sub("t", "c", 50)
    client.pub("t", b"x")
    client.finish(client.delivery())
    assert client.ask(b"RDY 51\n") == (ERROR, b"E_INVALID RDY count 51 out of range 0-50")
    assert client.ended()


def test_output_buffering_validity(start: Start) -> None:
    """TestOutputBufferingValidity: IDENTIFY three times and more on one connection."""
    server = start("--max-output-buffer-size=524288", "--max-output-buffer-timeout=1s")
    client = server.connect()
    for size, timeout in ((524288, 1000), (-1, -1), (0, 0)):
        assert client.identify(output_buffer_size=size, output_buffer_timeout=timeout) == OK
    text = b"E_BAD_BODY IDENTIFY output buffer size (524289) is invalid"
    assert client.identify(output_buffer_size=524289) == (ERROR, text)
    client = server.connect()
    text = b"E_BAD_BODY IDENTIFY output buffer timeout (1001) is invalid"
    assert client.identify(output_buffer_timeout=1001) == (ERROR, text)


def test_bad_fin(client: Client, topic: str) -> None:
    """TestBadFin."""
    client.sub(topic, "c")
    assert client.ask(b"FIN \n") == (ERROR, b"E_INVALID invalid message ID")
    assert client.ended()


def test_empty_command(client: Client, server: Server) -> None:
    """TestEmptyCommand: it must not crash."""
    assert client.ask(b"\n\n") == (ERROR, b"E_INVALID invalid command ")
    assert server.http("GET", "/ping").status == 200


# ---- delivery ----


def test_client_msg_timeout(client: Client, server: Server, topic: str) -> None:
    """TestClientMsgTimeout."""
    assert client.identify(msg_timeout=1000) == OK
    client.pub(topic, b"x")
    began = time.monotonic()
    client.sub(topic, "c", 1)
    first = client.delivery()
    again = client.delivery()
    assert time.monotonic() - began >= 0.95
    assert (again.id, again.attempts) == (first.id, 2)
    client.finish(again)
    error = b"E_FIN_FAILED FIN %b failed ID not in flight" % first.id
    assert client.ask(b"FIN %b\n" % first.id) == (ERROR, error)
    found = server.channel(topic, "c")
    assert (found["timeout_count"], found["requeue_count"]) == (1, 0)


def test_touch(client: Client, server: Server, topic: str) -> None:
    """TestTouch. The pauses are far below the timeout, because a busy machine makes them longer."""
    assert client.identify(msg_timeout=3000) == OK
    client.pub(topic, b"x")
    client.sub(topic, "c", 1)
    message = client.delivery()
    for _ in range(7):
        time.sleep(0.5)
        client.send(b"TOUCH %b\n" % message.id)
    client.finish(message)
    client.pub(topic, b"y")
    assert client.delivery().body == b"y"
    assert server.channel(topic, "c")["timeout_count"] == 0


def test_req_timeout_range(start: Start) -> None:
    """TestReqTimeoutRange: what is beyond the longest delay is that delay."""
    server = start("--max-req-timeout=2s")
    client = server.connect()
    client.pub("t", b"x")
    client.sub("t", "c", 1)
    message = client.delivery()
    began = time.monotonic()
    client.send(b"REQ %b 99999999\n" % message.id)
    eventually(lambda: server.channel("t", "c")["deferred_count"] == 1)
    again = client.delivery()
    assert (again.id, again.attempts) == (message.id, 2)
    assert time.monotonic() - began >= 1.95


def test_sampling(start: Start) -> None:
    """TestSampling: within 5 points; what is not delivered is gone."""
    server = start()
    producer, client = server.connect(), server.connect()
    for _ in range(10):
        assert producer.ask(mpub(b"sampled", [b"x" * 20] * 1000)) == OK
    assert client.identify(feature_negotiation=True, sample_rate=42)["sample_rate"] == 42
    client.sub("sampled", "c", 2500)
    got = 0
    client.sock.settimeout(1.5)
    try:
        while True:
            client.finish(client.delivery())
            got += 1
    except TimeoutError:
        pass
    assert 0.38 <= got / 10000 <= 0.48
    found = server.channel("sampled", "c")
    assert (found["depth"], found["in_flight_count"]) == (0, 0)


def test_pausing(client: Client, server: Server, topic: str) -> None:
    """TestPausing."""
    client.sub(topic, "c", 1)
    client.pub(topic, b"a")
    client.finish(client.delivery())
    assert server.post("/channel/pause", topic=topic, channel="c").status == 200
    time.sleep(0.2)  # nsqd may deliver one more that it was waiting for already
    client.pub(topic, b"b")
    assert client.quiet()
    assert server.channel(topic, "c")["depth"] == 1
    assert server.post("/channel/unpause", topic=topic, channel="c").status == 200
    assert client.delivery().body == b"b"


# ---- TLS ----


def secured(server: Server, certificate: Pair | None = None) -> bool:
    """Whether the server takes a TLS client with that certificate, and serves it."""
    client = server.connect()
    assert client.identify(feature_negotiation=True, tls_v1=True)["tls_v1"] is True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate is not None:
        context.load_cert_chain(*certificate)
    try:
        client.sock = context.wrap_socket(client.sock)
        if client.frame() != OK:  # with TLS 1.3 the server's refusal comes after the handshake
            return False
    except (ssl.SSLError, ConnectionError):
        return False
    client.pub("secured", b"x")
    return True


def test_tls_required(start: Start, certificate: Pair) -> None:
    """TestTLSRequired."""
    server = start(
        f"--tls-cert={certificate[0]}",
        f"--tls-key={certificate[1]}",
        "--tls-required=true",
        status=403,
    )
    client = server.connect()
    text = b"E_INVALID cannot SUB in current state (TLS required)"
    assert client.ask(b"SUB t c\n") == (ERROR, text)
    assert client.ended()
    assert secured(server)


def test_tls_auth_require(
    start: Start, certificate: Pair, signed: tuple[str, Pair], kind: str
) -> None:
    """TestTLSAuthRequire. nsqd takes any certificate, shmq one that it can verify."""
    server = start(
        f"--tls-cert={certificate[0]}",
        f"--tls-key={certificate[1]}",
        f"--tls-root-ca-file={signed[0]}",
        "--tls-client-auth-policy=require",
        status=403,
    )
    client = server.connect()
    text = b"E_INVALID cannot PUB in current state (TLS required)"  # the policy asks for it
    assert client.ask(b"PUB t\n") == (ERROR, text)
    assert not secured(server)
    assert secured(server, signed[1])
    assert secured(server, certificate) == (kind == "nsqd")


def test_tls_auth_require_verify(start: Start, certificate: Pair, signed: tuple[str, Pair]) -> None:
    """TestTLSAuthRequireVerify."""
    server = start(
        f"--tls-cert={certificate[0]}",
        f"--tls-key={certificate[1]}",
        f"--tls-root-ca-file={signed[0]}",
        "--tls-client-auth-policy=require-verify",
        status=403,
    )
    assert not secured(server)
    assert not secured(server, certificate)
    assert secured(server, signed[1])


# ---- the server ----


def test_http_get_status_json(start: Start) -> None:
    """TestHTTPgetStatusJSON: an idle server has no topics, not null."""
    body = start().http("GET", "/stats?format=json").body
    begins = rb'\{"version":"1\.3\.0","health":"OK","start_time":\d+,"topics":\[\],"memory":\{'
    assert re.match(begins, body)
    assert json.loads(body)["producers"] is None


def test_startup(start: Start) -> None:
    """TestStartup: what was not taken when it stopped is there when it starts, and no more."""
    words = ("--mem-queue-size=100", "--max-bytes-per-file=10240")
    server = start(*words)
    producer, client = server.connect(), server.connect()
    client.sub("kept", "c", 1)
    bodies = [b"%0250d" % i for i in range(400)]
    for first in range(0, 400, 100):
        assert producer.ask(mpub(b"kept", bodies[first : first + 100])) == OK
    got = []
    while len(got) < 200:
        message = client.delivery()
        client.finish(message)
        got.append(message.body)
    assert client.ask(b"RDY 0\nCLS\n") is not None
    client.close()
    eventually(lambda: server.channel("kept", "c")["client_count"] == 0)
    assert server.stop() == 0
    server = start(*words, again=server)
    eventually(lambda: server.channel("kept", "c")["depth"] >= 200)
    client = server.connect()
    client.sub("kept", "c", 10)
    while set(got) != set(bodies):
        message = client.delivery()
        client.finish(message)
        got.append(message.body)
    assert client.quiet()
    assert len(got) - len(bodies) <= 1  # one may have been on its way to the client


@pytest.mark.parametrize("what", ["topic", "channel"])
def test_pause_metadata(start: Start, kind: str, what: str) -> None:
    """TestPauseMetadata: in nsqd.dat (nsqd's before the answer, shmq's soon), and so after a
    restart."""
    server = start()
    params = {"topic": "t"} if what == "topic" else {"topic": "t", "channel": "c"}
    assert server.post("/topic/create", topic="t").status == 200
    assert server.post("/channel/create", topic="t", channel="c").status == 200
    data = server.data_path / "nsqd.dat"

    def paused(document: Any, key: str) -> Any:
        topic = next(item for item in document["topics"] if item.get(key) == "t")
        found = topic if what == "topic" else topic["channels"][0]
        return found["paused"]

    eventually(lambda: b'"c"' in data.read_bytes())
    for verb, expected in (("pause", True), ("unpause", False), ("pause", True)):
        assert server.post(f"/{what}/{verb}", **params).status == 200
        if kind == "nsqd":
            assert paused(json.loads(data.read_text()), "name") is expected
        eventually(lambda e=expected: paused(json.loads(data.read_text()), "name") is e)
    server.process.kill()
    server.process.wait()
    server = start(again=server)
    assert paused(server.stats(topic="t"), "topic_name") is True


def test_reconfigure(start: Start, noting_lookupd: Lookupd) -> None:
    """TestReconfigure: nsqlookupds come and go while it runs."""
    server = start()
    assert server.post("/topic/create", topic="T").status == 200
    with Lookupd() as other:
        for addresses in ([other.address], [other.address, noting_lookupd.address]):
            body = json.dumps(addresses, separators=(",", ":")).encode()
            answer = server.http("PUT", "/config/nsqlookupd_tcp_addresses", body)
            assert (answer.status, answer.body) == (200, body)
        for one in (other, noting_lookupd):
            eventually(lambda one=one: one.told == ["connected", "REGISTER T"])
        body = json.dumps([noting_lookupd.address]).encode()
        assert server.http("PUT", "/config/nsqlookupd_tcp_addresses", body).status == 200
        eventually(lambda: other.told == ["connected", "REGISTER T", "gone"])
    assert server.post("/topic/create", topic="U").status == 200
    eventually(lambda: noting_lookupd.told == ["connected", "REGISTER T", "REGISTER U"])
