"""The screen of `shmq stat --watch` may be stopped and continued at any instant."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import sys
from typing import Any

import click
import pytest

from shmq.cli.stat_screen import Screen


class StopsAmid(io.RawIOBase):
    """A terminal; the first write to it is interrupted by what Ctrl-Z and `fg` lead to."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.screen: Screen | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.screen is not None:
            screen, self.screen = self.screen, None
            screen._give_back()
            screen._take()
        return os.write(self._fd, data)


def rest_of(reader: int) -> str:
    """All that was written to a terminal whose other end is closed; the terminal is closed too."""
    found = b""
    with contextlib.suppress(OSError):  # EIO: nothing more comes
        while data := os.read(reader, 4096):
            found += data
    os.close(reader)
    return found.decode()


def test_a_stop_amid_a_write_leaves_a_whole_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pty.openpty()
    terminal = StopsAmid(writer)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(terminal), "utf-8"))
    monkeypatch.setenv("TERM", "xterm")
    try:
        with click.Context(click.Command("stat")):
            screen = Screen(is_live=True)
        terminal.screen = screen
        screen.show(["first line"])
    finally:
        os.close(writer)
        shown = rest_of(reader)
    assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l") == 1
    assert shown.index("first line") > shown.index("\x1b[?1049h")
