"""`shmq stat --watch` on the whole screen of a terminal, which it leaves as it was."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.processes import Child, eventually
from support.terminal import Terminal

import shmq
from shmq import history
from shmq.cli.stat_screen import sparkline
from shmq.cli.status import INTERRUPTED, OK

ENTERED, LEFT = "\x1b[?1049h", "\x1b[?1049l"
NEVER = "600"  # seconds between two refreshes, of which a test sees the first


@pytest.fixture(autouse=True)
def _xterm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def watch(keep: Callable[[Any], Any]) -> Callable[..., Terminal]:
    """`watch(instance, words...)`: `shmq stat --watch` in a terminal."""
    argv = [sys.executable, "-m", "shmq", "stat"]
    return lambda instance, *words, **how: keep(
        Terminal([*argv, f"--instance={instance}", *words], **how)
    )


@pytest.fixture
def full(open_broker: Callable[..., shmq.Broker]) -> shmq.Broker:
    """Channels c00 to c29; each has as many messages as its number."""
    broker = open_broker()
    for number in range(30):
        broker.create_channel(f"t{number:02}", f"c{number:02}")
        if number:
            broker.producer(f"t{number:02}").publish_many([b"x"] * number)
    return broker


def rows(screen: Terminal) -> list[str]:
    """The channels of the last picture."""
    return re.findall(r"^(t\d\d/c\d\d) ", screen.picture, re.M)


def test_ctrl_c_leaves_the_terminal_as_it_was(
    broker: shmq.Broker, watch: Callable[..., Terminal]
) -> None:
    broker.create_channel("jobs", "workers")
    screen = watch(broker.instance, "--watch", "0.1")
    before = screen.modes
    screen.shows(r"jobs/workers", times=2)
    assert screen.raw.startswith(ENTERED)
    assert screen.modes != before
    screen.type("\x03")
    assert screen.wait() == INTERRUPTED
    assert screen.modes == before
    assert screen.raw.rstrip().endswith(LEFT)
    assert screen.raw.count("\x1b[?25l") == screen.raw.count("\x1b[?25h") == 1  # the cursor


def test_q_ends_it(broker: shmq.Broker, watch: Callable[..., Terminal]) -> None:
    screen = watch(broker.instance, "--watch")  # without a number: every second
    before = screen.modes
    screen.shows("end: q")
    screen.type("q")
    assert screen.wait() == OK
    assert screen.modes == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(
    number: signal.Signals, broker: shmq.Broker, watch: Callable[..., Terminal]
) -> None:
    screen = watch(broker.instance, "--watch", NEVER)
    before = screen.modes
    screen.shows("end: q")
    os.kill(screen.pid, number)
    assert screen.wait() == -number
    assert screen.modes == before
    assert screen.raw.endswith(LEFT)


def test_ctrl_z_gives_the_terminal_back_meanwhile(
    broker: shmq.Broker, watch: Callable[..., Terminal]
) -> None:
    screen = watch(broker.instance, "--watch", NEVER)
    screen.shows("end: q")
    screen.type("\x1a")  # nobody could continue it here, so it goes on at once
    screen.shows("end: q", times=2)
    assert screen.raw.count(ENTERED) == 2
    assert screen.raw.count(LEFT) == 1
    screen.type("q")
    assert screen.wait() == OK


def test_another_size_is_filled_at_once(full: shmq.Broker, watch: Callable[..., Terminal]) -> None:
    screen = watch(full.instance, "--watch", NEVER, columns=180)
    screen.shows("end: q")
    assert "P50" in screen.picture
    assert len(rows(screen)) < 30
    screen.resize(50, 80)
    screen.shows("end: q", times=2)
    assert len(rows(screen)) == 30
    assert "P50" not in screen.picture
    assert max(map(len, screen.picture.splitlines())) <= 80


def test_keys_choose_the_order_and_scroll(
    full: shmq.Broker, watch: Callable[..., Terminal]
) -> None:
    screen = watch(full.instance, "--watch", NEVER)
    screen.shows("end: q")
    shown = len(rows(screen))
    assert rows(screen)[0] == "t00/c00"
    pictures = 1
    for key, first in (
        ("\x1b[B", 1),  # down
        ("\x1b[6~", 1 + shown),  # Page Down
        ("\x1b[F", 30 - shown),  # End
        ("\x1b[5~", max(30 - 2 * shown, 0)),
        ("\x1b[H", 0),
    ):
        screen.type(key)
        pictures += 1
        screen.shows("end: q", times=pictures)
        assert rows(screen)[0] == f"t{min(first, 30 - shown):02}/c{min(first, 30 - shown):02}", key
    screen.type(">")
    screen.shows("by depth")
    screen.shows("end: q", times=pictures + 1)
    assert rows(screen)[:2] == ["t29/c29", "t28/c28"]
    screen.type("<")
    screen.shows("end: q", times=pictures + 2)
    assert rows(screen)[0] == "t00/c00"


def test_the_last_minute_is_shown(broker: shmq.Broker, watch: Callable[..., Terminal]) -> None:
    broker.create_channel("jobs", "workers")
    broker.producer("jobs").publish_many([b"x"] * 1000)
    eventually(
        lambda: ("jobs", "workers") in history.read(broker.instance).channels,
        what="the channel is in the history",
    )
    screen = watch(broker.instance, "--watch", "0.2", columns=200)
    screen.shows(r"waiting +1000 [▁-█]*█")
    screen.shows(r"jobs/workers +1000 .*█")


def test_what_is_bad_has_a_color(
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    instance: str,
    watch: Callable[..., Terminal],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve()
    broker = attach()
    broker.configure("jobs", "workers", max_attempts=3)
    broker.producer("jobs").publish(b"x")
    with broker.consumer("jobs", "workers") as consumer:
        consumer.take(timeout=10).reject("no")
    eventually(lambda: broker.stats().channel("jobs", "workers").dead_lettered == 1)
    broker.pause_channel("jobs", "workers")
    server.kill()
    red, yellow = "\x1b[31m", "\x1b[33m"
    screen = watch(instance, "--watch", NEVER, columns=180)
    screen.shows("end: q")
    assert f"{red}\x1b[1mDEAD" in screen.raw
    assert re.search(rf"{re.escape(red)} +1\x1b", screen.raw)  # its dead letter
    assert re.search(rf"{re.escape(yellow)}jobs/workers \(paused\)", screen.raw)
    monkeypatch.setenv("NO_COLOR", "1")
    screen = watch(instance, "--watch", NEVER)
    screen.shows("end: q")
    assert not re.search(r"\x1b\[[0-9;]+m", screen.raw)
    assert "DEAD" in screen.picture
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    screen = watch(instance, "--watch", "0.1")
    screen.shows("DEAD", times=2)
    assert "\x1b" not in screen.raw


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 5, ""),
        ([0, 0, 0], 5, "▁▁▁"),
        ([7, 0, 6, 7], 5, "█▁▇█"),
        ([1, 7, 0, 0, 4, 2], 3, "█▁▅"),
        (list(range(8)), 8, "▁▂▃▄▅▆▇█"),
    ],
)
def test_a_sparkline_shows_the_highest_of_each_part(
    values: list[float], width: int, line: str
) -> None:
    assert sparkline(values, width) == line
