"""The readers, driven by hand in the orders that Spark may call them in (it stops, dies, repeats):
no JVM, so milliseconds each."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.deliveries import taken
from support.processes import eventually

import shmq
from shmq import LeaseFenced, LeaseLost, procfs

pytest.importorskip("pyspark")
pa = pytest.importorskip("pyarrow")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows  # noqa: E402
from pyspark.sql.types import StructType  # noqa: E402

from shmq.spark import chain, staging  # noqa: E402
from shmq.spark.options import Settings  # noqa: E402
from shmq.spark.reading import ShmqReader, finish_lease, return_lease  # noqa: E402
from shmq.spark.source import ShmqDataSource  # noqa: E402
from shmq.spark.stream import DataLoss, ShmqStreamReader  # noqa: E402

Offset = dict[str, Any]


class Query:
    """A query's runner: a reader, and what Spark would ask it."""

    def __init__(self, broker: shmq.Broker, **options: object) -> None:
        given = {"instance": broker.instance, "topic": "t", "channel": "c", "consumer": "q"}
        given |= {"pollTimeout": "10ms", "minPartitionRows": "1", "numPartitions": "2"}
        given |= {name: str(value) for name, value in options.items()}
        self.reader: ShmqStreamReader = pickle.loads(
            pickle.dumps(ShmqStreamReader(Settings(given)))
        )

    def begin(self) -> Offset:
        return self.reader.initialOffset()

    def latest(self, start: Offset, rows: int = 3) -> Offset:
        return self.reader.latestOffset(start, ReadMaxRows(rows))

    def read(self, start: Offset, end: Offset) -> list[bytes]:
        parts = [pickle.loads(pickle.dumps(part)) for part in self.reader.partitions(start, end)]
        batches = [batch for part in parts for batch in self.reader.read(part)]
        return [body for batch in batches for body in batch.column("body").to_pylist()]


def publish(broker: shmq.Broker, first: int, last: int) -> list[bytes]:
    broker.create_channel("t", "c")
    bodies = [b"%03d" % number for number in range(first, last)]
    broker.producer("t").publish_many(bodies)
    return bodies


def test_batches_follow_each_other_and_the_last_is_finished_when_spark_says_so(
    broker: shmq.Broker,
) -> None:
    bodies, query = publish(broker, 0, 7), Query(broker)
    offsets, came = [query.begin()], []
    while (end := query.latest(offsets[-1])) != offsets[-1]:
        came.append(query.read(offsets[-1], end))
        offsets.append(end)
    assert came == [bodies[:3], bodies[3:6], bodies[6:]]
    assert [offset["p"] for offset in offsets[1:]] == [offset["l"] for offset in offsets[:-1]]
    assert broker.channel_stats("t", "c").leased == 0
    assert query.reader.reportLatestOffset()["depth"] == 0
    query.reader.commit(offsets[-1])
    query.reader.commit(offsets[1])
    assert query.reader.partitions(offsets[-1], offsets[-1]) == []


def test_rows_are_what_the_schema_says(broker: shmq.Broker) -> None:
    ids = broker.producer("t").publish_many([b"a"])
    broker.create_channel("t", "c")
    columns = "channel,body,id,timestamp,attempts,topic"
    query = Query(broker, columns=columns)
    start = query.begin()
    (part,) = query.reader.partitions(start, query.latest(start))
    (batch,) = query.reader.read(part)
    (row,) = batch.to_pylist()
    assert list(row) == columns.split(",")
    assert (row["topic"], row["channel"], row["body"], row["attempts"]) == ("t", "c", b"a", 1)
    assert row["id"] == ids[0]
    (batch,) = broker.read_lease("t", "c", part.lease)
    assert int(row["timestamp"].timestamp() * 1e6) == batch.timestamps[0] // 1000


