"""A program in a terminal of its own, and what a person sees and types there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from typing import Any

from support.processes import WATCHDOG

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A process with a pty as stdin, stdout, stderr and controlling terminal."""

    def __init__(self, argv: list[str], columns: int = 100) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            # readline sets COLUMNS behind the back of os.environ; without TERM there are no colours
            os.execvpe(argv[0], argv, {"TERM": "xterm", **os.environ})
        self.resize(24, columns)
        self._text = ""
        self._status: int | None = None

    def resize(self, lines: int, columns: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    @property
    def modes(self) -> list[Any]:
        """How it treats keys and output."""
        return termios.tcgetattr(self._fd)

    def _read(self, seconds: float) -> bool:
        """Take what comes within a time; False at its end."""
        if select.select([self._fd], [], [], seconds)[0]:
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # EIO: nobody has the other end any more
                return False
            self._text += data.decode(errors="replace")
            return bool(data)
        return True

    @property
    def raw(self) -> str:
        """All it wrote, as it wrote it."""
        return self._text

    @property
    def text(self) -> str:
        """All it wrote, without colours and movements, with line feeds only. Each picture of a
        whole screen begins on a line of its own, and so does what comes after the last one."""
        text = self._text.replace("\x1b[H", "\n").replace("\x1b[?1049l", "\n")
        return _ESCAPE.sub("", text).replace("\r\n", "\n")

    @property
    def picture(self) -> str:
        """The text since the cursor was last moved to the top of the screen."""
        return _ESCAPE.sub("", self._text.rpartition("\x1b[H")[2]).replace("\r\n", "\n")

    def shows(self, pattern: str, times: int = 1, seconds: float = WATCHDOG) -> None:
        """Wait until it has shown this so often; fail after so many seconds."""
        deadline = time.monotonic() + seconds
        while len(re.findall(pattern, self.text)) < times:
            going = self._read(0.1)
            assert going, f"ended without {pattern!r}: {self.text!r}"
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text!r}"

    def type(self, keys: str) -> None:
        """Keys: "\\x03" is Ctrl-C."""
        os.write(self._fd, keys.encode())

    def wait(self) -> int:
        """Read to the end; the exit status."""
        deadline = time.monotonic() + WATCHDOG
        while self._read(0.1):
            assert time.monotonic() < deadline, f"does not end: {self.text!r}"
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def close(self) -> None:
        """Kill and reap it."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        os.close(self._fd)
