"""`--access-file`: reloads, quotas, other options, and administration without a file."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.access import ADMIN, RULES, SCANNER, WORKER, File, denied, http, login
from support.fake_auth_server import Authority, reply, rule
from support.nsq_client import ERROR, OK, RESPONSE, Server, mpub, sized
from support.processes import WATCHDOG, eventually

import shmq

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours has an access file."""
    return "shmq"


# ---- reload ----


def test_a_user_who_was_removed_is_disconnected_at_once(start: Start, file: File) -> None:
    server = start(file.flag, "--gateway-workers=2")
    workers = [login(server, WORKER) for _ in range(4)]
    for worker in workers:
        worker.sub("resize", "workers", 1)
    scanner = login(server, SCANNER)
    scanner.pub("scan-1", b"x")
    without = RULES[: RULES.index("[users.worker]")] + RULES[RULES.index("[users.admin]") :]
    file.reload(server, without)
    for worker in workers:
        answer = worker.frame()
        assert answer == (ERROR, b"E_UNAUTHORIZED the access rules have changed")
        assert worker.ended()
    for _ in range(3):
        scanner.pub("scan-1", b"x")  # keeps its connection
    answer = server.connect().ask(b"AUTH\n" + sized(WORKER.encode()))
    assert answer == (ERROR, b"E_AUTH_FAILED AUTH failed")


def test_a_token_that_was_replaced_ends_its_connections(start: Start, file: File) -> None:
    server = start(file.flag)
    client = login(server, SCANNER)
    client.pub("scan-1", b"x")
    file.reload(server, RULES.replace(SCANNER, SCANNER[::-1]))
    assert client.frame() == (ERROR, b"E_UNAUTHORIZED the access rules have changed")
    login(server, SCANNER[::-1]).pub("scan-1", b"x")


def test_a_right_that_is_gone_is_gone_on_the_fast_way_too(start: Start, file: File) -> None:
    server = start(file.flag)
    client = login(server, SCANNER)
    for _ in range(5):
        client.send((b"PUB resize\n" + sized(b"x")) * 10)
        assert [client.frame() for _ in range(10)] == [OK] * 10
    file.reload(server, RULES.replace('"resize", "scan-*"', '"scan-*"'))
    denied(client, (b"PUB resize\n" + sized(b"x")) * 2)


def test_a_subscription_ends_with_its_right(start: Start, file: File) -> None:
    server = start(file.flag)
    kept, lost = login(server, WORKER), login(server, WORKER)
    kept.sub("resize", "workers", 1)
    lost.sub("resize", "w-1", 1)
    file.reload(server, RULES.replace('"workers", "w-*"', '"workers"'))
    assert lost.frame() == (ERROR, b"E_UNAUTHORIZED the access rules have changed")
    login(server, ADMIN).pub("resize", b"x")
    assert kept.delivery().body == b"x"


def _says(server: Server, said: str) -> bool:
    return said in server.log


def test_a_broken_file_keeps_the_rules(start: Start, file: File) -> None:
    server = start(file.flag)
    client = login(server, SCANNER)
    for broken, said in (
        ("[users.x]\n", "users.x has no proof"),
        ("[users", "it is no TOML"),
        (None, "every user of this host may read"),
    ):
        if broken is None:
            file.path.chmod(0o644)
        else:
            file.write(broken)
        server.process.send_signal(signal.SIGHUP)
        eventually(functools.partial(_says, server, said), what=said)
        assert "everything stays as it was" in server.log
        client.pub("scan-1", b"x")
        denied(login(server, SCANNER), b"PUB other\n" + sized(b"x"))


def test_a_file_that_is_given_later_closes_what_is_open(start: Start, file: File) -> None:
    """The path is an option that a reload may change, so a subscriber of before must not stay."""
    config = file.path.with_name("config.toml")
    config.write_text("")
    server = start(f"--config={config}")
    client = server.connect()
    client.sub("resize", "workers", 1)
    config.write_text(f'access_file = "{file.path}"\n')
    server.process.send_signal(signal.SIGHUP)
    assert client.frame() == (ERROR, b"E_UNAUTHORIZED the access rules have changed")