def test_properties_are_a_column_if_asked(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    each = [{"key": "17", "raw": b"\xff"}, None]
    broker.producer("t").publish_many([b"with", b"without"], properties=each)
    query = Query(broker, columns="body,properties")
    start = query.begin()
    parts = query.reader.partitions(start, query.latest(start))
    rows = [row for part in parts for batch in query.reader.read(part) for row in batch.to_pylist()]
    assert rows == [
        {"body": b"with", "properties": [("key", b"17"), ("raw", b"\xff")]},
        {"body": b"without", "properties": []},
    ]


def test_a_batch_is_read_as_often_as_spark_likes(broker: shmq.Broker) -> None:
    bodies, query = publish(broker, 0, 5), Query(broker)
    start = query.begin()
    end = query.latest(start, 5)
    for _ in range(3):
        assert query.read(start, end) == bodies
    again = Query(broker)  # the driver was killed: no latestOffset, just the logged offsets
    assert again.read(start, end) == bodies
    assert again.latest(end) == end
    assert broker.channel_stats("t", "c").leased == 0


def test_a_query_without_a_name_goes_on_with_the_one_in_the_checkpoint(
    broker: shmq.Broker,
) -> None:
    bodies, query, again = publish(broker, 0, 3), Query(broker), Query(broker)
    for one in (query, again):
        one.reader._consumer = f"spark-{id(one)}"  # as without the option `consumer`
    start = query.begin()
    end = query.latest(start)
    assert again.begin()["c"] != start["c"]
    assert again.read(start, end) == bodies
    assert again.begin()["c"] == start["c"]


def test_a_batch_that_spark_did_not_write_down_is_given_again(broker: shmq.Broker) -> None:
    publish(broker, 0, 9)
    query = Query(broker)
    start = query.begin()
    first = query.latest(start)
    lost = query.latest(first)
    again = Query(broker)
    assert again.latest(first) == lost
    assert again.latest(first) == lost
    again.reader.stop()
    fresh = Query(broker)
    other = fresh.latest(fresh.begin(), 2)  # the checkpoint was deleted: nothing follows lease 0
    assert other["l"] > lost["l"]
    assert fresh.read(fresh.begin(), other) == [b"003", b"004"]
    assert broker.channel_stats("t", "c").leased == 2


def test_the_newest_run_of_a_query_wins(broker: shmq.Broker) -> None:
    publish(broker, 0, 3)
    before, after = Query(broker), Query(broker)
    start = before.begin()
    end = before.latest(start)
    assert after.latest(start) == end
    with pytest.raises(LeaseFenced):
        before.latest(end)
    before.reader.stop()
    assert after.read(start, end) == [b"000", b"001", b"002"]


def test_a_lost_batch_fails_the_query_or_is_left_out(broker: shmq.Broker) -> None:
    publish(broker, 0, 4)
    query = Query(broker)
    start = query.begin()
    end = query.latest(start)
    broker.return_lease("t", "c", end["l"])
    with pytest.raises(DataLoss, match=f"lease {end['l']}"):
        query.read(start, end)
    with pytest.raises(LeaseLost, match="onLostLease"):
        query.latest(end)
    loose = Query(broker, failOnDataLoss="false", onLostLease="warn")
    assert loose.read(start, end) == []
    following = loose.latest(end, 10)
    assert [body for body, _ in taken(broker)] == []
    assert loose.read(end, following) == [b"000", b"001", b"002", b"003"]
    assert loose.reader.reportLatestOffset()["lost_leases"] == 2


def test_a_channel_made_anew_is_told_from_the_old_one(broker: shmq.Broker) -> None:
    publish(broker, 0, 3)
    query = Query(broker)
    start = query.begin()
    end = query.latest(start)
    parts = query.reader.partitions(start, end)
    broker.delete_channel("t", "c")
    bodies = publish(broker, 5, 8)
    again = Query(broker)
    with pytest.raises(LeaseLost, match="created again"):
        list(again.reader.read(parts[0]))
    with pytest.raises(DataLoss):
        again.read(start, end)
    following = again.latest(end)  # `end` was processed: a new chain begins
    assert following["p"] == 0
    assert again.read(end, following) == bodies


def test_a_batch_that_fails_for_ever_is_named(broker: shmq.Broker) -> None:
    publish(broker, 0, 3)
    query = Query(broker, maxReplays=2)
    start = query.begin()
    end = query.latest(start)
    for attempt in (query, Query(broker, maxReplays=2)):
        for _ in range(2):  # both sides of a union
            assert len(attempt.read(start, end)) == 3
    with pytest.raises(shmq.ShmqError, match="shmq lease return"):
        Query(broker, maxReplays=2).read(start, end)


def test_available_now_ends_where_it_began(broker: shmq.Broker) -> None:
    bodies, query = publish(broker, 0, 5), Query(broker)
    query.reader.prepareForTriggerAvailableNow()
    offset, came = query.begin(), []
    while (end := query.latest(offset, 3)) != offset:
        came += query.read(offset, end)
        offset = end
        publish(broker, 100, 102)
    assert came == bodies
    assert broker.channel_stats("t", "c").leased == 0


def test_limits(broker: shmq.Broker) -> None:
    publish(broker, 0, 9)
    query = Query(broker, maxBytesPerTrigger=6)
    offset, sizes = query.begin(), []
    for limit in (ReadMaxRows(5), ReadMaxBytes(3), ReadMaxBytes(100)):
        end = query.reader.latestOffset(offset, limit)
        sizes.append(len(query.read(offset, end)))
        offset = end
    assert sizes == [2, 1, 6]
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(1_000_000)


def test_a_trigger_whose_last_batch_is_never_finished_is_refused(broker: shmq.Broker) -> None:
    publish(broker, 0, 3)
    query = Query(broker)
    with pytest.raises(ValueError, match="availableNow"):
        query.reader.latestOffset(query.begin(), ReadAllAvailable())
    assert broker.channel_stats("t", "c").depth == 3


def test_a_second_query_of_one_consumer_reads_nothing(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sinks of one DataFrame: the second would read what the first one reads."""
    monkeypatch.setattr(chain, "_ENDING", 0.1)
    bodies = publish(broker, 0, 3)
    first = Query(broker)
    start = first.begin()
    end = first.latest(start)
    assert first.read(start, end) == bodies
    with pytest.raises(LeaseFenced, match=f"process {os.getpid()} leases .* consumer of its own"):
        Query(broker).begin()
    other = {**start, "q": "another checkpoint"}
    with pytest.raises(LeaseFenced, match="consumer of its own"):
        Query(broker).latest(other)
    publish(broker, 3, 4)
    following = first.latest(end)  # nobody has fenced it
    assert first.read(end, following) == [b"003"]
    first.reader.stop()
    second = Query(broker)
    begin = second.begin()
    with pytest.raises(LeaseFenced, match=f"lease finish --instance .* t c {following['l']}"):
        second.latest(begin)  # its checkpoint may be gone, and its last batch processed or not
    assert broker.finish_lease("t", "c", following["l"]) == 1
    publish(broker, 4, 5)
    assert second.read(begin, second.latest(begin)) == [b"004"]


def test_a_reader_that_nobody_has_is_an_ended_one(broker: shmq.Broker) -> None:
    publish(broker, 0, 3)
    query = Query(broker)
    end = query.latest(query.begin())
    del query
    again = Query(broker)
    assert again.latest(again.begin())["l"] == end["l"]


def test_a_checkpoint_knows_its_topic(broker: shmq.Broker) -> None:
    publish(broker, 0, 3)
    query = Query(broker)
    start = query.begin()
    end = query.latest(start)
    query.reader.stop()
    broker.create_channel("other", "c")
    broker.producer("other").publish(b"x")
    for options in ({"topic": "other"}, {"channel": "d"}):
        wrong = Query(broker, **options)
        with pytest.raises(ValueError, match="reads t/c, and this query reads"):
            wrong.latest(end)
        with pytest.raises(ValueError, match="reads t/c, and this query reads"):
            wrong.read(start, end)
    assert broker.channel_stats("other", "c").depth == 1
    old = {name: end[name] for name in ("c", "b", "l", "p")}  # of an earlier version
    assert Query(broker).read(start, old) == [b"000", b"001", b"002"]


def test_a_checkpoint_knows_its_instance(
    broker: shmq.Broker, new_instance: Callable[[], str], tmp_path: Path
) -> None:
    publish(broker, 0, 3)
    query = Query(broker)
    start = query.begin()
    end = query.latest(start)
    assert len(query.read(start, end)) == 3
    query.reader.stop()
    with shmq.Broker(tmp_path / "other", new_instance()) as other:
        publish(other, 3, 5)
        wrong = Query(broker, instance=other.instance)
        with pytest.raises(ValueError, match=f"instance '{broker.instance}', and this .* reads"):
            wrong.latest(end)
        with pytest.raises(ValueError, match="the option instance that it had"):
            wrong.read(start, end)
        assert other.channel_stats("t", "c").depth == 2
        renamed = Query(broker, instance=other.instance, failOnDataLoss="false")
        after = renamed.latest(end)
        assert renamed.read(end, after) == [b"003", b"004"]
        renamed.reader.stop()
        again = Query(broker, instance=other.instance)
        assert again.read(end, after) == [b"003", b"004"]
        again.reader.stop()
    assert broker.channel_stats("t", "c").leased == 3


def test_a_schema_of_the_users_own_is_refused_before_a_row_is_leased(
    broker: shmq.Broker,
) -> None:
    publish(broker, 0, 3)
    options = {"instance": broker.instance, "topic": "t", "channel": "c", "columns": "id,body"}
    source = ShmqDataSource(options)
    mine = source.schema()
    good, short, wrong = {"id": "long", "body": "binary"}, {"id": "long"}, {"id": "date"}
    for kinds in (good, short, wrong):
        given = StructType()
        for name, kind in kinds.items():
            given.add(name, kind)
        with pytest.raises(ValueError, match=r"have the schema .*leave out .schema"):
            source.reader(given)
        with pytest.raises(ValueError, match=r"leave out .schema"):
            source.streamReader(given).initialOffset()
    assert broker.channel_stats("t", "c").leased == 0
    assert rows_of(source.reader(StructType.fromJson(json.loads(mine.json())))) == [
        b"000",
        b"001",
        b"002",
    ]
    assert finish_lease(SimpleNamespace(schema=mine)) == 3


@pytest.mark.parametrize("finished", [False, True])
def test_a_restart_between_two_triggers_is_exact_or_told(
    broker: shmq.Broker, data_path: Path, finished: bool
) -> None:
    bodies, query = publish(broker, 0, 3), Query(broker)
    start = query.begin()
    end = query.latest(start)
    assert query.read(start, end) == bodies
    if finished:  # the next trigger came, and there was nothing
        assert query.latest(end) == end
    query.reader.stop()
    broker.close()
    for _ in range(2):  # any number of restarts
        shmq.Broker(data_path, broker.instance).close()
    with shmq.Broker(data_path, broker.instance) as again:
        if not finished:
            with pytest.raises(LeaseLost, match="on-stop=keep"):
                Query(broker).latest(end)
        loose = Query(broker, onLostLease="warn")
        publish(again, 3, 5)
        loose.reader.prepareForTriggerAvailableNow()  # a part may be on disk
        following, came = loose.latest(end, 10), []
        while following != end:
            came += loose.read(end, following)
            end, following = following, loose.latest(following, 10)
        assert came == ([b"003", b"004"] if finished else [*bodies, b"003", b"004"])
        assert loose.reader.reportLatestOffset()["lost_leases"] == (0 if finished else 1)
        loose.reader.stop()


def test_a_batch_may_wait_for_more_messages(broker: shmq.Broker) -> None:
    publish(broker, 0, 2)
    query = Query(broker, minMessagesPerTrigger=3, maxTriggerDelay="never")
    start = query.begin()
    soon = Query(broker, consumer="r", minMessagesPerTrigger=3, maxTriggerDelay="0s")
    assert query.latest(start) == start
    publish(broker, 2, 3)
    end = query.latest(start)
    assert len(query.read(start, end)) == 3
    publish(broker, 3, 4)
    begin = soon.begin()
    assert soon.latest(begin) != begin


def test_a_batch_read_sees_the_same_until_it_is_finished(broker: shmq.Broker) -> None:
    bodies = publish(broker, 0, 6)
    given = {"instance": broker.instance, "topic": "t", "channel": "c", "minPartitionRows": "1"}
    reader = ShmqReader(Settings(given | {"consumer": "once", "maxMessagesPerTrigger": "4"}))
    for _ in range(2):
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        rows = [body for batch in batches for body in batch.column("body").to_pylist()]
        assert rows == bodies[:4]
    assert return_lease(broker.instance, "t", "c", "once") == 4
    assert len(reader.partitions()) > 0
    assert finish_lease(broker.instance, "t", "c", "once") == 4
    assert finish_lease(broker.instance, "t", "c", "once") == 0
    assert taken(broker) == [(bodies[4], 1), (bodies[5], 1)]


def batch(broker: shmq.Broker, **options: object) -> ShmqReader:
    """A batch read as Spark makes one of a DataFrame, in a process of its own."""
    given = {"instance": broker.instance, "topic": "t", "channel": "c", "minPartitionRows": "1"}
    given |= {name: str(value) for name, value in options.items()}
    made: ShmqReader = pickle.loads(pickle.dumps(ShmqDataSource(given).reader(None)))
    return made


def rows_of(reader: ShmqReader) -> list[bytes]:
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return [body for batch in batches for body in batch.column("body").to_pylist()]


def test_what_a_read_did_not_read_is_not_finished(broker: shmq.Broker) -> None:
    """Its lease has ended, and the name has another one."""
    bodies = publish(broker, 0, 3)
    assert rows_of(batch(broker, consumer="once")) == bodies
    (lease,) = broker.lease_owner("t", "c", "once").leases
    broker.return_lease("t", "c", lease.id)  # its time was over
    with broker.lease_holder("t", "c", "once") as other:
        assert other.lease(10).count == 3
        for end in (finish_lease, return_lease):
            with pytest.raises(LeaseLost, match=f"lease {lease.id} .* comes twice"):
                end(broker.instance, "t", "c", "once")
        assert broker.channel_stats("t", "c").leased == 3
    with pytest.raises(LeaseLost, match=f"lease {lease.id}"):
        finish_lease(broker.instance, "t", "c", "once")


def test_a_lease_that_nobody_here_has_read_is_not_finished(broker: shmq.Broker) -> None:
    publish(broker, 0, 3)
    assert finish_lease(broker.instance, "t", "c", "far") == 0
    with broker.lease_holder("t", "c", "far") as holder:
        lease = holder.lease(10)
        with pytest.raises(LeaseLost, match=f"shmq lease finish --instance .* t c {lease.id}"):
            finish_lease(broker.instance, "t", "c", "far")
        assert holder.finish_lease(lease.id) == 3


def test_a_read_is_found_by_its_columns(broker: shmq.Broker) -> None:
    bodies = publish(broker, 0, 3)
    source = ShmqDataSource({"instance": broker.instance, "topic": "t", "channel": "c"})
    frame = SimpleNamespace(schema=source.schema())
    assert rows_of(source.reader(None)) == bodies
    assert return_lease(frame) == 3
    assert rows_of(source.reader(None)) == bodies
    assert finish_lease(frame) == 3
    assert finish_lease(frame) == 0
    other = ShmqDataSource({"instance": broker.instance, "topic": "t", "channel": "c"})
    fields = [*source.schema().fields, *other.schema().fields]
    with pytest.raises(ValueError, match="2 batch reads"):
        finish_lease(SimpleNamespace(schema=SimpleNamespace(fields=fields)))


def test_a_restart_of_the_broker_is_told_to_who_finishes(
    broker: shmq.Broker, data_path: Path
) -> None:
    publish(broker, 0, 3)
    assert len(rows_of(batch(broker, consumer="once"))) == 3
    broker.close()
    with shmq.Broker(data_path, broker.instance) as again:
        with pytest.raises(LeaseLost, match="its instance was stopped"):
            finish_lease(broker.instance, "t", "c", "once")
        assert again.channel_depth("t", "c") == 3


def test_readers_that_plan_at_once_read_one_lease(broker: shmq.Broker) -> None:
    """Both sides of a join are planned in processes of their own."""
    bodies = publish(broker, 0, 100)
    context = multiprocessing.get_context("fork")

    def plan(name: str, go: Any, out: Any) -> None:
        reader = batch(broker, consumer=name)
        go.wait()
        out.put(rows_of(reader))
        out.close()

    for number in range(5):
        go, out = context.Barrier(3), context.Queue()
        planners = [context.Process(target=plan, args=(f"x{number}", go, out)) for _ in range(3)]
        for each in planners:
            each.start()
        assert [out.get() for _ in planners] == [bodies] * 3
        for each in planners:
            each.join()
        assert return_lease(broker.instance, "t", "c", f"x{number}") == 100


def test_a_lease_lives_as_long_as_the_application(broker: shmq.Broker) -> None:
    """Its ttl is over many times, and the process that planned it has ended."""
    bodies = publish(broker, 0, 3)
    application = subprocess.Popen(["sleep", "1000"])
    context = multiprocessing.get_context("fork")

    def plan() -> None:
        name = f"{application.pid}-{procfs.start_time(application.pid)}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging, "application", lambda: name)
            assert rows_of(batch(broker, consumer="once", leaseTtl="6s")) == bodies
            me = f"{os.getpid()}-{procfs.start_time(os.getpid())}"
            eventually(lambda: broker.lease_owner("t", "c", "once").process != me)

    planner = context.Process(target=plan)
    planner.start()
    planner.join()
    assert planner.exitcode == 0
    (kept,) = broker.lease_owner("t", "c", "once").leases
    over = time.monotonic() + 7
    eventually(lambda: time.monotonic() > over)
    assert [lease.id for lease in broker.lease_owner("t", "c", "once").leases] == [kept.id]
    assert broker.channel_stats("t", "c").leased == 3
    application.kill()
    application.wait()
    eventually(lambda: broker.channel_stats("t", "c").leased == 0)


def test_a_look_takes_nothing(broker: shmq.Broker) -> None:
    bodies = publish(broker, 0, 2500)
    broker.producer("t").publish(b"last", properties={"key": "17"})
    look = batch(broker, peek="true", columns="id,timestamp,attempts,body,topic,properties")
    for _ in range(2):
        batches = [batch for part in look.partitions() for batch in look.read(part)]
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert [row["body"] for row in rows] == [*bodies, b"last"]
        assert (rows[-1]["topic"], rows[-1]["properties"]) == ("t", [("key", b"17")])
    few = batch(broker, peek="true", maxMessagesPerTrigger=1200)
    assert rows_of(few) == bodies[:1200]
    counts = broker.channel_stats("t", "c")
    assert (counts.depth, counts.leased, counts.in_flight) == (2501, 0, 0)
    (part,) = batch(broker).partitions()[:1]
    (read,) = [next(batch(broker).read(part))]
    same = ("id", "timestamp")
    assert {name: rows[0][name] for name in same} == {
        name: read.to_pylist()[0][name] for name in same
    }
    with pytest.raises(shmq.Gone):
        batch(broker, channel="misspelt", peek="true").partitions()
    with pytest.raises(ValueError, match="one instance"):
        ShmqDataSource({"instances": "a:1", "topic": "t", "peek": "true"}).reader(None)
    source = ShmqDataSource({"topic": "t", "peek": "true"})
    with pytest.raises(ValueError, match="batch reads"):
        source.streamReader(None).initialOffset()


def test_what_was_only_looked_at_runs_out(broker: shmq.Broker) -> None:
    """`show` and `limit` close the rows before their end."""
    bodies = publish(broker, 0, 40_000)
    reader = batch(broker, leaseTtl="3s", numPartitions=1)
    (part,) = reader.partitions()
    rows = reader.read(part)
    assert len(next(rows)) < len(bodies)
    over = time.monotonic() + 5
    eventually(lambda: time.monotonic() > over)  # a task reads, however slowly
    assert broker.channel_stats("t", "c").leased == len(bodies)
    rows.close()
    eventually(lambda: broker.channel_stats("t", "c").leased == 0)
    assert taken(broker)[0] == (bodies[0], 2)


def test_a_read_under_the_name_of_a_stream_is_refused(broker: shmq.Broker) -> None:
    publish(broker, 0, 3)
    query = Query(broker)
    start = query.begin()
    end = query.latest(start)
    with pytest.raises(LeaseFenced, match=f"process {os.getpid()} leases under this name"):
        batch(broker, consumer="q").partitions()
    query.read(start, end)
    query.reader.stop()
    with pytest.raises(LeaseFenced, match="the checkpoint of a streaming query names"):
        batch(broker, consumer="q").partitions()
    assert Query(broker).read(start, end) == [b"000", b"001", b"002"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "topic"),
        ({"topic": "t", "chanel": "c"}, "no option 'chanel'; there are instance"),
        ({"topic": "not valid"}, "option topic"),
        ({"topic": "t", "columns": "id,nothing"}, "some of id"),
        ({"topic": "t", "leaseTtl": "soon"}, "10m"),
        ({"topic": "t", "maxBytesPerTrigger": "0"}, "64m"),
        ({"topic": "t", "publish": "later"}, "commit or immediate"),
        ({"topic": "t", "failOnDataLoss": "maybe"}, "true or false"),
    ],
)
def test_options_are_checked_where_they_are_given(options: dict[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Settings(options)


def test_options_are_parsed() -> None:
    given = {"topic": "t", "LEASETTL": "10m", "maxbytespertrigger": "64MB", "restartGrace": "never"}
    settings = Settings({**given, "path": "x", "pollTimeout": "50ms"})
    assert (settings.leaseTtl, settings.maxBytesPerTrigger) == (600.0, 64 << 20)
    assert (settings.restartGrace, settings.pollTimeout) == (1e9, 0.05)
