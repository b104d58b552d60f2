"""The statistics of several hosts: nsqlookupds say which there are, and each answers `/stats` as
nsqd does, whether it is a gateway of shmq or a real nsqd.

Nothing that a host answers is trusted: all answers are bounded in time and size, and every value in
them is checked. A host that does not answer, or not rightly, is told in words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from shmq.names import valid_name
from shmq.peers import http
from shmq.peers.documents import BadAnswer, flag, listed, number, parsed, table, text
from shmq.printing import printable, said
from shmq.remote.address import Address

LOOKUPD_PORT: Final = 4161
NSQD_PORT: Final = 4151
#: Seconds within which a host's answer must have come, to its last byte.
TIMEOUT: Final = 3.0
#: Highest size of an answer, about 50 000 channels; and of all answers of one look together.
MOST_BYTES: Final = 16 << 20
MOST_BYTES_IN_ALL: Final = 128 << 20
MOST_HOSTS: Final = 500

_LONGEST_TEXT: Final = 200  # characters of a host's own words
_HOST: Final = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._:%-]{0,252}\Z")


@dataclass(frozen=True)
class Counts:
    """Counts of a channel, or of a topic's messages that no channel has yet, with nsqd's names."""

    depth: int = 0
    backend_depth: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    message_count: int = 0
    requeue_count: int = 0
    timeout_count: int = 0
    client_count: int = 0
    paused: bool = False

    @classmethod
    def total(cls, parts: Iterable[Counts]) -> Counts:
        """Return the sums; it is paused if any of the parts is."""
        held = list(parts)
        sums = {name: sum(getattr(part, name) for part in held) for name in _OF_CHANNEL}
        return cls(**sums, paused=any(part.paused for part in held))


#: The numbers that nsqd tells of a channel, and of a topic.
_OF_CHANNEL: Final = tuple(item.name for item in dataclasses.fields(Counts))[:-1]
_OF_TOPIC: Final = ("depth", "backend_depth", "message_count")

#: (topic, channel); the channel is None for messages that no channel has yet.
Name = tuple[str, str | None]


@dataclass(frozen=True)
class Host:
    """A host's answer, or the reason why there is none."""

    address: str
    """`host:port` of its HTTP interface."""
    error: str | None = None
    """Why its answer cannot be shown; None if it can."""
    version: str = ""
    health: str = ""
    start_time: int = 0
    """Unix seconds."""
    counts: dict[Name, Counts] = field(default_factory=dict)
    taken_at: float = 0.0
    """When its answer came, monotonic seconds."""

    @property
    def trouble(self) -> str | None:
        """A sentence about the host, if it needs a look."""
        if self.error is not None:
            return f"{self.address}: {self.error}"
        return None if self.health == "OK" else f"{self.address}: {self.health}"


@dataclass(frozen=True)
class Lookupd:
    """A nsqlookupd. hosts: the addresses of the hosts that are registered there. error: why these
    are not all."""

    address: str
    error: str | None = None
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fleet:
    """The hosts at a moment, by address."""

    hosts: list[Host]
    lookupds: list[Lookupd]

    @property
    def answered(self) -> list[Host]:
        """The hosts whose answers can be shown."""
        return [host for host in self.hosts if host.error is None]

    @property
    def trouble(self) -> list[str]:
        """Everything that needs a look, as sentences: first the nsqlookupds, then the hosts."""
        found = [f"nsqlookupd {one.address}: {one.error}" for one in self.lookupds if one.error]
        if not self.hosts and not found:
            found.append("no host is registered")
        return found + [host.trouble for host in self.hosts if host.trouble is not None]

    def by_name(self) -> Iterator[tuple[Name, list[tuple[Host, Counts]]]]:
        """Yield each channel, sorted by its name, with the hosts that have it."""
        found: dict[Name, list[tuple[Host, Counts]]] = {}
        for host in self.answered:
            for name, counts in host.counts.items():
                found.setdefault(name, []).append((host, counts))
        for name in sorted(found, key=lambda name: (name[0], name[1] or "")):
            yield name, found[name]


