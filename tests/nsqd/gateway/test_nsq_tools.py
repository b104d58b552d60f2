"""nsqd's own tools and go-nsq's test-suite, unchanged, against shmq."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import browser, processes
from support.access import ADMIN, RULES, SCANNER, WORKER, File, http
from support.external_programs import BIN, peer
from support.nsq_client import OK, Server, mpub, sized, start_admin
from support.processes import WATCHDOG, eventually

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def kind() -> str:
    """Only the one whose tools these are not."""
    return "shmq"


def tcp(server: Server) -> str:
    return f"--nsqd-tcp-address=127.0.0.1:{server.port()}"


def web(server: Server) -> str:
    return f"--nsqd-http-address=127.0.0.1:{server.port('http')}"


def test_to_nsq_and_nsq_tail(start: Start, run: Any) -> None:
    server = start()
    tail = run("nsq_tail", tcp(server), "--topic=t")
    eventually(lambda: server.stats()["topics"] and server.topic("t")["channels"])
    feed = run("to_nsq", tcp(server), "--topic=t")
    feed.stdin.write(b"one\ntwo\n")
    feed.stdin.close()
    assert sorted(tail.stdout.readline().strip() for _ in range(2)) == [b"one", b"two"]
    assert feed.wait(WATCHDOG) == 0
    tail.send_signal(signal.SIGTERM)
    tail.wait(WATCHDOG)
    eventually(lambda: server.topic("t")["channels"] == [])  # its channel was ephemeral


def test_nsq_to_file(start: Start, run: Any, tmp_path: Path) -> None:
    server = start()
    client = server.connect()
    assert client.ask(mpub(b"t", [b"%d" % i for i in range(500)])) == OK
    out = tmp_path / "out"
    out.mkdir()
    tool = run("nsq_to_file", tcp(server), "--topic=t", f"--output-dir={out}", "--sync-interval=1s")
    eventually(lambda: server.stats(topic="t", channel="nsq_to_file")["topics"])
    eventually(lambda: server.channel("t", "nsq_to_file")["depth"] == 0)
    tool.send_signal(signal.SIGTERM)
    assert tool.wait(WATCHDOG) == 0
    lines = b"".join(path.read_bytes() for path in out.rglob("*.log")).split()
    assert sorted(map(int, lines)) == list(range(500))


@pytest.mark.parametrize(
    ("secret", "said"),
    [("", b"Auth Required"), (f"{WORKER}x", b"E_AUTH_FAILED"), (SCANNER, b"E_UNAUTHORIZED")],
    ids=["no secret", "a wrong secret", "the secret of a user who may not read"],
)
def test_clients_of_go_nsq_are_who_their_auth_secret_says(
    start: Start, run: Any, tmp_path: Path, secret: str, said: bytes
) -> None:
    """Tokens of the access file are go-nsq's auth_secret, for who publishes and who subscribes."""
    file = File(tmp_path / "access.toml")
    file.write(RULES)
    server = start(file.flag)
    to = (tcp(server), "--topic=resize")
    feed = run("to_nsq", *to, f"--producer-opt=auth_secret,{SCANNER}")
    feed.communicate(b"one\ntwo\n", WATCHDOG)
    assert feed.returncode == 0

    def wishes(secret: str) -> list[str]:
        return [f"--consumer-opt=auth_secret,{secret}"] * bool(secret)

    def depth() -> int:
        path = "/stats?format=json&topic=resize"
        (topic,) = json.loads(http(server, "GET", path, ADMIN).body)["topics"]
        return int(topic["depth"] + sum(item["depth"] for item in topic["channels"]))

    assert depth() == 2
    denied = run("nsq_tail", *to, "--channel=workers", *wishes(secret))
    eventually(lambda: said in (tmp_path / "nsq_tail.log").read_bytes())
    denied.kill()
    assert denied.communicate()[0] == b""
    assert depth() == 2
    tail = run("nsq_tail", *to, "--channel=workers", *wishes(WORKER))
    assert sorted(tail.stdout.readline().strip() for _ in range(2)) == [b"one", b"two"]
    eventually(lambda: depth() == 0)


def test_nsq_to_nsq(start: Start, run: Any) -> None:
    server, other = start(), start()
    client = server.connect()
    assert client.ask(mpub(b"t", [b"%d" % i for i in range(300)])) == OK
    run(
        "nsq_to_nsq",
        tcp(server),
        "--topic=t",
        "--destination-topic=u",
        f"--destination-nsqd-tcp-address=127.0.0.1:{other.port()}",
    )
    eventually(lambda: [item for item in other.stats()["topics"] if item["message_count"] == 300])
    eventually(lambda: server.channel("t", "nsq_to_nsq")["in_flight_count"] == 0)


def test_nsq_stat(start: Start, run: Any) -> None:
    server = start()
    client = server.connect()
    client.sub("t", "c")
    for _ in range(7):
        client.pub("t", b"x")
    tool = run("nsq_stat", web(server), "--topic=t", "--channel=c", "--interval=100ms", "--count=2")
    out, _ = tool.communicate(timeout=WATCHDOG)
    assert tool.returncode == 0
    lines = [line.split("|") for line in out.decode().splitlines() if line.strip()[:1].isdigit()]
    assert lines[0][1].split()[:3] == ["7", "7", "0"]  # total, in memory, on disk
    assert lines[0][2].split() == ["0", "0", "7", "1"]  # requeued, timed out, messages, clients