# ---- quotas ----


def quota(words: str) -> str:
    return f"""
[users.a]
token = "{SCANNER}"
allow = [{{ do = ["all"] }}]
quota = {{ {words} }}
[users.b]
token = "{ADMIN}"
allow = [{{ do = ["all"] }}]
"""


def test_connections_of_a_user(start: Start, file: File) -> None:
    file.write(quota("connections = 2"))
    server = start(file.flag, "--gateway-workers=1")
    first, second = login(server, SCANNER), login(server, SCANNER)
    third = server.connect()
    answer = third.ask(b"AUTH\n" + sized(SCANNER.encode()))
    assert answer == (ERROR, b"E_CONNECT_FAILED connections of a exceed limit of 2")
    assert http(server, "GET", "/stats", SCANNER).status == 429
    login(server, ADMIN)  # others are not concerned
    second.close()

    def again() -> bool:
        client = server.connect()
        found = client.ask(b"AUTH\n" + sized(SCANNER.encode()))
        client.close()
        return found is not None and found[0] == RESPONSE

    eventually(again, what="a place is free again")
    first.pub("t", b"x")


def test_messages_a_second_slow_a_publisher_down(start: Start, file: File) -> None:
    file.write(quota("messages_per_second = 100"))
    server = start(file.flag, "--gateway-workers=1")
    client = login(server, SCANNER)
    began = time.monotonic()
    client.send((b"PUB t\n" + sized(b"x")) * 150 + mpub(b"t", [b"x"] * 100) * 2)
    assert [client.frame() for _ in range(152)] == [OK] * 152  # no errors
    took = time.monotonic() - began
    # 100 at once, 50 more at 100 a second, then a batch; the second one waits for the first
    assert took >= 1.3
    other = login(server, ADMIN)
    other.send((b"PUB t\n" + sized(b"x")) * 1000)
    assert [other.frame() for _ in range(1000)] == [OK] * 1000


def test_messages_a_second_over_http(start: Start, file: File) -> None:
    file.write(quota("messages_per_second = 5"))
    server = start(file.flag, "--gateway-workers=1")
    answers = [http(server, "POST", "/pub?topic=t", SCANNER, b"x") for _ in range(100)]
    statuses = {answer.status for answer in answers}
    assert statuses == {200, 429}
    late = next(answer for answer in answers if answer.status == 429)
    assert late.message == "TOO_MANY_MESSAGES"
    assert int(late.headers["Retry-After"]) >= 1
    assert http(server, "POST", "/pub?topic=t", ADMIN, b"x").status == 200


def test_topics_that_a_user_makes(start: Start, file: File) -> None:
    file.write(quota("topics = 2"))
    server = start(file.flag, "--gateway-workers=1")
    client = login(server, SCANNER)
    for topic in ("t1", "t2", "t1"):
        client.pub(topic, b"x")
    for command in (b"PUB t3\n" + sized(b"x"), b"SUB t3 c\n"):
        answer = login(server, SCANNER).ask(command)
        assert answer is not None
        assert b"topics that a made exceed limit of 2" in answer[1]
    refused = http(server, "POST", "/topic/create?topic=t3", SCANNER)
    assert (refused.status, refused.message) == (503, "TOO_MANY_TOPICS")
    assert http(server, "POST", "/pub?topic=t3", SCANNER, b"x").status == 503
    assert http(server, "POST", "/topic/create?topic=t3", ADMIN).status == 200
    client.pub("t3", b"x")  # it is there, whoever made it
    assert http(server, "POST", "/topic/delete?topic=t1", SCANNER).status == 200
    client.pub("t4", b"x")  # a topic that is gone does not count


