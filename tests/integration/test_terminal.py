"""The command line in a real terminal: what people see, Ctrl-C, a closed pipe.

Terminals are ptys that the tests hold; once also tmux.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.external_programs import peer
from support.processes import WATCHDOG, Child, eventually, stop_process
from support.terminal import Terminal

import shmq
from shmq.cli.status import DEGRADED, INTERRUPTED, OK

SHMQ = [sys.executable, "-m", "shmq"]


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Children can be interrupted, also when these tests run in the background of a shell, which
    has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def terminal(keep: Callable[[Any], Any]) -> Callable[..., Terminal]:
    """`terminal(words...)`: `shmq WORDS` in a terminal."""
    return lambda *words, **how: keep(Terminal([*SHMQ, *words], **how))


def test_stat_shows_rates_until_ctrl_c(
    broker: shmq.Broker, terminal: Callable[..., Terminal]
) -> None:
    broker.create_channel("jobs", "workers")
    screen = terminal("stat", "-i", "0.2", f"--instance={broker.instance}")
    screen.shows(r"jobs/workers +0 ", times=2)
    broker.producer("jobs").publish_many([b"x"] * 7)
    screen.shows(r"jobs/workers +7 ")
    assert re.search(r"IN/s +OUT/s", screen.text)
    screen.type("\x03")
    assert screen.wait() == INTERRUPTED
    assert "Traceback" not in screen.text
    assert "Aborted" not in screen.text


def test_stat_is_written_anew_in_its_place(
    broker: shmq.Broker, terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_channel("jobs", "workers")
    words = ("stat", "-i", "0.05", "-n", "4", f"--instance={broker.instance}")
    monkeypatch.setenv("TERM", "xterm")
    screen = terminal(*words)
    assert screen.wait() == OK
    assert screen.raw.count("\x1b[2J") == 1
    assert screen.raw.count("\x1b[H") == 4
    assert screen.text.count("TOPIC/CHANNEL") == 5  # the last one stays below what was there before
    monkeypatch.setenv("TERM", "dumb")
    screen = terminal(*words)
    assert screen.wait() == OK
    assert "\x1b[H" not in screen.raw
    assert screen.text.count("TOPIC/CHANNEL") == 4
    piped = subprocess.run([*SHMQ, *words], capture_output=True, text=True, check=True)
    assert "\x1b" not in piped.stdout
    assert piped.stdout.count("TOPIC/CHANNEL") == 4


def test_stat_does_not_wrap(
    broker: shmq.Broker, terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    long = "the-beginning-is-long-and-so-is-what-comes-between-and-the-end"
    for topic, channel in (("jobs", "workers"), (long, long)):
        broker.create_channel(topic, channel)
        broker.producer(topic).publish_many([b"x"] * 3000)
    consumer = broker.consumer("jobs", "workers", max_in_flight=2000)
    assert len(consumer.take_many(2000, 10)) == 2000
    for columns in (80, 103, 300):
        for words in ((), ("-i", "0.05", "-n", "2"), ("--clients",)):
            monkeypatch.setenv("COLUMNS", str(columns))
            screen = terminal("stat", *words, f"--instance={broker.instance}", columns=columns)
            assert screen.wait() == OK
            lines = [line.rstrip("\r") for line in screen.text.splitlines()]
            assert max(map(len, lines)) <= columns, screen.text
            assert "jobs/workers" in screen.text
            if not words:
                assert ("P50" in screen.text) == (columns > 103)
                assert all(name in screen.text for name in ("DEPTH", "DISK", "INFLT", "CLIENTS"))
                cut = re.search(r"^the-beg\S*…\S*nd-the-end ", screen.text, re.M)
                assert (cut is not None) == (columns < 300), screen.text
    piped = subprocess.run(
        [*SHMQ, "stat", f"--instance={broker.instance}"], capture_output=True, text=True, check=True
    )
    assert f"{long}/{long}" in piped.stdout
    assert "LEASED" in piped.stdout


@pytest.mark.parametrize("words", [("doctor",), ("stat",)])
def test_no_color_is_honoured(
    words: tuple[str, ...],
    serve: Callable[..., Child],
    instance: str,
    terminal: Callable[..., Terminal],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve().kill()
    screen = terminal(*words, f"--instance={instance}")
    assert screen.wait() == DEGRADED
    assert "\x1b[" in screen.raw
    monkeypatch.setenv("NO_COLOR", "1")
    screen = terminal(*words, f"--instance={instance}")
    assert screen.wait() == DEGRADED
    assert "\x1b[" not in screen.raw


def test_stat_shows_a_dead_supervisor_in_red(
    serve: Callable[..., Child], instance: str, terminal: Callable[..., Terminal]
) -> None:
    serve().kill()
    screen = terminal("stat", f"--instance={instance}")
    assert screen.wait() == DEGRADED
    assert "\x1b[31m" in screen.raw
    assert "DEAD" in screen.text


def test_tail_shows_messages_until_ctrl_c(
    broker: shmq.Broker, terminal: Callable[..., Terminal]
) -> None:
    screen = terminal("tail", "jobs", "workers", f"--instance={broker.instance}")
    screen.shows("jobs/workers: Ctrl-C ends")
    producer = broker.producer("jobs")
    producer.publish(b"wide \xe2\x82\xac")
    producer.publish(b"\x1b]0;title\x07\x9b2J two\nlines")
    screen.shows("lines\n")
    eventually(lambda: broker.stats().channel("jobs", "workers").finished == 2)
    screen.type("\x03")
    assert screen.wait() == INTERRUPTED
    assert "wide €" in screen.text
    assert r"\x1b]0;title\x07\x9b2J two" in screen.text  # nothing a message says moves the cursor
    assert "\x1b]0" not in screen.raw
    assert "Traceback" not in screen.text
    channel = broker.stats().channel("jobs", "workers")
    assert (channel.depth, channel.in_flight) == (0, 0)
    eventually(lambda: not broker.stats().channel("jobs", "workers").sessions)


def test_tail_gives_back_what_a_stopped_terminal_did_not_take(
    broker: shmq.Broker, terminal: Callable[..., Terminal]
) -> None:
    screen = terminal("tail", "jobs", "workers", f"--instance={broker.instance}")
    screen.shows("Ctrl-C ends")
    broker.producer("jobs").publish_many([b"x" * 60_000] * 4)
    eventually(lambda: broker.stats().channel("jobs", "workers").in_flight == 1)  # nobody reads
    os.kill(screen.pid, signal.SIGINT)
    assert screen.wait() == INTERRUPTED
    channel = broker.stats().channel("jobs", "workers")
    assert channel.in_flight == 0
    assert channel.depth + channel.finished == 4
    assert channel.depth >= 1


def test_a_long_wait_says_what_it_waits_for(
    open_broker: Callable[..., shmq.Broker], terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    lines.write_text("one more\n")
    broker = open_broker(mem_queue_size=10, in_flight_slots=16)
    broker.create_channel("jobs", "workers")
    stop_process(broker.supervisor_pid)  # so that nothing goes to disk
    try:
        with contextlib.suppress(shmq.Full):
            while True:
                broker.producer("jobs").publish(b"x", timeout=0)
        for words, doing in (
            (["one more"], "waiting for room in"),
            ([f"--file={lines}"], "publishing to"),
        ):
            screen = terminal("pub", "jobs", *words, f"--instance={broker.instance}")
            screen.shows(rf"{doing} jobs \.\.\. 1 s")
            screen.type("\x03")
            assert screen.wait() == INTERRUPTED
            assert screen.raw.rstrip("\r\n").endswith("\x1b[K")  # the line was wiped
    finally:
        os.kill(broker.supervisor_pid, signal.SIGCONT)


def test_bench_shows_progress(terminal: Callable[..., Terminal]) -> None:
    screen = terminal("bench", "--seconds", "0.6")
    screen.shows("measuring")
    assert screen.wait() == OK
    assert "round trip" in screen.text
    assert "100%" in screen.text


def test_a_map_of_an_executor_shows_its_progress(keep: Callable[[Any], Any]) -> None:
    program = """
