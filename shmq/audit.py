"""The audit log: one line for each creation, deletion, emptying, pause and configuration, and for
each login that failed.

    audit: action=create_topic topic=orders channel=- by=192.0.2.7:50432 result=done

The five fields are always present, in this order. `-` stands for a field that an action does not
have, and further fields may follow. A character that is not plain in a name or an address is
written as `%XX` of its UTF-8, so a value holds no space, no `=` and no line end, and `grep
topic=orders` finds every line of a topic.

`by` is `ip:port` for a client on TCP or HTTP, and `pid:N/uid:N` for one on a Unix socket or on
shared memory (its effective uid at the time of the request). A field `user` follows if the access
file names one.

The log does not see everything: a client on shared memory empties and pauses by itself, in memory
that it may write anyway, without the supervisor. So only its creations and deletions are logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import urllib.parse
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final

from shmq.errors import Gone

#: Characters that are written as they are, beside letters, digits and `_.-~`.
_PLAIN: Final = "#:/@[]*,"
_MOST_CHARACTERS: Final = 1000  # of one value
_NOBODY: Final = "-"

#: The value of the option `audit_log` that sends the lines to the log.
WITH_THE_LOG: Final = "stderr"

_log = logging.getLogger("shmq.audit")
_log.setLevel(logging.INFO)  # a level of its own: --log-level does not silence it
_by: ContextVar[str] = ContextVar("by", default=_NOBODY)
_user: ContextVar[str] = ContextVar("user", default="")


def note(
    action: str,
    topic: str = "",
    channel: str = "",
    result: str = "done",
    by: str = "",
    **more: object,
) -> None:
    """Write a line. result: `done`, or a word for the reason of a failure. by: the client; empty:
    the one that `acting` names. more: further fields."""
    by = by or _by.get()
    fields: dict[str, object] = {"topic": topic, "channel": channel, "by": by, "result": result}
    if name := user():
        fields["user"] = name
    fields |= more
    words = " ".join(f"{name}={_escaped(str(value))}" for name, value in fields.items())
    _log.info("audit: action=%s %s", _escaped(action), words)


@contextlib.contextmanager
def noted(action: str, topic: str = "", channel: str = "", **more: str) -> Iterator[None]:
    """Write a line when the block is done or has failed. more: further fields."""
    try:
        yield
    except Exception as exc:
        note(action, topic, channel, result_of(exc), **more)
        raise
    note(action, topic, channel, **more)


def result_of(exc: Exception) -> str:
    """The word for the reason of a failure."""
    return "not_found" if isinstance(exc, Gone) else "refused"


@contextlib.contextmanager
def acting(by: str, user: str = "") -> Iterator[None]:
    """Lines that this thread or task writes inside the block name this client, and its user if
    the access file names one."""
    tokens = _by.set(by), _user.set(user)
    try:
        yield
    finally:
        _by.reset(tokens[0])
        _user.reset(tokens[1])


def user() -> str:
    """The user of the access file for whom this thread or task works; empty: there is none."""
    return _user.get()


def by_process(pid: int) -> str:
    """`by` of a process of this host."""
    try:
        uid = str(os.stat(f"/proc/{pid}").st_uid)
    except OSError:  # it has ended since
        uid = "unknown"
    return f"pid:{pid}/uid:{uid}"


def by_peer(transport: Any) -> str:
    """`by` of the peer of an asyncio transport that is connected."""
    peer = transport.get_extra_info("peername")
    if isinstance(peer, tuple) and peer:
        host = f"[{peer[0]}]" if ":" in peer[0] else peer[0]
        return f"{host}:{peer[1]}"
    found = credentials(transport)
    return "@" if found is None else f"pid:{found[0]}/uid:{found[1]}"


def credentials(transport: Any) -> tuple[int, int] | None:
    """The pid and the uid of the peer of an asyncio transport on a Unix socket; None if the kernel
    does not say."""
    return credentials_of(transport.get_extra_info("socket"))


def credentials_of(sock: Any) -> tuple[int, int] | None:
    """As `credentials`, of a socket."""
    import socket  # slow to import; who has a socket has it

    try:
        size = struct.calcsize("iII")
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid, uid, _ = struct.unpack("iII", found)
    except (AttributeError, OSError):
        return None
    return pid, uid


def set_up(destination: str, formatter: logging.Formatter | None) -> None:
    """Set the destination: `stderr` (with the log), a path, or empty for nowhere. Raises OSError if
    the file cannot be opened."""
    for handler in list(_log.handlers):
        _log.removeHandler(handler)
        handler.close()
    _log.disabled = not destination
    _log.propagate = destination == WITH_THE_LOG
    if destination and destination != WITH_THE_LOG:
        from shmq.audit_file import AuditFile  # slow to import

        file = AuditFile(destination)
        file.setFormatter(formatter)
        _log.addHandler(file)


def _escaped(text: str) -> str:
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}..."
    return urllib.parse.quote(text, safe=_PLAIN, errors="backslashreplace") or _NOBODY
