"""Both servers, for tests that say the same to each."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.access import RULES, File
from support.certificates import Pki, of_this_host, of_two_clients, write_certificate
from support.external_programs import peer
from support.fake_auth_server import Authority
from support.fake_lookupd import Lookupd
from support.nsq_client import Client, Server
from support.real_nsqlookupd import nsqlookupd

_numbers = itertools.count()


# A change in shmq does not change a real nsqd, so only --all tries the expectations on it.
@pytest.fixture(scope="session", params=[pytest.param("nsqd", marks=pytest.mark.deep), "shmq"])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of the server: nsqd or shmq."""
    return str(request.param)


def _instance() -> str:
    import os
    import secrets

    return f"wire-{os.getpid()}-{secrets.token_hex(4)}"


@pytest.fixture(scope="session")
def server(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One with default options, for all tests."""
    instance = _instance()
    try:
        server = Server(kind, tmp_path_factory.mktemp("server"), instance)
        yield server
        server.close()
    finally:  # also if it does not start
        processes.remove_instance(instance)


@pytest.fixture
def start(kind: str, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """`start(*flags)`: a server of its own; with `again=server` on what that one left."""
    made: list[tuple[Server, str]] = []
    instances: set[str] = set()  # also of servers that did not start

    def make(*words: str, again: Server | None = None, status: int = 200) -> Server:
        instance = next((name for one, name in made if one is again), None) or _instance()
        instances.add(instance)
        server = Server(kind, tmp_path, instance, *words, status=status)
        made.append((server, instance))
        return server

    yield make
    for server, _ in made:
        server.close()
    for instance in instances:
        processes.remove_instance(instance)


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[[], Client]]:
    """`connect()`: a new client of `server`."""
    made: list[Client] = []

    def make(**how: Any) -> Client:
        made.append(server.connect(**how))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(connect: Callable[[], Client]) -> Client:
    """A client of `server`."""
    return connect()


@pytest.fixture
def topic() -> str:
    """A name that no other test has."""
    return f"topic-{next(_numbers)}"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(certificate, key) of 127.0.0.1, signed by itself."""
    return of_this_host(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="session")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, tuple[str, str]]:
    """(the authority's certificate, (a certificate that it has signed, its key))."""
    directory = tmp_path_factory.mktemp("authority")

    def make(name: str, *words: str) -> tuple[str, str]:
        cert, key = directory / f"{name}.pem", directory / f"{name}.key"
        write_certificate(cert, key, name, words)
        return str(cert), str(key)

    authority = make("authority")
    plain = ("-addext", "basicConstraints=critical,CA:FALSE")
    return authority[0], make("somebody", "-CA", authority[0], "-CAkey", authority[1], *plain)


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """An authority, a server and its clients."""
    return of_two_clients(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def file(tmp_path: Path) -> File:
    """An access file with RULES."""
    made = File(tmp_path / "access.toml")
    made.write(RULES)
    return made


@pytest.fixture
def authority() -> Iterator[Authority]:
    """An authorisation server."""
    with Authority() as server:
        yield server


@pytest.fixture
def noting_lookupd() -> Iterator[Lookupd]:
    """A nsqlookupd that only writes down what it is told."""
    with Lookupd() as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """`run(tool, *words)`: a tool with pipes; killed at the end."""
    with contextlib.ExitStack() as stack:

        def start(tool: str, *words: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context(open(tmp_path / f"{tool}.log", "wb"))
            process = stack.enter_context(
                subprocess.Popen(
                    [peer(tool), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
                )
            )
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def lookupd() -> Iterator[tuple[str, int]]:
    """A real nsqlookupd: its TCP address and HTTP port."""
    with nsqlookupd() as (tcp, web):
        yield tcp, int(web.rpartition(":")[2])
