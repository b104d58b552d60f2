"""shmq.prometheus: names, escaping, and counters that only rise."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from support.fake_segments import FakeDirectory, FakeQueue, FakeSource

from shmq import prometheus, stats
from shmq.layout import ClientKind, ClientState, State
from shmq.prometheus import METRICS, exposition


def busy_source() -> FakeSource:
    """Topic `orders` with the channel `billing` and a backlog, topic `idle`, a gateway."""
    directory = FakeDirectory()
    directory.header["epoch"] = 2
    client = directory.clients[2]
    client["state"], client["pid"], client["kind"] = ClientState.LIVE, 1, ClientKind.GATEWAY
    directory.topic(0, "orders", messages=20)
    directory.topic(2, "idle")
    directory.queue(0, 0, "billing", 11)
    directory.queue(1, 0, None, 12)
    channel, backlog = FakeQueue(serial=11), FakeQueue(serial=12, index=1)
    channel.ring("ready", [channel.message(State.READY) for _ in range(3)])
    channel.heap("in_flight", [(100, channel.message(State.IN_FLIGHT))])
    channel.header["disk_depth"], channel.header["timed_out"] = 5, 2
    channel.header["dead_lettered"] = 7
    channel.header["in_use_bytes"] = 4096
    backlog.ring("ready", [backlog.message(State.READY)])
    return FakeSource(directory, channel, backlog)


def families(page: str) -> dict[str, object]:
    return {family.name: family for family in text_string_to_metric_families(page)}


def test_every_family_is_there_with_help_and_type() -> None:
    page = exposition(stats.collect(busy_source()))
    for metric in METRICS:
        assert f"# HELP shmq_{metric.name} " in page
        assert f"# TYPE shmq_{metric.name} {metric.kind}" in page
    assert page.endswith("\n")
    assert len(families(page)) == len(METRICS)


def test_names_follow_the_rules() -> None:
    for metric in METRICS:
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert not metric.name.endswith(("_count", "_counter", "_ms"))
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_numbers_are_those_of_stat() -> None:
    taken = stats.collect(busy_source())
    found = families(exposition(taken))

    def values(name: str) -> dict[str, float]:
        return {s.labels["channel"]: s.value for s in found[name].samples}  # type: ignore[attr-defined]

    channel = taken.channel("orders", "billing")
    assert values("shmq_ready_messages") == {"billing": channel.depth, "": 1}
    assert values("shmq_in_flight_messages")["billing"] == channel.in_flight
    assert values("shmq_messages_timed_out")["billing"] == channel.timeout_count
    assert values("shmq_messages_dead_lettered") == {"billing": 7, "": 0}
    assert values("shmq_segment_body_limit_bytes")["billing"] == channel.body_limit > 0
    assert values("shmq_segment_held_bytes")["billing"] == 4096
    roles = {s.labels["role"]: s.value for s in found["shmq_clients"].samples}  # type: ignore[attr-defined]
    assert roles == {"client": 0, "supervisor": 0, "gateway": 1}


def test_latency_is_a_summary() -> None:
    (family,) = (
        found
        for name, found in families(exposition(stats.collect(busy_source()))).items()
        if name == "shmq_end_to_end_seconds"
    )
    billing = [s for s in family.samples if s.labels["channel"] == "billing"]  # type: ignore[attr-defined]
    assert [s.labels.get("quantile") for s in billing] == ["0.5", "0.95", "0.99", None, None]
    assert all(math.isnan(s.value) for s in billing[:3])  # nothing was finished lately
    assert [s.name[-4:] for s in billing[3:]] == ["_sum", "ount"]


def test_only_one_topic_or_channel() -> None:
    page = exposition(stats.collect(busy_source()), topic="orders", channel="billing")
    assert 'topic="idle"' not in page
    assert 'channel=""' not in page
    assert 'channel="billing"' in page


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r")))
def test_labels_are_escaped(name: str) -> None:
    taken = dataclasses.replace(stats.collect(busy_source()), instance=name)
    page = exposition(taken)
    (sample,) = families(page)["shmq_supervisor_up"].samples  # type: ignore[attr-defined]
    assert sample.labels["broker"] == name


def test_an_instance_without_topics_is_a_page_too() -> None:
    taken = dataclasses.replace(stats.collect(busy_source()), topics=[])
    assert "shmq_messages_published_total" not in exposition(taken)
    assert math.isclose(
        families(exposition(taken))["shmq_epoch"].samples[0].value,  # type: ignore[attr-defined]
        taken.epoch,
    )
    assert prometheus.CONTENT_TYPE.startswith("text/plain; version=0.0.4")