def test_leases_and_staged_bytes_of_a_user(start: Start, file: File) -> None:
    file.write(quota("leases = 1, staged_bytes = '64KiB'"))
    server = start(file.flag, "--gateway-workers=1")
    where = f"127.0.0.1:{server.port()}"
    with shmq.connect(where, token=SCANNER) as limited, shmq.connect(where, token=ADMIN) as free:
        free.producer("t").publish_many([b"x"] * 10)
        first = limited.lease_holder("t", "c", "one")
        assert first.lease(1) is not None
        with pytest.raises(shmq.ShmqError):
            first.lease(1)
        with pytest.raises(shmq.ShmqError):
            limited.stage("t", "w", 1, [bytes(1000)] * 200)
        assert free.stage("t", "v", 1, [bytes(1000)] * 200) is not None


# ---- with other options ----


def test_an_authorisation_server_wins_on_tcp(
    start: Start, file: File, authority: Authority
) -> None:
    server = start(file.flag, authority.flag)
    authority.reply = 200, reply(60, rule())
    client = login(server, "whatever the server likes")
    client.pub("hidden", b"x")
    authority.reply = 403, b""
    refused = server.connect()
    assert refused.ask(b"AUTH\n" + sized(SCANNER.encode())) == (ERROR, b"E_AUTH_FAILED AUTH failed")
    assert http(server, "POST", "/pub?topic=scan-1", SCANNER, b"x").status == 200
    assert http(server, "POST", "/pub?topic=hidden", SCANNER, b"x").status == 403
    assert server.http("POST", "/pub?topic=hidden", b"x").status == 401


def start_fails(tmp_path: Path, *words: str, **env: str) -> str:
    """The last line of a broker that does not start."""
    argv = [sys.executable, "-m", "shmq", "serve", f"--data-path={tmp_path}"]
    argv += ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", *words]
    environment = {**os.environ, "SHMQ_INSTANCE": f"access-fails-{os.getpid()}", **env}
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=WATCHDOG, check=False
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_tokens_and_an_access_file_exclude_each_other(file: File, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(SCANNER)
    tokens.chmod(0o600)
    said = start_fails(tmp_path, file.flag, f"--http-token-file={tokens}")
    assert "give one of them" in said
    said = start_fails(tmp_path, file.flag, SHMQ_HTTP_TOKEN=SCANNER)
    assert "SHMQ_HTTP_TOKEN" in said


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("[users.a]\n", 0o600, "users.a has no proof"),
        (RULES, 0o644, "may read"),
        (RULES, 0o622, "may"),
        (None, 0o600, "No such file"),
    ],
)
def test_a_broker_with_a_bad_file_does_not_start(
    file: File, tmp_path: Path, text: str | None, mode: int, said: str
) -> None:
    if text is None:
        file.path.unlink()
    else:
        file.write(text)
        file.path.chmod(mode)
    line = start_fails(tmp_path, file.flag)
    assert said in line
    assert str(file.path) in line


# ---- administration without a file ----