import shmq
if __name__ == "__main__":
    with shmq.Executor(2) as pool:
        assert list(pool.map(abs, range(-50, 0), progress="text")) == list(range(50, 0, -1))
"""
    screen = keep(Terminal([sys.executable, "-c", program]))
    screen.shows(r"tasks .*100%")
    assert screen.wait() == 0, screen.text


def test_doctor_asks_before_it_removes(instance: str, terminal: Callable[..., Terminal]) -> None:
    path = Path(shmq.shm.path_of(shmq.shm.directory_name(instance)))
    path.touch(0o600)  # half-made
    screen = terminal("doctor", "--fix", f"--instance={instance}")
    screen.shows(r"remove it\? \[y/N\]")
    screen.type("n\n")
    assert screen.wait() == DEGRADED
    assert path.exists()
    screen = terminal("doctor", "--fix", f"--instance={instance}")
    screen.shows(r"remove it\? \[y/N\]")
    screen.type("y\n")
    assert screen.wait() == OK
    assert "removed 1 object" in screen.text
    assert not path.exists()


@pytest.mark.parametrize("command", ["stat -i 0.05", "stat --json -i 0.05", "tail jobs workers"])
def test_a_closed_pipe_ends_without_a_word(
    command: str, broker: shmq.Broker, tmp_path: Path, keep: Callable[[Any], Any]
) -> None:
    broker.create_channel("jobs", "workers")
    broker.producer("jobs").publish_many([b"body"] * 50)
    words = " ".join(SHMQ)
    errors = tmp_path / "errors"
    line = f"{words} {command} --instance={broker.instance} 2>{errors} | head -1"
    screen = keep(Terminal(["bash", "-c", line]))
    assert screen.wait() == OK
    assert screen.text.strip()
    assert errors.read_text() == ""


# ---- tmux ----


@pytest.fixture
def tmux(instance: str) -> Iterator[Callable[..., str]]:
    """`tmux(words...)`: a command to a tmux server of this test's own; what it prints."""
    base = [peer("tmux"), "-L", instance, "-f", "/dev/null"]

    def call(*words: str) -> str:
        return subprocess.run(
            [*base, *words], check=True, capture_output=True, text=True, timeout=WATCHDOG
        ).stdout

    yield call
    subprocess.run([*base, "kill-server"], capture_output=True, check=False)


