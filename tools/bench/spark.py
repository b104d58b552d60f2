"""Spark reads from shmq and writes to it: beside a source and a sink in memory that only copy, and
beside parquet files in memory; and the tasks of one session hand each other messages.

All in one session of two cores, made for the first of these lines. A run is one query; the first
ones of a line are not counted, for the JVM compiles as it goes. Rows have the four columns of
shmq's, in two partitions; bodies are noise, no two of a run alike, so that a format that compresses
has nothing to leave out.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)
from runs import (
    SPARK_DISK,
    SPARK_HAND_OVER,
    SPARK_LISTS,
    SPARK_PARQUET,
    SPARK_READ,
    SPARK_STREAM,
    SPARK_WRITE,
    Contestant,
    Outcome,
    Plan,
)

import shmq
import shmq.spark
from shmq.option_fields import MAX_SLOTS

PARTS = 2
BATCH = 16_384  # rows of a record batch of the source that only copies
BATCH_BYTES = 4 << 20  # ... and at most this many bytes of bodies
SLACK, STRIDE = 65_536, 7919  # its batches begin at different bytes of the same noise
TOPIC, CHANNEL = "t", "c"
SCHEMA = "id bigint, timestamp timestamp, attempts int, body binary"
ARROW = pa.schema(
    [
        ("id", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("attempts", pa.int32()),
        ("body", pa.binary()),
    ]
)
WARM = 3  # runs of a line that are not counted
FILL = 2000  # messages published at once
IDLE = 20.0  # seconds after which a task of the exchange gives up
COLD = 500  # messages handed over that are not counted


# ---- the source and the sink that only copy ------------------------------------------------------


@dataclass(frozen=True)
class CopyPart(InputPartition):
    rows: int
    size: int
    seed: int


def copies(part: CopyPart) -> Iterator[pa.RecordBatch]:
    """Batches whose columns are copied from memory, one pass over the bytes."""
    rows = min(BATCH, part.rows, BATCH_BYTES // part.size)
    numbers = np.arange(rows + 1, dtype=np.int64)
    offsets = (numbers * part.size).astype(np.int32)
    words = (rows * part.size + SLACK) // 8 + 1
    noise = np.random.default_rng(part.seed).integers(0, 1 << 64, words, np.uint64).tobytes()
    for start in range(0, part.rows, rows):
        first = start // rows * STRIDE % SLACK
        count = min(rows, part.rows - start)
        eights, fours = numbers[:count], numbers[:count].astype(np.int32)
        columns = [
            pa.Array.from_buffers(field.type, count, [None, pa.py_buffer(column.tobytes())])
            for field, column in zip(ARROW, (eights, eights, fours), strict=False)
        ]
        body = [offsets[: count + 1].tobytes(), noise[first : first + count * part.size]]
        buffers = [None, *map(pa.py_buffer, body)]
        columns.append(pa.Array.from_buffers(pa.binary(), count, buffers))
        yield pa.RecordBatch.from_arrays(columns, schema=ARROW)


class Copying(DataSource):
    """format("copying"), options rows and size."""

    @classmethod
    def name(cls) -> str:
        return "copying"

    def schema(self) -> str:
        return SCHEMA

    def _parts(self) -> list[CopyPart]:
        return [
            CopyPart(int(self.options["rows"]) // PARTS, int(self.options["size"]), seed)
            for seed in range(PARTS)
        ]

    def reader(self, schema: Any) -> Any:
        return CopyReader(self._parts())

    def streamReader(self, schema: Any) -> Any:
        return CopyStreamReader(self._parts())

    def writer(self, schema: Any, overwrite: bool) -> Any:
        return CopyWriter()


class CopyReader(DataSourceReader):
    def __init__(self, parts: list[CopyPart]) -> None:
        self._parts = parts

    def partitions(self) -> list[CopyPart]:
        return self._parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, CopyPart)
        return copies(partition)


class CopyStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Everything in one micro-batch."""

    def __init__(self, parts: list[CopyPart]) -> None:
        self._parts = parts

    def prepareForTriggerAvailableNow(self) -> None:
        pass

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, int]:
        return {"n": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"n": 1}

    def reportLatestOffset(self) -> dict[str, int]:
        return {"n": 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[CopyPart]:
        return self._parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, CopyPart)
        return copies(partition)

    def commit(self, end: dict[str, int]) -> None:
        pass


