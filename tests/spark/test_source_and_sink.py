"""`format("shmq")` in Spark itself: batch, streams, retries, killed workers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.deliveries import take_all
from support.processes import eventually
from support.slow_spark import was_too_slow

import shmq
import shmq.spark

pytestmark = pytest.mark.spark


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%05d" % number for number in range(start, start + count)]


def source(spark: Any, broker: shmq.Broker, **options: object) -> Any:
    given = {"instance": broker.instance, "topic": "t", "channel": "c", "consumer": "q"}
    given |= {"minPartitionRows": "1", "numPartitions": "2"}
    given |= {name: str(value) for name, value in options.items()}
    return spark.readStream.format("shmq").options(**given).load()


def write(rows: Any, broker: shmq.Broker, checkpoint: Path, **options: str) -> Any:
    return rows.writeStream.format("shmq").options(
        instance=broker.instance, topic="out", checkpointLocation=str(checkpoint), **options
    )


def run(query: Any) -> None:
    """All that is there, to the end. A query whose Python process is too slow is started again."""
    from pyspark.errors import StreamingQueryException

    for last in (False, False, True):
        started = query.trigger(availableNow=True).start()
        try:
            assert started.awaitTermination(120)
            return
        except StreamingQueryException as exc:
            if last or not was_too_slow(exc):
                raise


@pytest.fixture
def topics(broker: shmq.Broker) -> shmq.Broker:
    """With topic t and channel c to read, topic out and channel o to write."""
    broker.create_channel("t", "c")
    broker.create_channel("out", "o")
    return broker


def test_a_batch_is_read_more_than_once_and_then_finished(spark: Any, topics: shmq.Broker) -> None:
    topics.producer("t").publish_many(numbered(1000))
    given = {"instance": topics.instance, "topic": "t", "channel": "c", "consumer": "once"}
    # not registered by name here: Spark found pyspark_shmq
    rows = spark.read.format("shmq").options(**given, minPartitionRows="10").load()
    assert rows.dtypes == [
        ("id", "bigint"),
        ("timestamp", "timestamp"),
        ("attempts", "int"),
        ("body", "binary"),
    ]
    counts = rows.selectExpr("count(*)", "count(distinct id)", "max(attempts)")
    assert counts.first() == (1000, 1000, 1)
    assert sorted(bytes(row.body) for row in rows.select("body").collect()) == numbered(1000)
    assert shmq.spark.finish_lease(topics.instance, "t", "c", "once") == 1000
    assert topics.channel_stats("t", "c").leased == 0


def test_a_batch_without_a_name_joins_itself_and_is_finished(
    spark: Any, topics: shmq.Broker, tmp_path: Path
) -> None:
    """Both sides of the join are planned at once, as its first use. The lease outlives its ttl and
    the processes that planned it."""
    topics.producer("t").publish_many(numbered(1000))
    given = {"instance": topics.instance, "topic": "t", "channel": "c", "leaseTtl": "9s"}
    rows = spark.read.format("shmq").options(**given, minPartitionRows="10").load()
    assert rows.alias("a").join(rows.alias("b"), "id").count() == 1000
    topics.producer("t").publish_many(numbered(10, 1000))
    ends = time.monotonic() + 12
    eventually(lambda: time.monotonic() > ends)
    rows.write.parquet(str(tmp_path / "written"))
    written = spark.read.parquet(str(tmp_path / "written"))
    assert sorted(bytes(row.body) for row in written.collect()) == numbered(1000)
    assert shmq.spark.finish_lease(rows) == 1000
    assert shmq.spark.finish_lease(rows) == 0
    assert topics.channel_stats("t", "c").depth == 10
    eventually(lambda: topics.lease_owner("t", "c", _holder(rows)).process is None)


def test_rows_are_read_one_after_the_other_as_slowly_as_the_program_likes(
    spark: Any, topics: shmq.Broker
) -> None:
    """Spark reads the next part when the program has come to it: that is no look."""
    topics.producer("t").publish_many(numbered(1000))
    given = {"instance": topics.instance, "topic": "t", "channel": "c", "leaseTtl": "9s"}
    rows = spark.read.format("shmq").options(**given).load()
    found = rows.select("body").toLocalIterator()
    first = [bytes(next(found).body)]
    ends = time.monotonic() + 12  # a look ends after leaseTtl, or a minute
    eventually(lambda: time.monotonic() > ends)
    assert sorted(first + [bytes(row.body) for row in found]) == numbered(1000)
    assert shmq.spark.finish_lease(rows) == 1000


def test_a_look_takes_nothing(spark: Any, topics: shmq.Broker) -> None:
    topics.producer("t").publish_many(numbered(3000))
    given = {"instance": topics.instance, "topic": "t", "channel": "c", "peek": "true"}
    rows = spark.read.format("shmq").options(**given).load()
    assert [bytes(row.body) for row in rows.limit(2).collect()] == numbered(2)
    assert rows.count() == 3000
    assert topics.channel_stats("t", "c").depth == 3000
    with pytest.raises(ValueError, match="0 batch reads"):
        shmq.spark.finish_lease(rows)


def _holder(rows: Any) -> str:
    return str(json.loads(rows.schema["id"].metadata["shmq"])["consumer"])


@pytest.mark.parametrize("why", ["empty", "leased by another", "finished by the first run"])
def test_a_batch_read_of_nothing_has_no_rows(
    why: str, spark: Any, topics: shmq.Broker, tmp_path: Path
) -> None:
    def rows(consumer: str) -> Any:
        given = {"instance": topics.instance, "topic": "t", "channel": "c", "consumer": consumer}
        return spark.read.format("shmq").options(**given, columns="id,body").load()

    if why != "empty":
        topics.producer("t").publish_many(numbered(10))
        assert rows("first").count() == 10
    if why == "finished by the first run":
        assert shmq.spark.finish_lease(topics.instance, "t", "c", "first") == 10
    nothing = rows("second")
    assert nothing.count() == 0
    assert nothing.collect() == []
    assert nothing.toPandas().shape == (0, 2)
    nothing.write.parquet(str(tmp_path / "written"))
    assert spark.read.schema(nothing.schema).parquet(str(tmp_path / "written")).count() == 0
    nothing.write.format("shmq").mode("append").options(
        instance=topics.instance, topic="out"
    ).save()
    assert topics.channel_stats("out", "o").message_count == 0
    assert shmq.spark.finish_lease(topics.instance, "t", "c", "second") == 0
    assert shmq.spark.return_lease(topics.instance, "t", "c", "first") == (
        10 if why == "leased by another" else 0
    )


def test_a_stream_through_two_topics_gives_each_message_once(
    spark: Any, topics: shmq.Broker, tmp_path: Path
) -> None:
    rows = source(spark, topics, maxMessagesPerTrigger=400).select("body")
    for first in (0, 1000):
        topics.producer("t").publish_many(numbered(1000, first))
        run(write(rows, topics, tmp_path / "checkpoint"))
        assert topics.channel_stats("t", "c").leased == 0
    came = take_all(topics, "out", "o")
    assert sorted(came.bodies) == numbered(2000)
    assert set(came.attempts) == {1}


def test_a_stream_goes_on_as_messages_come(spark: Any, topics: shmq.Broker, tmp_path: Path) -> None:
    query = write(source(spark, topics).select("body"), topics, tmp_path / "checkpoint").start()
    try:
        for first in range(0, 300, 100):
            topics.producer("t").publish_many(numbered(100, first))
            wanted = first + 100
            eventually(lambda n=wanted: topics.channel_stats("out", "o").depth == n, 60)
        eventually(lambda: topics.channel_stats("t", "c").leased == 0)
        told = json.loads(query.lastProgress["sources"][0]["latestOffset"])
        assert {"depth", "in_flight", "leased", "oldest_ms"} <= set(told)
    finally:
        query.stop()
    assert sorted(take_all(topics, "out", "o").bodies) == numbered(300)


def test_a_task_that_fails_or_whose_worker_is_killed_reads_the_same_again(
    spark: Any, topics: shmq.Broker, tmp_path: Path
) -> None:
    topics.producer("t").publish_many(numbered(600))
    died = tmp_path / "died"
    died.mkdir()

    def dies_twice(batches):  # type: ignore[no-untyped-def]
        for number, batch in enumerate(batches):
            if number == 0:
                for name, end in (("killed", None), ("failed", "this task fails once")):
                    try:
                        os.close(os.open(died / name, os.O_CREAT | os.O_EXCL))
                    except FileExistsError:
                        continue
                    if end is None:
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise RuntimeError(end)
            yield batch

    rows = source(spark, topics).select("body").mapInArrow(dies_twice, "body binary")
    run(write(rows, topics, tmp_path / "checkpoint"))
    assert {path.name for path in died.iterdir()} == {"killed", "failed"}
    came = take_all(topics, "out", "o")
    assert sorted(came.bodies) == numbered(600)
    assert set(came.attempts) == {1}


def test_publish_in_foreach_batch_with_more_than_one_action(
    spark: Any, topics: shmq.Broker, tmp_path: Path
) -> None:
    topics.producer("t").publish_many(numbered(500))
    counted: Counter[int] = Counter()

    def each(rows: Any, epoch: int) -> None:
        counted[epoch] += rows.count()
        for _ in range(2):
            shmq.spark.publish(rows, "out", topics.instance, txnAppId="w", txnVersion=epoch)

    query = (
        source(spark, topics, maxMessagesPerTrigger=300)
        .select("body")
        .writeStream.foreachBatch(each)
    )
    run(query.option("checkpointLocation", str(tmp_path / "checkpoint")))
    assert counted == {0: 300, 1: 200}
    assert sorted(take_all(topics, "out", "o").bodies) == numbered(500)


def test_a_batch_write_is_there_when_it_succeeded_and_not_before(
    spark: Any, topics: shmq.Broker
) -> None:
    rows = spark.range(1000).selectExpr("printf('%05d', id) as body")
    to = {"instance": topics.instance, "topic": "out"}
    rows.write.format("shmq").mode("append").options(**to).save()
    rows.write.format("shmq").mode("append").options(**to, publish="immediate").save()
    broken = rows.selectExpr("if(body = '00999', cast(null as string), body) as body")
    with pytest.raises(Exception, match="null"):
        broken.write.format("shmq").mode("append").options(**to).save()
    came = take_all(topics, "out", "o")
    assert Counter(came.bodies) == Counter(numbered(1000) * 2)


def test_tasks_hand_each_other_messages(spark: Any, topics: shmq.Broker, tmp_path: Path) -> None:
    tasks = shmq.spark.Exchange(topics.instance, "tasks", "work")
    results = shmq.spark.Exchange(topics.instance, "out", "o")
    tasks.create()
    died = str(tmp_path / "died")

    def work(_: Any) -> Any:
        for message in tasks.messages(idle=3.0):
            if message.body == b"00050":
                try:
                    os.close(os.open(died, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    pass
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            results.publish([message.body])
        return iter(())

    def publish(part: Any) -> Any:
        tasks.publish(b"%05d" % number for number in part)
        return iter(())

    context = spark.sparkContext
    working = threading.Thread(
        target=lambda: context.parallelize(range(1), 1).mapPartitions(work).count()
    )
    working.start()
    context.parallelize(range(200), 1).mapPartitions(publish).count()
    working.join()
    assert os.path.exists(died)
    assert set(take_all(topics, "out", "o").bodies) == set(numbered(200))
    assert topics.channel_stats("tasks", "work").in_flight == 0


def test_what_is_wrong_is_said_where_it_is_asked_for(spark: Any, topics: shmq.Broker) -> None:
    with pytest.raises(Exception, match="no option 'chanel'"):
        spark.read.format("shmq").options(topic="t", chanel="c").load()
    with pytest.raises(Exception, match="NotRunning"):
        spark.read.format("shmq").options(topic="t", instance="nobody").load().count()
