"""Those who guess tokens and secrets of a real gateway: how often their guesses are looked at."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_auth_server import Authority, reply, rule
from support.nsq_client import ERROR, OK, RESPONSE, Client, Server, sized
from support.processes import WATCHDOG, eventually

Start = Callable[..., Server]

TOKEN = "a-token-that-nobody-can-guess-0123456789"
_guesses = itertools.count()


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours."""
    return "shmq"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


def status_of(server: Server, token: str, source: str = "127.0.0.1") -> int:
    """The answer to a publish with a token, on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port("http"), WATCHDOG, (source, 0))
    with contextlib.closing(connection):
        connection.request("POST", "/pub?topic=t", b"x", {"Authorization": f"Bearer {token}"})
        return connection.getresponse().status


def guess() -> str:
    return f"guess-{next(_guesses):012}"


def figure(server: Server, name: str) -> int:
    """A figure of /metrics."""
    text = server.http("GET", "/metrics").body.decode()
    found = re.search(rf"^shmq_gateway_{name}_total\{{.*\}} (\d+)$", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


def test_wrong_tokens_are_slowed_and_another_address_is_not(start: Start, token_file: Path) -> None:
    server = start(f"--http-token-file={token_file}")
    for _ in range(2):
        assert status_of(server, guess()) == 401
    with contextlib.ExitStack() as stack:
        ended: list[int] = []

        def attack() -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                ended.append(status_of(server, guess()))

        threads = [threading.Thread(target=attack, daemon=True) for _ in range(60)]
        for thread in threads:
            thread.start()
            stack.callback(thread.join, 1)
        eventually(lambda: 429 in ended, what="some are refused unseen")
        for source in ("127.0.0.2", "127.0.0.3"):
            assert status_of(server, TOKEN, source) == 200
        assert server.http("GET", "/ping").status == 200  # the loop goes on
        assert figure(server, "proofs_failed") <= 2 + 16
        assert figure(server, "proofs_delayed") >= 1
        assert figure(server, "proofs_refused") >= 40
    eventually(lambda: "wrong proofs of 127.0.0.1" in server.log, what="the log says who guesses")
    assert server.log.count("refused unseen") <= 11
    assert TOKEN not in server.log
    assert "guess-" not in server.log


def test_a_connection_that_was_let_in_does_not_wait_again(start: Start, token_file: Path) -> None:
    server = start(f"--http-token-file={token_file}")
    known = http.client.HTTPConnection("127.0.0.1", server.port("http"), WATCHDOG)
    with contextlib.closing(known):
        for number in range(30):
            if number in (1, 2, 3, 4):
                assert status_of(server, guess()) == 401
            known.request("GET", "/debug/pprof/", headers={"Authorization": f"Bearer {TOKEN}"})
            answer = known.getresponse()
            answer.read()
            assert answer.status == 200
    assert figure(server, "proofs_delayed") == 2  # of the guesses


def test_on_a_unix_socket_the_uid_counts(start: Start, token_file: Path, tmp_path: Path) -> None:
    server = start(f"--http-token-file={token_file}", f"--http-address={tmp_path / 'http'}")
    for _ in range(4):
        wrong = {"Authorization": f"Bearer {guess()}"}
        assert server.http("POST", "/pub?topic=t", b"x", **wrong).status == 401
    eventually(lambda: "wrong proofs of uid:" in server.log, what="the log has the uid")


def authenticate(server: Server, secret: bytes, source: str = "127.0.0.1") -> tuple[int, bytes]:
    """The answer to AUTH on a connection of its own."""
    sock = socket.create_connection(("127.0.0.1", server.port()), WATCHDOG, (source, 0))
    client = Client(sock)
    with contextlib.closing(client):
        client.send(b"  V2AUTH\n" + sized(secret))
        answer = client.frame()
        assert answer is not None
        return answer


def test_wrong_secrets_are_slowed(start: Start, authority: Authority) -> None:
    server = start(authority.flag)
    authority.reply = (403, b"no")
    for _ in range(2):
        assert authenticate(server, guess().encode())[0] == ERROR
    ended: list[bytes] = []

    def attack() -> None:
        with contextlib.suppress(OSError, AssertionError):  # the server ends while it waits
            ended.append(authenticate(server, guess().encode())[1])

    threads = [threading.Thread(target=attack, daemon=True) for _ in range(60)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(ended) > 40, what="most are refused unseen")
    assert set(ended) == {b"E_AUTH_FAILED AUTH failed"}
    assert len(authority.asked) <= 2 + 16
    authority.reply = (200, reply(3600, rule()))
    assert authenticate(server, b"right", "127.0.0.2")[0] == RESPONSE


def test_a_server_that_does_not_answer_makes_nobody_a_guesser(
    start: Start, authority: Authority
) -> None:
    server = start(authority.flag)
    authority.reply = (500, b"broken")
    for _ in range(5):
        assert authenticate(server, guess().encode())[0] == ERROR
    assert figure(server, "proofs_failed") == 0
    authority.reply = (200, reply(3600, rule()))
    client = server.connect()
    assert client.ask(b"AUTH\n" + sized(b"right")) != OK
    assert client.ask(b"PUB t\n" + sized(b"x")) == OK
