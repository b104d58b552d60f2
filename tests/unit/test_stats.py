"""shmq.stats: counts from fabricated segments, and nsqd's /stats shape."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_segments import SECOND, FakeDirectory, FakeQueue, FakeSource

import shmq
from shmq import procfs, stats
from shmq.gateway import nsqd_stats
from shmq.layout import ClientKind, ClientState, State


def busy_queue() -> FakeQueue:
    queue = FakeQueue(slots=16, serial=11)
    ready = [queue.message(State.READY) for _ in range(3)]
    back = [queue.message(State.REQUEUED) for _ in range(2)]
    held = queue.message(State.IN_FLIGHT, client=2)
    later = queue.message(State.DEFERRED)
    queue.ring("ready", ready)
    queue.ring("requeue", back)
    queue.ring("defer", [later])
    queue.heap("in_flight", [(100, held)])
    for field, value in {
        "enqueued": 20,
        "enqueued_bytes": 200,
        "disk_depth": 5,
        "spilling_count": 4,
        "requeued": 3,
        "timed_out": 2,
        "finished": 6,
        "returned": 1,
        "delivered": 9,
    }.items():
        queue.header[field] = value
    session = queue.sessions[1]
    session["client"], session["max_in_flight"], session["in_flight"] = 3, 200, 1
    session["delivered"], session["finished"], session["since"] = 9, 6, 1795183493 * SECOND
    return queue


def busy_source() -> FakeSource:
    directory = FakeDirectory()
    directory.header["supervisor_pid"] = os.getpid()
    directory.header["supervisor_start_time"] = procfs.start_time(os.getpid())
    directory.header["supervisor_since"] = 1795183492 * SECOND
    directory.header["epoch"] = 2
    client = directory.clients[2]
    client["state"], client["pid"], client["kind"] = (
        ClientState.LIVE,
        os.getpid(),
        ClientKind.GATEWAY,
    )
    client["pins_high"] = 2
    client["pins"][1] = 4
    directory.topic(0, "orders", messages=20)
    directory.topic(2, "idle")
    directory.queue(0, 0, "billing", 11)
    directory.queue(1, 0, None, 12)
    backlog = FakeQueue(slots=4, serial=12, index=1)
    backlog.ring("ready", [backlog.message(State.READY)])
    return FakeSource(directory, busy_queue(), backlog)


def test_depth_counts_what_waits_in_memory_and_on_disk_only() -> None:
    channel = stats.collect(busy_source()).channel("orders", "billing")
    assert channel.depth == 3 + 2 + 5 + 4
    assert channel.backend_depth == 5
    assert channel.in_flight == 1
    assert channel.deferred == 1
    assert channel.message_count == 20
    assert (channel.requeue_count, channel.timeout_count, channel.returned) == (3, 2, 1)
    assert channel.body_bytes == 7 * 64


def test_the_oldest_waiting_message_has_its_age() -> None:
    queue = busy_queue()
    age = stats.read_queue("billing", queue.view()).oldest_age
    assert age is not None
    assert 4 <= age < 60  # slot 4 is in the requeue ring
    queue.ring("ready", [])
    queue.ring("requeue", [])
    assert stats.read_queue("billing", queue.view()).oldest_age is None


def test_a_topic_has_the_depth_of_its_backlog() -> None:
    found = stats.collect(busy_source())
    assert [topic.name for topic in found.topics] == ["idle", "orders"]
    assert found.topic("orders").depth == 1
    assert found.topic("idle").depth == 0
    with pytest.raises(KeyError):
        found.topic("nope")


def test_clients_and_their_sessions_are_shown() -> None:
    found = stats.collect(busy_source())
    (client,) = found.clients
    assert (client.index, client.pid, client.kind, client.pins) == (2, os.getpid(), "gateway", 1)
    assert "python" in client.cmd or "pytest" in client.cmd
    (session,) = found.channel("orders", "billing").sessions
    assert session.client is client
    assert (session.max_in_flight, session.in_flight, session.delivered) == (200, 1, 9)


def test_the_supervisor_is_known_by_pid_and_start_time() -> None:
    source = busy_source()
    assert stats.collect(source).supervisor_alive
    assert stats.collect(source).health == "OK"
    assert not stats.collect(source, alive=False).supervisor_alive
    assert stats.collect(source, alive=False).health.startswith("NOK - ")
    directory = FakeDirectory()
    directory.header["supervisor_pid"] = os.getpid()
    directory.header["supervisor_start_time"] = 1
    assert not stats.collect(FakeSource(directory)).supervisor_alive


# nsqd, nsqd/stats.go; fields that are omitted when empty are not listed
ROOT = {"version", "health", "start_time", "topics", "producers"}
TOPIC = {
    "topic_name",
    "channels",
    "depth",
    "backend_depth",
    "message_count",
    "message_bytes",
    "paused",
    "e2e_processing_latency",
}
CHANNEL = {
    "channel_name",
    "depth",
    "backend_depth",
    "in_flight_count",
    "deferred_count",
    "message_count",
    "requeue_count",
    "timeout_count",
    "client_count",
    "clients",
    "paused",
    "e2e_processing_latency",
}
CLIENT = {
    "client_id",
    "hostname",
    "version",
    "remote_address",
    "state",
    "ready_count",
    "in_flight_count",
    "message_count",
    "finish_count",
    "requeue_count",
    "connect_ts",
    "sample_rate",
    "deflate",
    "snappy",
    "user_agent",
    "topology_zone",
    "topology_region",
    "tls",
    "tls_cipher_suite",
    "tls_version",
    "tls_negotiated_protocol",
    "tls_negotiated_protocol_is_mutual",
}


def test_json_has_the_keys_of_nsqd_and_its_own_only_under_shmq() -> None:
    document = json.loads(json.dumps(stats.collect(busy_source()).to_json()))
    assert set(document) == ROOT | {"shmq"}
    idle, orders = document["topics"]
    assert set(orders) == TOPIC | {"shmq"}
    assert idle["channels"] == []
    (channel,) = orders["channels"]
    assert set(channel) == CHANNEL | {"shmq"}
    assert set(channel["clients"][0]) == CLIENT | {"shmq"}
    assert channel["e2e_processing_latency"] == {"count": 0, "percentiles": None}
    assert document["start_time"] == 1795183492
    assert channel["clients"][0]["connect_ts"] == 1795183493


def test_json_numbers_are_whole() -> None:
    def walk(value: object) -> None:
        assert not isinstance(value, float | np.generic), value
        if isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(stats.collect(busy_source()).to_json())


def test_json_filters_answer_as_nsqd_does() -> None:
    found = stats.collect(busy_source())
    assert found.to_json(topic="nope")["topics"] is None
    assert found.to_json(channel="nope")["topics"] == []
    only = found.to_json(topic="orders", channel="billing", include_clients=False)["topics"]
    assert [topic["topic_name"] for topic in only] == ["orders"]
    assert only[0]["channels"][0]["clients"] is None
    assert only[0]["channels"][0]["client_count"] == 1


def test_held_bytes_are_those_that_consumers_hold(open_broker: Callable[..., shmq.Broker]) -> None:
    broker = open_broker()
    with broker.consumer("t", "c") as consumer:
        broker.producer("t").publish_many([b"x" * 1000] * 3)
        first, second = consumer.take(timeout=5), consumer.take(timeout=5)
        assert first is not None
        assert second is not None
        both = broker.channel_stats("t", "c").held_bytes
        assert both >= 2000
        first.requeue(0)  # it waits again, in memory
        assert broker.channel_stats("t", "c").held_bytes == both // 2
        second.finish()
        assert broker.channel_stats("t", "c").held_bytes == 0


def test_statistics_of_one_topic_look_at_no_queue_of_another(
    open_broker: Callable[..., shmq.Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = open_broker()
    for topic in ("t", "u", "v"):
        broker.create_channel(topic, f"{topic}1")
    read, looked = stats.read_queue, []

    def note(name: str | None, *args: Any) -> stats.ChannelStats:
        looked.append(name)
        return read(name, *args)

    monkeypatch.setattr(stats, "read_queue", note)

    async def call(function: Callable[[], Any], kind: str) -> Any:
        return function()

    async def none(question: object) -> list[Any]:
        return []

    context: Any = SimpleNamespace(
        broker=broker,
        call=call,
        control=SimpleNamespace(ask_all=none),
        health="OK",
        start_time=0,
        options=SimpleNamespace(e2e_processing_latency_percentile=()),
    )
    found = asyncio.run(nsqd_stats.collect(context, None, "u"))
    assert looked == ["u1"]
    assert [topic["topic_name"] for topic in found.document("u")["topics"]] == ["u"]
    assert asyncio.run(nsqd_stats.collect(context, None, "none")).stats.topics == []
    assert looked == ["u1"]
    assert len(asyncio.run(nsqd_stats.collect(context)).stats.topics) == 3