class CopyWriter(DataSourceArrowWriter):
    """Copies the bodies into memory of its own."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        kept = [np.frombuffer(b.column("body").buffers()[2], np.uint8).copy() for b in iterator]
        assert kept
        return WriterCommitMessage()


# ---- the session ---------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Session:
    """Spark, two brokers and cached rows, each made when first needed."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch / "spark"
        self._spark: Any = None
        self._numbers = itertools.count()
        self.address = f"127.0.0.1:{_free_port()}"
        """Of the gateway of the broker that keeps its messages in memory."""
        self._brokers: dict[str, shmq.Broker] = {}
        self._cached: dict[tuple[int, int], Any] = {}

    @property
    def spark(self) -> Any:
        if self._spark is None:
            self._scratch.mkdir(exist_ok=True)
            cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers have no tools/
            self._spark = shmq.spark.session(
                "local[2]",
                "shmq bench",
                spark_log_level="OFF",
                spark_local_dir=str(self._scratch),
                spark_driver_memory="4g",
            )
            self._spark.dataSource.register(Copying)
        return self._spark

    def fresh(self) -> str:
        """A name."""
        return f"bench{next(self._numbers)}"

    def path(self) -> str:
        return str(self._scratch / self.fresh())

    def copying(self, reader: Any, plan: Plan) -> Any:
        return reader.format("copying").options(rows=plan.rows, size=plan.size).load()

    def rows(self, plan: Plan) -> Any:
        """Bodies to be written, in Spark's cache."""
        key = plan.rows, plan.size
        if key not in self._cached:
            self._cached[key] = self.copying(self.spark.read, plan).select("body").cache()
            self._cached[key].count()
        return self._cached[key]

    def broker(self, plan: Plan, on_disk: bool = False) -> shmq.Broker:
        name = f"bench-{os.getpid()}-{'disk' if on_disk else 'memory'}"
        if name not in self._brokers:
            room: dict[str, Any] = {"mem_queue_size": 0}
            if not on_disk:
                slots = min(2 * plan.rows, MAX_SLOTS // 2)  # what is more overflows
                arena = slots * (plan.size + 80)
                room = {"mem_queue_size": slots, "in_flight_slots": slots, "arena_size": arena}
                room["tcp_address"] = self.address
            path = self._scratch / name
            path.mkdir(parents=True)
            self._brokers[name] = shmq.Broker(path, name, **room)
            self._brokers[name].create_channel(TOPIC, CHANNEL)
        return self._brokers[name]

    def filled(self, plan: Plan, on_disk: bool = False) -> dict[str, str]:
        """Options of a read: the rows, and no others, are in the channel."""
        broker = self.broker(plan, on_disk)
        have = broker.channel_stats(TOPIC, CHANNEL).depth
        if have != plan.rows:
            broker.empty_channel(TOPIC, CHANNEL)
            producer, shape = broker.producer(TOPIC), (FILL, plan.size)
            bodies = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
            at_once = 200 if on_disk else FILL  # mem_queue_size=0 has room for 256
            for start in range(0, plan.rows, at_once):
                producer.publish_many(bodies[: min(at_once, plan.rows - start)], timeout=60)
            while broker.channel_stats(TOPIC, CHANNEL).depth < plan.rows:
                time.sleep(0.05)
        return self.options(plan, broker)

    def options(self, plan: Plan, broker: shmq.Broker) -> dict[str, str]:
        """Of a read of all that is there."""
        return {
            "instance": broker.instance,
            "topic": TOPIC,
            "channel": CHANNEL,
            "consumer": self.fresh(),
            "maxMessagesPerTrigger": str(2 * plan.rows),
            "maxBytesPerTrigger": "64g",
        }

    def stream(self, rows: Any, plan: Plan) -> Outcome:
        """Of the micro-batches that have the rows."""
        writer = rows.writeStream.format("noop").option("checkpointLocation", self.path())
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        found = [p for p in query.recentProgress if p["numInputRows"]]
        counts = [p["numInputRows"] for p in found]
        if sum(counts) != plan.rows:
            raise RuntimeError(f"micro-batches of {counts} rows")
        return Outcome(plan.rows, sum(p["durationMs"]["triggerExecution"] for p in found) / 1000)

    def close(self) -> None:
        for broker in self._brokers.values():
            with contextlib.suppress(shmq.ShmqError):
                broker.delete_topic(TOPIC)  # nothing is worth flushing
            broker.close()
        self._brokers.clear()
        spark, self._spark = self._spark, None
        if spark is not None:
            with contextlib.suppress(Exception):  # a call was interrupted: no other is understood
                spark.stop()


def timed(plan: Plan, *work: Callable[[], object]) -> Outcome:
    began = time.perf_counter()
    for step in work:
        step()
    return Outcome(plan.rows, time.perf_counter() - began)


def nowhere(rows: Any) -> Callable[[], object]:
    """Read them all."""
    writer = rows.write.format("noop").mode("overwrite")
    return lambda: writer.save()


class InSpark(Contestant):
    def __init__(self, session: Session) -> None:
        self._session = session
        self._warm: set[str] = set()

    def version(self) -> str:
        import pyspark

        return f"Spark {pyspark.__version__}"

    def run(self, plan: Plan) -> Outcome:
        if plan.line not in self._warm:
            self._warm.add(plan.line)
            for _ in range(WARM):
                self._run(plan)
        return self._run(plan)

    def _run(self, plan: Plan) -> Outcome:
        raise NotImplementedError

    def close(self) -> None:
        self._session.close()


class Copies(InSpark):
    name = "only copies"
    lines: ClassVar[tuple[str, ...]] = (
        SPARK_READ,
        SPARK_STREAM,
        SPARK_DISK,
        SPARK_WRITE,
        SPARK_PARQUET,
    )

    def _run(self, plan: Plan) -> Outcome:
        session = self._session
        writer = session.rows(plan).write.format("copying").mode("append")
        write = writer.options(rows=plan.rows, size=plan.size).save
        if plan.line == SPARK_WRITE:
            return timed(plan, write)
        if plan.line == SPARK_STREAM:
            return session.stream(session.copying(session.spark.readStream, plan), plan)

        def read() -> None:
            nowhere(session.copying(session.spark.read, plan))()

        return timed(plan, write, read) if plan.line == SPARK_PARQUET else timed(plan, read)


class Parquet(InSpark):
    name = "parquet in memory"
    lines: ClassVar[tuple[str, ...]] = (SPARK_PARQUET,)

    def _run(self, plan: Plan) -> Outcome:
        path, spark = f"/dev/shm/shmq-bench-{os.getpid()}", self._session.spark
        writer = self._session.rows(plan).write.mode("overwrite").option("compression", "none")
        try:
            return timed(
                plan,
                lambda: writer.parquet(path),
                lambda: nowhere(spark.read.parquet(path))(),
            )
        finally:
            shutil.rmtree(path, ignore_errors=True)


class OurSpark(InSpark):
    name = "shmq"
    lines: ClassVar[tuple[str, ...]] = (
        SPARK_READ,
        SPARK_STREAM,
        SPARK_DISK,
        SPARK_WRITE,
        SPARK_PARQUET,
        SPARK_HAND_OVER,
        SPARK_LISTS,
    )
    publish: ClassVar[str] = "commit"

    def _run(self, plan: Plan) -> Outcome:
        return {
            SPARK_READ: self._read,
            SPARK_STREAM: self._stream,
            SPARK_DISK: self._read,
            SPARK_WRITE: self._write,
            SPARK_PARQUET: self._write_and_read,
            SPARK_HAND_OVER: self._hand_over,
            SPARK_LISTS: self._lists,
        }[plan.line](plan)

    def _read(self, plan: Plan) -> Outcome:
        """Messages that only one query has read go back to the channel."""
        given = self._session.filled(plan, plan.line == SPARK_DISK)
        return Outcome(plan.rows, self._queries(given, plan, keep=True))

    def _queries(self, given: dict[str, str], plan: Plan, *, keep: bool) -> float:
        """Seconds of as many as it takes to read all; more than memory holds takes several."""
        broker, done, seconds = self._session.broker(plan, plan.line == SPARK_DISK), 0, 0.0
        while done < plan.rows:
            given["consumer"] = self._session.fresh()
            reader = self._session.spark.read.format("shmq").options(**given)
            seconds += timed(plan, lambda reader=reader: nowhere(reader.load())()).seconds
            leased = broker.channel_stats(TOPIC, CHANNEL).leased
            whole = keep and leased == plan.rows
            end = shmq.spark.return_lease if whole else shmq.spark.finish_lease
            done += end(given["instance"], TOPIC, CHANNEL, given["consumer"])
        return seconds

    def _stream(self, plan: Plan) -> Outcome:
        given = self._session.filled(plan)
        rows = self._session.spark.readStream.format("shmq").options(**given).load()
        return self._session.stream(rows, plan)

    def _writer(self, plan: Plan) -> Any:
        broker = self._session.broker(plan)
        broker.empty_channel(TOPIC, CHANNEL)
        writer = self._session.rows(plan).write.format("shmq").mode("append")
        given = {"instance": broker.instance, "topic": TOPIC, "publish": self.publish}
        return writer.options(**given)

    def _write(self, plan: Plan) -> Outcome:
        return timed(plan, self._writer(plan).save)

    def _write_and_read(self, plan: Plan) -> Outcome:
        outcome = timed(plan, self._writer(plan).save)
        given = self._session.options(plan, self._session.broker(plan))
        given["columns"] = "body"  # as parquet has
        seconds = outcome.seconds + self._queries(given, plan, keep=False)
        return Outcome(plan.rows, seconds)

    # ---- tasks that hand each other messages ----

    def _exchanges(self, plan: Plan) -> tuple[Any, Any]:
        instance = self._session.broker(plan).instance
        names = self._session.fresh(), self._session.fresh()
        there, back = (shmq.spark.Exchange(instance, name) for name in names)
        there.create()
        back.create()
        return there, back

    def _together(self, first: Any, second: Any) -> Any:
        """Two jobs of one task each, at a time; what the second one's says."""
        context = self._session.spark.sparkContext

        def job(task: Any) -> list[Any]:
            found: list[Any] = context.parallelize([0], 1).mapPartitions(task).collect()
            return found

        thread = threading.Thread(target=job, args=(first,))
        thread.start()
        try:
            (found,) = job(second)
        finally:
            thread.join()
        return found

    def _hand_over(self, plan: Plan) -> Outcome:
        """One message there, one back, for a while; how long it was on its way there."""
        there, back = self._exchanges(plan)
        seconds = plan.seconds

        def ask(_: Any) -> Iterator[int]:
            answers = back.messages(idle=IDLE, at_once=1)
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                there.publish([b"%d" % time.monotonic_ns()])
                next(answers)
            there.publish([b"end"])
            yield 0

        def answer(_: Any) -> Iterator[list[float]]:
            took = []
            for message in there.messages(idle=IDLE, at_once=1):
                now = time.monotonic_ns()
                if message.body == b"end":
                    break
                took.append((now - int(message.body)) / 1e3)
                back.publish([b"."])
            yield took[COLD:]

        began = time.monotonic()
        found = self._together(ask, answer)
        p50, p99 = (float(np.percentile(found, q)) for q in (50, 99))
        return Outcome(len(found), time.monotonic() - began, p50_us=p50, p99_us=p99)

    def _lists(self, plan: Plan) -> Outcome:
        there, _ = self._exchanges(plan)
        size, at_once = plan.size, 1000
        lists = -(-plan.rows // at_once)

        def send(_: Any) -> Iterator[int]:
            bodies = pa.array([b"x" * size] * at_once)
            for _number in range(lists):
                there.publish(bodies)
            yield 0

        def receive(_: Any) -> Iterator[tuple[int, float]]:
            count, began = 0, 0.0
            for batch in there.batches(idle=IDLE, at_once=at_once):
                began = began or time.monotonic()
                count += len(batch.to_arrow())
                if count == lists * at_once:
                    batch.finish()
                    break
            yield count, time.monotonic() - began

        return Outcome(*self._together(send, receive))


class OverTcp(OurSpark):
    """The same read through the gateway, as from another host."""

    name = "shmq over TCP"
    lines: ClassVar[tuple[str, ...]] = (SPARK_READ,)
    note = "lease protocol, loopback"

    def _queries(self, given: dict[str, str], plan: Plan, *, keep: bool) -> float:
        many = {"instances": self._session.address}
        given = {key: value for key, value in given.items() if key != "instance"}
        given |= many | {"transport": "tcp", "consumer": self._session.fresh()}
        reader = self._session.spark.read.format("shmq").options(**given)
        seconds = timed(plan, lambda: nowhere(reader.load())()).seconds
        done = shmq.spark.return_lease(None, TOPIC, CHANNEL, given["consumer"], **many)
        if done != plan.rows:
            raise RuntimeError(f"a lease of {done} messages, not {plan.rows}")
        return seconds


class Immediate(OurSpark):
    """At least once."""

    name = "shmq publish=immediate"
    lines: ClassVar[tuple[str, ...]] = (SPARK_WRITE, SPARK_PARQUET)
    publish: ClassVar[str] = "immediate"


def in_spark(scratch: Path) -> list[Contestant]:
    session = Session(scratch)
    ours = [OurSpark(session), OverTcp(session), Immediate(session)]
    return [*ours, Copies(session), Parquet(session)]
