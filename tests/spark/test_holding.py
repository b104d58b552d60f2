"""The leases of batch reads, kept while their application runs and refused to others: of one
instance, and of many over TCP, by the same rules. No JVM: another process stands for it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fleet import Instance
from support.processes import eventually

import shmq
from shmq import LeaseFenced, LeaseLost, procfs

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from pyspark.sql.streaming.datasource import ReadMaxRows

from shmq.spark import chain, hosts, keeper, reads, staging
from shmq.spark.options import Settings
from shmq.spark.reading import finish_lease
from shmq.spark.source import ShmqDataSource

TTL = 4.0


class Place:
    """The instances that are read: one, or two by TCP."""

    def __init__(self, brokers: list[shmq.Broker], options: dict[str, str]) -> None:
        self.brokers, self._options = brokers, {"topic": "t", "channel": "c", **options}
        for broker in brokers:
            broker.create_channel("t", "c")

    def publish(self, *bodies: bytes) -> list[bytes]:
        for broker in self.brokers:
            broker.producer("t").publish_many(bodies)
        return sorted(bodies * len(self.brokers))

    def options(self, **more: object) -> dict[str, str]:
        return self._options | {name: str(value) for name, value in more.items()}

    def batch(self, **more: object) -> Any:
        return pickle.loads(pickle.dumps(ShmqDataSource(self.options(**more)).reader(None)))

    def rows(self, **more: object) -> list[bytes]:
        reader = self.batch(**more)
        found = [batch for part in reader.partitions() for batch in reader.read(part)]
        return sorted(body for batch in found for body in batch.column("body").to_pylist())

    @property
    def leased(self) -> int:
        return sum(broker.channel_stats("t", "c").leased for broker in self.brokers)

    def finish(self, consumer: str) -> int:
        known = ("instance", "instances")
        names = {name: value for name, value in self._options.items() if name in known}
        return finish_lease(names.pop("instance", None), "t", "c", consumer, **names)


@pytest.fixture(params=["one", "many"])
def place(
    request: pytest.FixtureRequest, new_instance: Callable[[], str], tmp_path: Path
) -> Iterator[Place]:
    made: list[Instance] = []
    many = request.param == "many"
    for number in range(1 + many):
        directory = tmp_path / f"instance{number}"
        made.append(Instance(new_instance(), directory, gateway_workers=1))
    options = {"instance": made[0].broker.instance}
    if many:
        addresses = ",".join(one.address for one in made)
        options = {"instances": addresses, "transport": "tcp"}
    yield Place([one.broker for one in made], options)
    hosts.disconnect()
    for one in made:
        one.close()


class Application:
    """A process that stands for the JVM of an application, whose Python processes are forked."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "1000"])
        pid = self._process.pid
        self.name = f"{pid}-{procfs.start_time(pid)}"

    def call(self, work: Callable[[], Any]) -> Any:
        """Do `work` in a process of this application, which then ends."""
        context = multiprocessing.get_context("fork")
        answer = context.Queue()

        def run() -> None:
            with pytest.MonkeyPatch.context() as patch:
                mine = reads.Application(self.name, ())
                patch.setattr(staging, "application", lambda: self.name)
                patch.setattr(reads.Application, "mine", classmethod(lambda cls: mine))
                try:
                    answer.put(work())
                except Exception as exc:
                    answer.put(exc)
                # its end must not come before the keeper is there: the ttl is short
                for child in keeper._children:
                    eventually(lambda child=child: child.stdout is None or child.stdout.closed)
            answer.close()
            answer.join_thread()

        process = context.Process(target=run)
        process.start()
        found = answer.get()
        process.join()
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def application() -> Iterator[Callable[[], Application]]:
    made: list[Application] = []

    def start() -> Application:
        made.append(Application())
        return made[-1]

    yield start
    for each in made:
        each.kill()


def passes(seconds: float) -> None:
    over = time.monotonic() + seconds
    eventually(lambda: time.monotonic() > over)


def test_what_is_read_is_kept_as_long_as_the_application(
    place: Place, application: Callable[[], Application]
) -> None:
    bodies, job = place.publish(b"1", b"2", b"3"), application()
    for _ in range(2):  # each time by another process of Spark's
        assert job.call(lambda: place.rows(consumer="x", leaseTtl=f"{TTL}s")) == bodies
    passes(2 * TTL)
    place.publish(b"later")
    assert job.call(lambda: place.rows(consumer="x", leaseTtl=f"{TTL}s")) == bodies
    assert job.call(lambda: place.finish("x")) == len(bodies)
    assert place.leased == 0
    later = [b"later"] * len(place.brokers)
    assert job.call(lambda: place.rows(consumer="x", leaseTtl=f"{TTL}s")) == later
    job.kill()
    eventually(lambda: place.leased == 0)


def test_another_application_does_not_get_a_lease_that_is_needed(
    place: Place, application: Callable[[], Application]
) -> None:
    bodies, job, other = place.publish(b"1", b"2"), application(), application()
    assert job.call(lambda: place.rows(consumer="x")) == bodies
    with pytest.raises(LeaseFenced, match=r"leases under this name, and lives.*of its own"):
        other.call(lambda: place.rows(consumer="x"))
    with pytest.raises(LeaseFenced, match="another Spark application, which lives"):
        other.call(lambda: place.finish("x"))
    assert job.call(lambda: place.rows(consumer="x")) == bodies
    job.kill()
    # the next run of the program reads what the dead one has left
    eventually(lambda: _reads(other, place) == bodies)
    assert other.call(lambda: place.finish("x")) == len(bodies)
    assert place.leased == 0


