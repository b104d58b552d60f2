"""Many instances as one: which of them answer, and calls to all of them."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from shmq.errors import MemoryLost
from shmq.spark.chain import Offset
from shmq.spark.hosts import UNREACHABLE, Directory, Host, HostAway, NoLookupd, probe, said
from shmq.spark.options import Settings

_log = logging.getLogger(__name__)

H = TypeVar("H")
T = TypeVar("T")

#: Identity of the memory of an instance -> the offset there, and its address as "a".
Offsets = dict[str, Offset]

#: Hosts that are asked at the same time.
_AT_ONCE: Final = 16
#: Seconds between two looks at whether a missing host is back.
_LOOK_AGAIN: Final = 0.1


class Fleet:
    """The instances that one query reads. It is used by one thread; the calls run in others."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._directory = Directory(settings)
        self._hosts: dict[str, Host] = {}  # by identity
        self._at: dict[str, str] = {}  # address -> identity of the memory there
        self._failed: dict[str, Failure] = {}  # by address
        self._named: frozenset[str] = frozenset()
        self._told: set[str] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._lost_before = 0

    # ---- which there are ----

    def live(self, start: Offsets, exact: bool = False) -> dict[str, Host]:
        """The instances that are named, and those of `start`, by identity; without those that are
        away. exact: none may be away, whatever onMissingHost says.

        Raises HostAway, but with onMissingHost=skip only if `exact`."""
        named = self._name()
        self._connect(named)
        recorded = self._unknown(start)
        self._connect(recorded)
        wanted = {self._at.get(address) for address in named} | start.keys()
        hosts = {key: host for key, host in self._hosts.items() if key in wanted}
        away = {
            address: self._failed[address].error
            for address in {*named, *recorded}
            if address in self._failed
        }
        for key, host in list(hosts.items()):
            if host.away is not None and not host.is_due:
                away[host.address] = host.away
                del hosts[key]
        self._report(away, exact)
        return hosts

    def needed(self, end: Offsets) -> tuple[dict[str, Host], Offsets]:
        """The hosts of the offsets, and the offsets whose memory is lost. Raises HostAway for one
        that is away, whatever onMissingHost says, because a micro-batch that Spark has written
        down must be whole. With failOnDataLoss=false one that is not named any more counts as
        lost."""
        named = self._name()
        self._connect(named)
        self._connect(self._unknown(end))
        hosts, lost, away = dict[str, Host](), Offsets(), dict[str, Exception]()
        for key, offset in end.items():
            address, host = offset["a"], self._hosts.get(key)
            if host is not None:
                hosts[key] = host
            elif self.is_lost(key, offset):
                lost[key] = offset
            else:
                away[address] = self._failed[address].error
        self._report(away, exact=True)
        return hosts, lost

    def is_lost(self, key: str, offset: Offset) -> bool:
        """Whether the address of an offset answers, but with other memory. With failOnDataLoss=
        false an instance that is away and not named any more counts as lost."""
        if key in self._hosts:
            return False
        if offset["a"] in self._at:
            return True
        return not self._settings.failOnDataLoss and offset["a"] not in self._named

    def is_named(self, host: Host) -> bool:
        """Whether an option names the instance. With lookupd each that was read counts as named,
        because an nsqlookupd forgets what is away."""
        if not self._directory.is_fixed:
            return True
        return any(self._at.get(address) == host.identity for address in self._named)

    @property
    def away(self) -> list[str]:
        """The addresses of the instances that do not answer."""
        silent = {host.address for host in self._hosts.values() if host.away is not None}
        return sorted(silent | self._failed.keys())

    @property
    def lost(self) -> int:
        """How often leases were lost; see `Chain.lost`."""
        return self._lost_before + sum(host.chain.lost for host in self._hosts.values())

    def connected(self) -> dict[str, Host]:
        """The instances that answered the last call, by identity."""
        return {key: host for key, host in self._hosts.items() if host.away is None}

    def _name(self) -> frozenset[str]:
        try:
            self._named = frozenset(self._directory.addresses())
        except NoLookupd:
            if self._settings.onMissingHost != "skip":
                raise
            _log.warning("no nsqlookupd answers", exc_info=True)
        return self._named

    def _unknown(self, offsets: Offsets) -> set[str]:
        """The addresses of those offsets whose memory was not found where the options look."""
        return {offset["a"] for key, offset in offsets.items() if key not in self._hosts}

    def _connect(self, addresses: Iterable[str]) -> None:
        new = {
            address: address
            for address in addresses
            if address not in self._at
            and (address not in self._failed or self._failed[address].is_due)
        }

        def connected(address: str) -> Host:
            if address in self._failed:
                probe(address)
            return Host(self._settings, address)

        found, failed = self._all(new, connected)
        for address, host in found.items():
            self._failed.pop(address, None)
            self._at[address] = host.identity
            known = self._hosts.get(host.identity)
            if known is not None and known.away is None:
                continue  # another address of the same instance
            if known is not None:
                known.close()
            self._hosts[host.identity] = host
        for address, error in failed.items():
            self._failed.setdefault(address, Failure()).note(error)

    def _forget(self, key: str) -> None:
        host = self._hosts.pop(key, None)
        if host is not None:
            self._lost_before += host.chain.lost
            host.close()
        self._at = {address: memory for address, memory in self._at.items() if memory != key}

    # ---- calls ----

    def each(
        self, hosts: Mapping[str, Host], function: Callable[[Host], T], exact: bool = False
    ) -> dict[str, T]:
        """`function(host)` for each host, at the same time. Returns the results of those that
        answered. Raises HostAway as `live`, MemoryLost if the memory of one has ended meanwhile,
        and any other error when all calls have ended."""
        results, errors = self._all(hosts, lambda host: host.call(function))
        lost = [key for key, error in errors.items() if isinstance(error, MemoryLost)]
        for key in lost:
            self._forget(key)
        if lost:
            raise errors[lost[0]]
        self._report({hosts[key].address: error for key, error in errors.items()}, exact)
        return results

    def end(self, ending: Callable[[Any], int]) -> int:
        """`ending(broker)` on every instance that answers. Returns the sum. Raises HostAway at the
        end if one does not."""
        named = self._name()
        self._connect(named)
        hosts = {key: host for key, host in self._hosts.items() if key in self._at.values()}
        results = self.each(hosts, lambda host: ending(host.broker), exact=True)
        self.live({}, exact=True)
        return sum(results.values())

    def until(self, call: Callable[[], T]) -> T:
        """`call()`, again while the memory of an instance has changed, and with onMissingHost=wait
        while one is away."""
        while True:
            try:
                return call()
            except MemoryLost as exc:
                _log.warning("%s", exc)
            except HostAway:
                if self._settings.onMissingHost != "wait":
                    raise
                time.sleep(_LOOK_AGAIN)

    def close(self) -> None:
        """Close the holders. Their leases wait for the next run."""
        for key in list(self._hosts):
            self._forget(key)
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _all(
        self, keys: Mapping[str, H], call: Callable[[H], T]
    ) -> tuple[dict[str, T], dict[str, Exception]]:
        """`call` of each value at the same time: the results, and the errors of those that did not
        answer or lost their memory. Any other error is raised when all calls have ended."""
        results: dict[str, T] = {}
        errors: dict[str, Exception] = {}
        other: Exception | None = None
        if len(keys) > 1 and self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, "shmq hosts")
        running = [
            (key, self._threads.submit(call, value) if len(keys) > 1 and self._threads else None)
            for key, value in keys.items()
        ]
        for key, future in running:
            try:
                results[key] = call(keys[key]) if future is None else future.result()
            except ssl.SSLCertVerificationError as exc:  # an OSError that no time will mend
                other = other or exc
            except (*UNREACHABLE, MemoryLost) as exc:
                errors[key] = exc
            except Exception as exc:
                other = other or exc
        if other is not None:
            raise other
        return results, errors

    def _report(self, away: Mapping[str, Exception], exact: bool) -> None:
        """Raises HostAway for these addresses, unless onMissingHost=skip and not `exact`. With skip
        and wait it logs each of them once."""
        self._told &= {*self.away, *away}
        if not away:
            return
        policy, settings = self._settings.onMissingHost, self._settings
        each = "; ".join(f"{address}: {said(error)}" for address, error in sorted(away.items()))
        channel = f"{settings.topic}/{settings.channel}"
        if policy != "fail" and (new := away.keys() - self._told):
            self._told |= new
            _log.warning("%s: %s instances that do not answer: %s", channel, policy, each)
        if policy != "skip":
            raise HostAway(
                f"read {channel} of {len(away)} of {len(self._named)} instances: no answer within "
                f"{settings.hostTimeout:g} s ({each}). What they hold waits there. Start the query "
                'again when they answer, or .option("onMissingHost", "wait") or "skip"'
            )
        if exact:
            raise HostAway(
                f"read {channel}: Spark has planned a micro-batch with messages of instances that "
                f"do not answer ({each}), and a micro-batch cannot be read in part. Start the "
                'query again when they answer; .option("onMissingHost", "wait") waits for them. '
                "If one will never come back, take it out of the option instances and give "
                '.option("failOnDataLoss", "false")'
            )


class Failure:
    """Attempts to connect to an address that failed."""

    #: Seconds until the next attempt: the first pause, and the longest.
    PAUSES: Final = (0.2, 5.0)

    def __init__(self) -> None:
        self.error: Exception = NoLookupd("not tried")
        self._pause, self._next = self.PAUSES[0] / 2, 0.0

    def note(self, error: Exception) -> None:
        """Another attempt has failed."""
        self.error = error
        self._pause = min(self._pause * 2, self.PAUSES[1])
        self._next = time.monotonic() + self._pause

    @property
    def is_due(self) -> bool:
        """Whether to try again now."""
        return time.monotonic() >= self._next
