"""Batch jobs of Spark as actors: a driver with its JVM and Python workers, which runs one job after
the other until it is killed.

A job reads what waits in a channel, writes rows to another topic, and finishes what it read. Rows
that are read and written are errands (`errand_actors`). A driver that comes after one that was
killed writes the last job's rows again, under the same name and version: they must come once."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from chaos.storm import history
from chaos.storm.actors import Place
from chaos.storm.errand_actors import Errands, Putter
from chaos.storm.history import LEAST_BYTES, Errand, Log, What, key_of, record
from support import recount

import shmq
from shmq.errors import Gone, LeaseFenced, LeaseLost, NotRunning

FEED, CHANNEL = "spark-feed", "s"
OUT = "spark-out"
TOPICS = "spark-"
ROWS = 300  # of a write, at most
LEASE_TTL = "20s"  # after a driver's death, unless the next one goes on
BEATS = 60  # signs of life of a job, every 5 s: one that takes longer is stuck
WORKER_LIFE = 6.0  # seconds until a Python worker of Spark's is killed, on average


class Feeder(Putter):
    """Publishes the rows that jobs read."""

    role = "spark-feeder"

    def work(self) -> None:
        producer = self.patiently(self.open_producer)
        while not self.over:
            with contextlib.suppress(NotRunning):
                self.publish(producer)
            time.sleep(0.2 * (10 if self.place.control.throttle else 1))

    def open_producer(self) -> shmq.Producer:
        assert self.broker is not None
        self.broker.create_channel(FEED, CHANNEL)
        return self.broker.producer(FEED)

    def publish(self, producer: shmq.Producer) -> None:
        key = next(self.keys)
        size = LEAST_BYTES + int(self.choice.expovariate(1 / 200))
        body = history.make_body(key, size, self.place.filler)
        self.note(Errand.BEGUN, key)
        self.core(lambda: producer.publish(body, timeout=5))
        self.note(Errand.SENT, key)


class SparkJobs(Errands):
    """A driver."""

    role = "spark-jobs"

    def __init__(self, place: Place, number: int, seed: int) -> None:
        super().__init__(place, number, seed)
        self.out = Log(place.directory / history.file_name(number, self.role, OUT))
        self.state = place.directory / f"spark-{place.seat}.json"

    def note_out(self, errand: Errand, keys: list[int]) -> None:
        self.out.write(b"".join(record(What.ERRAND, flag=errand, key=key, count=1) for key in keys))

    def work(self) -> None:
        home = self.place.directory / f"spark-{self.number}"
        home.mkdir()
        with self.beats():
            spark = self.session(home)
        threading.Thread(target=self.kill_workers, daemon=True).start()
        for turn in itertools.count(1):
            if self.over:
                break
            with contextlib.suppress(NotRunning, Gone), self.beats():
                self.one(spark, turn)
            self.rest()
        spark.stop()

    def session(self, home: Path) -> Any:
        from support.spark_home import spark_home

        import shmq.spark

        os.environ["SPARK_HOME"] = str(spark_home(home / "spark"))
        above = str(Path(shmq.__file__).resolve().parents[1])
        os.environ["PYTHONPATH"] = os.pathsep.join([above, *sys.path])
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        return shmq.spark.session(
            "local[2,4]",
            "storm",
            spark_sql_shuffle_partitions=2,
            spark_log_level="OFF",
            spark_local_dir=str(home / "local"),
            spark_sql_warehouse_dir=str(home / "warehouse"),
            spark_driver_memory="700m",
        )

    # ---- a job ----

    def one(self, spark: Any, turn: int) -> None:
        """Spark gives up a job whose workers, or whose supervisor, were killed too often. The
        checker looks at the promises that hold all the same."""
        job = self.last_job() or self.new_job(turn)
        try:
            self.read(spark)
            self.write(spark, job)
        except Exception as exc:
            if not type(exc).__module__.startswith(("pyspark", "py4j")):
                raise
            print(f"{type(exc).__name__}: {str(exc)[:2000]}", flush=True)

    def read(self, spark: Any) -> None:
        given = {"instance": self.place.instance, "topic": FEED, "channel": CHANNEL}
        given |= {"consumer": f"storm-{self.place.seat}", "maxMessagesPerTrigger": "2000"}
        given |= {"columns": "body", "leaseTtl": LEASE_TTL}
        rows = spark.read.format("shmq").options(**given).load()
        for _ in range(self.choice.choice([1, 1, 2])):
            self.note(Errand.ASKED)
            found = rows.toArrow().column("body").to_pylist()
            self.had([bytes(body) for body in found])
        keys = [history.read_body(body)[0] for body in found]
        for key in keys:
            self.note(Errand.ENDING, key)
        with contextlib.suppress(LeaseLost, LeaseFenced):
            count = self.core(lambda: shmq.spark.finish_lease(rows))
            assert count == len(keys), (count, len(keys))
            for key in keys:
                self.note(Errand.ENDED, key)

    def had(self, bodies: list[bytes]) -> None:
        for body in bodies:
            key, good = history.read_body(body)
            self.note(Errand.HAD, key, good)

    def new_job(self, turn: int) -> dict[str, Any]:
        count = self.choice.randrange(1, ROWS)
        keys = [key_of(self.number, turn + (part << 12)) for part in range(count)]
        job = {"name": f"storm-{self.number}-{turn}", "keys": keys}
        part = self.state.with_suffix(".new")
        part.write_text(json.dumps(job))
        part.rename(self.state)
        return job

    def last_job(self) -> dict[str, Any] | None:
        """The job whose end nobody knows."""
        if not self.state.exists():
            return None
        found: dict[str, Any] = json.loads(self.state.read_text())
        return found

    def write(self, spark: Any, job: dict[str, Any]) -> None:
        filler, keys = self.place.filler, job["keys"]
        bodies = [(history.make_body(key, LEAST_BYTES + key % 400, filler),) for key in keys]
        rows = spark.createDataFrame(bodies, "body binary").repartition(2)
        self.note_out(Errand.BEGUN, keys)
        shmq.spark.publish(rows, OUT, self.place.instance, txnAppId=job["name"], txnVersion=1)
        self.note_out(Errand.SENT, keys)
        self.state.unlink()

    # ---- beside the jobs ----

    @contextlib.contextmanager
    def beats(self) -> Iterator[None]:
        """The log grows while Spark works, which may take long on a busy machine."""
        over = threading.Event()

        def beat() -> None:
            for _ in range(BEATS):
                if over.wait(5):
                    return
                self.note(Errand.CAME)

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def kill_workers(self) -> None:
        """Kill Python processes of the executors and of Spark's planning, as the kernel does when
        memory is short."""
        choice = random.Random(self.number)
        while not self.over:
            time.sleep(choice.expovariate(1 / WORKER_LIFE))
            with contextlib.suppress(psutil.Error):
                found = [
                    one
                    for one in psutil.Process().children(recursive=True)
                    if any(word.startswith("pyspark.daemon") for word in one.cmdline())
                    and any("pyspark.daemon" in word for word in one.parent().cmdline())
                ]
                if found:
                    os.kill(choice.choice(found).pid, signal.SIGKILL)
                    self.note(Errand.CAME)


class SparkSweeper(Errands):
    """At the end: takes what jobs have not read, or all that they wrote."""

    role = "spark-sweeper"

    def work(self) -> None:
        channel = CHANNEL if self.place.topic == FEED else "o"
        assert self.broker is not None
        self.broker.create_channel(self.place.topic, channel)
        with self.broker.consumer(self.place.topic, channel, max_in_flight=1000) as consumer:
            while not recount.is_drained(self.place.instance, self.place.topic, channel):
                self.note(Errand.ASKED)
                for message in consumer.take_many(1000, 0.2):
                    key, good = history.read_body(bytes(message.body))
                    self.note(Errand.HAD, key, good)
                    message.finish()


def staged(instance: str) -> list[str]:
    """The files that are staged for an instance when the commit of another write has ended."""
    from shmq.spark import staging
    from shmq.spark.options import Settings
    from shmq.staging_place import staged_paths

    if not staged_paths(instance, os.geteuid()):
        return []
    with staging.directory(Settings({"instance": instance, "topic": OUT})) as here:
        staging.sweep(here)
    places = [Path(place) for place in staged_paths(instance, os.geteuid())]
    # a manifest is of a commit that was begun: its write may be repeated
    return [path.name for place in places for path in place.glob("*") if not _may_go_on(path)]


def _may_go_on(path: Path) -> bool:
    manifests = list(path.parent.glob("*.manifest"))
    decided = {item["file"] for one in manifests for item in json.loads(one.read_bytes())}
    return path in manifests or path.name in decided
