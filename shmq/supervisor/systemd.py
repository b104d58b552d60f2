"""systemd's protocols for a service, without libsystemd: sd_notify and passed sockets.

Nothing here knows the broker. Reading a variable of the protocols removes it from the environment,
so that no child process takes it for its own.

Protocols: sd_notify(3), sd_watchdog_enabled(3), sd_listen_fds(3).
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import socket

_FIRST_FD = 3  # SD_LISTEN_FDS_START
_DIGITS = 9  # of a number of descriptors, at most
_LONGEST = 1e9  # seconds, of a watchdog
_PATIENCE = 2.0  # seconds for a message; a manager that does not read must not stop a broker

_log = logging.getLogger(__name__)


class Notifier:
    """Sends messages to the service manager. Without a manager every method does nothing.

    It never raises: a broker does not end because its messages cannot be sent.
    """

    def __init__(self, address: str = "", watchdog: float = 0.0) -> None:
        """address: the value of NOTIFY_SOCKET, empty for none. watchdog: seconds within which the
        manager expects a ping, 0 for none."""
        self._address = _address(address)
        self.watchdog = watchdog if self._address is not None else 0.0
        """Seconds within which `alive` must be called again. 0: the manager has no watchdog."""
        self._socket: socket.socket | None = None
        self._trouble = ""

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] | None = None) -> Self:
        """A notifier for the manager that started this process. Removes the variables."""
        environ = os.environ if environ is None else environ
        address = environ.pop("NOTIFY_SOCKET", "")
        usec = environ.pop("WATCHDOG_USEC", "")
        pid = environ.pop("WATCHDOG_PID", "")
        # without WATCHDOG_PID it is meant for any process that gets it
        mine = not pid or pid == str(os.getpid())
        return cls(address, min(float(usec) / 1e6, _LONGEST) if mine and usec.isdecimal() else 0.0)

    def __bool__(self) -> bool:
        """True if there is a manager to send to."""
        return self._address is not None

    def ready(self, status: str = "") -> None:
        """Tell the manager that the service is open to its clients."""
        self._send(f"READY=1\nMAINPID={os.getpid()}", status)

    def stopping(self, status: str = "") -> None:
        """Tell the manager that the service has begun to stop."""
        self._send("STOPPING=1", status)

    def status(self, status: str) -> None:
        """Send the status line, which `systemctl status` shows."""
        self._send("", status)

    def alive(self) -> None:
        """Ping the watchdog."""
        self._send("WATCHDOG=1")

    def extend(self, seconds: float, status: str = "") -> None:
        """Ask the manager to wait `seconds` more from now for a start or stop to end."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}", status)

    def close(self) -> None:
        """Close the socket. May be called again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str, status: str = "") -> None:
        if self._address is None:
            return
        import socket  # slow to import

        if status:
            message += f"\nSTATUS={' '.join(status.split())}"
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.settimeout(_PATIENCE)
            # not connected, because a re-executed manager has another socket of the same name
            data = message.strip().encode()
            self._socket.sendmsg([data], [], socket.MSG_NOSIGNAL, self._address)
            self._trouble = ""
        except OSError as exc:
            if str(exc) != self._trouble:
                _log.warning("cannot tell the service manager (NOTIFY_SOCKET): %s", exc)
            self._trouble = str(exc)


def _address(text: str) -> str | None:
    """The address in the socket module's form: a path, or an abstract name after a zero byte."""
    if not text:
        return None
    if text.startswith("@") and len(text) > 1:
        return "\0" + text[1:]
    if text.startswith("/"):
        return text
    _log.warning("NOTIFY_SOCKET=%s is neither a path nor an abstract name (@...); ignored", text)
    return None


@dataclass(frozen=True)
class PassedSocket:
    """A socket that the manager opened before it started this process."""

    fd: int
    name: str
    """FileDescriptorName= of the socket unit, or `unknown` if it has none."""


def listen_fds(environ: MutableMapping[str, str] | None = None) -> tuple[PassedSocket, ...]:
    """The sockets that the manager passed to this process, made close-on-exec.

    It removes the variables, so only the first call returns the sockets. Empty if none were passed,
    or if they are for another process. Raises ValueError if the variables are impossible.
    """
    environ = os.environ if environ is None else environ
    pid, count, names = (
        environ.pop(variable, "") for variable in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
    )
    environ.pop("LISTEN_PIDFDID", None)
    if not count or pid != str(os.getpid()):
        return ()
    if not count.isdecimal() or len(count) > _DIGITS:
        raise ValueError(f"LISTEN_FDS must be a number of descriptors, not {count[:100]!r}")
    called = names.split(":") if names else []
    passed = []
    for index in range(int(count)):
        fd = _FIRST_FD + index
        try:
            os.set_inheritable(fd, False)
        except OSError as exc:
            raise ValueError(
                f"LISTEN_FDS={count}, but descriptor {fd} is not open: {exc.strerror}"
            ) from exc
        name = called[index] if index < len(called) else ""
        passed.append(PassedSocket(fd, name or "unknown"))
    return tuple(passed)