def test_nsqadmin(start: Start, run: Any, tmp_path: Path) -> None:
    server = start("--broadcast-address=127.0.0.1")
    producer, consumer = server.connect(), server.connect()
    for _ in range(3):
        producer.pub("t", b"x")
    consumer.identify(client_id="admin-sees-me", hostname="h", user_agent="ua/1")
    consumer.sub("t", "c", 1)
    consumer.delivery()
    base = admin(run, server, tmp_path)

    def ask(path: str, body: dict[str, str] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"{base}{path}", data, WATCHDOG) as reply:
            return json.loads(reply.read() or b"null")

    node = f"127.0.0.1:{server.port('http')}"
    assert ask("/api/topics")["topics"] == ["t"]
    topic = ask("/api/topics/t")
    assert (topic["message_count"], topic["channels"][0]["channel_name"]) == (3, "c")
    channel = ask("/api/topics/t/c")
    assert (channel["depth"], channel["in_flight_count"]) == (2, 1)
    assert channel["clients"][0]["client_id"] == "admin-sees-me"
    assert [item["version"] for item in ask("/api/nodes")["nodes"]] == ["1.3.0"]
    assert ask(f"/api/nodes/{node}")["total_messages"] == 3
    assert ask("/api/counter")["stats"]
    ask("/api/topics/t/c", {"action": "pause"})
    assert server.channel("t", "c")["paused"]
    ask("/api/topics/t", {"action": "empty"})
    with urllib.request.urlopen(f"{base}/topics/t/c", None, WATCHDOG) as page:
        assert b"nsqadmin" in page.read()


def admin(run: Any, server: Server, tmp_path: Path) -> str:
    """Start nsqadmin; its address."""
    return start_admin(run, tmp_path, web(server))


def test_pages_of_nsqadmin_in_a_browser(start: Start, run: Any, tmp_path: Path) -> None:
    """Its topic, channel and node pages, and the lists before them."""
    server = start("--broadcast-address=127.0.0.1", "--e2e-processing-latency-percentile=0.99,0.5")
    producer, consumer = server.connect(), server.connect()
    for _ in range(12345):
        producer.send(b"PUB orders\n" + sized(b"x"))
    for _ in range(12345):
        assert producer.frame() == OK
    consumer.identify(client_id="admin-sees-me", hostname="shown-host", user_agent="shown-agent/1")
    consumer.sub("orders", "billing", 1)
    consumer.finish(consumer.delivery())
    consumer.delivery()
    base, node = admin(run, server, tmp_path), f"127.0.0.1:{server.port('http')}"
    pages = browser.look(
        tmp_path,
        [
            (f"{base}/", ["orders"]),
            (f"{base}/topics/orders", ["orders", "billing", "12,345", node]),
            (f"{base}/topics/orders/billing", ["12,343", "shown-host", "shown-agent/1", node]),
            (f"{base}/nodes", ["127.0.0.1", "1.3.0"]),
            (f"{base}/nodes/{node}", ["orders", "billing", "12,345", "shown-host"]),
            (f"{base}/counter", ["Messages Processed"]),
        ],
    )
    assert [page.errors for page in pages] == [[]] * len(pages)


LOOPBACK = """
import fcntl, os, socket, struct, sys
with socket.socket() as sock:
    fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up
os.execvp("sh", ["sh", "-c", sys.argv[1], *sys.argv[2:]])
"""

#: go-nsq's test.sh with its fixed ports, in a network namespace of its own. Its tests have limits
#: of seconds in them: those that fail on a busy machine must pass when they run again.
SUITE = """
chmod 600 ./test/server.key    # a key that others may read is refused
"$1" -m shmq serve --data-path="$2" --tls-cert=./test/server.pem --tls-key=./test/server.key \
    --tls-root-ca-file=./test/ca.pem 2>"$2/log" &
server=$!
until grep -q "gateway 0: serving" "$2/log"; do
    kill -0 $server || exit 9
    sleep 0.05
done
"$0" -test.v -test.timeout 100s >"$2/out"
status=$?
cat "$2/out"
failed=$(sed -n 's/^--- FAIL: \\([A-Za-z0-9]*\\) .*/\\1/p' "$2/out" | paste -sd "|")
if [ $status != 0 ] && [ -n "$failed" ]; then
    "$0" -test.v -test.timeout 100s -test.run "^($failed)\\$"
    status=$?
fi
kill $server
wait $server
exit $status
"""


def test_the_test_suite_of_go_nsq(tmp_path: Path) -> None:
    instance = f"gonsq-{os.getpid()}-{secrets.token_hex(4)}"
    suite = peer("go-nsq.test")
    (tmp_path / "data").mkdir()
    argv = [peer("unshare"), "--map-root-user", "--net", sys.executable, "-c", LOOPBACK]
    try:
        done = subprocess.run(
            [*argv, SUITE, suite, sys.executable, str(tmp_path / "data")],
            cwd=BIN.parent / "go-nsq",
            capture_output=True,
            timeout=150,
            env={**os.environ, "SHMQ_INSTANCE": instance},
        )
    finally:
        processes.remove_instance(instance)
    out = done.stdout.decode()
    assert done.returncode == 0, out + done.stderr.decode()
    assert out.count("--- PASS") >= 24


def test_a_killed_gateway_gives_back_what_it_had_and_another_serves(start: Start) -> None:
    server = start("--msg-timeout=10m")
    client = server.connect()
    client.pub("t", b"x")
    client.sub("t", "c", 1)
    first = client.delivery()
    children = [
        int(pid)
        for task in os.listdir(f"/proc/{server.process.pid}/task")
        for pid in Path(f"/proc/{server.process.pid}/task/{task}/children").read_text().split()
    ]
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    assert client.ended()
    again = server.connect()  # waits in the socket, which is the supervisor's
    again.sub("t", "c", 1)
    delivery = again.delivery()
    assert (delivery.id, delivery.attempts) == (first.id, 2)
    again.finish(delivery)
    assert server.stop() == 0
