"""The histograms of the time from publish to finish, and percentiles of them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from support.processes import eventually

import shmq
from shmq import layout, sources
from shmq.page import heat
from shmq.stats import Latency


def counted(samples: np.ndarray) -> Latency:
    bounds = Latency.bounds()
    buckets = np.bincount(np.searchsorted(bounds, samples, side="right"), minlength=len(bounds))
    return Latency(len(samples), len(samples), int(samples.sum()), buckets.astype(np.uint64))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.999])
def test_a_percentile_is_within_a_bucket_of_the_exact_one(share: float) -> None:
    samples = np.random.default_rng(7).lognormal(13, 2, 20_000)
    exact = float(np.quantile(samples, share)) / 1e9
    found = counted(samples).percentile(share)
    assert found is not None
    assert exact * 0.99 <= found <= exact * 1.14


def test_without_messages_there_is_no_percentile() -> None:
    empty = Latency(0, 0, 0, np.zeros(layout.constant("LATENCY_BUCKETS"), np.uint64))
    assert empty.percentile(0.5) is None
    with pytest.raises(ValueError, match="from 0 to 1"):
        empty.percentile(99)


def test_finished_messages_are_counted_with_their_age() -> None:
    with shmq.Broker() as broker:
        producer, consumer = broker.producer("t"), broker.consumer("t", "c")
        producer.publish_many([b"x"] * 100)
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
        consumer.take_many(100).finish()
        producer.publish(b"left")
        consumer.take().requeue()
        latency = broker.stats().topics[0].channels[0].latency
        assert latency.count == latency.total_count == 100
        median = latency.percentile(0.5)
        assert median is not None
        assert 0.05 <= median <= 60
        assert latency.total_sum >= 100 * 50_000_000
        document = broker.stats().to_json()["topics"][0]["channels"][0]
        assert document["shmq"]["latency_count"] == 100
        assert document["shmq"]["latency_ms"]["p50"] >= 50


def test_a_wait_and_a_processing_time_are_counted_apart() -> None:
    with shmq.Broker() as broker:
        producer, consumer = broker.producer("t"), broker.consumer("t", "c")

        def one(waits: float, is_held: float) -> tuple[int, int]:
            """The buckets in which a message was counted."""
            before = parts(broker)
            producer.publish(b"x")
            time.sleep(waits)
            message = consumer.take(timeout=10)
            time.sleep(is_held)
            message.finish()
            passed = parts(broker) - before
            assert passed.sum(axis=1).tolist() == [1, 1]
            wait, processing = passed.argmax(axis=1).tolist()
            return wait, processing

        place = np.searchsorted(heat.bounds(), 40)  # ms; the clock of a take ticks
        eventually(lambda: (found := one(0.05, 0))[0] >= place > found[1])
        eventually(lambda: (found := one(0, 0.05))[0] < place <= found[1])
        eventually(lambda: one(0, 0) == (0, 0))
        producer.publish(b"x")
        before = parts(broker)
        holder = broker.lease_holder("t", "c", "holder")
        lease = holder.lease(1, timeout=10)
        assert lease is not None
        time.sleep(0.05)
        holder.finish_lease(lease.id)
        eventually(lambda: (parts(broker) - before)[1, place:].sum() == 1)


def parts(broker: shmq.Broker) -> np.ndarray:
    with sources.open_readonly(broker.instance) as source:
        entry = source.directory.find_topic("t")
        assert entry is not None
        found = source.directory.find_queue(entry.index, "c")
        assert found is not None
        return heat.counts(source.queue(found))
