"""TLS, snappy, deflate, authorisation, nsqlookupd and statsd: with a real nsqd and with shmq."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cramjam
import pytest
from support.fake_auth_server import Authority, reply, rule
from support.fake_lookupd import Lookupd
from support.nsq_client import ERROR, OK, Client, Server, drop_in, sized
from support.processes import WATCHDOG, eventually

Start = Callable[..., Server]


# ---- TLS, snappy, deflate ----


class Wrapped:
    """A socket under compression, as far as `Client` uses one."""

    def __init__(self, sock: Any, layer: str, came: bytes) -> None:
        """came: what the server has sent already."""
        self._sock = sock
        self._came = came
        self._layer = layer
        self._out = zlib.compressobj(6, zlib.DEFLATED, -15)
        self._in = zlib.decompressobj(-15)
        self._held = b""

    def sendall(self, data: bytes) -> None:
        if self._layer == "snappy":  # a stream of its own for every write, as pynsq does
            self._sock.sendall(bytes(cramjam.snappy.compress(data)))
        else:
            self._sock.sendall(self._out.compress(data) + self._out.flush(zlib.Z_SYNC_FLUSH))

    def recv(self, most: int) -> bytes:
        while True:
            data, self._came = self._came or self._sock.recv(most), b""
            if not data:
                return b""
            plain = self._in.decompress(data) if self._layer == "deflate" else self._unsnap(data)
            if plain:
                return plain

    def _unsnap(self, data: bytes) -> bytes:
        self._held += data
        plain = b""
        while len(self._held) >= 4:
            end = 4 + int.from_bytes(self._held[1:4], "little")
            if len(self._held) < end:
                break
            chunk, self._held = self._held[:end], self._held[end:]
            if chunk[0] < 2:
                plain += bytes(cramjam.snappy.decompress(b"\xff\x06\0\0sNaPpY" + chunk))
        return plain

    def settimeout(self, seconds: float) -> None:
        self._sock.settimeout(seconds)

    def close(self) -> None:
        self._sock.close()


def upgrade(
    client: Client, *layers: str, ciphers: str = "", certificate: tuple[str, str] | None = None
) -> None:
    """The settings that IDENTIFY agreed on, each with its OK. ciphers: of TLS 1.2."""
    for layer in layers:
        if layer == "tls":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            if certificate is not None:
                context.load_cert_chain(*certificate)
            if ciphers:
                context.maximum_version = ssl.TLSVersion.TLSv1_2
                context.set_ciphers(ciphers)
            client.sock = context.wrap_socket(client.sock)
        else:
            client.sock = Wrapped(client.sock, layer, client.held())  # type: ignore[assignment]
        assert client.frame() == OK


@pytest.mark.parametrize(
    "layers", [("tls",), ("snappy",), ("deflate",), ("tls", "snappy"), ("tls", "deflate")]
)
def test_upgraded_connections(
    start: Start, certificate: tuple[str, str], layers: tuple[str, ...]
) -> None:
    server = start(f"--tls-cert={certificate[0]}", f"--tls-key={certificate[1]}")
    client = server.connect()
    wishes = {"tls_v1" if layer == "tls" else layer: True for layer in layers}
    answer = client.identify(feature_negotiation=True, **wishes)
    assert {key: answer[key] for key in ("tls_v1", "snappy", "deflate")} == {
        "tls_v1": "tls" in layers,
        "snappy": "snappy" in layers,
        "deflate": "deflate" in layers,
    }
    upgrade(client, *layers)
    bodies = [b"x" * 300000, bytes(range(256)) * 500, b"y"]
    for body in bodies:
        client.pub("t", body)
    client.sub("t", "c", 1)
    for body in bodies:
        message = client.delivery()
        assert message.body == body
        client.finish(message)
    found = server.channel("t", "c")["clients"][0]
    assert (found["tls"], found["snappy"], found["deflate"]) == (
        "tls" in layers,
        "snappy" in layers,
        "deflate" in layers,
    )
    if "tls" in layers:
        assert found["tls_version"] == "TLS1.3"
        assert found["tls_cipher_suite"] in ("Unknown 4865", "Unknown 4866", "Unknown 4867")


@pytest.mark.parametrize(
    ("ciphers", "name"),
    [
        ("ECDHE-RSA-AES128-GCM-SHA256", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"),
        ("ECDHE-RSA-AES256-GCM-SHA384", "Unknown 49200"),
        ("ECDHE-RSA-CHACHA20-POLY1305", "Unknown 52392"),
    ],
)
def test_names_of_cipher_suites(
    start: Start, certificate: tuple[str, str], ciphers: str, name: str
) -> None:
    """Which nsqd knows the older of."""
    server = start(f"--tls-cert={certificate[0]}", f"--tls-key={certificate[1]}")
    client = server.connect()
    client.identify(feature_negotiation=True, tls_v1=True)
    upgrade(client, "tls", ciphers=ciphers)
    client.sub("t", "c")
    found = server.channel("t", "c")["clients"][0]
    assert (found["tls_cipher_suite"], found["tls_version"]) == (name, "TLS1.2")


def test_tls_may_be_required(start: Start, certificate: tuple[str, str]) -> None:
    server = start(
        f"--tls-cert={certificate[0]}", f"--tls-key={certificate[1]}", "--tls-required=tcp-https"
    )
    for command, name in ((b"PUB t\n", b"PUB"), (b"\n", b""), (b"what x\n", b"what")):
        client = server.connect()
        text = b"E_INVALID cannot %b in current state (TLS required)" % name
        assert client.ask(command) == (ERROR, text)
    client = server.connect()
    client.identify(feature_negotiation=True, tls_v1=True)
    upgrade(client, "tls")
    client.pub("t", b"x")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificate[0])
    address = ("127.0.0.1", server.port("https"))
    with (
        socket.create_connection(address, WATCHDOG) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as sock,
    ):
        sock.sendall(b"GET /ping HTTP/1.0\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.")


def test_a_required_certificate_is_verified(certificate: tuple[str, str], tmp_path: Path) -> None:
    """Where nsqd takes any; without anything to verify with, serve says so and does not start."""
    argv = [
        drop_in(tmp_path),
        f"--data-path={tmp_path}",
        "--tls-client-auth-policy=require",
        f"--tls-cert={certificate[0]}",
        f"--tls-key={certificate[1]}",
        "--tcp-address=127.0.0.1:0",
        "--http-address=127.0.0.1:0",
        "--https-address=127.0.0.1:0",
    ]
    done = subprocess.run(argv, capture_output=True, timeout=WATCHDOG)
    assert done.returncode == 1
    assert b"--tls-root-ca-file" in done.stderr


def test_a_failed_handshake_is_told_in_clear(start: Start, certificate: tuple[str, str]) -> None:
    server = start(f"--tls-cert={certificate[0]}", f"--tls-key={certificate[1]}")
    client = server.connect()
    client.identify(feature_negotiation=True, tls_v1=True)
    client.send(b"GET / HTTP/1.0\r\n\r\n")
    data = b""
    while part := client.sock.recv(4096):
        data += part
    text = b"E_IDENTIFY_FAILED IDENTIFY failed tls: first record does not look like a TLS handshake"
    assert data.endswith(text)


def test_plain_http_is_sent_to_https(start: Start, certificate: tuple[str, str]) -> None:
    words = (f"--tls-cert={certificate[0]}", f"--tls-key={certificate[1]}", "--tls-required")
    server = start(*words, status=403)
    reply = server.http("GET", "/stats")
    body = b'{"message": "TLS_REQUIRED", "https_port": %d}' % server.port("https")
    assert (reply.status, reply.body) == (403, body)


# ---- authorisation ----


def test_authorisation(start: Start, authority: Authority) -> None:
    server = start(authority.flag)
    client = server.connect()
    assert client.identify(feature_negotiation=True)["auth_required"] is True
    error = (ERROR, b"E_AUTH_FIRST AUTH required before PUB")
    assert client.ask(b"PUB t\n" + sized(b"x")) == error

    rules = (
        rule(topic="^orders$", channels=["^ch$"], permissions=["subscribe"]),
        rule(topic="pubok", permissions=["publish"]),
    )
    authority.reply = 200, reply(3600, *rules, identity="bob", identity_url="http://x/bob")

    def authorised() -> Client:
        client = server.connect()
        answer = client.ask(b"AUTH\n" + sized(b"s&c=r t"))
        assert answer is not None
        expected = {"identity": "bob", "identity_url": "http://x/bob", "permission_count": 2}
        assert json.loads(answer[1]) == expected
        return client

    client = authorised()
    expected = {"secret": "s&c=r t", "tls": "false", "remote_ip": "127.0.0.1", "common_name": ""}
    assert authority.asked == [expected]
    client.pub("xpubokx", b"x")
    client.sub("orders", "ch")
    found = server.channel("orders", "ch")["clients"][0]
    assert (found["authed"], found["auth_identity"]) == (True, "bob")
    for command, text in (
        (b"PUB orders\n" + sized(b"x"), b'PUB on "orders" ""'),
        (b"SUB orders other\n", b'SUB on "orders" "other"'),
        (b"MPUB orders\n", b'MPUB on "orders" ""'),
        (b"DPUB orders 1\n" + sized(b"x"), b'DPUB on "orders" ""'),
    ):
        client = authorised()
        assert client.ask(command) == (ERROR, b"E_UNAUTHORIZED AUTH failed for " + text)
    client = authorised()
    error = (ERROR, b"E_INVALID AUTH already set")
    assert client.ask(b"AUTH\n" + sized(b"again")) == error


def test_who_has_a_certificate_is_named(
    start: Start,
    authority: Authority,
    certificate: tuple[str, str],
    signed: tuple[str, tuple[str, str]],
) -> None:
    server = start(
        f"--tls-cert={certificate[0]}",
        f"--tls-key={certificate[1]}",
        authority.flag,
        f"--tls-root-ca-file={signed[0]}",
        "--tls-client-auth-policy=require-verify",
        status=403,
    )
    authority.reply = 200, reply(60, rule())
    client = server.connect()
    client.identify(feature_negotiation=True, tls_v1=True)
    upgrade(client, "tls", certificate=signed[1])
    answer = client.ask(b"AUTH\n" + sized(b"s"))
    assert answer is not None
    assert json.loads(answer[1])["permission_count"] == 1
    expected = {"secret": "s", "tls": "true", "remote_ip": "127.0.0.1", "common_name": "somebody"}
    assert authority.asked == [expected]


@pytest.mark.parametrize(
    ("pattern", "topic"),
    [
        ("(?=t)", None),
        ("(", None),
        ("a{2000}", None),
        (r"^\pL$", b"t"),
        ("^[[:alpha:]]$", b"t"),
        (r"^(?P<name>t)\z", b"t"),
        ("", b"t"),
    ],
)
def test_patterns_of_an_authorisation_server(
    start: Start, authority: Authority, pattern: str, topic: bytes | None
) -> None:
    """Their syntax is RE2's."""
    authority.reply = 200, reply(60, rule(topic=pattern))
    client = start(authority.flag).connect()
    answer = client.ask(b"AUTH\n" + sized(b"secret"))
    assert answer is not None
    if topic is None:
        assert answer == (ERROR, b"E_AUTH_FAILED AUTH failed")
    else:
        client.pub(topic.decode(), b"x")


