"""`--access-file`: who may do what over TCP and HTTP, shown by real gateways and clients."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import other_users
from support.access import ADMIN, READER, RULES, SCANNER, WORKER, File, denied, http, login
from support.certificates import Pki, context_of
from support.nsq_client import ERROR, OK, RESPONSE, Server, mpub, sized
from support.processes import WATCHDOG

import shmq
from shmq.errors import Unauthorized
from shmq.gateway.acts import COMMANDS, Scope

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours has an access file."""
    return "shmq"


@pytest.fixture(scope="module")
def shared(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with RULES, for tests that do not change it, and the topics that they need."""
    from support import processes

    directory = tmp_path_factory.mktemp("access")
    made = File(directory / "access.toml")
    made.write(RULES)
    name = f"access-{os.getpid()}"
    server = Server(kind, directory, name, made.flag, "--gateway-workers=1")
    try:
        for topic in ("resize", "hidden"):
            for channel in ("workers", "others"):
                assert http(server, "POST", f"/pub?topic={topic}", ADMIN, b"1").status == 200
                path = f"/channel/create?topic={topic}&channel={channel}"
                assert http(server, "POST", path, ADMIN).status == 200
        yield server
    finally:
        server.close()
        processes.remove_instance(name)


def body(document: dict[str, Any]) -> bytes:
    return sized(json.dumps(document).encode())


# ---- who is let in ----


def test_clients_are_told_to_say_who_they_are(shared: Server) -> None:
    client = shared.connect()
    assert client.identify(feature_negotiation=True)["auth_required"] is True
    assert denied(client, b"PUB resize\n" + sized(b"x")) == b"E_AUTH_FIRST AUTH required before PUB"


def test_a_wrong_secret_is_refused(start: Start, file: File) -> None:
    """Each on a gateway of its own would wait less: wrong ones are slowed down."""
    server = start(file.flag)
    for secret in ("x", f"{SCANNER}x", "worker:wrong", "nobody:open sesame"):
        client = server.connect()
        answer = client.ask(b"AUTH\n" + sized(secret.encode()))
        assert answer == (ERROR, b"E_AUTH_FAILED AUTH failed")
        assert client.ended()


def test_a_password_lets_in_as_the_user(shared: Server) -> None:
    client = shared.connect()
    answer = client.ask(b"AUTH\n" + sized(b"worker:open sesame"))
    assert answer is not None
    assert json.loads(answer[1])["identity"] == "worker"
    client.sub("resize", "workers")


def test_basic_and_bearer_over_http(start: Start, file: File) -> None:
    server = start(file.flag)

    def ask(authorization: str) -> int:
        path = "/topic/delete?topic=none"
        return int(server.http("POST", path, b"", Authorization=authorization).status)

    basic = base64.b64encode(b"worker:open sesame").decode()
    assert ask(f"Bearer {ADMIN}") == 404
    assert ask(f"bearer {ADMIN}") == 404
    assert ask(f"Basic {basic}") == 403
    for wrong in ("Bearer x", "Basic x", "Basic !!", f"Basic {basic}x", f"Digest {ADMIN}", ADMIN):
        assert ask(wrong) == 401, wrong
    assert server.http("GET", "/ping").status == 200
    assert server.http("GET", "/stats").status == 401
    assert "Basic" in server.http("GET", "/stats").headers["WWW-Authenticate"]


# ---- TCP: every command ----


#: A command that asks for something on topic and channel, with a body that is right.
_HOLDER: dict[str, Any] = {"holder": [0, 1]}
BODIES: dict[bytes, bytes] = {
    b"PUB": sized(b"x"),
    b"MPUB": mpub(b"t", [b"x"])[len(b"MPUB t\n") :],
    b"DPUB": sized(b"x"),
    b"SUB": b"",
}


def command(name: bytes, topic: str, channel: str) -> bytes:
    """A command line with its body."""
    words = [name, topic.encode(), channel.encode()]
    if name in (b"PUB", b"MPUB", b"STAGE", b"COMMIT", b"ABANDON"):
        words.pop()
    if name == b"DPUB":
        words[2] = b"1000"
    return b" ".join(words) + b"\n" + BODIES.get(name, body({"n": 1}))


ASKED = [name for name, need in COMMANDS.items() if need.scope is Scope.NAMES]


@pytest.mark.parametrize("name", ASKED, ids=bytes.decode)
def test_each_command_is_refused_alike_for_names_that_are_there_and_that_are_not(
    shared: Server, name: bytes
) -> None:
    """Neither the text nor what exists afterwards tells whether a topic exists."""
    said = []
    for topic in ("hidden", "absent"):
        client = login(shared, WORKER)
        client.identify(feature_negotiation=True, leases=True)
        said.append(denied(client, command(name, topic, "workers")))
    assert said[0].replace(b"hidden", b"absent") == said[1]
    topics = json.loads(http(shared, "GET", "/stats?format=json", ADMIN).body)["topics"]
    assert "absent" not in {item["topic_name"] for item in topics}


@pytest.mark.parametrize("name", ASKED, ids=bytes.decode)
def test_each_command_needs_auth(shared: Server, name: bytes) -> None:
    client = shared.connect()
    client.identify(feature_negotiation=True, leases=True)
    assert denied(client, command(name, "resize", "workers")).startswith(b"E_AUTH_FIRST")


def test_patterns_decide_topics_and_channels(shared: Server) -> None:
    scanner = login(shared, SCANNER)
    for topic in ("resize", "scan-1", "scan-2#ephemeral"):
        scanner.pub(topic, b"x")
    denied(scanner, b"PUB Resize\n" + sized(b"x"))
    denied(login(shared, SCANNER), b"PUB scan\n" + sized(b"x"))
    denied(login(shared, SCANNER), b"SUB resize workers\n")
    login(shared, WORKER).sub("resize", "w-1#ephemeral")
    denied(login(shared, WORKER), b"SUB resize others\n")
    denied(login(shared, WORKER), b"PUB resize\n" + sized(b"x"))


def test_a_publisher_on_the_fast_way_keeps_to_its_topics(shared: Server) -> None:
    """The second PUB to a topic takes a shorter way; the next one may name another topic."""
    client = login(shared, SCANNER)
    for _ in range(5):
        client.send((b"PUB resize\n" + sized(b"x")) * 50)
        assert [client.frame() for _ in range(50)] == [OK] * 50
    client.send((b"PUB resize\n" + sized(b"x")) * 3 + b"PUB hidden\n" + sized(b"x"))
    frames = [client.frame() for _ in range(4)]
    assert frames[:3] == [OK] * 3
    assert frames[3] is not None
    assert frames[3][1].startswith(b"E_UNAUTHORIZED")


def test_the_instance_tells_only_what_each_client_needs(shared: Server) -> None:
    client = login(shared, SCANNER)
    client.identify(feature_negotiation=True, leases=True)
    answer = client.ask(b"LINFO\n" + body({}))
    assert answer is not None
    assert answer[0] == RESPONSE
    assert b"hidden" not in answer[1]


# ---- HTTP ----


ROUTES = [
    ("POST", "/pub?topic={t}"),
    ("POST", "/mpub?topic={t}"),
    ("POST", "/topic/create?topic={t}"),
    ("POST", "/topic/delete?topic={t}"),
    ("POST", "/topic/empty?topic={t}"),
    ("POST", "/topic/pause?topic={t}"),
    ("POST", "/topic/unpause?topic={t}"),
    ("POST", "/channel/create?topic={t}&channel=workers"),
    ("POST", "/channel/delete?topic={t}&channel=workers"),
    ("POST", "/channel/empty?topic={t}&channel=workers"),
    ("POST", "/channel/pause?topic={t}&channel=workers"),
    ("POST", "/channel/unpause?topic={t}&channel=workers"),
    ("PUT", "/config/log_level"),
    ("GET", "/config/log_level"),
    ("GET", "/debug/pprof/cmdline"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_each_route_is_refused_alike(shared: Server, method: str, path: str) -> None:
    for token, status in (("", 401), (READER, 403), (WORKER, 403)):
        answers = [
            http(shared, method, path.format(t=topic), token, b"x")
            for topic in ("hidden", "absent")
        ]
        assert [answer.status for answer in answers] == [status, status]
        assert answers[0].body == answers[1].body


@pytest.mark.parametrize("query", ["topic=resize&topic=hidden", "Topic=resize&topic=hidden"])
def test_the_first_topic_counts_for_rule_and_handler(shared: Server, query: str) -> None:
    before = http(shared, "GET", "/stats?format=json&topic=hidden", ADMIN).body
    http(shared, "POST", f"/pub?{query}", SCANNER, b"x")
    after = http(shared, "GET", "/stats?format=json&topic=hidden", ADMIN).body
    count = [json.loads(each)["topics"][0]["message_count"] for each in (before, after)]
    assert count[0] == count[1]


def test_who_may_publish_may_do_so_over_http(shared: Server) -> None:
    assert http(shared, "POST", "/pub?topic=scan-http", SCANNER, b"x").status == 200
    assert http(shared, "POST", "/topic/create?topic=scan-new", SCANNER).status == 200
    assert http(shared, "POST", "/pub?topic=hidden", SCANNER, b"x").status == 403
    path = "/channel/create?topic=resize&channel=w-http"
    assert http(shared, "POST", path, WORKER).status == 200
    assert http(shared, "POST", path, SCANNER).status == 403


def test_the_same_head_again_is_not_published_after_the_right_is_gone(
    start: Start, file: File
) -> None:
    """A publisher's known head is not parsed again; a reload makes it unknown."""
    server = start(file.flag)
    request = (
        f"POST /pub?topic=resize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
        f"Authorization: Bearer {SCANNER}\r\n\r\nx"
    ).encode()
    with socket.create_connection(("127.0.0.1", server.port("http")), WATCHDOG) as sock:

        def ask() -> bytes:
            sock.sendall(request)
            return sock.recv(65536).split(b"\r\n")[0]

        assert [ask() for _ in range(5)] == [b"HTTP/1.1 200 OK"] * 5
        file.reload(server, RULES.replace('"resize", "scan-*"', '"scan-*"'))
        assert ask() == b"HTTP/1.1 403 Forbidden"


def test_statistics_are_filtered(shared: Server) -> None:
    client = login(shared, ADMIN)
    client.identify(client_id="a-client", feature_negotiation=True)
    client.pub("hidden", b"x")
    for path in ("/stats?format=json", "/stats", "/metrics", "/stats?format=json&topic=hidden"):
        found = http(shared, "GET", path, READER)
        assert found.status == 200, path
        for secret in (b"hidden", b"others", b"scan-"):
            assert secret not in found.body, path
        if "topic=" not in path:
            assert b"resize" in found.body
            assert b"workers" in found.body
            assert b"hidden" in http(shared, "GET", path, ADMIN).body
    missing = http(shared, "GET", "/stats?format=json&topic=absent&include_mem=0", READER).body
    there = http(shared, "GET", "/stats?format=json&topic=hidden&include_mem=0", READER).body
    assert there == missing
    assert http(shared, "GET", "/stats", SCANNER).status == 403
    assert http(shared, "GET", "/info", READER).status == 200


# ---- the page ----

VIEWER = "view-0123456789ab"
PAGES = f"""
[users.viewer]
token = "{VIEWER}"
allow = [
  {{ do = ["statistics"], topics = ["orders"], channels = ["pack"] }},
  {{ do = ["statistics"], topics = ["open"] }},
  {{ do = ["bodies"], topics = ["open"] }},
]
[users.admin]
token = "{ADMIN}"
allow = [{{ do = ["all"] }}]
"""


@pytest.fixture
def paged(start: Start, file: File) -> Server:
    """A server with topics that VIEWER may see, in part or not at all."""
    file.write(PAGES)
    server = start(file.flag)
    for topic in ("orders", "open", "hidden"):
        for channel in ("pack", "secretive"):
            path = f"/channel/create?topic={topic}&channel={channel}"
            assert http(server, "POST", f"/topic/create?topic={topic}", ADMIN).status == 200
            assert http(server, "POST", path, ADMIN).status == 200
        body = b"of a customer" if topic == "orders" else b"for everybody"
        assert http(server, "POST", f"/pub?topic={topic}", ADMIN, body).status == 200
    remote = shmq.connect(f"127.0.0.1:{server.port()}", token=ADMIN)
    for topic in ("hidden", "orders"):
        remote.lease_holder(topic, "secretive", "holder").lease(1)
    remote.close()
    return server


@pytest.mark.parametrize(
    "path",
    ["state", "dead", "leases", "processes", "results", "history", "deaths", "topic?topic=orders"]
    + [f"{name}?topic=orders&channel=pack" for name in ("channel", "messages", "heat", "history")],
)
def test_the_page_has_only_what_its_viewer_may_see(paged: Server, path: str) -> None:
    found = http(paged, "GET", f"/page/{path}", VIEWER)
    assert found.status == 200
    for secret in (b"hidden" if b"hidden: bodies" not in found.body else b"hidden/", b"customer"):
        assert secret not in found.body
    if "open" not in path and not path.startswith("state"):
        assert b"secretive" not in found.body
    if path == "state":
        rows = json.loads(found.body)["rows"].values()
        places = {(row[0], row[1]) for row in rows}
        assert places == {("orders", "pack"), ("open", "pack"), ("open", "secretive")}
        facts = json.loads(found.body)
        assert (facts["topics"], facts["queues"]) == (2, 3)
    if path in ("state", "leases"):
        assert b"secretive" in http(paged, "GET", f"/page/{path}", ADMIN).body


def test_denied_places_of_the_page_look_as_if_they_were_not_there(paged: Server) -> None:
    for name in ("channel", "messages", "heat", "history", "message"):
        for topic, channel in (("hidden", "pack"), ("orders", "secretive")):
            path = f"/page/{name}?topic={topic}&channel={channel}"
            there = http(paged, "GET", path, VIEWER)
            missing = http(paged, "GET", path.replace(topic, "absent"), VIEWER)
            assert there.status == missing.status == 404, path
            assert there.body == missing.body.replace(b"absent", topic.encode())
            assert http(paged, "GET", path, ADMIN).status in (200, 404)
    there = http(paged, "GET", "/page/topic?topic=hidden", VIEWER)
    missing = http(paged, "GET", "/page/topic?topic=absent", VIEWER)
    assert (there.status, there.body.replace(b"hidden", b"absent")) == (404, missing.body)


def test_bodies_need_their_own_right(paged: Server) -> None:
    def seen(token: str, topic: str) -> bytes:
        path = f"/page/messages?topic={topic}&channel=pack"
        return bytes(http(paged, "GET", path, token).body)

    assert b"everybody" in seen(VIEWER, "open")
    assert b"customer" not in seen(VIEWER, "orders")
    assert b"customer" in seen(ADMIN, "orders")


def test_the_ticks_of_the_page_are_filtered_and_end_at_a_reload(paged: Server, file: File) -> None:
    request = (
        f"GET /page/ticks HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {VIEWER}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", paged.port("http")), WATCHDOG) as sock:
        sock.sendall(request.encode())
        data = b""
        while b"event: tick" not in data:
            more = sock.recv(65536)
            assert more
            data += more
        for topic in ("hidden", "open"):
            path = f"/channel/create?topic={topic}&channel=another"
            assert http(paged, "POST", path, ADMIN).status == 200
        while b"another" not in data:
            data += sock.recv(65536)
        assert b"hidden" not in data
        file.reload(paged, PAGES.replace('"open"', '"closed"'))
        while not data.endswith(b"\r\n0\r\n\r\n"):  # the end of the answer
            more = sock.recv(65536)
            assert more
            data += more
        assert b"hidden" not in data


