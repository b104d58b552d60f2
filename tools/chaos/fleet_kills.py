"""One stream from three instances, over TCP, while everything about it is killed.

Numbers are published to three instances, each of which is served by processes of its own. One query
moves them to a topic, where they are counted. Random ones of the processes get SIGKILL: those that
spark_kills.py kills, the gateways, and the supervisors of the instances, which are away for some
seconds then and start again with the memory that is left. Gateways are also stopped for some
seconds (SIGSTOP), as a network that delivers nothing. At the end every number must have come
once, in its first attempt, and no lease may be left.

    python fleet_kills.py drive WORK     what the driver's process runs
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
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
from spark_kills import AHEAD, BATCH, LULL, PATIENCE, PAUSE, PER_TRIGGER, Driver, Rest, Violation
from support import processes
from support.deliveries import Drain
from support.processes import WATCHDOG, Child

import shmq

INSTANCES = 3
LONGEST_AWAY = 6.0  # seconds that an instance without a supervisor is away
LONGEST_PAUSE = 8.0  # seconds that a gateway is stopped: longer than the query's hostTimeout


@dataclass(frozen=True)
class Work:
    """The parameters of a driver. out: the instance that is written to."""

    instances: str
    out: str
    scratch: str
    available_now: bool
    transport: str


def drive(work: Work) -> None:
    """The query, begun again whenever it ends, until stdin ends."""
    import shmq.spark

    spark = shmq.spark.session(
        "local[2,4]",
        "shmq fleet kills",
        spark_sql_shuffle_partitions=2,
        spark_log_level="OFF",
        spark_local_dir=work.scratch,
    )
    stopping = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopping.set()), daemon=True).start()
    query, rest = None, Rest()
    while not stopping.wait(PAUSE) or (query is not None and query.isActive):
        if query is not None and query.isActive:
            if stopping.is_set() and not work.available_now:
                query.stop()
            continue
        if query is not None and (error := query.exception()) is not None:
            print(str(error)[:3000], flush=True)
            rest.failed(query.lastProgress is not None)
        query = _start(spark, work) if not stopping.is_set() and rest.over else None
    spark.stop()


def _start(spark: Any, work: Work) -> Any:
    read = {"instances": work.instances, "topic": "t", "channel": "c", "consumer": "kills"}
    read |= {"transport": work.transport, "onMissingHost": "wait", "hostTimeout": "5s"}
    rows = (
        spark.readStream.format("shmq")
        .options(**read, maxMessagesPerTrigger=PER_TRIGGER, minPartitionRows=100, numPartitions=2)
        .load()
        .selectExpr("concat(cast(body as string), ' ', attempts) as body")
    )
    checkpoint = str(Path(work.scratch, "checkpoint"))
    writer = rows.writeStream.format("shmq").options(
        instance=work.out, topic="out", checkpointLocation=checkpoint
    )
    trigger = (
        {"availableNow": True} if work.available_now else {"processingTime": "100 milliseconds"}
    )
    return writer.trigger(**trigger).start()


class FleetDriver(Driver):
    """The driver that lives, and those before it: with the triggers, and the transports, in
    turns."""

    def __init__(self, fleet: list[Instance], out: str, scratch: Path) -> None:
        self._fleet = ",".join(one.address for one in fleet)
        self._transports = itertools.cycle(("tcp", "auto", "tcp"))
        super().__init__(out, scratch)

    def _begin(self) -> subprocess.Popen[bytes]:
        work = Work(
            self._fleet,
            self._instance,
            str(self._scratch),
            next(self._available_now),
            next(self._transports),
        )
        return self._launch(__file__, json.dumps(asdict(work)))


class Instance:
    """An instance, whose gateway has the same port each time."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self._directory = name, directory
        directory.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._child = self._serve()
        self.broker = shmq.attach(name, timeout=WATCHDOG)
        self.broker.create_channel("t", "c")

    def _serve(self) -> Child:
        return processes.serve(self.name, self._directory, tcp_address=self.address)

    def kill_supervisor(self, seconds: float) -> None:
        """Kill it, and start another after some seconds."""
        self._child.close()
        time.sleep(seconds)
        self._child = self._serve()

    def gateways(self) -> list[int]:
        """The gateway's processes."""
        children = psutil.Process(self._child.pid).children(recursive=True)
        return [one.pid for one in children if "shmq.gateway.worker" in one.cmdline()]

    def close(self) -> None:
        self.broker.close()
        self._child.close()
        processes.remove_instance(self.name)