def public_address() -> str | None:
    """An address of this host that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.connect(("192.0.2.1", 9))
        return str(sock.getsockname()[0])
    return None


ADMINISTRATION = [
    ("POST", "/topic/delete?topic=t"),
    ("POST", "/topic/empty?topic=t"),
    ("POST", "/topic/pause?topic=t"),
    ("POST", "/channel/delete?topic=t&channel=c"),
    ("POST", "/channel/empty?topic=t&channel=c"),
    ("POST", "/channel/unpause?topic=t&channel=c"),
    ("PUT", "/config/log_level"),
]


def test_administration_needs_a_token_where_other_hosts_reach_http(
    start: Start, file: File
) -> None:
    server = start("--http-address=0.0.0.0:0")
    server.http("POST", "/pub?topic=t", b"x")
    server.http("POST", "/channel/create?topic=t&channel=c")
    for method, path in ADMINISTRATION:
        answer = server.http(method, path, b"info")
        assert answer.status == 403, path
        assert "--access-file" in answer.message
        assert "--http-token-file" in answer.message
    assert server.topic("t")["message_count"] == 1


def test_administration_is_free_on_loopback_and_on_a_unix_socket(
    start: Start, tmp_path: Path
) -> None:
    for words in (["--http-address=127.0.0.1:0"], [f"--http-address={tmp_path / 'http'}"]):
        server = start(*words)
        assert server.http("POST", "/topic/create?topic=t").status == 200
        assert server.http("POST", "/topic/delete?topic=t").status == 200


def test_everybody_may_administer_again_if_the_file_says_so(start: Start, file: File) -> None:
    """As nsqd, for nsqadmin, which has no token to give."""
    file.write("[users.anonymous]\nallow = [{ do = ['all'] }]\n")
    server = start(file.flag, "--http-address=0.0.0.0:0")
    assert server.http("POST", "/topic/create?topic=t").status == 200
    assert server.http("POST", "/topic/delete?topic=t").status == 200


def test_http_beside_auth_is_warned_of(start: Start, authority: Authority, file: File) -> None:
    assert "AUTH is asked for on TCP only" in start(authority.flag).log
    assert "AUTH is asked for on TCP only" not in start(authority.flag, file.flag).log


# ---- floods ----


def test_a_flood_of_passwords_leaves_the_gateway_its_processor(start: Start, file: File) -> None:
    """Wrong passwords wait for their turn; a client with a token is served meanwhile."""
    server = start(file.flag, "--gateway-workers=1")
    stop = threading.Event()

    def guess() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with contextlib.suppress(OSError, AssertionError):
                client = server.connect()
                client.ask(b"AUTH\n" + sized(b"worker:%d" % number))
                client.close()

    threads = [threading.Thread(target=guess, daemon=True) for _ in range(4)]
    client = login(server, SCANNER)
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            client.pub("scan-1", b"x")
    finally:
        stop.set()
        server.close()
        for thread in threads:
            thread.join(WATCHDOG)


def test_the_audit_log_names_the_user(start: Start, file: File) -> None:
    server = start(file.flag)
    login(server, SCANNER).pub("scan-audit", b"x")
    assert http(server, "POST", "/topic/delete?topic=scan-audit", ADMIN).status == 200
    lines = [line for line in server.log.splitlines() if "topic=scan-audit" in line]
    assert any("action=create_topic" in line and "user=scanner" in line for line in lines)
    assert any("action=delete_topic" in line and "user=admin" in line for line in lines)


def test_the_audit_log_counts_what_each_user_published(start: Start, file: File) -> None:
    """One line for many messages, whatever way they took."""
    server = start(file.flag, "--audit-publish=200ms", "--gateway-workers=1")
    client = login(server, SCANNER)
    for _ in range(4):
        client.send((b"PUB resize\n" + sized(b"x")) * 50)
        assert [client.frame() for _ in range(50)] == [OK] * 50
    gone = login(server, SCANNER)
    gone.pub("resize", b"x")
    gone.close()
    with socket.create_connection(("127.0.0.1", server.port("http")), WATCHDOG) as sock:
        request = (
            f"POST /pub?topic=scan-http HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
            f"Authorization: Bearer {SCANNER}\r\n\r\nx"
        )
        for _ in range(5):  # the later ones are not parsed again
            sock.sendall(request.encode())
            assert b"200 OK" in sock.recv(65536)

    def count(topic: str) -> int:
        lines = [line for line in server.log.splitlines() if "action=publish" in line]
        found = [line for line in lines if f"topic={topic} " in line and "user=scanner" in line]
        return sum(int(line.partition("messages=")[2].split()[0]) for line in found)

    eventually(lambda: count("resize") == 201, what="the lines of TCP")
    eventually(lambda: count("scan-http") == 5, what="the lines of HTTP")
    assert server.log.count("action=publish") < 50