# ---- proofs without a secret ----


def test_a_process_on_a_unix_socket_is_known_by_its_uid(
    start: Start, file: File, tmp_path: Path
) -> None:
    file.write(
        f"[users.me]\nuid = {os.geteuid()}\n"
        "allow = [{ do = ['publish', 'administer'], topics = ['t'] }]\n" + RULES
    )
    server = start(
        file.flag,
        f"--tcp-address={tmp_path / 'tcp'}",
        f"--http-address={tmp_path / 'http'}",
        status=200,
    )
    client = server.connect()
    assert client.identify(feature_negotiation=True)["auth_required"] is False
    client.pub("t", b"x")
    denied(client, b"PUB resize\n" + sized(b"x"))
    assert server.http("POST", "/topic/empty?topic=t").status == 200
    assert server.http("POST", "/topic/empty?topic=resize").status == 403
    assert http(server, "POST", "/topic/create?topic=resize", ADMIN).status == 200
    other = server.connect()  # a secret decides, if there is one
    answer = other.ask(b"AUTH\n" + sized(SCANNER.encode()))
    assert answer is not None
    assert json.loads(answer[1])["identity"] == "scanner"
    other.pub("resize", b"x")


@other_users.needed
def test_another_uid_is_another_user(start: Start, file: File, tmp_path: Path) -> None:
    file.write(
        f"[users.stranger]\nuid = {other_users.STRANGER}\n"
        "allow = [{ do = ['publish'], topics = ['t'] }]\n"
    )
    start(file.flag, f"--tcp-address={tmp_path / 'tcp'}", f"--http-address={tmp_path / 'http'}")
    os.chmod(tmp_path / "tcp", 0o666)
    for parent in (tmp_path, *tmp_path.parents):
        with contextlib.suppress(OSError):
            if parent.stat().st_uid == os.geteuid():
                parent.chmod(parent.stat().st_mode | 0o011)
    program = (
        "import socket, struct, sys\n"
        "sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1])\n"
        "sock.sendall(b'  V2PUB ' + sys.argv[2].encode() + b'\\n' + struct.pack('>i', 1) + b'x')\n"
        "sys.stdout.write(repr(sock.recv(200)))\n"
    )

    def said(uid: int, topic: str) -> str:
        argv = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
        argv += [sys.executable, "-S", "-c", program, str(tmp_path / "tcp"), topic]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    assert "OK" in said(other_users.STRANGER, "t")
    assert "E_UNAUTHORIZED" in said(other_users.STRANGER, "u")
    assert "E_AUTH_FIRST" in said(other_users.SERVICE, "t")
    assert "E_AUTH_FIRST" in said(0, "t")