def parse_address(text: str, port: int) -> str:
    """Return `text` with the port, if it has none. Raises ValueError if it is no address."""
    bare = ":" not in text.rpartition("]")[2] and not text.startswith("/")
    return str(Address.parse(f"{text}:{port}" if bare else text))


def survey(
    lookupds: Sequence[str],
    nsqds: Sequence[str],
    topic: str | None = None,
    timeout: float = TIMEOUT,
    tokens: Mapping[str, str] | None = None,
) -> Fleet:
    """Ask the nsqlookupds for their hosts, and then these and `nsqds`, all at once.

    topic: ask for this topic alone. timeout: seconds for each of the two rounds. An address is one
    of `parse_address`. tokens: address -> what shows a gateway there who this is; no other host,
    and no nsqlookupd, gets one. Errors are in what is returned."""
    purse = _Purse(MOST_BYTES_IN_ALL)
    answers = _ask_all([(address, "/nodes") for address in lookupds], timeout, purse)
    found = [_lookupd(address, answer) for address, answer in answers]
    addresses = {*nsqds, *(host for one in found for host in one.hosts)}
    refused = sorted(addresses - {*nsqds})[max(MOST_HOSTS - len(nsqds), 0) :]
    path = "/stats?format=json&include_clients=false&include_mem=false"
    path += f"&topic={urllib.parse.quote(topic)}" if topic else ""
    asked = [(address, path) for address in sorted(addresses.difference(refused))]
    answered = _ask_all(asked, timeout, purse, tokens or {})
    hosts = [_host(address, answer) for address, answer in answered]
    hosts += [Host(address, f"is not asked: more than {MOST_HOSTS} hosts") for address in refused]
    return Fleet(sorted(hosts, key=lambda host: host.address), found)


# ---- asking ----


class _Purse:
    """The bytes that all answers together may still have."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        with self._lock:
            self._left -= count
            if self._left < 0:
                raise BadAnswer(
                    f"the answers of all hosts are longer than {MOST_BYTES_IN_ALL >> 20} MiB"
                )


class _Request:
    """One GET in a thread of its own, because looking a name up cannot be interrupted."""

    def __init__(
        self, address: str, path: str, deadline: float, purse: _Purse, token: str | None
    ) -> None:
        """deadline: monotonic seconds."""
        self.address = address
        self._token = token
        self._path, self._deadline, self._purse = path, deadline, purse
        self._sock: socket.socket | None = None
        self._is_given_up = False

    def answer(self) -> bytes:
        """Return the body. Raises BadAnswer, OSError."""
        where = Address.parse(self.address)
        sock = self._sock = where.connected(self._deadline)
        with sock:
            if self._is_given_up:
                raise TimeoutError
            answer = http.exchange(
                sock,
                str(where) if where.port else "unix",
                self._path,
                self._deadline,
                most=MOST_BYTES,
                headers={} if self._token is None else http.bearer(self._token),
                spend=self._purse.take,
            )
        if answer.status == 401:
            raise BadAnswer(
                "it asks who this is: name it with --nsqd, and a token with --token-file"
                if self._token is None
                else "it does not know the token"
            )
        if answer.status != 200:
            words = said(answer.body.strip(), _LONGEST_TEXT)
            words = f"{answer.status}: {words}" if words else str(answer.status)
            raise BadAnswer(f"it answers with status {words}")
        return answer.body

    def give_up(self) -> None:
        """End the request: whatever is slow in it, a connection or bytes that drip, fails."""
        self._is_given_up = True
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)


def _ask_all(
    asked: Sequence[tuple[str, str]],
    timeout: float,
    purse: _Purse,
    tokens: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[str, bytes | str]]:
    """Yield each address with its answer, as bytes, or why there is none, as text. asked: pairs of
    address and path."""
    deadline = time.monotonic() + timeout
    came: queue.SimpleQueue[tuple[_Request, bytes | str]] = queue.SimpleQueue()

    def ask(request: _Request) -> None:
        try:
            came.put((request, request.answer()))
        except TimeoutError:
            came.put((request, _no_answer(timeout)))
        except OSError as exc:
            came.put((request, f"no answer: {_words(exc.strerror or str(exc))}"))
        except http.NotHttp as exc:
            came.put((request, f"it does not speak HTTP: {exc}"))
        except ValueError as exc:  # BadAnswer, or a name that no host can have
            came.put((request, _words(str(exc))))

    left = [
        _Request(address, path, deadline, purse, tokens.get(address)) for address, path in asked
    ]
    for request in left:
        try:
            threading.Thread(target=ask, args=(request,), name="shmq-fleet", daemon=True).start()
        except RuntimeError as exc:  # this process may not have so many
            came.put((request, f"is not asked: {exc}"))
    while left:
        try:
            request, answer = came.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            break
        left.remove(request)
        yield request.address, answer
    for request in left:
        request.give_up()
        yield request.address, _no_answer(timeout)


def _no_answer(timeout: float) -> str:
    return f"no answer within {timeout:g} s"


def _words(text: str) -> str:
    """A host's own words for a terminal."""
    return printable(text, _LONGEST_TEXT)


