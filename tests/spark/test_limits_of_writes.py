"""Writes that meet a limit: of a message, and of a channel. On this host and over TCP. No JVM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fleet import Instance

import shmq
from shmq.errors import MessageTooBig, Rejected

pytest.importorskip("pyspark")
pa = pytest.importorskip("pyarrow")

from shmq.spark import hosts  # noqa: E402
from shmq.spark.source import ShmqDataSource  # noqa: E402

MOST = 100_000


class Sink:
    """A topic of an instance, and how it is written."""

    def __init__(self, broker: shmq.Broker, options: dict[str, str]) -> None:
        self.broker, self._options = broker, {"topic": "t", **options}

    def writer(self, **more: str) -> Any:
        return ShmqDataSource(self._options | more).writer(None, False)

    @staticmethod
    def rows(*bodies: bytes) -> Iterator[Any]:
        return iter([pa.record_batch({"body": pa.array(bodies, pa.binary())})])


@pytest.fixture(params=["instance", "instances"])
def sink(
    request: pytest.FixtureRequest, new_instance: Callable[[], str], tmp_path: Path
) -> Iterator[Sink]:
    made = Instance(new_instance(), tmp_path / "x", gateway_workers=1, max_msg_size=MOST)
    one = {"instance": made.broker.instance}
    far = {"instances": made.address, "transport": "tcp"}
    yield Sink(made.broker, one if request.param == "instance" else far)
    hosts.disconnect()
    made.close()


@pytest.mark.parametrize("publish", ["commit", "immediate"])
def test_a_row_that_is_too_big_fails_its_task_and_names_the_flag(sink: Sink, publish: str) -> None:
    sink.broker.create_channel("t", "c")
    writer = sink.writer(publish=publish)
    with pytest.raises(MessageTooBig, match="--max-msg-size"):
        writer.write(sink.rows(b"small", b"x" * (MOST + 1)))
    writer.abort([None])
    assert sink.broker.channel_depth("t", "c") == 0
    exact = sink.writer(publish=publish)
    exact.commit([exact.write(sink.rows(b"x" * MOST))])
    assert sink.broker.channel_depth("t", "c") == 1


@pytest.mark.parametrize("limit", [{"max_messages": 7}, {"max_bytes": 1500}])
@pytest.mark.parametrize("name", [{}, {"txnAppId": "w", "txnVersion": "1"}])
def test_more_rows_than_a_channel_holds_are_written_as_it_is_consumed(
    sink: Sink, limit: dict[str, int], name: dict[str, str]
) -> None:
    sink.broker.create_channel("t", "c")
    sink.broker.configure("t", "c", overflow="block", **limit)
    bodies = [b"%0100d" % number for number in range(60)]
    writer = sink.writer(**name)
    written = writer.write(sink.rows(*bodies))
    commit = threading.Thread(target=writer.commit, args=([written],))
    commit.start()
    came: list[bytes] = []
    with sink.broker.consumer("t", "c") as consumer:
        while len(came) < len(bodies):
            message = consumer.take(timeout=0.5)
            if message is not None:
                came.append(bytes(message.body))
                message.finish()
        commit.join()
        assert consumer.take(timeout=0) is None
    assert came == bodies


def test_what_a_channel_that_rejects_has_no_room_for_is_an_error(sink: Sink) -> None:
    sink.broker.create_channel("t", "c")
    sink.broker.configure("t", "c", overflow="reject", max_messages=7)
    writer = sink.writer(timeout="1s")
    written = writer.write(sink.rows(*(b"%d" % number for number in range(60))))
    with pytest.raises(Rejected):
        writer.commit([written])
