"""Streams from topic to topic through Spark, while everything about them is killed.

Numbers are published to a first topic; one query moves them to a second, another from there to a
third, where they are counted. Random ones of the processes get SIGKILL: the driver, its JVM, the
executors' Python workers, the processes that plan and commit for Spark, the broker's supervisor. A
driver that died is started again, each time with the other trigger. At the end every number must
have come once, in its first attempt at every hop, and nothing may be left: no lease, no staged row,
no message in a slot, no entry of a dead client.

    python spark_kills.py drive WORK     what the driver's process runs
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil
import standstill
from support import recount
from support.deliveries import Drain
from support.spark_home import spark_home

import shmq
from shmq import layout, shm, sources
from shmq.staging_place import staged_paths

HOPS = (("first", "c", "second"), ("second", "c", "third"))
OUT = ("third", "c")
PER_TRIGGER = 500  # messages, so that there are many micro-batches
BATCH = 20  # published at once
AHEAD = 3000  # messages published that have not come: then publishing waits
LULL = 1.5  # seconds at most between progress and the next kill
PATIENCE = 300.0  # seconds without progress that are too many
DRIVERS = 12  # that end by themselves without progress are too many: Spark gives up if it is slow
PAUSE = 0.05
FIRST_REST, LONGEST_REST = 1.0, 30.0  # seconds before a query that failed is begun again


class Violation(Exception):
    """A promise was broken."""


@dataclass(frozen=True)
class Work:
    """The parameters of a driver."""

    instance: str
    scratch: str
    available_now: bool


# ---- the driver ----


def drive(work: Work) -> None:
    """Both queries, begun again whenever they end, until stdin ends."""
    import shmq.spark

    spark = shmq.spark.session(
        "local[2,4]",
        "shmq kills",
        spark_sql_shuffle_partitions=2,
        spark_log_level="OFF",
        spark_local_dir=work.scratch,
    )
    stopping = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopping.set()), daemon=True).start()
    queries: dict[Any, Any] = {}
    rests = {hop: Rest() for hop in HOPS}
    # from this thread only: in another Spark does not see which sources are registered
    while not stopping.wait(PAUSE) or any(query.isActive for query in queries.values()):
        for hop in HOPS:
            query = queries.get(hop)
            if query is not None and query.isActive:
                if stopping.is_set() and not work.available_now:  # that comes to its end
                    query.stop()
                continue
            if query is not None:
                if (error := query.exception()) is not None:
                    print(f"from {hop[0]}: {str(error)[:3000]}", flush=True)
                    rests[hop].failed(query.lastProgress is not None)
                del queries[hop]
            if not stopping.is_set() and rests[hop].over:
                queries[hop] = _start(spark, work, *hop)
    spark.stop()


class Rest:
    """The time before a query that failed is begun again, which doubles with each failure.

    Spark gives a Python process ten seconds to start, then fails the query; the process goes on
    with its start. A query that is begun again at once on a busy machine starts the next process
    beside it, and that one is slower still: no query ever gets past its beginning.
    """

    def __init__(self) -> None:
        self._rest, self._until = FIRST_REST, 0.0

    def failed(self, began: bool) -> None:
        """began: it got past its beginning, so the machine is not to blame."""
        self._rest = FIRST_REST if began else min(2 * self._rest, LONGEST_REST)
        self._until = time.monotonic() + self._rest

    @property
    def over(self) -> bool:
        """Whether it may be begun."""
        return time.monotonic() >= self._until


def _start(spark: Any, work: Work, topic: str, channel: str, to: str) -> Any:
    read = {"instance": work.instance, "topic": topic, "channel": channel, "consumer": "kills"}
    rows = (
        spark.readStream.format("shmq")
        .options(**read, maxMessagesPerTrigger=PER_TRIGGER, minPartitionRows=100, numPartitions=2)
        .load()
        .selectExpr("concat(cast(body as string), ' ', attempts) as body")
    )
    write = {
        "instance": work.instance,
        "topic": to,
        "checkpointLocation": str(Path(work.scratch, topic)),
    }
    writer = rows.writeStream.format("shmq").options(**write)
    trigger = (
        {"availableNow": True} if work.available_now else {"processingTime": "100 milliseconds"}
    )
    return writer.trigger(**trigger).start()


class Driver:
    """The driver that lives, and those before it."""

    def __init__(self, instance: str, scratch: Path) -> None:
        self._instance, self._scratch = instance, scratch
        self._available_now = itertools.cycle((False, True))
        self._log = (scratch / "drivers.log").open("ab")
        home = str(spark_home(scratch / "spark"))
        self._env = {**os.environ, **standstill.ENVIRONMENT, "SPARK_HOME": home}
        self._sessions: list[int] = []
        self.statuses: list[int] = []  # the exit statuses of those before
        self.process = self._begin()

    def _begin(self) -> subprocess.Popen[bytes]:
        work = Work(self._instance, str(self._scratch), next(self._available_now))
        return self._launch(__file__, json.dumps(asdict(work)))

    def _launch(self, program: str, work: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, program, "drive", work],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env=self._env,
        )
        self._sessions.append(process.pid)
        return process

    def revive(self) -> None:
        """Start another if this one has ended."""
        if self.process.poll() is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.statuses.append(self.process.returncode)
            self.process = self._begin()

    def processes(self, word: str, old: bool = False) -> list[psutil.Process]:
        """Those of the driver's session whose command line has this word; old: of former drivers'
        too."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                mine = os.getsid(process.pid) in (self._sessions if old else self._sessions[-1:])
                if mine and word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def children(self) -> list[psutil.Process]:
        """Of the driver: its JVM."""
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def standing(self) -> str:
        """Where all processes of all drivers stand; the drivers are dead then."""
        return standstill.report(self._sessions, self._scratch / "drivers.log")

    def end(self) -> None:
        """As a service ends: its queries stop first."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.wait(PATIENCE):
            raise Violation(f"the last driver ended with {self.process.returncode}")

    def close(self) -> None:
        """Kill what lives still of any driver."""
        for process in self.processes("", old=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        self._log.close()


# ---- the kills ----


class Kills:
    """The victims, in turns: each kind once before any comes again."""

    def __init__(self, driver: Driver, broker: shmq.Broker, choice: random.Random) -> None:
        self._driver, self._broker, self._choice = driver, broker, choice
        self._kinds: dict[str, Callable[[], list[int]]] = {
            "driver": lambda: [driver.process.pid],
            "JVM": lambda: [child.pid for child in driver.children()],
            "worker": lambda: self._pids("pyspark.daemon"),
            "planner": lambda: self._pids("python_streaming_source_runner"),
            "supervisor": lambda: [broker.supervisor_pid],
        }
        self._turn = self._turns()
        self.done: Counter[str] = Counter()

    def _pids(self, word: str) -> list[int]:
        return [process.pid for process in self._driver.processes(word)]

    def _turns(self) -> Iterator[str]:
        while True:
            kinds = list(self._kinds)
            self._choice.shuffle(kinds)
            yield from kinds

    def one(self) -> str:
        """Kill one process; of which kind."""
        for kind in self._turn:
            pids = self._kinds[kind]()
            if not pids:
                continue  # between two queries
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._choice.choice(pids), signal.SIGKILL)
                self.done[kind] += 1
                return kind
        raise AssertionError


class Stream:
    """Numbers into the first topic, until told to stop."""

    def __init__(self, instance: str, rate: float, drain: Drain) -> None:
        self.published = 0
        self._instance, self._rate, self._drain = instance, rate, drain
        self._stop = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with shmq.attach(self._instance) as broker:
                producer = broker.producer(HOPS[0][0])
                while not self._stop.wait(BATCH / self._rate):
                    if self.published - len(self._drain.delivered.bodies) > AHEAD:
                        continue
                    numbers = range(self.published, self.published + BATCH)
                    producer.publish_many([b"%d" % number for number in numbers])
                    self.published += BATCH
        except BaseException as exc:
            self.error = exc

    def stop(self) -> None:
        """How many there were is final then."""
        self._stop.set()
        self._thread.join(PATIENCE)
        if self.error is not None:
            raise self.error


def progress(stream: Stream, drain: Drain, driver: Driver, beyond: int) -> None:
    """Until more than `beyond` have come out at the end."""
    came, deadline, drivers = -1, 0.0, 0
    while len(drain.delivered.bodies) <= beyond:
        driver.revive()
        for error in (stream.error, drain.error):
            if error is not None:
                raise error
        if len(drain.delivered.bodies) > came:
            came, deadline = len(drain.delivered.bodies), time.monotonic() + PATIENCE
            drivers = len(driver.statuses) + DRIVERS
        if len(driver.statuses) > drivers:
            raise Violation(f"{DRIVERS} drivers ended and none of them moved a message")
        if time.monotonic() > deadline:
            raise Violation(f"{came} of {stream.published} have come and none for {PATIENCE:.0f} s")
        time.sleep(PAUSE)


def finished(broker: shmq.Broker, driver: Driver) -> bool:
    """Whether Spark has said of every micro-batch that it is done; it says so at its next look."""
    driver.revive()
    return not any(broker.channel_stats(*hop[:2]).leases for hop in HOPS)


def _watched(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise Violation(f"not so after {PATIENCE:.0f} s: {what}")
        time.sleep(PAUSE)


# ---- the verdict ----


def clients(instance: str) -> int:
    """Entries in the broker's table of clients."""
    with sources.open_readonly(instance) as source:
        return int((source.directory.clients["state"] != 0).sum())