# ---- reading answers ----


def _lookupd(address: str, answer: bytes | str) -> Lookupd:
    """An entry that is wrong does not hide the others: a host may have no HTTP interface."""
    if isinstance(answer, str):
        return Lookupd(address, answer)
    try:
        producers = listed(table(parsed(answer), "it"), "producers", "")
    except BadAnswer as exc:
        return Lookupd(address, f"its answer is not nsqlookupd's: {exc}")
    hosts, wrong = set(), []
    for index, item in enumerate(producers):
        try:
            hosts.add(_where(table(item, f"producers[{index}]"), f"producers[{index}]."))
        except BadAnswer as exc:
            wrong.append(str(exc))
    error = f"{len(wrong)} of its hosts cannot be asked: {wrong[0]}" if wrong else None
    return Lookupd(address, error, tuple(sorted(hosts)))


def _where(item: dict[str, Any], place: str) -> str:
    """The address of a host's HTTP interface. A path would be a socket of this host."""
    name, port = text(item, "broadcast_address", place), number(item, "http_port", place)
    if not _HOST.match(name):
        raise BadAnswer(f"{place}broadcast_address is not the name of a host")
    if not 0 < port < 65536:
        raise BadAnswer(f"{name} has no HTTP port")
    return str(Address(name, port))


def _host(address: str, answer: bytes | str) -> Host:
    if isinstance(answer, str):
        return Host(address, answer)
    try:
        document = table(parsed(answer), "it")
        return Host(
            address,
            None,
            _words(text(document, "version", "")),
            _words(text(document, "health", "")),
            number(document, "start_time", ""),
            dict(_topics(document)),
            time.monotonic(),
        )
    except BadAnswer as exc:
        return Host(address, f"its answer is not nsqd's: {exc}")


def _topics(document: dict[str, Any]) -> Iterator[tuple[Name, Counts]]:
    seen = set()
    for index, item in enumerate(listed(document, "topics", "")):
        place = f"topics[{index}]"
        topic = table(item, place)
        name, own = _name(topic, "topic_name", f"{place}."), _counts(topic, f"{place}.", _OF_TOPIC)
        channels = listed(topic, "channels", f"{place}.")
        found: list[tuple[Name, Counts]] = []
        for at, each in enumerate(channels):
            where = f"{place}.channels[{at}]"
            channel = table(each, where)
            counts = _counts(channel, f"{where}.", _OF_CHANNEL)
            counts = dataclasses.replace(counts, paused=counts.paused or own.paused)
            found.append(((name, _name(channel, "channel_name", f"{where}.")), counts))
        if own.depth or not found:
            found.append(((name, None), own))
        for key, _ in found:
            if key in seen:
                raise BadAnswer(f"{place} has a name twice")
            seen.add(key)
        yield from found


def _counts(item: dict[str, Any], place: str, names: Sequence[str]) -> Counts:
    paused = flag(item, "paused", place)
    return Counts(**{name: number(item, name, place) for name in names}, paused=paused)


def _name(item: dict[str, Any], key: str, place: str) -> str:
    value = text(item, key, place)
    if not valid_name(value):
        raise BadAnswer(f"{place}{key} is not a name")
    return value
