"""No answer of the gateway has a path, a user or a process of its host, whatever fails there; the
log has the whole."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.nsq_client import Server, sized
from support.processes import WATCHDOG

import shmq
from shmq.staging_place import staged_paths

OF_HOST = re.compile(rb"/dev/shm|\b[ugp]id \d|diskqueue|staged-")


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours has them."""
    return "shmq"


def ask(server: Server, line: bytes, body: bytes = b"") -> bytes:
    client = server.connect()
    client.identify(feature_negotiation=True, leases=True, heartbeat_interval=-1)
    client.send(line + b"\n" + body)
    kind, data = client.frame()
    assert kind == 1, data
    return bytes(data)


def squat(server: Server, topic: str, channel: str = "") -> str:
    """Have the topic's files be somebody else's."""
    base = f"{topic}:{channel}" if channel else topic
    for end in ("diskqueue.meta.dat", "diskqueue.000000.dat"):
        os.symlink("/etc/passwd", Path(server.data_path, f"{base}.{end}"))
    return topic


def staging(server: Server) -> Path:
    """The directory of staged rows."""
    with shmq.connect(server.addresses["tcp"], timeout=WATCHDOG) as remote:
        remote.stage("t", "w", 0, [b"x"])
    (place,) = staged_paths(server.instance, os.geteuid())
    return Path(place)


def stage(**values: Any) -> bytes:
    given = {"writer": "w", "epoch": 1, "attempt": "0" * 32, "rows": 1, "at": 0, **values}
    document = json.dumps(given).encode()
    return sized(sized(document) + b"\1\0\0\0r")


def of_stage(server: Server) -> bytes:
    place = staging(server)
    place.chmod(0o770)  # others may write it
    try:
        return ask(server, b"STAGE t", stage())
    finally:
        place.chmod(0o700)


def of_size(server: Server) -> bytes:
    with shmq.connect(server.addresses["tcp"], timeout=WATCHDOG, secret="s" * 16) as remote:
        staged = remote.stage("t", "w", 0, [b"x"])
        assert staged is not None
        with pytest.raises(shmq.ShmqError) as info:
            remote.commit("t", "w", 0, [replace(staged, size=staged.size + 1)])
    assert "name the size" in str(info.value)
    return str(info.value).encode()


CASES: dict[str, Callable[[Server], bytes]] = {
    "PUB": lambda server: ask(server, b"PUB " + squat(server, "pub").encode(), sized(b"x")),
    "SUB": lambda server: ask(server, b"SUB " + squat(server, "sub", "c").encode() + b" c"),
    "LMAKE": lambda server: ask(
        server, b"LMAKE " + squat(server, "make", "c").encode() + b" c", sized(b"{}")
    ),
    "HTTP": lambda server: server.post("/pub", b"x", topic=squat(server, "http")).body,
    "STAGE": of_stage,
    "size": of_size,
}


@pytest.mark.parametrize("case", CASES)
def test_an_answer_has_nothing_of_the_host(server: Server, case: str) -> None:
    said = CASES[case](server)
    assert not OF_HOST.search(said), said
    assert os.fsencode(server.data_path) not in said
    assert b"option(" not in said  # Spark's, which this client does not have