def judge_output(drain: Drain, published: int) -> None:
    """Every number once, in its first attempt at each hop."""
    wanted = Counter(b"%d 1 1" % number for number in range(published))
    came = Counter(drain.delivered.bodies)
    if came != wanted:
        missing, more = list((wanted - came).items()), list((came - wanted).items())
        raise Violation(
            f"{len(missing)} of {published} did not come: {missing[:5]}; "
            f"{len(more)} came that should not have: {more[:5]}"
        )
    if set(drain.delivered.attempts) != {1}:
        raise Violation(f"attempts at the end: {Counter(drain.delivered.attempts)}")


def judge_rest(broker: shmq.Broker, before: tuple[list[str], int]) -> None:
    """Nothing is left."""
    instance = broker.instance
    for (topic, channel), found in recount.recount_all(instance).items():
        waiting = found.waiting + found.ids[layout.State.LEASED] + found.ids[layout.State.IN_FLIGHT]
        if waiting or found.on_disk:
            raise Violation(f"{topic}/{channel} has messages: {waiting[:5]}")
        if channel is not None and (leases := broker.channel_stats(topic, channel).leases):
            raise Violation(f"{topic}/{channel} has leases: {leases}")
    places = map(Path, staged_paths(broker.instance, os.geteuid()))
    left = sorted(path.name for place in places for path in place.glob("*"))
    if left:
        raise Violation(f"staged rows are left: {left[:5]}")
    _watched(
        lambda: clients(instance) == before[1],
        f"{before[1]} clients in the table, as at the beginning",
    )
    objects = sorted(item.name for item in shm.list_objects(instance))
    if objects != before[0]:
        raise Violation(f"shared memory has {objects}, had {before[0]}")


