"""The program that test_cluster.py starts: a session whose tasks run in two JVMs.

python cluster_job.py INSTANCE SCRATCH
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

import shmq.spark

MESSAGES = 2000
PATIENCE = 120.0  # seconds


def executor() -> int:
    """The JVM that this task's worker belongs to: its daemon's parent."""
    return psutil.Process(os.getppid()).ppid()


def copied(spark: Any, instance: str, scratch: Path) -> None:
    """A stream, a partition of which each executor reads."""
    seen = scratch / "executors"
    seen.mkdir()

    def note(batches: Iterator[Any]) -> Iterator[Any]:
        (seen / str(executor())).touch()
        yield from batches

    rows = spark.readStream.format("shmq").options(
        instance=instance, topic="t", channel="c", consumer="q", numPartitions=2, minPartitionRows=1
    )
    out = rows.load().select("body").mapInArrow(note, "body binary").writeStream.format("shmq")
    to = {"instance": instance, "topic": "out", "checkpointLocation": str(scratch / "checkpoint")}
    query = out.options(**to).trigger(availableNow=True).start()
    query.awaitTermination()


def exchanged(spark: Any, instance: str, scratch: Path) -> dict[str, Any]:
    """Tasks in one JVM answer those in the other; the JVM that answers is killed once."""
    tasks = shmq.spark.Exchange(instance, "tasks", "work")
    answers = shmq.spark.Exchange(instance, "answers", "a")
    tasks.create()
    answers.create()
    died, begun = scratch / "died", scratch / "begun"

    def answer(_: Any) -> Iterator[int]:
        begun.touch()
        for message in tasks.messages(idle=PATIENCE):
            if message.body == b"%d" % (MESSAGES // 2) and not died.exists():
                died.touch()
                os.kill(executor(), signal.SIGKILL)
                signal.pause()  # what the task holds is in flight until its JVM's end ends it
            answers.publish([b"%d %d" % (executor(), int(message.body))])
            if message.body == b"%d" % (MESSAGES - 1):  # what had come back came before
                message.finish()
                break
        yield executor()

    def ask(_: Any) -> Iterator[int]:
        tasks.publish(b"%d" % number for number in range(MESSAGES))
        yield executor()

    context = spark.sparkContext
    answering: list[int] = []
    thread = threading.Thread(
        target=lambda: answering.extend(context.parallelize([0], 1).mapPartitions(answer).collect())
    )
    thread.start()
    while not begun.exists():  # it has one of the two places now
        thread.join(0.05)
        if not thread.is_alive():
            raise RuntimeError("the job that answers ended before it began")
    (asking,) = context.parallelize([0], 1).mapPartitions(ask).collect()
    thread.join()
    return {"asking": asking, "answering": answering[0], "killed": died.exists()}


def await_executors(spark: Any) -> None:
    """Both: a job that begins with one has all its tasks there."""
    deadline = time.monotonic() + PATIENCE
    while spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < 3:  # and the driver
        if time.monotonic() > deadline:
            raise TimeoutError("no two executors came")
        time.sleep(0.05)


def main(instance: str, scratch: Path) -> None:
    """Both, and what is to be known of them on stdout."""
    spark = shmq.spark.session(
        "local-cluster[2,1,512]",
        "shmq cluster test",
        spark_sql_shuffle_partitions=2,
        spark_local_dir=str(scratch),
        spark_log_level="OFF",
    )
    await_executors(spark)
    copied(spark, instance, scratch)
    told = exchanged(spark, instance, scratch)
    spark.stop()
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
