"""The audit log: who created, deleted, emptied, paused, configured, failed to log in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_auth_server import Authority
from support.nsq_client import Server, sized
from support.processes import WATCHDOG, eventually

import shmq
from shmq import audit

Start = Callable[..., Server]

LINE = re.compile(
    r"audit: action=(?P<action>\S+) topic=(?P<topic>\S+) channel=(?P<channel>\S+) "
    r"by=(?P<by>\S+) result=(?P<result>\S+)(?P<more>( \w+=\S+)*)"
)


@pytest.fixture(scope="session")
def kind() -> str:
    """nsqd has none."""
    return "shmq"


def lines(text: str) -> list[tuple[str, str, str, str]]:
    """(action, topic/channel, by without a port, result) of every line."""
    found = []
    for line in text.splitlines():
        if "audit:" in line:
            match = LINE.fullmatch(line[line.index("audit:") :])
            assert match, line
            by = re.sub(r"^(127\.0\.0\.1):[0-9]+$", r"\1", match["by"])
            found.append(
                (match["action"], f"{match['topic']}/{match['channel']}", by, match["result"])
            )
    return found


ME = f"pid:{os.getpid()}/uid:{os.geteuid()}"


def test_who_did_what_over_http(start: Start) -> None:
    server = start()
    assert server.http("PUT", "/config/log_level", b"error").status == 200
    for path in (
        "/topic/create",
        "/topic/create",
        "/topic/pause",
        "/topic/unpause",
        "/topic/empty",
    ):
        assert server.post(path, topic="t").status == 200
    for verb in ("create", "pause", "unpause", "empty", "delete"):
        assert server.post(f"/channel/{verb}", topic="t", channel="c#ephemeral").status == 200
    assert server.post("/channel/delete", topic="t", channel="none").status == 404
    assert server.post("/topic/delete", topic="t").status == 200
    assert server.post("/topic/delete", topic="none").status == 404
    assert server.post("/pub", b"x", topic="new").status == 200
    assert server.http("PUT", "/config/log_level", b"fatal").status == 200
    here = "127.0.0.1"
    assert lines(server.log) == [
        ("config", "-/-", here, "done"),
        ("create_topic", "t/-", here, "done"),
        ("pause_topic", "t/-", here, "done"),
        ("unpause_topic", "t/-", here, "done"),
        ("empty_topic", "t/-", here, "done"),
        ("create_channel", "t/c#ephemeral", here, "done"),
        ("pause_channel", "t/c#ephemeral", here, "done"),
        ("unpause_channel", "t/c#ephemeral", here, "done"),
        ("empty_channel", "t/c#ephemeral", here, "done"),
        ("delete_channel", "t/c#ephemeral", here, "done"),
        ("delete_channel", "t/none", here, "not_found"),
        ("delete_topic", "t/-", here, "done"),
        ("delete_topic", "none/-", here, "not_found"),
        ("create_topic", "new/-", here, "done"),
        ("config", "-/-", here, "done"),
    ]
    assert " option=log_level value=fatal" in server.log


def test_who_created_by_a_command(start: Start, authority: Authority) -> None:
    server = start()
    client = server.connect()
    port = client.sock.getsockname()[1]
    client.pub("t", b"x")
    client.pub("t", b"x")
    client.sub("t", "c")
    done = [
        ("create_topic", "t/-", "127.0.0.1", "done"),
        ("create_channel", "t/c", "127.0.0.1", "done"),
    ]
    assert lines(server.log) == done
    assert server.log.count(f" by=127.0.0.1:{port} ") == 2
    server.connect().sub("t", "c")
    assert lines(server.log) == done

    authority.reply = 403, b""
    server = start(authority.flag)
    client = server.connect()
    client.ask(b"AUTH\n" + sized(b"secret"))
    assert ("auth", "-/-", "127.0.0.1", "refused") in lines(server.log)
    assert "secret" not in server.log


def test_who_did_it_on_shared_memory(start: Start) -> None:
    server = start()
    with shmq.attach(server.instance) as broker:
        broker.create_channel("t", "c")
        broker.create_channel("t", "c")
        broker.producer("t").publish(b"x")
        broker.delete_channel("t", "c")
        broker.delete_topic("t")
    assert lines(server.log) == [
        ("create_topic", "t/-", ME, "done"),
        ("create_channel", "t/c", ME, "done"),
        ("delete_channel", "t/c", ME, "done"),
        ("delete_topic", "t/-", ME, "done"),
    ]


def test_who_is_at_a_unix_socket(start: Start) -> None:
    with tempfile.TemporaryDirectory() as directory:
        server = start(f"--http-address={directory}/http", f"--tcp-address={directory}/tcp")
        assert server.post("/topic/create", topic="by-http").status == 200
        server.connect().pub("by-tcp", b"x")
        assert lines(server.log) == [
            ("create_topic", "by-http/-", ME, "done"),
            ("create_topic", "by-tcp/-", ME, "done"),
        ]


def test_what_is_taken_up_was_nobodys_deed(start: Start) -> None:
    server = start()
    assert server.post("/topic/create", topic="t").status == 200
    assert server.stop() == 0
    server = start(again=server)
    assert server.topic("t")["topic_name"] == "t"
    assert lines(server.log) == []


def test_a_file_of_its_own(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "audit"
    server = start(f"--audit-log={path}")
    assert server.post("/topic/create", topic="a").status == 200
    with shmq.attach(server.instance) as broker:
        broker.create_topic("b")
    assert lines(server.log) == []
    assert [one[1] for one in lines(path.read_text())] == ["a/-", "b/-"]
    assert path.stat().st_mode & 0o777 == 0o600
    path.rename(tmp_path / "audit.1")  # as logrotate does
    assert server.post("/topic/create", topic="c").status == 200
    assert [one[1] for one in lines(path.read_text())] == ["c/-"]
    with shmq.attach(server.instance) as broker:
        broker.create_topic("d")
    assert [one[1] for one in lines(path.read_text())] == ["c/-", "d/-"]


def test_none(start: Start) -> None:
    server = start("--audit-log=")
    assert server.post("/topic/create", topic="t").status == 200
    eventually(lambda: "TOPIC(t): created" in server.log)
    assert lines(server.log) == []


def test_a_link_is_not_written_to(start: Start, tmp_path: Path) -> None:
    """As root in a directory that others may write."""
    victim, link = tmp_path / "victim", tmp_path / "audit"
    victim.write_text("mine")
    link.symlink_to(victim)
    os.mkfifo(tmp_path / "pipe")
    for path in (link, tmp_path / "pipe", tmp_path / "none" / "audit"):
        argv = [
            sys.executable,
            "-m",
            "shmq",
            "serve",
            f"--audit-log={path}",
            f"--data-path={tmp_path}",
            "--tcp-address=",
            "--http-address=",
        ]
        env = {**os.environ, "SHMQ_INSTANCE": f"audit-{os.getpid()}"}
        done = subprocess.run(argv, env=env, capture_output=True, timeout=WATCHDOG)
        assert done.returncode == 2
        assert b"--audit-log=" in done.stderr
        assert b"Traceback" not in done.stderr
    assert victim.read_text() == "mine"


def test_no_value_forges_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with audit.acting("1.2.3.4:5"):
        audit.note(
            "config", value="x\n audit: action=delete_topic by=\x1b[31m\ud800=é" + "y" * 5000
        )
    text = caplog.messages[-1]
    assert text.isascii()
    assert text.isprintable()
    assert LINE.fullmatch(text)
    assert len(text) < 2000
    assert text.count("action=") == 1
