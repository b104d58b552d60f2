"""Rows of Spark's readers and writers, in a process as Spark's driver and Python workers are: it
makes them, and asks them what Spark asks. There is no JVM."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
from lifecycle.ends import ENDS
from lifecycle.handles import CHANNEL, Held, Site, handle
from pyspark.sql.streaming.datasource import ReadMaxRows

from shmq.spark import Exchange
from shmq.spark.options import Settings
from shmq.spark.reading import ShmqReader, return_lease
from shmq.spark.sink import ShmqWriter
from shmq.spark.stream import ShmqStreamReader


def settings(site: Site, **more: str) -> Settings:
    given = {"instance": site.instance, "topic": site.topic, "channel": CHANNEL, **more}
    return Settings(given)


EVERY = tuple(end for ends in ENDS.values() for end in ends if end != "second")
#: Not the stop of the instance, at which its leases end, so that the query has lost what it had.
ENDS_OF_A_STREAM = tuple(end for end in EVERY if end != "instance_stopped")


@handle(ShmqStreamReader, keeps=True, warm=True, ends=ENDS_OF_A_STREAM)
def spark_stream(site: Site) -> Held:
    """A query that is started again after it had taken a batch: it has that one again."""
    made = ShmqStreamReader(settings(site, consumer="stream", pollTimeout="10ms"))
    checkpoint = Path(site.directory, "checkpoint")
    if not checkpoint.exists():
        checkpoint.write_text(json.dumps(made.initialOffset()))
    start = json.loads(checkpoint.read_text())
    end = made.latestOffset(start, ReadMaxRows(3))
    parts: list[Any] = [pickle.loads(pickle.dumps(each)) for each in made.partitions(start, end)]
    batches = [batch for part in parts for batch in made.read(part)]
    assert sum(batch.num_rows for batch in batches) == 3
    return Held(made, None, batches, made.stop)


#: Not those after which its process lives without a word about the rows, or is dead: what it has
#: staged goes with the next commit, or with the instance (tests/spark/test_staging.py).
ENDS_OF_A_WRITE = ("close", "owner", "thread", "stopped_and_continued", "supervisor_killed")


@handle(ShmqWriter, keeps=True, warm=True, ends=ENDS_OF_A_WRITE)
def spark_writer(site: Site) -> Held:
    made = ShmqWriter(settings(site, topic=site.silent), None)
    batch = pa.record_batch({"body": pa.array([b"x", b"y"])})
    written = made.write(iter([batch]))
    assert written.rows == 2
    return Held(made, None, written, lambda: made.abort([]))


#: Not those after which the application lives without a word about the rows: they stay its own, and
#: a process is not all of it (tests/spark/test_holding.py has its deaths). Nor the stop, of which
#: the next read is told.
ENDS_OF_A_READ = ("close", "stopped_and_continued", "supervisor_killed", "gateway_killed")


@handle(ShmqReader, keeps=True, warm=True, ends=ENDS_OF_A_READ)
def spark_batch(site: Site) -> Held:
    made = ShmqReader(settings(site, consumer="batch"))
    parts: list[Any] = [pickle.loads(pickle.dumps(each)) for each in made.partitions()]
    batches = [batch for part in parts for batch in made.read(part)]
    assert sum(batch.num_rows for batch in batches) == 5

    def close() -> None:
        return_lease(site.instance, site.topic, CHANNEL, "batch")

    return Held(made, None, batches, close)


@handle(Exchange, keeps=True)
def spark_exchange(site: Site) -> Held:
    made = Exchange(site.instance, site.topic, CHANNEL)
    messages = made.messages(idle=60.0)
    next(messages)
    return Held(messages, None, made)