def _reads(application: Application, place: Place) -> list[bytes] | None:
    try:
        found: list[bytes] = application.call(lambda: place.rows(consumer="x"))
    except LeaseFenced:  # the end of the application is not known there yet
        return None
    return found


def test_rows_that_went_back_are_not_finished_as_those_that_came_for_them(
    place: Place, application: Callable[[], Application]
) -> None:
    """A job writes what it reads, loses its lease, counts, and finishes: what it counted was never
    written."""
    place.publish(b"1", b"2")
    job = application()
    job.call(lambda: place.rows(consumer="x"))
    for broker in place.brokers:
        for lease in broker.lease_owner("t", "c", "x").leases:
            broker.return_lease("t", "c", lease.id)
    everything = place.publish(b"3") + place.publish()
    with pytest.raises(LeaseLost, match="comes twice"):
        job.call(lambda: place.rows(consumer="x"))
    assert place.leased == 0
    assert job.call(lambda: place.finish("x")) == 0
    assert len(job.call(lambda: place.rows(consumer="x"))) == 3 * len(everything)


def test_a_keeper_that_was_killed_is_followed_by_another(
    place: Place, application: Callable[[], Application]
) -> None:
    bodies, job = place.publish(b"1"), application()

    def read() -> tuple[list[bytes], list[int]]:
        rows = place.rows(consumer="x", leaseTtl=f"{TTL}s")
        return rows, [child.pid for child in keeper._children]

    rows, (mine,) = job.call(read)
    assert rows == bodies
    began = procfs.start_time(mine)
    os.kill(mine, signal.SIGKILL)
    eventually(lambda: procfs.start_time(mine) != began)
    assert job.call(lambda: place.rows(consumer="x", leaseTtl=f"{TTL}s")) == bodies
    passes(2 * TTL)
    assert job.call(lambda: place.finish("x")) == len(bodies)


def test_a_second_query_under_the_name_of_one_that_lives_reads_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a batch, and a batch under that of a query."""
    monkeypatch.setattr(chain, "_ENDING", 0.1)
    place.publish(b"1", b"2")

    def query() -> Any:
        return pickle.loads(
            pickle.dumps(ShmqDataSource(place.options(consumer="x")).streamReader(None))
        )

    def latest(reader: Any) -> Any:
        return reader.latestOffset(reader.initialOffset(), ReadMaxRows(10))

    first = query()
    end = latest(first)
    second = query()
    with pytest.raises(LeaseFenced, match=r"leases under this name, and lives.*of its own"):
        latest(second)
    with pytest.raises(LeaseFenced, match="of its own"):
        place.rows(consumer="x")
    start = first.initialOffset() if "instance" in place.options() else {}
    parts = first.partitions(start, end)
    assert sum(len(batch) for part in parts for batch in first.read(part)) == 2 * len(place.brokers)
    first.stop()
    # a lease that a checkpoint names is not another query's either
    for take in (lambda: place.rows(consumer="x"), lambda: latest(query())):
        with pytest.raises(LeaseFenced, match="checkpoint"):
            take()
    again = query()
    assert again.latestOffset(end, ReadMaxRows(10)) == end
    again.stop()
    assert place.leased == 0


# ---- looks ----


def test_a_look_is_told_from_a_use(
    place: Place, application: Callable[[], Application], monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(place.brokers) > 1:
        pytest.skip("who reads many instances may be on other hosts")
    for number in range(100):
        place.publish(b"%03d" % number)
    first, second = application(), application()
    settings = Settings(place.options())
    assert settings.numPartitions > 1 or pytest.skip("one core: a batch has one part")

    def looks() -> None:
        reader = place.batch(consumer="x", leaseTtl=f"{TTL}s")
        parts = reader.partitions()
        assert len(parts) == 2
        assert [batch.num_rows for batch in reader.read(parts[0])] == [50]  # as `show` does

    first.call(looks)
    eventually(lambda: place.leased == 0)
    with pytest.raises(LeaseLost, match=r"lease 1 .*"):
        first.call(lambda: place.finish("x"))
    assert len(first.call(lambda: place.rows(consumer="x", leaseTtl=f"{TTL}s"))) == 100
    passes(2 * TTL)
    assert first.call(lambda: place.finish("x")) == 100
    assert second.call(lambda: place.rows(consumer="y")) == []


def test_who_reads_on_after_a_look_is_told(
    place: Place, application: Callable[[], Application]
) -> None:
    if len(place.brokers) > 1 or Settings(place.options()).numPartitions < 2:
        pytest.skip("of one instance, and with two parts")
    place.publish(*(b"%03d" % number for number in range(100)))
    job = application()

    def looks() -> Any:
        reader = place.batch(leaseTtl=f"{TTL}s")
        parts = reader.partitions()
        list(reader.read(parts[0]))
        return reader, parts

    reader, parts = job.call(looks)
    eventually(lambda: place.leased == 0)
    with pytest.raises(LeaseLost, match=r"only looked at.*load.. again.*peek"):
        list(reader.read(parts[1]))
