"""The instances of many hosts: their addresses, this process's connections to them, and the way to
read one that is on this very host.

An instance is recognised by the identity of its memory, which its gateway states and its directory
segment has: a random number that nothing else has. A name is no proof, because every host may have
an instance `default`. So a process that finds that identity in its own /dev/shm reads there, and
any other process reads over TCP.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import shmq
from shmq import shm
from shmq.errors import Gone, LayoutMismatch, MemoryLost, NotRunning, ShmqError
from shmq.peers import http
from shmq.peers.documents import BadAnswer, listed, number, parsed, table, text
from shmq.remote.address import Address
from shmq.sources import open_readonly
from shmq.spark.chain import Chain
from shmq.spark.options import Settings
from shmq.views import DirectoryView

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds between two questions to the nsqlookupds.
LOOK_EVERY: Final = 5.0
#: Seconds for an answer of an nsqlookupd, and its largest size in bytes.
_LOOKUPD_SECONDS: Final = 2.0
_LOOKUPD_BYTES: Final = 16 << 20
#: A path would be a socket of this host.
_HOST: Final = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._:%-]{0,252}")
#: Seconds after which a host that is away is tried again: the first pause, and the longest.
PAUSES: Final = (0.2, 5.0)
_PROBE_SECONDS: Final = 0.5
#: Errors that mean that a host did not answer.
UNREACHABLE: Final = (OSError, NotRunning)


class HostAway(ShmqError):
    """An instance does not answer. The text says which, what was tried, and what to do."""


class NoLookupd(HostAway):
    """No nsqlookupd answers, so the instances are not known."""


# ---- one process's connections ----

_remotes: dict[Place, Any] = {}
#: Identity and owner -> the name of the instance in this host's /dev/shm, None: it is not there.
_names: dict[tuple[str, str | None], str | None] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Place:
    """Where an instance is, with all that a task needs to read it.

    address: of its gateway. identity: of the memory that it must have; None: any. owner: the user
    whose broker it may be, if it is on this host. timeout: seconds for an answer. shared: it may be
    read in shared memory. patient: a task waits for it. tls: the option of this name;
    secret: token or authSecret. proof: `Settings.proof`.
    """

    address: str
    identity: str | None
    owner: str | None
    timeout: float
    shared: bool = False
    patient: bool = False
    tls: str | None = None
    secret: str | None = field(default=None, repr=False)
    proof: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, settings: Settings, address: str) -> Place:
        """The instance at an address, whatever its memory is."""
        return cls(
            address,
            None,
            settings.owner,
            settings.hostTimeout,
            settings.transport == "auto",
            settings.onMissingHost == "wait",
            settings.tls,
            settings.token or settings.authSecret,
            settings.proof,
        )


def said(error: Exception) -> str:
    """The text of a client's error, with the option of a query in place of the client's
    argument."""
    return str(error).replace("raise timeout", "raise hostTimeout")


def dial(place: Place) -> Any:
    """A new connection to a gateway. Raises as `shmq.connect`, and OSError for the certificates."""
    tls: bool | ssl.SSLContext | None = None
    if place.tls is not None:
        tls = place.tls == "true" or ssl.create_default_context(cafile=place.tls)
    return shmq.connect(
        place.address,
        tls=tls,
        auth_secret=place.secret,
        timeout=place.timeout,
        secret=place.proof,
    )


def memory_identity(directory: DirectoryView) -> str:
    """The identity of an instance's memory, as its gateway states it."""
    made = directory.header["segment"]["instance"]
    return f"{int(made[0]):016x}@{int(made[1]):016x}"


def local_instance(identity: str, owner: str | None) -> shmq.Broker | None:
    """This process's attachment to the instance whose memory has this identity, if it is in this
    host's /dev/shm and this process may attach to it."""
    from shmq.spark.reading import attached

    if (identity, owner) not in _names:  # memory does not move, so the answer stays
        _names[identity, owner] = _name_of(identity, owner)
    name = _names[identity, owner]
    if name is not None:
        with contextlib.suppress(ShmqError):
            broker = attached(name, owner, timeout=0)
            if broker.identity == identity:
                return broker
    return None


def _name_of(identity: str, owner: str | None) -> str | None:
    for name in shm.list_instances():
        with (
            contextlib.suppress(ShmqError, LayoutMismatch, OSError),
            open_readonly(name, owner) as source,
        ):
            if memory_identity(source.directory) == identity:
                return name
    return None


def probe(address: str) -> None:
    """Raises OSError if nothing accepts a connection at an address within a moment. It is the first
    thing to do with a host that was away, because a client would try again for its timeout."""
    Address.parse(address).connected(time.monotonic() + _PROBE_SECONDS).close()


def broker_at(place: Place) -> Any:
    """This process's connection to an instance, kept for all its tasks; or its attachment, if the
    instance is on this host. Raises MemoryLost if the identity is not that of `place`, and an error
    of `UNREACHABLE`."""
    wanted = place.identity
    if wanted is not None and (local := _local(place, wanted)) is not None:
        return local
    remote = remote_at(place)
    found: str = remote.identity
    if wanted is not None and found != wanted:
        raise MemoryLost(
            f"the instance at {place.address} has other memory ({found}) than before ({wanted})"
        )
    return _local(place, found) or remote


def _local(place: Place, identity: str) -> shmq.Broker | None:
    return local_instance(identity, place.owner) if place.shared else None


