"""The output of `shmq stat`: a pipe, a terminal that prints table under table, or the whole screen
of a terminal, with keys."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from types import FrameType
from typing import Any, Final, Self

import click

from shmq.cli.output import say_styled, styled

#: The alternate screen, which the terminal forgets at its end, without a cursor; and back.
_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_KEYS: Final = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[C": ">",
    b"\x1bOC": ">",
    b"\x1b[D": "<",
    b"\x1bOD": "<",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
}


class Screen:
    """Where the tables go. It is a context manager: at its end the terminal is as it was, after
    Ctrl-C, Ctrl-Z and SIGTERM too."""

    def __init__(self, is_live: bool) -> None:
        """is_live: tables follow each other, so they may take the whole screen."""
        self.is_terminal = sys.stdout.isatty()
        can_move = self.is_terminal and os.environ.get("TERM", "dumb") not in ("", "dumb")
        self.is_full = is_live and can_move
        self.has_colors = can_move and click.get_current_context().color is not False
        self._keyboard: list[Any] | None = None
        self._before: dict[signal.Signals, object] = {}
        self._bell: tuple[int, int] | None = None

    @property
    def columns(self) -> int | None:
        """Width of the terminal; None if there is no limit."""
        if not self.is_terminal:
            return None
        # if the last column is used, erasing the rest of the line erases that column
        return shutil.get_terminal_size().columns - (1 if self.is_full else 0)

    @property
    def lines(self) -> int:
        """Height of the terminal."""
        return shutil.get_terminal_size().lines

    @property
    def has_keys(self) -> bool:
        """Whether somebody can type to this process."""
        return self._keyboard is not None

    def show(self, lines: Sequence[str]) -> None:
        """Print the lines; on a whole screen over those before, and no more than fit."""
        if not self.is_full:
            self.print(lines)
            return
        # erase the rest of each line as it is written: to erase all first would flicker
        shown = "\x1b[K\n".join(self._colored(lines[: self.lines]))
        sys.stdout.write(f"\x1b[H{shown}\x1b[K\x1b[J")
        sys.stdout.flush()

    def print(self, lines: Sequence[str]) -> None:
        """Print the lines below what is there, to stay."""
        for line in self._colored(lines):
            say_styled(line)
        sys.stdout.flush()

    def _colored(self, lines: Sequence[str]) -> Sequence[str]:
        shown = [styled(line) for line in lines]
        return shown if self.has_colors else [click.unstyle(line) for line in shown]

    def wait(self, until: float) -> str | None:
        """Wait for a key. until: monotonic seconds. Returns its name, "" after a change of the
        terminal's size, and None when the time has come."""
        while True:
            left = max(until - time.monotonic(), 0)
            if self._bell is None:
                time.sleep(left)
                return None
            watched = [self._bell[0], *([sys.stdin.fileno()] if self.has_keys else [])]
            ready, _, _ = select.select(watched, [], [], left)
            if not ready:
                return None
            if self._bell[0] in ready:
                os.read(self._bell[0], 512)
                return ""
            typed = os.read(sys.stdin.fileno(), 64)
            if not typed:  # nobody types any more
                self._keyboard = None
            elif key := _KEYS.get(typed, typed.decode("ascii", "replace")):
                return key

    # ---- the terminal ----

    def __enter__(self) -> Self:
        if self.is_full:
            self._bell = os.pipe()
            for fd in self._bell:
                os.set_blocking(fd, False)
            signal.set_wakeup_fd(self._bell[1], warn_on_full_buffer=False)
            self._handle(signal.SIGWINCH, lambda *_: None)
            self._handle(signal.SIGTSTP, self._on_stop)
            for ending in (signal.SIGTERM, signal.SIGHUP):
                self._handle(ending, self._on_end)
            sys.stdout.flush()
            self._take()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bell is None:
            return
        self._give_back()
        signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
        for fd in self._bell:
            os.close(fd)
        self._bell = None

    def _handle(self, number: signal.Signals, handler: object) -> None:
        if signal.getsignal(number) != signal.SIG_IGN:
            self._before[number] = signal.signal(number, handler)  # type: ignore[arg-type]

    def _take(self) -> None:
        """Take the whole screen, and single keys if this process is in the foreground."""
        fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        if fd >= 0 and os.tcgetpgrp(fd) == os.getpgrp():
            self._keyboard = termios.tcgetattr(fd)
            tty.setcbreak(fd)
        os.write(sys.stdout.fileno(), _ENTER.encode())  # as in `_give_back`

    def _give_back(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            if self._keyboard is not None:
                keyboard, self._keyboard = self._keyboard, None
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, keyboard)
            # not through sys.stdout: a signal may have come amid its writing
            os.write(sys.stdout.fileno(), _LEAVE.encode())

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z, and `fg` some time later."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._on_stop)
        self._take()

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        self._give_back()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def sparkline(values: Sequence[float], width: int) -> str:
    """A series as `width` characters at most, the newest at the right: each shows the highest of
    its part. "" if there is none, or if the output cannot have such characters."""
    try:
        _BLOCKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return ""
    count = min(len(values), width)
    parts = [
        max(values[len(values) * place // count : len(values) * (place + 1) // count])
        for place in range(count)
    ]
    most = max(parts, default=0)
    last = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(last * part / most) if most else 0] for part in parts)
