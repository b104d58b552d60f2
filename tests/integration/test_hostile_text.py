"""Bytes of messages, clients and servers that a terminal would obey, in every place that a command
shows: what comes out is printable text, in a terminal, in a pipe and in a log."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.hostile import EVIL, Hostile, evil_in, frame, page
from support.processes import WATCHDOG
from support.terminal import Terminal

import shmq
from shmq.cli import COMMANDS
from shmq.printing import Formatter

SHMQ = [sys.executable, "-m", "shmq"]
EVIL_BYTES = EVIL.encode("utf-8", "replace")
EVIL_LINE = EVIL.replace("\r\n", "").encode("utf-8", "replace")
#: Sequences that the commands themselves send: colors, and places of the cursor and the screen.
_OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[[0-9;]*[HJK]|\x1b\[\?(?:25|1049)[hl]|\r")


def assert_clean(shown: str, has_lines: bool = False) -> None:
    """Nothing of `EVIL` has come through, nor a line of its own. has_lines: line ends of bodies
    stay, since they are shown whole."""
    assert not evil_in(_OWN.sub("", shown)), repr(shown)
    assert "\x1b[31mred" not in shown
    assert has_lines or not re.search(r"^shmq: forged", shown, re.M)


@pytest.fixture
def screen(keep: Callable[[Any], Any]) -> Callable[..., str]:
    """`screen(words...)`: all that `shmq WORDS` writes in a terminal."""

    def run(*words: str, ends: bool = True, until: str = "") -> str:
        terminal = keep(Terminal([*SHMQ, *words], 200))
        if ends:
            terminal.wait()
        else:
            terminal.shows(until)
            terminal.type("\x03")
            terminal.wait()
        return str(terminal.raw)

    return run


@pytest.fixture
def full(broker: shmq.Broker) -> shmq.Broker:
    """A broker with hostile text in all places that a local process can reach."""
    for channel in ("c", "d", "e", "f"):
        broker.create_channel("t", channel)
    producer = broker.producer("t")
    for _ in range(4):
        producer.publish(EVIL_BYTES, properties={"p": EVIL_BYTES})
    producer.publish(EVIL_BYTES, defer=60)
    broker.configure("t", "d", max_attempts=1)
    with broker.consumer("t", "d") as consumer:
        message = consumer.take(WATCHDOG)
        assert message is not None
        with contextlib.suppress(Exception):
            message.reject(EVIL_LINE.decode())
    broker.results("r").set(b"key", EVIL_BYTES)
    broker.results("r").set(EVIL_BYTES, EVIL_BYTES)
    return broker


#: The words of each command that shows bytes of others; {i} is the instance.
SHOWN = [
    ["peek", "t", "c"],
    ["peek", "t", "c", "--json"],
    ["peek", "t", "c", "--state", "deferred"],
    ["peek", "t", "d", "--state", "in_flight"],
    ["peek", "t", EVIL_LINE.decode()],
    ["tail", "t", "c", "--peek"],
    ["tail", "t", "c", "--peek", "--json"],
    ["tail", "t", "e", "-n", "2"],
    ["tail", "t", "f", "-n", "2", "--properties"],
    ["stat"],
    ["stat", "--clients"],
    ["stat", "--json"],
    ["stat", "--prometheus"],
    ["stat", "--sort", EVIL_LINE.decode()],
    ["stat", EVIL_LINE.decode()],
    ["dead", "ls", "t", "d"],
    ["dead", "peek", "t", "d"],
    ["deaths"],
    ["lease", "ls"],
    ["results", "ls"],
    ["results", "ls", "r"],
    ["results", "get", "r", "key"],
    ["results", "get", "r", EVIL_LINE.decode()],
    ["results", "get", EVIL_LINE.decode(), "key"],
    ["channel", "show", "t", EVIL_LINE.decode()],
    ["topic", "create", EVIL_LINE.decode()],
    ["pub", EVIL_LINE.decode(), "x"],
    ["message", "finish", "t", "c", EVIL_LINE.decode()],
    ["doctor"],
    ["ls"],
    ["inspect", EVIL_LINE.decode()],
    [EVIL_LINE.decode()],
]
_WITHOUT_INSTANCE = {"ls", "doctor", "inspect", EVIL_LINE.decode()}


@pytest.mark.parametrize("words", SHOWN, ids=lambda words: " ".join(words).encode("unicode_escape"))
def test_a_terminal_gets_printable_text(
    full: shmq.Broker, screen: Callable[..., str], words: list[str]
) -> None:
    where = [] if words[0] in _WITHOUT_INSTANCE else [f"--instance={full.instance}"]
    assert_clean(screen(*words, *where), words[0] == "tail" or words[:2] == ["results", "get"])


def test_each_command_is_shown_hostile_text() -> None:
    """A command that is new gets a row above, or shows nothing that others have written."""
    others = {"serve", "page", "rm", "worker", "bench", "forward", "access"}
    missing = COMMANDS.keys() - {words[0] for words in SHOWN} - others
    assert not missing, f"{missing}: give each a row of SHOWN"


def test_a_pipe_gets_bytes_as_they_are(full: shmq.Broker) -> None:
    """Of messages and values: a program reads them, not a person."""
    where = f"--instance={full.instance}"
    found = subprocess.run([*SHMQ, "results", "get", "r", "key", where], capture_output=True)
    assert found.stdout == EVIL_BYTES
    found = subprocess.run([*SHMQ, "tail", "t", "c", "-n", "1", where], capture_output=True)
    assert found.stdout == EVIL_BYTES + b"\n"


# ---- servers ----


def _answering(data: bytes, first: bytes = b"") -> Callable[[socket.socket], None]:
    def serve(sock: socket.socket) -> None:
        if first:
            sock.sendall(first)
        sock.recv(65536)
        sock.sendall(data)
        sock.recv(65536)

    return serve


_STATS = json.dumps(
    {
        "version": EVIL,
        "health": f"NOK {EVIL}",
        "start_time": 1,
        "topics": [{"topic_name": f"t{EVIL}", "channels": [], "depth": 1}],
    }
).encode()


@pytest.mark.parametrize(
    "answer",
    [
        page(_STATS),
        page(_STATS.replace(b'"topics": [', b'"topics": [], "x": [')),
        page(EVIL_BYTES, b"HTTP/1.1 500 \x1b[31mred\r\n"),
        page(b"", b"HTTP/1.1 200 OK\r\n" + EVIL_LINE + b": x\r\n"),
        EVIL_BYTES,
        page(json.dumps({"producers": [{"broadcast_address": EVIL, "http_port": 1}]}).encode()),
    ],
    ids=lambda answer: repr(answer[:30]),
)
@pytest.mark.parametrize("option", ["--nsqd", "--lookupd"])
def test_statistics_of_hostile_hosts(
    screen: Callable[..., str], answer: bytes, option: str
) -> None:
    with Hostile(_answering(answer)) as server:
        assert_clean(screen("stat", option, server.address))
        assert_clean(screen("stat", option, server.address, "--json"))


_INFO = b'INFO {"headers":true,"max_payload":1048576}\r\n'


@pytest.mark.parametrize(
    ("scheme", "lasts", "serve"),
    [
        ("nats", True, _answering(b"-ERR 'authorization " + EVIL_LINE + b"'\r\n", _INFO)),
        ("nats", False, _answering(b"-ERR '" + EVIL_LINE + b"'\r\n", _INFO)),
        ("nats", False, _answering(b"", b"INFO " + EVIL_LINE + b"\r\n")),
        ("nats", False, _answering(b"", b"INFO [1]\r\n")),
        ("nats", True, _answering(b"", EVIL_BYTES)),
        ("nsq", True, _answering(frame(1, b"E_BAD " + EVIL_BYTES))),
        ("nsq", False, _answering(frame(1, EVIL_BYTES))),
        ("nsq", False, _answering(frame(0, EVIL_BYTES))),
    ],
    ids=["lasting", "passing", "no JSON", "a list", "no NATS", "E_BAD", "an error", "a response"],
)
def test_forward_to_a_hostile_server(
    full: shmq.Broker,
    screen: Callable[..., str],
    scheme: str,
    lasts: bool,
    serve: Callable[[socket.socket], None],
) -> None:
    with Hostile(serve) as server:
        words = ["forward", "t", "c", f"{scheme}://{server.address}/S"]
        words.append(f"--instance={full.instance}")
        shown = screen(*words, ends=lasts, until="trying again")
    assert_clean(shown)
    assert "Traceback" not in shown


def test_forward_from_a_hostile_gateway(screen: Callable[..., str]) -> None:
    with Hostile(_answering(frame(1, b"E_FAILED " + EVIL_BYTES))) as server:
        shown = screen("forward", "t", "c", "nsq://127.0.0.1:1/x", "--from", server.address)
    assert_clean(shown)
    assert "IDENTIFY" in shown


# ---- logs ----


def test_no_line_of_a_log_is_forged() -> None:
    formatter = Formatter("%(levelname)s %(message)s")
    try:
        raise ValueError(EVIL)
    except ValueError:
        record = logging.LogRecord("x", 40, "f", 1, "%s", (EVIL,), sys.exc_info())
    shown = formatter.format(record)
    assert not evil_in(shown)
    first, *others = shown.split("\n")
    assert first.startswith("ERROR ")
    assert all(line.startswith("    ") for line in others)
    record = logging.LogRecord("x", 40, "f", 1, "x" * 10**6, (), None)
    assert len(formatter.format(record)) < 20_000


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_traceback_is_printable(where: str) -> None:
    raising = f"raise ValueError({EVIL!a})"
    code = f"from shmq.printing import clean_tracebacks; clean_tracebacks()\n{raising}"
    if where == "thread":
        code = (
            "import threading\nfrom shmq.printing import clean_tracebacks; clean_tracebacks()\n"
            f"def f(): {raising}\nt = threading.Thread(target=f); t.start(); t.join()"
        )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Traceback" in found.stderr
    assert not evil_in(found.stderr)
