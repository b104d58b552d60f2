"""No client of the gateway fills the tables of topics and channels: whatever it makes, by whatever
command, others still get theirs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import other_users
from support.nsq_client import Client, Server, mpub, sized
from support.other_users import STRANGER, become
from support.processes import WATCHDOG

import shmq

Start = Callable[..., Server]
#: Topics of each server here: a client may have 30, and 4 are not for clients.
MOST = 64
FEW = f"--max-topics={MOST}"
_MAKE = """
sock = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
sock.sendall(b'  V2PUB ' + sys.argv[2].encode() + b'\\n\\0\\0\\0\\1x')
print(sock.recv(4096)[8:].decode())
"""


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours has shares."""
    return "shmq"


def leased(server: Server, line: str, **document: object) -> bytes:
    client = server.connect()
    client.identify(feature_negotiation=True, leases=True, heartbeat_interval=-1)
    answer = client.ask(f"{line}\n".encode() + sized(json.dumps(document).encode()))
    return answer[1] if answer is not None else b"closed"


def said(server: Server, data: bytes) -> bytes:
    answer = server.connect().ask(data)
    return answer[1] if answer is not None else b"closed"


#: Each makes a topic, and returns what the client is told.
WAYS: dict[str, Callable[[Server, str], bytes]] = {
    "PUB": lambda server, name: said(server, b"PUB %s\n" % name.encode() + sized(b"x")),
    "DPUB": lambda server, name: said(server, b"DPUB %s 9\n" % name.encode() + sized(b"x")),
    "MPUB": lambda server, name: said(server, mpub(name.encode(), [b"x"])),
    "SUB": lambda server, name: said(server, b"SUB %s c\n" % name.encode()),
    "ephemeral": lambda server, name: said(server, b"SUB %s#ephemeral c\n" % name.encode()),
    "LMAKE": lambda server, name: leased(server, f"LMAKE {name}"),
    "LMAKE channel": lambda server, name: leased(server, f"LMAKE {name} c"),
    "LHOLD": lambda server, name: leased(server, f"LHOLD {name} c", name="h", ttl=60),
    "pub": lambda server, name: server.post("/pub", b"x", topic=name).body,
    "mpub": lambda server, name: server.post("/mpub", b"x", topic=name).body,
    "create": lambda server, name: server.post("/topic/create", topic=name).body,
}


def stranger_publishes(server: Server, topic: str) -> str:
    """Publish by a process of another user; the text that it gets."""
    program = f"import socket, sys\n{become(STRANGER)}{_MAKE}"
    words = [sys.executable, "-c", program, str(server.port()), topic]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=WATCHDOG)
    return done.stdout.strip()


@other_users.needed
def test_one_client_leaves_topics_to_others(start: Start) -> None:
    server = start(FEW)
    for number in range(MOST // 2 - 2):
        assert server.post("/topic/create", topic=f"t{number}").status == 200
    for name, make in WAYS.items():
        told = make(server, f"more-{name.replace(' ', '')}")
        assert b"TOO_MANY_TOPICS" in told or b"are free are for others" in told, (name, told)
    assert "topic 'more-PUB' was not made: this client has made 30 topics" in server.log
    assert "client(127.0.0.1:" in server.log
    # another address of loopback, and a Unix socket, are the same client
    with socket.create_connection(
        ("127.0.0.1", server.port()), WATCHDOG, source_address=("127.0.0.9", 0)
    ) as sock:
        sock.sendall(b"  V2")
        told = (Client(sock).ask(b"PUB from-9\n" + sized(b"x")) or (0, b""))[1]
        assert b"E_PUB_FAILED" in told, told
    assert stranger_publishes(server, "of-another") == "OK"
    with shmq.attach(server.instance) as local:
        local.create_topic("of-this-host")
    # what is deleted is given back
    assert server.post("/topic/delete", topic="t0").status == 200
    assert server.post("/topic/delete", topic="t1").status == 200
    assert server.post("/topic/create", topic="again").status == 200


def test_a_unix_socket_is_the_same_client(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "door"
    server = start(FEW, f"--tcp-address={path}")
    for number in range(MOST // 2 - 2):
        assert server.post("/topic/create", topic=f"t{number}").status == 200
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WATCHDOG)
        sock.connect(str(path))
        sock.sendall(b"  V2")
        told = (Client(sock).ask(b"PUB more\n" + sized(b"x")) or (0, b""))[1]
    assert b"are free are for others" in told, told


#: Each makes a channel of `t`, and returns what the client is told.
CHANNELS: dict[str, Callable[[Server, str], bytes]] = {
    "SUB": lambda server, name: said(server, b"SUB t %s\n" % name.encode()),
    "ephemeral": lambda server, name: said(server, b"SUB t %s#ephemeral\n" % name.encode()),
    "LMAKE": lambda server, name: leased(server, f"LMAKE t {name}"),
    "LHOLD": lambda server, name: leased(server, f"LHOLD t {name}", name="h", ttl=60),
    "create": lambda server, name: server.post("/channel/create", topic="t", channel=name).body,
}


def test_one_client_leaves_channels_to_others(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's share of the 16 384 is thousands, which take minutes to make, so here it is the
    least that a client has: 4 topics and channels together."""
    (tmp_path / "sitecustomize.py").write_text(
        "from shmq.gateway import shares\nshares._QUEUES = 0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    server = start("--gateway-workers=1")
    assert server.post("/topic/create", topic="t").status == 200
    for number in range(3):
        assert server.post("/channel/create", topic="t", channel=f"c{number}").status == 200
    answer = server.post("/channel/create", topic="t", channel="more")
    assert (answer.status, answer.message) == (503, "TOO_MANY_CHANNELS")
    for name, make in CHANNELS.items():
        told = make(server, f"more-{name}")
        assert b"TOO_MANY_CHANNELS" in told or b"are free are for others" in told, (name, told)
    assert "channel 'more' of topic 't' was not made: this client has made 4 channels" in server.log
    assert said(server, b"SUB t c0\n") == b"OK"  # what is there may be used
    with shmq.attach(server.instance) as local:
        assert {each.name for each in local.stats().topics[0].channels} == {"c0", "c1", "c2"}
        local.create_channel("t", "of-this-host")
    assert server.post("/channel/delete", topic="t", channel="c1").status == 200
    assert server.post("/channel/create", topic="t", channel="again").status == 200
