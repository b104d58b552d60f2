"""Bytes of other programs are read in few places, which have deadlines, bounds and checks. Each
call below may stand in the files beside it alone; a new place goes through `shmq.peers`, or gives
its reason here."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import ROOT

PACKAGE = ROOT / "shmq"

#: The name of a call -> the files that may make it, with the reason.
ALLOWED: dict[str, dict[str, str]] = {
    # from clear text to TLS
    "wrap_socket": {"peers/sockets.py": "refuses bytes from before TLS"},
    "wrap_bio": {"gateway/codecs.py": "bytes from before TLS go into its handshake"},
    "MemoryBIO": {"gateway/codecs.py": "as `wrap_bio`"},
    "start_tls": {},
    "upgrade_tls": {},
    # sockets
    "create_connection": {},
    "open_connection": {"gateway/lookupd.py": "one second for each command, 1 MiB for its answer"},
    "getaddrinfo": {
        "peers/sockets.py": "the only one",
        "gateway/statsd.py": "statistics are sent by UDP, and nothing is read",
        "gateway/listeners.py": "an address of this host, to listen on",
    },
    "recv": {
        "door/acceptor.py": "of a client that is refused, and it does not wait",
        "peers/sockets.py": "`received`, with a deadline",
        "pool/nursery.py": "one end of a pair of sockets, with what forked it at the other",
        "remote/connection.py": "each has the deadline of the request",
        "forward/nats_connection.py": "each has the deadline of the request",
    },
    "recv_into": {"remote/connection.py": "has the deadline of the request"},
    "makefile": {},
    "readexactly": {"gateway/lookupd.py": "as `open_connection`"},
    # HTTP
    "urlopen": {},
    "HTTPConnection": {},
    "HTTPSConnection": {},
    "ClientSession": {},
}

#: Modules that nobody imports, since their requests have no deadline of the whole.
FORBIDDEN = ("http.client", "urllib.request", "urllib.error", "requests", "httpx", "aiohttp.client")


@functools.cache
def calls(path: Path) -> list[tuple[str, int]]:
    """The names of all that a file calls, with the line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                found.append((function.attr, node.lineno))
            elif isinstance(function, ast.Name):
                found.append((function.id, node.lineno))
    return found


def places() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path


@pytest.mark.parametrize("name", ALLOWED)
def test_sockets_and_tls_are_used_where_it_is_safe(name: str) -> None:
    found = {
        f"{place}:{line}"
        for place, path in places()
        for called, line in calls(path)
        if called == name and place not in ALLOWED[name]
    }
    assert not found, f"{found}: go through shmq/peers, or say here why not"


@pytest.mark.parametrize("name", ALLOWED)
def test_every_exception_is_still_one(name: str) -> None:
    for place in ALLOWED[name]:
        assert name in {called for called, _ in calls(PACKAGE / place)}, place


def test_no_client_of_http_but_ours_is_imported() -> None:
    found = []
    for place, path in places():
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found += [f"{place}: {name}" for name in names if name in FORBIDDEN]
    assert not found, f"{found}: use shmq.peers.http"


def test_json_of_other_programs_is_checked() -> None:
    """`json.loads` ends in a RecursionError for some texts, and takes NaN."""
    found = {
        f"{place}:{line}"
        for place, path in places()
        if place.startswith(("remote/", "forward/", "peers/", "diagnostics/fleet", "spark/hosts"))
        or place in ("gateway/auth.py", "gateway/lookupd.py")
        for called, line in calls(path)
        if called == "loads" and place != "peers/documents.py"
    }
    assert not found, f"{found}: use shmq.peers.documents"


def test_every_answer_of_a_gateway_has_a_shape() -> None:
    """Each lease command that a gateway executes, but LREAD, whose answer its reader checks."""
    from shmq.gateway.lease_requests import COMMANDS
    from shmq.remote.answers import _SHAPES

    assert {name.decode() for name in COMMANDS} - {"LREAD"} == {
        name.partition("/")[0] for name in _SHAPES
    }
