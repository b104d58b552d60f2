"""The second job: events from outside Spark, counted by event-time window, the driver killed once.

A process without Spark publishes an event for every line of the files of a tree. A structured
streaming query takes them, counts them by window and package and publishes the counts that changed
to another topic. A plain Python consumer keeps the last count of each and shows them. In the
middle the driver and its JVM are killed; another driver goes on from the checkpoint. At the end
every count must be what the publishing process has counted itself.

    python tools/demo/streaming.py produce|drive WORK   what the processes of the demonstration run
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import tasks

import shmq
from shmq.staging_place import staged_paths

EVENTS, QUERY = "events", "windows"
COUNTS, TABLE = "counts", "table"
WINDOW = 2  # seconds
BATCH = 100  # events published at once
PER_TRIGGER = 4000  # at most, so that there is a middle to kill the driver in
KILL_AT = 0.4  # of the events counted
RESTARTS = 3  # of a driver that ended by itself
SHOWN = 6  # rows of the table
PATIENCE = 600.0  # seconds without anything new until the demonstration is given up

Key = tuple[int, str]


@dataclass(frozen=True)
class Work:
    """The parameters of every process of the demonstration."""

    instance: str
    root: str
    scratch: str
    limit: int
    rate: float  # events a second; 0: flat out

    @property
    def tally(self) -> Path:
        """The published events, as the publishing process counted them."""
        return Path(self.scratch, "published.json")


def key_of(event: dict[str, Any]) -> Key:
    """Start of the event's window in seconds since 1970, and its package."""
    return int(event["time"] // WINDOW) * WINDOW, event["package"]


# ---- the process that publishes ----


def events(work: Work) -> Iterator[dict[str, Any]]:
    """One for each line of the tree's files, at the time it is read."""
    for path in tasks.source_files(work.root):
        package = path.partition(os.sep)[0] if os.sep in path else "(top level)"
        for number, line in enumerate(Path(work.root, path).read_bytes().splitlines(), 1):
            yield {
                "time": time.time(),
                "package": tasks.printable(package),
                "line": number,
                "bytes": len(line),
            }


def produce(work: Work) -> None:
    """Publish them, throttled, and write down how many of each key there were."""
    tally: Counter[Key] = Counter()
    batch: list[bytes] = []
    began, sent = time.monotonic(), 0
    with shmq.attach(work.instance) as broker:
        producer = broker.producer(EVENTS)
        for event in events(work):
            if sent + len(batch) == work.limit:
                break
            tally[key_of(event)] += 1
            batch.append(json.dumps(event).encode())
            if len(batch) == BATCH:
                producer.publish_many(batch)
                sent, batch = sent + len(batch), []
                if work.rate:
                    time.sleep(max(0.0, began + sent / work.rate - time.monotonic()))
        if batch:
            producer.publish_many(batch)
    fresh = work.tally.with_suffix(".new")
    fresh.write_text(json.dumps([[*key, count] for key, count in tally.items()]))
    fresh.rename(work.tally)


# ---- the driver ----


def drive(work: Work) -> None:
    """The query, until somebody ends this process."""
    import shmq.spark

    spark = shmq.spark.session(
        "local[2,4]",
        "shmq streaming demo",
        spark_sql_shuffle_partitions=2,
        spark_log_level="OFF",
        spark_sql_session_timeZone="UTC",
        spark_local_dir=work.scratch,
    )
    from pyspark.sql import functions as sql

    source = {"instance": work.instance, "topic": EVENTS, "channel": QUERY, "consumer": "demo"}
    event = sql.from_json(sql.col("body").cast("string"), "time double, package string")
    counts = (
        spark.readStream.format("shmq")
        .options(**source, maxMessagesPerTrigger=PER_TRIGGER)
        .load()
        .select(event.alias("event"))
        .select(sql.timestamp_seconds("event.time").alias("time"), "event.package")
        .groupBy(sql.window("time", f"{WINDOW} seconds"), "package")
        .count()
    )
    changed = counts.select(
        sql.to_json(
            sql.struct(sql.col("window.start").cast("long").alias("window"), "package", "count")
        ).alias("body")
    )

    def publish(rows: Any, epoch: int) -> None:
        shmq.spark.publish(rows, COUNTS, work.instance, txnAppId="demo", txnVersion=epoch)

    query = (
        changed.writeStream.outputMode("update")
        .option("checkpointLocation", str(Path(work.scratch, "checkpoint")))
        .trigger(processingTime="200 milliseconds")
        .foreachBatch(publish)
        .start()
    )
    query.awaitTermination()


# ---- the table, and the kill ----


class Table:
    """The last count of every window and package, taken from the topic of the counts."""

    def __init__(self, broker: shmq.Broker) -> None:
        self._consumer = broker.consumer(COUNTS, TABLE, max_in_flight=5000)
        self.counts: dict[Key, int] = {}
        self._shown = ""

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def take(self, timeout: float) -> bool:
        """The rows that came since, at most one batch of them."""
        batch = self._consumer.take_many(5000, timeout)
        for body in batch.bodies():
            row = json.loads(body)
            # updates come one after the other, in each a key once
            self.counts[row["window"], row["package"]] = row["count"]
        batch.finish()
        return bool(batch)

    def show(self, published: int) -> None:
        """The windows with the most events; again only if something changed."""
        best = Counter(self.counts).most_common(SHOWN)
        rows = [
            f"  {time.strftime('%H:%M:%S', time.gmtime(window))}  {package:24.24} {count:>8}"
            for (window, package), count in best
        ]
        text = "\n".join([f"{self.total} of {published} events are counted", *rows])
        if text != self._shown:
            click.echo(text)
            self._shown = text


class Different(Exception):
    """The counts are not those of the process that published."""


def start(what: str, work: Work) -> subprocess.Popen[bytes]:
    """One of the processes, in a group of its own, so that all of it can be killed."""
    arguments = [sys.executable, __file__, what, json.dumps(asdict(work))]
    return subprocess.Popen(arguments, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the process and its JVM."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def count(broker: shmq.Broker, work: Work, with_kill: bool) -> Table:
    """Until everything published is counted."""
    table = Table(broker)
    producer, driver = start("produce", work), start("drive", work)
    restarts = 0
    last_news = last_shown = time.monotonic()
    try:
        while True:
            # in this order: what is published after the look at the process would not be counted
            status = producer.poll()
            published = broker.stats().topic(EVENTS).message_count
            now = time.monotonic()
            if status:
                raise Different(f"the publishing process failed with status {status}")
            if table.take(0.2):
                last_news = now
            if now - last_shown > 1:
                table.show(published)
                last_shown = now
            if with_kill and table.total >= KILL_AT * min(published, work.limit) > 0:
                leased = broker.channel_stats(EVENTS, QUERY).leased
                end(driver)
                click.secho(
                    f"--- the driver and its JVM are killed; {leased} events are leased to them; "
                    "another driver starts from the checkpoint",
                    bold=True,
                )
                driver, with_kill = start("drive", work), False
            if status is not None and table.total >= published:
                break
            if driver.poll() is not None:
                # Spark gives a Python worker ten seconds to start, which a busy machine may not
                # have. A query in production is started again too.
                if restarts == RESTARTS:
                    raise Different(f"the driver ended with status {driver.returncode}")
                restarts += 1
                click.secho(
                    f"--- the driver ended with status {driver.returncode}; "
                    "another driver starts from the checkpoint",
                    bold=True,
                )
                end(driver)
                driver = start("drive", work)
            if now - last_news > PATIENCE:
                raise Different(f"nothing was counted for {PATIENCE:.0f} s")
        while table.take(1.0):  # nothing may come on top of it
            pass
        table.show(published)
    finally:
        end(producer)
        end(driver)
    return table


def compare(table: Table, work: Work) -> None:
    """Every count must be equal."""
    wanted = {(window, package): n for window, package, n in json.loads(work.tally.read_text())}
    wrong = [
        key
        for key in wanted.keys() | table.counts.keys()
        if wanted.get(key) != table.counts.get(key)
    ]
    for window, package in sorted(wrong)[:10]:
        found = table.counts.get((window, package))
        click.secho(
            f"{window} {package}: {found}, published {wanted.get((window, package))}",
            fg="red",
            err=True,
        )
    if wrong:
        raise Different(f"{len(wrong)} of {len(wanted)} counts differ")
    click.secho(
        f"{sum(wanted.values())} events in {len(wanted)} windows and packages, every count equal",
        fg="green",
    )


def demonstrate(root: str, limit: int, rate: float, with_kill: bool) -> None:
    """All of it."""
    instance = f"demo-{os.getpid()}"
    scratch = Path(tempfile.mkdtemp(prefix="shmq-demo-"))
    work = Work(instance, root, str(scratch), limit, rate)
    data_path = scratch / "broker"
    data_path.mkdir()
    try:
        with shmq.Broker(data_path, instance, in_flight_slots=100_000) as broker:
            broker.create_channel(EVENTS, QUERY)
            broker.create_channel(COUNTS, TABLE)
            compare(count(broker, work, with_kill), work)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for place in staged_paths(instance, os.geteuid()):
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    {"produce": produce, "drive": drive}[sys.argv[1]](Work(**json.loads(sys.argv[2])))