def test_an_afternoon_in_tmux(broker: shmq.Broker, tmux: Callable[..., str]) -> None:
    """tail in one pane, Ctrl-C, its status, then stat, as a person would."""
    words = f"{' '.join(SHMQ)}"
    where = f"--instance={broker.instance}"
    tmux("new-session", "-d", "-x", "120", "-y", "30", "env PS1='$ ' sh -i")

    def screen() -> str:
        return tmux("capture-pane", "-p")

    def type(text: str) -> None:
        tmux("send-keys", "-l", text)
        tmux("send-keys", "Enter")

    def interrupt() -> None:
        """Ctrl-C, and the prompt is back: what is typed earlier, the terminal throws away."""
        tmux("send-keys", "C-c")
        eventually(lambda: screen().rstrip().endswith("\n$"))

    type(f"{words} tail jobs {where}")
    eventually(lambda: "Ctrl-C ends" in screen())
    broker.producer("jobs").publish("grüße".encode())
    eventually(lambda: "\ngrüße" in screen())
    interrupt()
    type("echo status=$?")
    eventually(lambda: "\nstatus=130" in screen())
    eventually(lambda: not broker.stats().topic("jobs").channels)
    broker.create_channel("jobs", "workers")
    type(f"clear; {words} stat -i 0.2 {where}")
    eventually(lambda: "IN/s" in screen())
    broker.producer("jobs").publish_many([b"x"] * 1234)
    eventually(lambda: re.search(r"jobs/workers +1234 ", screen()))
    assert screen().count("TOPIC/CHANNEL") == 1  # in its place
    tmux("send-keys", "C-z")
    eventually(lambda: "Stopped" in screen())
    assert "TOPIC/CHANNEL" not in screen()
    type("fg")
    eventually(lambda: "TOPIC/CHANNEL" in screen())
    interrupt()
    assert "TOPIC/CHANNEL" not in screen()
    type("echo status=$?")
    eventually(lambda: "\nstatus=130" in screen())
    assert "Traceback" not in screen()
