"""Staged writes, driven by hand in the orders that Spark may call them in (it stops, dies,
repeats): no JVM, so milliseconds each."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from support.deliveries import taken

import shmq
from shmq import procfs

pytest.importorskip("pyspark")
pa = pytest.importorskip("pyarrow")


from shmq.spark import staging  # noqa: E402
from shmq.spark.options import Settings  # noqa: E402
from shmq.spark.source import ShmqDataSource  # noqa: E402

Offset = dict[str, Any]


# ---- writing ----


def sink(broker: shmq.Broker, **options: object) -> Settings:
    given = {"instance": broker.instance, "topic": "t"}
    return Settings(given | {name: str(value) for name, value in options.items()})


def batch_of(*bodies: bytes | None, kind: Any = None) -> Any:
    return pa.record_batch({"body": pa.array(bodies, kind or pa.binary())})


def stage(settings: Settings, epoch: int, *batches: Any, key: str = "q") -> Any:
    staged = staging.stage(batches, settings, key, epoch, staging.application())
    assert staged is not None
    return staged


def test_an_epoch_is_published_when_it_is_committed_and_once(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    settings = sink(broker)
    first = stage(settings, 0, batch_of(b"a", b"b"), batch_of(b"c"))
    second = stage(settings, 0, batch_of("d", kind=pa.string()))
    never = stage(settings, 0, batch_of(b"a dead attempt's"))
    assert broker.channel_stats("t", "c").depth == 0
    assert staging.commit([first, second], settings, "q", 0) == 4
    again = stage(settings, 0, batch_of(b"the same epoch, after a restart"))
    assert staging.commit([again], settings, "q", 0) == 0
    other = stage(settings, 0, batch_of(b"another query's"), key="r")
    assert staging.commit([other], settings, "r", 0) == 1
    staging.drop([stage(settings, 1, batch_of(b"aborted")), None], settings)
    assert never
    came = [body for body, _ in taken(broker)]
    assert came == [b"a", b"b", b"c", b"d", b"another query's"]


def test_a_commit_that_was_cut_short_goes_on_where_it_was(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_channel("t", "c")
    settings = sink(broker)
    bodies = [b"%04d" % number for number in range(1000)]
    monkeypatch.setattr(staging, "_ROWS", 100)

    class Killed(BaseException):
        pass

    from shmq.client import Producer

    whole, calls = Producer.publish_once, []

    def dies(self: Producer, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            raise Killed
        return whole(self, *arguments)

    first = stage(settings, 3, batch_of(*bodies))
    monkeypatch.setattr(Producer, "publish_once", dies, raising=False)
    with pytest.raises(Killed):
        staging.commit([first], settings, "q", 3)
    monkeypatch.delattr(Producer, "publish_once")
    reordered = stage(settings, 3, batch_of(*reversed(bodies)))
    assert staging.commit([reordered], settings, "q", 3) == 700
    assert [body for body, _ in taken(broker)] == bodies


def test_rows_that_cannot_be_messages_fail_their_task(broker: shmq.Broker) -> None:
    settings = sink(broker, body="text")
    for column, match in (
        (pa.array([1]), "cast it"),
        (pa.array(["a", None]), "null"),
        (pa.array(["a", ""]), "1 byte or more"),
    ):
        with pytest.raises(ValueError, match=match):
            staging.stage([pa.record_batch({"text": column})], settings, "q", 0, "1-1")
    with pytest.raises(ValueError, match="no column 'text'"):
        staging.stage([batch_of(b"a")], settings, "q", 0, "1-1")
    assert staging.stage([], settings, "q", 0, "1-1") is None


def staged_files(settings: Settings) -> set[str]:
    with staging.directory(settings) as here:
        return set(here.names())


def test_what_a_dead_application_staged_goes_with_the_next_commit(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    settings = sink(broker)
    process = subprocess.Popen(["sleep", "1000"])
    owner = f"{process.pid}-{procfs.start_time(process.pid)}"
    others = staging.stage([batch_of(b"of another")], settings, "other", 5, owner)
    decided = staging.stage([batch_of(b"decided")], settings, "third", 7, owner)
    assert others is not None
    assert decided is not None
    manifest = staging._prefix("third", "t") + ".7.manifest"
    with staging.directory(settings) as here:
        (here.path / manifest).write_text(json.dumps([asdict(decided)]))
        (here.path / manifest).chmod(0o600)

    assert staging.commit([stage(settings, 0, batch_of(b"a"))], settings, "q", 0) == 1
    assert staged_files(settings) == {others.file, decided.file, manifest}  # it lives
    process.kill()
    process.wait()
    assert staging.commit([stage(settings, 1, batch_of(b"b"))], settings, "q", 1) == 1
    assert staged_files(settings) == {decided.file, manifest}  # somebody may finish that

    with pytest.raises(shmq.ShmqError, match="are gone"):
        staging.commit([others], settings, "other", 5)
    assert staging.commit([], settings, "third", 7) == 1
    assert [body for body, _ in taken(broker)] == [b"a", b"b", b"decided"]


def test_what_a_killed_task_staged_goes_with_the_next_commit(broker: shmq.Broker) -> None:
    """Its application lives, and cleaned up before the task was there."""
    broker.create_channel("t", "c")
    settings = sink(broker)
    context = multiprocessing.get_context("fork")
    is_there = context.Event()

    def writes() -> None:
        def rows() -> Iterator[pa.RecordBatch]:
            yield batch_of(b"a row")
            is_there.set()
            signal.pause()

        staging.stage(rows(), settings, "killed", 0, staging.application())

    task = context.Process(target=writes)
    task.start()
    is_there.wait()
    staging.abandon(settings, "another", 0)
    (mine,) = staged_files(settings)  # it writes
    whole = stage(settings, 0, batch_of(b"whole"), key="w")
    task.kill()
    task.join()
    staging.abandon(settings, "another", 0)
    assert staged_files(settings) == {whole.file}
    assert mine != whole.file
    assert staging.commit([whole], settings, "w", 0) == 1
    assert staged_files(settings) == set()


def test_no_room_for_staged_rows_is_said(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = sink(broker)
    monkeypatch.setattr(
        staging,
        "_create",
        lambda settings, name: (staging.directory(settings), os.open("/dev/full", os.O_WRONLY)),
    )
    with pytest.raises(shmq.Full, match=r"publish to .* has no room .* larger .*staging"):
        staging.stage([batch_of(b"a" * 100_000)], settings, "q", 0, "1-1")


def test_a_write_that_is_given_up_leaves_nothing(broker: shmq.Broker) -> None:
    settings = sink(broker)
    stage(settings, 0, batch_of(b"of a task that succeeded"), key="w")
    other = stage(settings, 0, batch_of(b"another write's"), key="v")
    staging.abandon(settings, "w", 0)
    assert staged_files(settings) == {other.file}
    staging.abandon(settings, "v", 0)


def writer(broker: shmq.Broker, **options: object) -> Any:
    given = {"instance": broker.instance, "topic": "t"}
    given |= {name: str(value) for name, value in options.items()}
    return pickle.loads(pickle.dumps(ShmqDataSource(given).writer(None, False)))


def write(broker: shmq.Broker, *bodies: bytes, **options: object) -> None:
    made = writer(broker, **options)
    made.commit([made.write(iter([batch_of(*bodies)]))])


def test_a_version_below_the_last_is_an_error_and_not_a_loss(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    for version in range(3):
        write(broker, b"%d" % version, txnAppId="report", txnVersion=version)
    write(broker, b"2", txnAppId="report", txnVersion=2)  # the last one, again after a death
    late = writer(broker, txnAppId="report", txnVersion=0)  # the checkpoint was deleted
    rows = late.write(iter([batch_of(b"new")]))
    with pytest.raises(
        shmq.ShmqError, match=r"1 rows .* as version 0 of 'report'.*another txnAppId"
    ):
        late.commit([rows])
    late.abort([None])
    write(broker, b"skipped", txnAppId="report", txnVersion=0, failOnDataLoss="false")
    write(broker, b"new", txnAppId="report-2", txnVersion=0)
    assert [body for body, _ in taken(broker)] == [b"0", b"1", b"2", b"new"]


def test_two_writes_of_one_version_are_an_error(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    terms = {"txnAppId": "report", "txnVersion": 7}
    write(broker, b"good", **terms)
    again = writer(broker, **terms)
    with pytest.raises(shmq.ShmqError, match="a txnAppId of its own"):
        again.commit([again.write(iter([batch_of(b"bad!")]))])
    again.abort([None])
    write(broker, b"good", **terms)  # a program that tries its micro-batch again
    other = again.write(iter([batch_of(b"computed anew")]))
    again.commit([replace(other, run="a later run of the query")])
    write(broker, b"bad!", txnAppId="errors", txnVersion=7)
    assert [body for body, _ in taken(broker)] == [b"good", b"bad!"]


def test_a_write_without_a_name_takes_no_mark(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are 256, and a stream whose mark gives way would publish twice."""
    from shmq.client import Producer

    whole, marks = Producer.publish_once, []

    def once(self: Producer, *arguments: Any) -> Any:
        marks.append(arguments)
        return whole(self, *arguments)

    monkeypatch.setattr(Producer, "publish_once", once, raising=False)
    broker.create_channel("t", "c")
    write(broker, b"a", b"b")
    write(broker, b"c", publish="immediate")
    assert not marks
    write(broker, b"d", txnAppId="report", txnVersion=1)
    assert len(marks) == 1
    assert [body for body, _ in taken(broker)] == [b"a", b"b", b"c", b"d"]