@pytest.fixture
def secured(start: Start, file: File, pki: Pki) -> Server:
    file.write(
        "[users.scanner]\ncertificate = ['CN=scanner,O=Acme']\n"
        "allow = [{ do = ['publish'], topics = ['t'] }, { do = ['statistics'] }]\n"
        f"[users.more]\ntoken = '{WORKER}'\nallow = [{{ do = ['publish'], topics = ['more'] }}]\n"
    )
    cert, key = pki["server"]
    return start(
        file.flag,
        f"--tls-cert={cert}",
        f"--tls-key={key}",
        f"--tls-root-ca-file={pki['authority'][0]}",
        "--tls-client-auth-policy=require-verify",
        "--https-address=127.0.0.1:0",
        status=403,
    )


def test_a_certificate_shows_who_a_client_is(secured: Server, pki: Pki) -> None:
    where = f"127.0.0.1:{secured.port()}"
    with shmq.connect(where, tls=context_of(pki, "scanner")) as remote:
        with remote.producer("t") as producer:
            producer.publish(b"x")
        with pytest.raises(Unauthorized):
            remote.producer("u")
    with pytest.raises(Unauthorized):
        shmq.connect(where, tls=context_of(pki, "other"))
    with shmq.connect(where, tls=context_of(pki, "other"), token=WORKER) as remote:
        remote.producer("more").publish(b"x")
    with pytest.raises((OSError, shmq.ShmqError)):
        shmq.connect(where, tls=context_of(pki, "forged"), timeout=2)


