"""Polars and DuckDB, which know nothing of shmq, exchange columns with it."""

from __future__ import annotations

from typing import Any

import duckdb
import polars
import pytest
from support.processes import WATCHDOG

import shmq

BODIES = [b"one", b"\0\xff", b"3" * 300]


@pytest.fixture
def ends(broker: shmq.Broker) -> tuple[shmq.Producer, shmq.Consumer]:
    return broker.producer("t"), broker.consumer("t", "c")


SERIES = {
    "binary": lambda: polars.Series(BODIES),
    "sliced": lambda: polars.Series([b"-", *BODIES, b"-"])[1:4],
    "several chunks": lambda: polars.concat(
        [polars.Series(BODIES[:1]), polars.Series(BODIES[1:])], rechunk=False
    ),
    "of a frame": lambda: polars.DataFrame({"body": BODIES, "other": [1, 2, 3]})["body"],
}


@pytest.mark.parametrize("kind", SERIES)
def test_a_series_of_polars_is_published(
    ends: tuple[shmq.Producer, shmq.Consumer], kind: str
) -> None:
    producer, consumer = ends
    ids = producer.publish_many(SERIES[kind](), properties={"from": "polars"})
    with consumer.take_many(10, timeout=WATCHDOG) as batch:
        assert (batch.bodies(), batch.ids.tolist()) == (BODIES, list(ids))
        assert batch.properties[2] == {"from": b"polars"}


def test_other_series_are_refused(ends: tuple[shmq.Producer, shmq.Consumer]) -> None:
    producer, consumer = ends
    refused: list[tuple[Any, type[Exception], str]] = [
        (polars.Series([b"a", None]), ValueError, "1 of the bodies are null"),
        (polars.Series([1, 2]), TypeError, "cast it"),
        (polars.DataFrame({"body": BODIES}), TypeError, "one column of a table"),
        (duckdb.sql("SELECT 'a'::BLOB AS body"), TypeError, "one column of a table"),
    ]
    for column, error, words in refused:
        with pytest.raises(error, match=words):
            producer.publish_many(column)
    assert consumer.take(0) is None


def test_a_batch_is_a_frame_of_polars(
    broker: shmq.Broker, ends: tuple[shmq.Producer, shmq.Consumer]
) -> None:
    producer, consumer = ends
    ids = producer.publish_many(BODIES)
    batch = consumer.take_many(10, timeout=WATCHDOG)
    stamps = batch.timestamps.tolist()
    frame = polars.DataFrame(batch)
    batch.finish()
    del batch
    broker.close()
    assert frame.schema == {
        "id": polars.UInt64,
        "timestamp": polars.Datetime("ns", "UTC"),
        "attempts": polars.UInt16,
        "body": polars.Binary,
    }
    assert frame["id"].to_list() == list(ids)
    assert frame["timestamp"].to_physical().to_list() == stamps
    assert frame["attempts"].to_list() == [1, 1, 1]
    assert frame["body"].to_list() == BODIES


def test_a_batch_is_a_table_of_duckdb(ends: tuple[shmq.Producer, shmq.Consumer]) -> None:
    producer, consumer = ends
    producer.publish_many(BODIES)
    batch = consumer.take_many(10, timeout=WATCHDOG)
    empty = consumer.take_many(10, 0)
    with duckdb.connect() as connection:
        connection.register("batch", batch)
        connection.register("nothing", empty)
        rows = connection.sql("SELECT body FROM batch ORDER BY id").fetchall()
        assert rows == [(body,) for body in BODIES]
        found = connection.sql("SELECT count(*), sum(attempts) FROM batch").fetchall()
        assert found == [(3, 3)]
        assert connection.sql("SELECT count(*) FROM nothing").fetchall() == [(0,)]
    batch.finish()