class Storm:
    """The instances, what is published to them and what came."""

    def __init__(self, fleet: list[Instance], drain: Drain, driver: FleetDriver) -> None:
        self._fleet, self._drain, self._driver = fleet, drain, driver
        self.published = 0

    @property
    def came(self) -> int:
        """How many numbers have come."""
        return len(self._drain.delivered.bodies)

    def publish(self) -> None:
        """Some numbers to each instance, unless many have not come yet."""
        if self.published - self.came < AHEAD:
            for one in self._fleet:
                numbers = range(self.published, self.published + BATCH)
                one.broker.producer("t").publish_many([b"%d" % number for number in numbers])
                self.published += BATCH

    def wait(self, condition: Callable[[], bool], what: str, publish: bool = True) -> None:
        """Until it holds, with a driver that lives."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self._drain.error is not None:
                raise self._drain.error
            if time.monotonic() > deadline:
                raise Violation(
                    f"{self.came} of {self.published} have come; not so after {PATIENCE:.0f} s: "
                    f"{what}"
                )
            if publish:
                self.publish()
            self._driver.revive()
            time.sleep(PAUSE)

    def leased(self) -> bool:
        """Whether there is a lease anywhere."""
        return any(one.broker.channel_stats("t", "c").leases for one in self._fleet)

    def judge(self) -> None:
        """Every number once, in its first attempt."""
        wanted = Counter(b"%d 1" % number for number in range(self.published))
        came = Counter(self._drain.delivered.bodies)
        if came != wanted:
            missing, more = list((wanted - came).items()), list((came - wanted).items())
            raise Violation(
                f"{len(missing)} of {self.published} did not come: {missing[:5]}; "
                f"{len(more)} came that should not have: {more[:5]}"
            )


def victims(
    fleet: list[Instance], driver: FleetDriver, choice: random.Random
) -> Iterator[tuple[str, Callable[[], bool]]]:
    """The kinds, in turns, with what kills one; that returns False if there was none."""

    def killed(pids: list[int]) -> bool:
        with contextlib.suppress(ProcessLookupError):
            if pids:
                os.kill(choice.choice(pids), signal.SIGKILL)
                return True
        return False

    def found(word: str) -> bool:
        return killed([process.pid for process in driver.processes(word)])

    def paused() -> bool:
        pids = choice.choice(fleet).gateways()
        with contextlib.suppress(ProcessLookupError):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(choice.uniform(0, LONGEST_PAUSE))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return bool(pids)

    def supervisor() -> bool:
        choice.choice(fleet).kill_supervisor(choice.uniform(0, LONGEST_AWAY))
        return True

    kinds: dict[str, Callable[[], bool]] = {
        "driver": lambda: killed([driver.process.pid]),
        "JVM": lambda: killed([child.pid for child in driver.children()]),
        "worker": lambda: found("pyspark.daemon"),
        "planner": lambda: found("python_streaming_source_runner"),
        "gateway": lambda: killed(choice.choice(fleet).gateways()),
        "supervisor": supervisor,
        "pause": paused,
    }
    while True:
        names = list(kinds)
        choice.shuffle(names)
        for name in names:
            yield name, kinds[name]


def storm(kills: int, choice: random.Random) -> None:
    """All of it. Raises Violation."""
    name = f"fleet-{os.getpid()}"
    scratch = Path(tempfile.mkdtemp(prefix="shmq-fleet-"))
    (scratch / "out").mkdir()
    done: Counter[str] = Counter()
    good = False
    try:
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(
                shmq.Broker(scratch / "out", f"{name}-out", in_flight_slots=50_000)
            )
            out.create_channel("out", "o")
            drain = stack.enter_context(contextlib.closing(Drain(out, "out", "o")))
            fleet = [
                stack.enter_context(
                    contextlib.closing(Instance(f"{name}-{number}", scratch / str(number)))
                )
                for number in range(INSTANCES)
            ]
            driver = stack.enter_context(
                contextlib.closing(FleetDriver(fleet, out.instance, scratch))
            )
            storm = Storm(fleet, drain, driver)
            storm.wait(lambda: storm.came > 0, "the first have come")
            turns = victims(fleet, driver, choice)
            while done.total() < kills:
                time.sleep(choice.uniform(0, LULL))
                kind, kill = next(turns)
                if not kill():
                    continue  # between two queries
                done[kind] += 1
                beyond = out.channel_stats("out", "o").message_count + PER_TRIGGER
                storm.wait(lambda n=beyond: storm.came > n, f"more came after {kind}")
                click.echo(f"kill {done.total()}: {kind}; {storm.came} of {storm.published}")
            storm.wait(lambda: storm.came >= storm.published, "all have come", publish=False)
            storm.wait(lambda: not storm.leased(), "every lease is finished", publish=False)
            driver.end()
            storm.judge()
        good = True
        click.secho(
            f"{storm.published} messages of {INSTANCES} instances, {done.total()} kills "
            f"({', '.join(f'{kind} {n}' for kind, n in sorted(done.items()))}), "
            f"{len(driver.statuses) + 1} drivers: each came once, in its first attempt, "
            "and no lease is left",
            fg="green",
        )
    finally:
        if good:
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            click.secho(f"what the drivers said: {scratch}/drivers.log", fg="red", err=True)
        shutil.rmtree(Path(f"/dev/shm/shmq-staged-{os.getuid()}", f"{name}-out"), True)


@click.command()
@click.option("--kills", default=50, show_default=True, help="How many processes to kill.")
@click.option("--seed", default=None, type=int, help="Of the choices; else a random one.")
def main(kills: int, seed: int | None) -> None:
    """Kill what Spark and three instances consist of while a stream reads these."""
    seed = random.randrange(1 << 32) if seed is None else seed
    click.echo(f"seed {seed}")
    try:
        storm(kills, random.Random(seed))
    except (Violation, AssertionError) as exc:
        click.secho(str(exc), fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["drive"]:
        drive(Work(**json.loads(sys.argv[2])))
    else:
        main()
