"""The commit of a write to many instances, which are gateways of this process that the tests cut
off: no JVM, no broker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from shmq.errors import Unreachable

pytest.importorskip("pyspark")

from shmq.spark import hosts, many_sink
from shmq.spark.hosts import HostAway
from shmq.spark.options import Settings

A, B, C = "a:4150", "b:4150", "c:4150"
ALL = f"{A},{B},{C}"


@dataclass
class Network:
    """The addresses that do not answer, and the rows that were committed."""

    away: set[str] = field(default_factory=set)
    committed: dict[tuple[str, str, int], list[Rows]] = field(default_factory=dict)

    def check(self, address: str) -> None:
        if address in self.away:
            raise Unreachable(f"{address} did not answer")


@dataclass
class Receiver:
    """A gateway that takes staged rows."""

    network: Network
    address: str
    ended = False

    def stage(self, topic: str, writer: str, epoch: int, bodies: Any) -> Any:
        self.network.check(self.address)
        rows = [bytes(body) for body in bodies]
        return Rows(rows) if rows else None

    def commit(
        self, topic: str, writer: str, epoch: int, staged: list[Rows], skip: bool = False
    ) -> int:
        self.network.check(self.address)
        if not self.network.committed.setdefault((self.address, writer, epoch), []):
            self.network.committed[self.address, writer, epoch] = staged
            return sum(len(one.bodies) for one in staged)
        return 0

    def close(self) -> None:
        pass


@dataclass
class Rows:
    bodies: list[bytes]

    @property
    def rows(self) -> int:
        return len(self.bodies)


@pytest.fixture
def receivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """Gateways that only take rows."""
    network = Network()
    monkeypatch.setattr(hosts, "dial", lambda place: Receiver(network, place.address))
    yield network
    hosts.disconnect()


def written(network: Network) -> list[bytes]:
    return sorted(
        body for found in network.committed.values() for one in found for body in one.bodies
    )


def test_a_commit_is_repeated_until_every_instance_has_it(
    receivers: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    settings = Settings({"instances": ALL, "topic": "out"})
    staged = []
    for number in range(6):
        monkeypatch.setattr(many_sink, "_turn", lambda _, n=number: settings.instances[n % 3])
        rows = pa.record_batch({"body": pa.array([b"%d" % number, b"x%d" % number])})
        staged.append(many_sink.stage([rows.slice(0, 1), rows.slice(1)], settings, "w", 3, ""))
    bodies = sorted(b"%s%d" % (x, number) for number in range(6) for x in (b"", b"x"))
    receivers.away.add(B)
    loose = Settings({"instances": ALL, "topic": "out", "timeout": "0s"})
    with pytest.raises(HostAway, match=f"{B} of 3 instances did not answer"):
        many_sink.commit(staged, loose, "w", 3)
    assert len(written(receivers)) == 8
    monkeypatch.setattr(many_sink, "_turn", lambda _: B)
    with pytest.raises(HostAway, match="stage rows"):
        many_sink.stage([rows], settings, "w", 4, "")
    monkeypatch.setattr(many_sink.time, "sleep", lambda seconds: receivers.away.clear())
    patient = Settings({"instances": ALL, "topic": "out", "onMissingHost": "wait"})
    assert many_sink.commit(staged, patient, "w", 3) == 4
    assert written(receivers) == bodies
    assert many_sink.commit(staged, settings, "w", 3) == 0
    assert many_sink.stage([], settings, "w", 3, "") is None


@pytest.mark.parametrize(
    "given", [{"lookupd": "a:4161"}, {"instances": A, "onMissingHost": "skip"}]
)
def test_a_write_needs_all_of_its_instances(given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="a write"):
        many_sink.check(Settings({"topic": "out", **given}))