def test_a_grant_is_asked_for_again(start: Start, authority: Authority) -> None:
    server = start(authority.flag)
    authority.reply = 200, reply(1, rule())
    client = server.connect()
    client.ask(b"AUTH\n" + sized(b"x"))
    client.pub("t", b"x")
    eventually(lambda: client.pub("t", b"x") is None and len(authority.asked) > 1)
    authority.reply = 403, b""
    answer = eventually(lambda: [a for a in [client.ask(b"PUB t\n" + sized(b"x"))] if a != OK])
    assert answer == [(ERROR, b"E_AUTH_FAILED AUTH failed")]


# ---- nsqlookupd ----


def ask_lookupd(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WATCHDOG)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_topics_and_channels_are_registered(start: Start, lookupd: tuple[str, int]) -> None:
    tcp, web = lookupd
    words = (f"--lookupd-tcp-address={tcp}", "--broadcast-address=127.0.0.1")
    server = start(*words)
    eventually(lambda: ask_lookupd(web, "/nodes")["producers"])
    assert server.post("/topic/create", topic="T").status == 200
    assert server.post("/channel/create", topic="T", channel="C").status == 200
    found = eventually(
        lambda: [a for a in [ask_lookupd(web, "/lookup?topic=T")] if a.get("channels") == ["C"]]
    )[0]
    one = found["producers"][0]
    expected = {
        "broadcast_address": "127.0.0.1",
        "tcp_port": server.port(),
        "version": "1.3.0",
        "http_port": server.port("http"),
        "hostname": socket.gethostname(),
    }
    assert {key: one[key] for key in expected} == expected
    assert server.post("/channel/delete", topic="T", channel="C").status == 200
    assert server.post("/topic/delete", topic="T").status == 200
    eventually(lambda: not ask_lookupd(web, "/lookup?topic=T").get("producers"))
    server.stop()
    eventually(lambda: not ask_lookupd(web, "/nodes")["producers"])