def remote_at(place: Place) -> Any:
    """This process's connection to an instance, also if it is on this host. Raises as
    `shmq.connect`."""
    key = replace(place, identity=None)
    with _lock:
        remote = _remotes.get(key)
    if remote is None or remote.ended:
        remote = dial(place)
        with _lock:
            _remotes[key] = remote
    return remote


def disconnect() -> None:
    """Close this process's connections to other hosts. The next call makes new ones."""
    with _lock:
        remotes = list(_remotes.values())
        _remotes.clear()
        _names.clear()
    for remote in remotes:
        remote.close()


def forget_in_child() -> None:
    """Forget the parent's connections: a forked worker makes its own."""
    _remotes.clear()
    _names.clear()


os.register_at_fork(after_in_child=forget_in_child)

# ---- addresses ----


def known_to_lookupd(urls: Iterable[str], topic: str) -> list[str]:
    """Addresses of the instances that the nsqlookupds know for a topic. Raises NoLookupd if none of
    them answers."""
    found: set[str] = set()
    errors = []
    for url in urls:
        try:
            found.update(_ask_lookupd(url, topic))
        except (OSError, ValueError) as exc:
            errors.append(f"{url}: {exc}")
            _log.warning("nsqlookupd %s: instances of topic %s: %s", url, topic, exc)
    if errors and len(errors) == len(list(urls)):
        raise NoLookupd(
            f"ask for the instances of topic {topic}: no nsqlookupd answers ({'; '.join(errors)}): "
            'name their HTTP addresses in .option("lookupd", ...), or the instances\' in '
            '.option("instances", ...)'
        )
    return sorted(found)


def _ask_lookupd(url: str, topic: str) -> list[str]:
    query = urllib.parse.urlencode({"topic": topic})
    deadline = time.monotonic() + _LOOKUPD_SECONDS
    answer = http.ask(f"{url}/lookup?{query}", deadline, most=_LOOKUPD_BYTES)
    if answer.status == 404:  # it does not know the topic (yet)
        return []
    if answer.status != 200:
        raise BadAnswer(f"it answers with status {answer.status}")
    document = table(parsed(answer.body))
    found = []
    for index, item in enumerate(listed(table(document.get("data", document)), "producers")):
        try:
            found.append(_address(table(item, f"producers[{index}]"), f"producers[{index}]."))
        except BadAnswer as exc:  # one that is wrong does not hide the others
            _log.warning("nsqlookupd %s: instances of topic %s: %s", url, topic, exc)
    return found


def _address(producer: dict[str, Any], place: str) -> str:
    host, port = text(producer, "broadcast_address", place), number(producer, "tcp_port", place)
    if not _HOST.fullmatch(host) or not 0 < port < 65536:
        raise BadAnswer(f"{place}broadcast_address and tcp_port are no address")
    return str(Address(host, port))


class Directory:
    """The addresses of the instances that a query reads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: list[str] = []
        self._look_at = 0.0

    @property
    def is_fixed(self) -> bool:
        """Whether the addresses are those of an option."""
        return bool(self._settings.instances)

    def addresses(self) -> list[str]:
        """The addresses now. Raises NoLookupd if no nsqlookupd ever answered."""
        if self.is_fixed:
            return list(self._settings.instances)
        if time.monotonic() >= self._look_at:
            topic = self._settings.topic
            try:
                self._found = known_to_lookupd(self._settings.lookupd, topic)
            except NoLookupd:
                if not self._found:
                    raise
            if not self._found and not self._look_at:
                _log.warning("no nsqlookupd knows an instance that has topic %s (yet)", topic)
            self._look_at = time.monotonic() + LOOK_EVERY
        return self._found


class Host:
    """One instance of many: its connection, and the leases that the query has there. The connection
    stays the same object while the instance is away; the client connects again by itself, and the
    holder of its leases stays the one that was opened, so that a later run's can fence it."""

    def __init__(self, settings: Settings, address: str) -> None:
        """Connect. Raises an error of `UNREACHABLE`."""
        place = Place.of(settings, address)
        self.broker = broker_at(place)
        self.identity: str = self.broker.identity
        self.place = replace(place, identity=self.identity)
        # over a network the death of a driver is not known, but that of a gateway process is
        self.chain = Chain(settings, lambda: self.broker, address, settings.leaseTtl)
        self.away: Exception | None = None
        self._pause, self._next = PAUSES[0], 0.0

    def call(self, function: Callable[[Host], T]) -> T:
        """`function(self)`. Notes an error of `UNREACHABLE`. Raises MemoryLost also if an instance
        on this host was stopped."""
        try:
            if self.away is not None:
                probe(self.address)
            found = function(self)
        except UNREACHABLE as exc:
            raise self._missed(exc) from None
        except Gone as exc:
            if not self.broker.ended:  # only the channel was deleted
                raise
            raise MemoryLost(str(exc)) from None
        self.away, self._pause = None, PAUSES[0]
        return found

    def _missed(self, error: Exception) -> Exception:
        self._pause = min(self._pause * 2, PAUSES[1]) if self.away else PAUSES[0]
        self.away, self._next = error, time.monotonic() + self._pause
        return error

    @property
    def is_due(self) -> bool:
        """Whether to call it: it answered the last time, or enough time has passed since."""
        return self.away is None or time.monotonic() >= self._next

    @property
    def address(self) -> str:
        """The address of its gateway."""
        return self.place.address

    def close(self) -> None:
        """Close the holder. An instance that is away is not told."""
        if self.away is not None:
            return
        with contextlib.suppress(ShmqError, OSError):
            self.chain.close()
