"""One view of several hosts: `shmq stat --lookupd` and nsqadmin over gateways and a real nsqd."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.access import ADMIN, RULES, SCANNER, WORKER, File, http
from support.certificates import Pki, context_of
from support.nsq_client import OK, Server, mpub, start_admin
from support.processes import ROOT, WATCHDOG, Child, eventually

import shmq
from shmq.cli import status

STAT = [sys.executable, "-m", "shmq", "stat"]
COUNTS = {"in_flight_count", "deferred_count", "message_count", "requeue_count", "timeout_count"}
COUNTS |= {"depth", "backend_depth", "client_count", "paused"}


@pytest.fixture(scope="session")
def kind() -> str:
    """A real nsqd is beside them."""
    return "shmq"


@pytest.fixture
def hosts(
    start: Callable[..., Server], lookupd: tuple[str, int], tmp_path: Path
) -> Iterator[list[Server]]:
    """Two gateways and an nsqd, which has the smallest depth of the channel t/c."""
    words = (f"--lookupd-tcp-address={lookupd[0]}", "--broadcast-address=127.0.0.1")
    real = Server("nsqd", tmp_path, "real", *words)
    try:
        found = [start(*words), start(*words), real]
        for depth, server in zip((3, 2, 1), found, strict=True):
            server.post("/topic/create", topic="t")
            server.post("/channel/create", topic="t", channel="c")
            assert server.connect().ask(mpub(b"t", [b"x"] * depth)) == OK
            eventually(lambda: server.channel("t", "c")["depth"])  # noqa: B023
        yield found
    finally:
        real.close()


def address(server: Server) -> str:
    return f"127.0.0.1:{server.port('http')}"


def ask(*words: str) -> tuple[int, str]:
    """Exit status and output of `shmq stat`."""
    done = subprocess.run([*STAT, *words], capture_output=True, timeout=WATCHDOG, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout


def depths(document: Any) -> dict[str, int]:
    """Depth of t/c on each host."""
    (topic,) = document["topics"]
    (channel,) = topic["channels"]
    return {host["host"]: host["depth"] for host in channel["hosts"]}


def test_all_hosts_are_in_one_table(hosts: list[Server], lookupd: tuple[str, int]) -> None:
    where, names = f"--lookupd=127.0.0.1:{lookupd[1]}", [address(server) for server in hosts]
    eventually(
        lambda: json.loads(ask(where, "--json")[1])["topics"][0]["channels"][0]["depth"] == 6
    )
    code, text = ask(where)
    assert code == status.OK
    lines = [line.split() for line in text.splitlines()]
    assert lines[1][:3] == ["TOPIC/CHANNEL", "HOST", "DEPTH"]
    assert lines[2][:4] == ["t/c", "3", "hosts", "6"]
    assert {line[1]: line[2] for line in lines[3:]} == dict(zip(names, "321", strict=True))

    watch = Child([*STAT, where, "--json", "-i", "0.1"])
    try:
        first = json.loads(eventually(lambda: watch.lines[:1])[0])
        assert set(first) == {"v", "time", "hosts", "lookupds", "topics"}
        assert {host["host"]: (host["error"], host["health"]) for host in first["hosts"]} == (
            dict.fromkeys(names, (None, "OK"))
        )
        assert first["lookupds"][0]["hosts"] == sorted(names)
        assert set(first["topics"][0]["channels"][0]) == COUNTS | {"channel_name", "hosts"}
        assert depths(first) == dict(zip(names, (3, 2, 1), strict=True))
        rates = json.loads(eventually(lambda: watch.lines[1:2])[0])["topics"][0]["channels"][0][
            "rates"
        ]
        assert rates == {"message_count": 0.0, "requeue_count": 0.0, "timeout_count": 0.0}

        hosts[0].process.kill()  # nsqlookupd forgets it at once, this command does not
        eventually(lambda: set(depths(json.loads(watch.lines[-1]))) == set(names[1:]))

        def gone() -> dict[str, str | None]:
            return {host["host"]: host["error"] for host in json.loads(watch.lines[-1])["hosts"]}

        # its gateway may answer that it has no supervisor before it ends
        eventually(lambda: (gone()[names[0]] or "").startswith("no answer"))
        assert set(gone()) == set(names)
    finally:
        watch.close()
    code, text = ask(where, f"--nsqd={names[0]},{names[1]}")
    assert code == status.DEGRADED
    assert any(line.startswith(f"{names[0]}: no answer: ") for line in text.splitlines())
    assert ["t/c", "2", "hosts", "3"] in [line.split()[:4] for line in text.splitlines()]
    code, text = ask("--nsqd", names[0])
    assert code == status.NOT_RUNNING


def test_nsqadmin_as_documented(
    hosts: list[Server], lookupd: tuple[str, int], run: Any, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "fleet.md").read_text()
    (line,) = re.findall(
        r"^ +nsqadmin (--lookupd-http-address=\S+) --http-address=\S+$", text, re.M
    )
    base = start_admin(run, tmp_path, re.sub(r"=\S+", f"=127.0.0.1:{lookupd[1]}", line))

    def look(path: str) -> Any:
        with urllib.request.urlopen(f"{base}/api/{path}", None, WATCHDOG) as reply:
            return json.loads(reply.read())

    eventually(lambda: len(look("nodes")["nodes"]) == 3)
    channel = eventually(lambda: [c for c in [look("topics/t/c")] if len(c["nodes"]) == 3])[0]
    assert channel["depth"] == 6
    assert {node["node"]: node["depth"] for node in channel["nodes"]} == {
        address(server): depth for depth, server in zip((3, 2, 1), hosts, strict=True)
    }


def test_an_instance_without_an_http_address_is_told_why_it_is_not_registered(
    lookupd: tuple[str, int], new_instance: Callable[[], str], data_path: Path
) -> None:
    where = {"tcp_address": "127.0.0.1:0", "lookupd_tcp_address": lookupd[0]}
    with contextlib.closing(processes.serve(new_instance(), data_path, **where)) as server:
        eventually(lambda: "it registers only who has an HTTP address" in server.errors)


# ---- hosts that ask who it is ----


class Greedy:
    """A host that keeps what it is sent, says that it is this host, and leads to another."""

    def __init__(self, elsewhere: str) -> None:
        self.got = b""
        self._answer = elsewhere
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                self.got += sock.recv(65536)
                sock.sendall(self._answer.encode())

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def greedy() -> Iterator[Callable[[str], Greedy]]:
    made: list[Greedy] = []

    def make(answer: str) -> Greedy:
        made.append(Greedy(answer))
        return made[-1]

    yield make
    for each in made:
        each.close()


def nodes(*ports: int) -> str:
    found = [{"broadcast_address": "127.0.0.1", "http_port": port} for port in ports]
    return f"HTTP/1.1 200 OK\r\n\r\n{json.dumps({'producers': found})}"


def token_file(directory: Path, text: str) -> str:
    path = directory / "token"
    path.touch(0o600)
    path.write_text(f"{text}\n")
    return f"--token-file={path}"


@pytest.mark.parametrize("secret", [ADMIN, "worker:open sesame", "wrong-0123456789ab", ""])
@pytest.mark.parametrize("path", ["tcp", "unix"])
def test_a_token_shows_a_gateway_who_asks(
    start: Callable[..., Server], file: File, tmp_path: Path, secret: str, path: str
) -> None:
    file.write(RULES.replace('do = ["subscribe"', 'do = ["statistics", "subscribe"'))
    words = [f"--http-address={tmp_path / 'web'}"] if path == "unix" else []
    server = start(file.flag, *words)
    for channel in ("workers", "others"):
        channels = f"/channel/create?topic=resize&channel={channel}"
        http(server, "POST", "/topic/create?topic=resize", ADMIN)
        assert http(server, "POST", channels, ADMIN).status == 200
    where = str(tmp_path / "web") if path == "unix" else address(server)
    given = [token_file(tmp_path, secret)] if secret else []
    code, text = ask("--nsqd", where, *given)
    if secret == ADMIN:
        assert (code, "resize/workers" in text, "resize/others" in text) == (0, True, True)
    elif secret.startswith("worker"):
        assert (code, "resize/workers" in text, "resize/others" in text) == (0, True, False)
    else:
        assert code == status.NOT_RUNNING
        assert ("does not know the token" if secret else "name it with --nsqd, and a token") in text
    if secret:
        assert secret not in text + server.log


def test_a_token_goes_to_no_host_that_was_not_named(
    greedy: Callable[[str], Greedy], tmp_path: Path
) -> None:
    stranger = greedy("HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
    lookupd = greedy(nodes(stranger.port))
    led = f"http://127.0.0.1:{stranger.port}/stats"
    named = greedy(f"HTTP/1.1 302 Found\r\nLocation: {led}\r\nContent-Length: 0\r\n\r\n")
    words = [f"--lookupd=127.0.0.1:{lookupd.port}", f"--nsqd=127.0.0.1:{named.port}"]
    code, text = ask(*words, token_file(tmp_path, ADMIN), "--json", "-i", "0.1", "-n", "3")
    assert code == status.NOT_RUNNING
    assert named.got.count(f"Authorization: Bearer {ADMIN}\r\n".encode()) == 3
    assert stranger.got.count(b"GET ") == 3
    assert ADMIN.encode() not in stranger.got + lookupd.got
    assert ADMIN not in text
    assert "name it with --nsqd" in text


@pytest.mark.parametrize(
    ("mode", "text", "said"),
    [
        (0o644, ADMIN, "every user of this host may read"),
        (0o600, "", "it must hold one line"),
        (0o600, f"{ADMIN}\nX-Other: 1", "it must hold one line"),
    ],
)
def test_a_file_that_has_no_token_for_this_user_alone_is_refused(
    tmp_path: Path, mode: int, text: str, said: str
) -> None:
    word = token_file(tmp_path, text)
    (tmp_path / "token").chmod(mode)
    for command in (
        [*STAT, "--nsqd=127.0.0.1:1", word],
        [*STAT[:-1], "forward", "t", "c", "nsq://127.0.0.1:1/t", "--from=127.0.0.1:1", word],
    ):
        done = subprocess.run(command, capture_output=True, timeout=WATCHDOG, text=True)
        assert done.returncode != 0
        assert said in done.stderr
        assert ADMIN not in done.stderr + done.stdout
        assert "Traceback" not in done.stderr


def test_a_forwarder_shows_the_gateway_who_it_is(
    start: Callable[..., Server], file: File, pki: Pki, tmp_path: Path
) -> None:
    cert, key = pki["server"]
    source = start(
        file.flag, f"--tls-cert={cert}", f"--tls-key={key}", "--tls-required=true", status=403
    )
    target = start()
    forward = [*STAT[:-1], "forward", "resize", "workers", f"nsq://127.0.0.1:{target.port()}/out"]
    forward += [f"--from=127.0.0.1:{source.port()}", "--until-empty", "--json"]
    environ = {**os.environ, "SSL_CERT_FILE": pki["authority"][0]}
    where = {"tls": context_of(pki, ""), "token": ADMIN}
    with (
        shmq.connect(f"127.0.0.1:{source.port()}", **where) as remote,
        remote.lease_holder("resize", "workers", "first"),
    ):
        remote.producer("resize").publish_many([b"1", b"2"])
    for words, expected in (
        ([], "AUTH"),
        ([token_file(tmp_path, WORKER)], "TLS"),
        (["--tls"], "AUTH"),
        (["--tls", token_file(tmp_path, SCANNER)], "AUTH failed for LHOLD"),
    ):
        done = subprocess.run(
            [*forward, *words], capture_output=True, timeout=WATCHDOG, text=True, env=environ
        )
        assert done.returncode != 0, words
        assert expected in done.stderr, done.stderr
        assert SCANNER not in done.stderr
    done = subprocess.run(
        [*forward, "--tls", token_file(tmp_path, WORKER)],
        capture_output=True,
        timeout=WATCHDOG,
        text=True,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    assert WORKER not in done.stderr + done.stdout + source.log
    eventually(
        lambda: target.http("GET", "/stats?format=json&topic=out").body.count(b'"message_count":2')
    )