def test_a_library_that_insists_on_a_secret_gives_its_name(secured: Server, pki: Pki) -> None:
    """go-nsq sends a secret wherever auth_required is true, and it is asked before the
    certificate."""
    where = f"127.0.0.1:{secured.port()}"
    with shmq.connect(where, tls=context_of(pki, "scanner"), token="scanner") as remote:
        remote.producer("t").publish(b"x")
    for name, secret in (("other", "scanner"), ("scanner", "more"), ("scanner", "admin")):
        with pytest.raises(Unauthorized):
            shmq.connect(where, tls=context_of(pki, name), token=secret)


def test_a_certificate_over_https(secured: Server, pki: Pki) -> None:
    import http.client

    def status(name: str, method: str, path: str) -> int:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", secured.port("https"), context=context_of(pki, name), timeout=WATCHDOG
        )
        with contextlib.closing(connection):
            connection.request(method, path, b"x" if method == "POST" else None)
            return connection.getresponse().status

    assert status("scanner", "POST", "/pub?topic=t") == 200
    assert status("scanner", "POST", "/pub?topic=u") == 403
    assert status("scanner", "GET", "/stats") == 200
    assert status("other", "GET", "/stats") == 401


def test_an_anonymous_user_who_may_only_look_is_told_to_say_who_he_is(
    start: Start, file: File
) -> None:
    """Libraries of NSQ send their secret only then."""
    file.write(RULES + "[users.anonymous]\nallow = [{ do = ['statistics'] }]\n")
    client = start(file.flag).connect()
    assert client.identify(feature_negotiation=True)["auth_required"] is True


def test_everybody_as_anonymous(start: Start, file: File) -> None:
    file.write(RULES + "[users.anonymous]\nallow = [{ do = ['publish'], topics = ['open'] }]\n")
    server = start(file.flag)
    client = server.connect()
    assert client.identify(feature_negotiation=True)["auth_required"] is False
    client.pub("open", b"x")
    denied(client, b"PUB resize\n" + sized(b"x"))
    client = server.connect()
    client.pub("open", b"x")
    answer = client.ask(b"AUTH\n" + sized(SCANNER.encode()))  # who is it after all
    assert answer is not None
    assert answer[0] == RESPONSE
    client.pub("resize", b"x")
    denied(client, b"PUB open\n" + sized(b"x"))
    assert server.http("POST", "/pub?topic=open", b"x").status == 200
    assert server.http("POST", "/pub?topic=resize", b"x").status == 403
    assert http(server, "POST", "/pub?topic=open", "wrong", b"x").status == 401
