"""One view of several hosts: `shmq stat --lookupd` and nsqadmin over gateways and a real nsqd."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.nsq_client import OK, Server, mpub, start_admin
from support.processes import ROOT, WATCHDOG, Child, eventually

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