@contextlib.contextmanager
def _told(broker: shmq.Broker, driver: Driver) -> Iterator[None]:
    """After a violation say how everything stands, before it is cleared away."""
    try:
        yield
    except (Violation, AssertionError):
        for topic, channel in (*(hop[:2] for hop in HOPS), OUT):
            found = broker.channel_stats(topic, channel)
            click.echo(
                f"{topic}/{channel}: {found.message_count} came, {found.depth} wait, "
                f"{found.in_flight} in flight, leases {found.leases}"
            )
        click.echo(f"exit statuses of the drivers before this one: {driver.statuses}")
        click.echo(driver.standing())
        raise


def storm(kills: int, minutes: float, rate: float, seed: int) -> None:
    """All of it. Violation."""
    instance = f"kills-{os.getpid()}"
    scratch = Path(tempfile.mkdtemp(prefix="shmq-kills-"))
    (data_path := scratch / "broker").mkdir()
    began, good = time.monotonic(), False
    try:
        with shmq.Broker(data_path, instance, in_flight_slots=50_000) as broker:
            for topic, channel in (*(hop[:2] for hop in HOPS), OUT):
                broker.create_channel(topic, channel)
            with contextlib.ExitStack() as stack:
                drain = stack.enter_context(contextlib.closing(Drain(broker, *OUT)))
                before = (sorted(o.name for o in shm.list_objects(instance)), clients(instance))
                driver = stack.enter_context(contextlib.closing(Driver(instance, scratch)))
                stack.enter_context(_told(broker, driver))
                choice = random.Random(seed)
                blows, stream = Kills(driver, broker, choice), Stream(instance, rate, drain)
                progress(stream, drain, driver, 0)
                for number in range(1, kills + 1):
                    if time.monotonic() - began > minutes * 60:
                        break
                    time.sleep(choice.uniform(0, LULL))
                    kind = blows.one()
                    out = broker.channel_stats(*OUT).message_count
                    progress(stream, drain, driver, out + PER_TRIGGER)  # more than was on its way
                    click.echo(
                        f"{time.monotonic() - began:7.1f} s  kill {number}: {kind}; "
                        f"{len(drain.delivered.bodies)} of {stream.published} have come"
                    )
                stream.stop()
                while (came := len(drain.delivered.bodies)) < stream.published:
                    progress(stream, drain, driver, came)
                _watched(lambda: finished(broker, driver), "every lease is finished")
                driver.end()
                judge_output(drain, stream.published)
                judge_rest(broker, before)
        good = True
        click.secho(
            f"{stream.published} messages through {len(HOPS)} streams, {blows.done.total()} kills "
            f"({', '.join(f'{kind} {n}' for kind, n in sorted(blows.done.items()))}), "
            f"{len(driver.statuses) + 1} drivers: each came once, in its first attempt, "
            "and nothing is left",
            fg="green",
        )
    finally:
        if good:
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            click.secho(f"what the drivers said: {scratch}/drivers.log", fg="red", err=True)
        for place in staged_paths(instance, os.geteuid()):
            shutil.rmtree(place, ignore_errors=True)


@click.command()
@click.option("--kills", default=50, show_default=True, help="How many processes to kill.")
@click.option("--minutes", default=90.0, show_default=True, help="How long at most to kill.")
@click.option("--rate", default=500.0, show_default=True, help="Messages published a second.")
@click.option("--seed", default=None, type=int, help="Of the choices; else a random one.")
def main(kills: int, minutes: float, rate: float, seed: int | None) -> None:
    """Kill what Spark and shmq consist of while streams run from topic to topic."""
    seed = random.randrange(1 << 32) if seed is None else seed
    click.echo(f"seed {seed}")
    try:
        storm(kills, minutes, rate, seed)
    except (Violation, AssertionError) as exc:
        click.secho(str(exc), fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["drive"]:
        drive(Work(**json.loads(sys.argv[2])))
    else:
        main()