def test_a_new_topic_gets_the_channels_that_others_have(
    start: Start, lookupd: tuple[str, int]
) -> None:
    tcp, web = lookupd
    words = (f"--lookupd-tcp-address={tcp}", "--broadcast-address=127.0.0.1")
    first = start(*words)
    for channel in ("C", "D#ephemeral"):
        assert first.post("/topic/create", topic="T").status == 200
        assert first.post("/channel/create", topic="T", channel=channel).status == 200
    eventually(lambda: len(ask_lookupd(web, "/channels?topic=T").get("channels", [])) == 2)
    second = start(*words)
    eventually(lambda: len(ask_lookupd(web, "/nodes")["producers"]) == 2)
    second.connect().pub("T", b"x")
    eventually(lambda: [item["channel_name"] for item in second.topic("T")["channels"]] == ["C"])
    eventually(lambda: second.channel("T", "C")["depth"] == 1)


@pytest.mark.deep
def test_a_nsqlookupd_that_was_away_is_told_everything(
    start: Start, noting_lookupd: Lookupd
) -> None:
    server = start(noting_lookupd.flag)
    told = noting_lookupd.told
    eventually(lambda: told == ["connected"])
    for path, params in (
        ("/topic/create", {"topic": "T"}),
        ("/topic/create", {"topic": "U"}),
        ("/channel/create", {"topic": "T", "channel": "C"}),
    ):
        assert server.post(path, **params).status == 200
    eventually(lambda: len(told) == 4)
    noting_lookupd.hang_up()
    eventually(lambda: told[-1] == "gone")
    del told[:]
    assert server.post("/topic/create", topic="V").status == 200
    eventually(lambda: "REGISTER V" in told)  # at the latest with the next PING
    assert told[0] == "connected"
    assert {"REGISTER T C", "REGISTER U", "REGISTER V"} <= set(told)
    assert "REGISTER T" not in told  # its channel says it
    assert len(noting_lookupd.identities) == 2


# ---- statsd ----


def test_statsd(start: Start) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(WATCHDOG)
        where = f"127.0.0.1:{sock.getsockname()[1]}"
        server = start(
            f"--statsd-address={where}",
            "--statsd-interval=1100ms",
            "--broadcast-address=h.x",
            "--statsd-udp-packet-size=200",
        )
        client = server.connect()
        client.sub("t", "c", 1)
        client.pub("t", b"hello")
        client.delivery()
        prefix = f"nsq.h_x_{server.port('http')}."
        wanted = {
            f"{prefix}topic.t.message_count:1|c",
            f"{prefix}topic.t.message_bytes:5|c",
            f"{prefix}topic.t.depth:0|g",
            f"{prefix}topic.t.channel.c.in_flight_count:1|g",
            f"{prefix}topic.t.channel.c.clients:1|g",
            f"{prefix}topic.t.message_count:0|c",
        }
        seen: set[str] = set()
        while not wanted <= seen:
            data = sock.recv(65536)
            assert len(data) <= 200
            assert data.endswith(b"\n")
            seen |= set(data.decode().splitlines())
        assert any(line.startswith(f"{prefix}mem.gc_runs:") for line in seen)
