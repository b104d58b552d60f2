"""The instances of fleet_kills.py, each in a network namespace of its own, and how a query reaches
them: with TLS and AUTH or without, by their addresses or by a real nsqlookupd.

Servers that the instances call (nsqlookupd, the one that authorises) are on the storm's side of the
cables, so what happens to a cable happens to these calls too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from chaos.fleet.verdict import Loss, Row
from support import processes, recount
from support.certificates import write_certificate
from support.fake_auth_server import Authority, reply, rule
from support.fleet import Instance
from support.network import Cable
from support.real_nsqlookupd import Lookupd

from shmq.layout import State
from shmq.staging_place import staged_paths

INSTANCES = 3
OUT = "out"  # the topic that a query writes, and its channel
PORT, WEB_PORT = 4150, 4151
SECRET = "open sesame"


@dataclass(frozen=True)
class Round:
    """The choices for a round. writes: the query writes to topics of the instances, else to files.
    tls: connections have TLS and AUTH. lookupd: the query finds what it reads by an nsqlookupd."""

    writes: bool = False
    tls: bool = False
    lookupd: bool = False

    def __str__(self) -> str:
        to = "topics of the instances" if self.writes else "parquet files"
        how = "over TCP" if not self.tls else "over TLS, with a secret"
        found = "that an nsqlookupd knows" if self.lookupd else "at known addresses"
        return f"from three instances {found} to {to}, {how}"


class Remote(Instance):
    """An instance in a namespace. log: the numbers that were published, by id."""

    def __init__(
        self, name: str, directory: Path, log: dict[int, int], cable: Cable, options: dict[str, Any]
    ) -> None:
        self._log, self.cable = log, cable
        super().__init__(name, directory, f"{cable.address}:{PORT}", cable.nsenter, **options)

    def begin(self) -> None:
        """Serve, and attach to it."""
        super().begin()
        self.broker.create_channel(OUT, OUT)
        self._reader = self.broker.consumer(OUT, OUT, max_in_flight=2000)

    def publish_numbers(self, numbers: range) -> None:
        """One message for each."""
        ids = self.broker.producer("t").publish_many([b"%d" % number for number in numbers])
        self._log.update(zip(ids, numbers, strict=True))

    def written(self) -> list[bytes]:
        """The bodies that have come to the topic that a query writes, since the last call."""
        found: list[bytes] = []
        while batch := self._reader.take_many(1000, timeout=0):
            found += batch.bodies()
            batch.finish()
        return found

    @property
    def held(self) -> int:
        """How many messages wait or are leased."""
        stats = self.broker.channel_stats("t", "c")
        return int(stats.depth + stats.leased)

    def leased(self) -> dict[int, set[int]]:
        """The numbers of each lease."""
        found = self._recount()
        slots = found.slots[found.of[State.LEASED]]
        leases: dict[int, set[int]] = {}
        for lease, number in zip(slots["move"].tolist(), slots["id"].tolist(), strict=True):
            leases.setdefault(lease, set()).add(self._log[number])
        return leases

    def _recount(self) -> recount.Recount:
        return recount.recount(self.name, "t", "c", undecided=True)

    def kill_supervisor(self, seconds: float) -> None:
        """Kill it, and start another after some seconds."""
        self.child.close()
        time.sleep(seconds)
        self.start()

    def lose_memory(self, seconds: float) -> Loss:
        """Kill all processes, remove the memory, and start again after some seconds."""
        gateways = self.gateways()
        self.child.close()
        for pid in gateways:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            processes.wait_ended(pid)
        waiting = {self._log[int(number, 16)] for number in self._recount().waiting}
        loss = Loss(self.address, waiting, self.leased())
        self.broker.close()
        processes.remove_instance(self.name)
        time.sleep(seconds)
        self.begin()
        return loss

    def staged(self) -> list[str]:
        """The files of rows that are staged, and of commits that have begun and not ended."""
        places = map(Path, staged_paths(self.name, os.geteuid()))
        return sorted(path.name for place in places for path in place.glob("gateway/*/*"))

    def close(self) -> None:
        super().close()
        processes.remove_instance(self.name)
        for place in staged_paths(self.name, os.geteuid()):
            shutil.rmtree(place, ignore_errors=True)


@dataclass
class Fleet:
    """The instances of a round, and the servers that they call."""

    round: Round
    instances: list[Remote] = field(default_factory=list)
    lookupd: Lookupd | None = None
    _certificate: str | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @classmethod
    def begin(cls, round_: Round, name: str, scratch: Path, log: dict[int, int]) -> Self:
        """Start all of it. name: how the instances' names begin. log: the numbers that are
        published, by id."""
        made = cls(round_)
        with contextlib.ExitStack() as stack:
            cables = [stack.enter_context(contextlib.closing(Cable())) for _ in range(INSTANCES)]
            if round_.lookupd:
                made.lookupd = Lookupd("0.0.0.0")  # each cable has another address of this side
                stack.callback(made.lookupd.close)
            secure = made._secured(cables, scratch) if round_.tls else {}
            for number, cable in enumerate(cables):
                options = dict(secure)
                if round_.tls:
                    authority = stack.enter_context(Authority(cable.host))
                    authority.reply = (200, reply(3600, rule()))
                    options["auth_http_address"] = authority.address
                if made.lookupd is not None:
                    options |= {"lookupd_tcp_address": f"{cable.host}:{made.lookupd.port}"}
                    options |= {"broadcast_address": cable.address}
                    options |= {"http_address": f"{cable.address}:{WEB_PORT}"}
                one = Remote(f"{name}-{number}", scratch / str(number), log, cable, options)
                made.instances.append(one)
                stack.callback(one.close)
            made._stack = stack.pop_all()
        return made

    def _secured(self, cables: list[Cable], scratch: Path) -> dict[str, Any]:
        cert, key = scratch / "cert.pem", scratch / "key.pem"
        names = ",".join(f"IP:{cable.address}" for cable in cables)
        write_certificate(cert, key, "fleet", ("-addext", f"subjectAltName={names}"))
        self._certificate = str(cert)
        return {
            "tls_cert": cert,
            "tls_key": key,
            "https_address": "",
            "tls_required": "tcp-https",
        }

    @property
    def reading(self) -> dict[str, str]:
        """The options of a query that reads them."""
        if self.lookupd is not None:
            return {"lookupd": self.lookupd.web, **self._login}
        return {"instances": self._addresses, **self._login}

    @property
    def writing(self) -> dict[str, str] | None:
        """The options of a query that writes to them; None if it writes to files."""
        if not self.round.writes:
            return None
        return {"instances": self._addresses, "topic": OUT, **self._login}

    @property
    def _addresses(self) -> str:
        return ",".join(one.address for one in self.instances)

    @property
    def _login(self) -> dict[str, str]:
        if self._certificate is None:
            return {}
        return {"tls": self._certificate, "authSecret": SECRET}

    def close(self) -> None:
        """End all of it."""
        self._stack.close()


class Topics:
    """The rows that a query has written to topics of the instances."""

    def __init__(self, instances: list[Remote]) -> None:
        self.rows: list[Row] = []
        self._instances = instances

    def read(self) -> int:
        """Read what was added. Returns the number of all rows."""
        for one in self._instances:
            self.rows += [Row(*map(int, body.split())) for body in one.written()]
        return len(self.rows)
