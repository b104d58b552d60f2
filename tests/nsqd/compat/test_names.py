"""nsqd.dat both ways: topics, channels and pauses; whose backlogs are whose."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nsqd.compat.handover import ON_DISK, SMALL, complaints, numbered, publish, stop
from support.deliveries import take_all
from support.processes import Child, eventually
from support.real_nsqd import Nsqd

import shmq

pytestmark = pytest.mark.peers

Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]
Start = Callable[..., Nsqd]

Names = dict[str, tuple[bool, dict[str, bool]]]
"""Of each topic whether it is paused, and of each of its channels."""

NAMES: Names = {
    "plain": (False, {"one": False, "two": False}),
    "halted": (True, {"one": False}),
    "part": (False, {"halted": True, "goes.on": False}),
    "alone": (False, {}),
    "halted_alone": (True, {}),
    "-" * 64: (False, {"." * 64: True}),
}


def by_shmq(broker: shmq.Broker) -> Names:
    return {
        topic.name: (topic.paused, {channel.name: channel.paused for channel in topic.channels})
        for topic in broker.stats().topics
    }


def by_nsqd(peer: Nsqd) -> Names:
    return {
        name: (topic["paused"], {key: item["paused"] for key, item in topic["channels"].items()})
        for name, topic in peer.stats().items()
    }


def in_file(data_path: Path) -> Names:
    text = (data_path / "nsqd.dat").read_text()
    document: dict[str, Any] = json.loads(text)
    assert text == json.dumps(document, separators=(",", ":"))

    def paused(items: list[dict[str, Any]] | None) -> dict[str, bool]:
        return {item["name"]: item["paused"] for item in items or ()}

    return {
        topic["name"]: (topic["paused"], paused(topic["channels"]))
        for topic in document["topics"] or ()
    }


def make_by_shmq(broker: shmq.Broker) -> None:
    for topic, (paused, channels) in NAMES.items():
        broker.create_topic(topic)
        for channel, channel_paused in channels.items():
            broker.create_channel(topic, channel)
            if channel_paused:
                broker.pause_channel(topic, channel)
        if paused:
            broker.pause_topic(topic)


def make_by_nsqd(peer: Nsqd) -> None:
    for topic, (paused, channels) in NAMES.items():
        peer.post(f"/topic/create?topic={topic}")
        for channel, channel_paused in channels.items():
            peer.post(f"/channel/create?topic={topic}&channel={channel}")
            if channel_paused:
                peer.post(f"/channel/pause?topic={topic}&channel={channel}")
        if paused:
            peer.post(f"/topic/pause?topic={topic}")


def test_names_and_pauses_that_shmq_left(
    serve: Serve, attach: Attach, nsqd: Start, data_path: Path
) -> None:
    server = serve()
    broker = attach()
    make_by_shmq(broker)
    broker.create_channel("passing#ephemeral", "c")
    broker.create_channel("plain", "passing#ephemeral")
    stop(server)
    assert in_file(data_path) == NAMES
    peer = nsqd()
    assert by_nsqd(peer) == NAMES
    # what nsqd changes, shmq finds
    peer.post("/topic/unpause?topic=halted")
    peer.post("/channel/pause?topic=plain&channel=two")
    peer.post("/channel/delete?topic=plain&channel=one")
    peer.post("/topic/delete?topic=alone")
    peer.post("/topic/create?topic=new")
    peer.stop()
    serve()
    changed = NAMES | {
        "plain": (False, {"two": True}),
        "halted": (False, {"one": False}),
        "new": (False, {}),
    }
    del changed["alone"]
    assert by_shmq(attach()) == changed


def test_names_and_pauses_that_nsqd_left(
    serve: Serve, attach: Attach, nsqd: Start, data_path: Path
) -> None:
    peer = nsqd()
    make_by_nsqd(peer)
    peer.post("/topic/create?topic=passing%23ephemeral")
    peer.post("/channel/create?topic=passing%23ephemeral&channel=c")
    peer.post("/channel/create?topic=plain&channel=passing%23ephemeral")
    peer.stop()
    assert in_file(data_path) == NAMES
    server = serve()
    broker = attach()
    assert by_shmq(broker) == NAMES
    broker.unpause_topic("halted")
    broker.pause_channel("plain", "two")
    broker.delete_channel("plain", "one")
    broker.delete_topic("alone")
    broker.create_topic("new")
    stop(server)
    changed = NAMES | {
        "plain": (False, {"two": True}),
        "halted": (False, {"one": False}),
        "new": (False, {}),
    }
    del changed["alone"]
    assert in_file(data_path) == changed
    assert by_nsqd(nsqd()) == changed


@pytest.mark.parametrize("topic", ["t", "t#ephemeral"])
def test_what_is_ephemeral_is_handed_to_nobody(
    topic: str, serve: Serve, attach: Attach, nsqd: Start, data_path: Path
) -> None:
    server = serve(**SMALL)
    broker = attach()
    broker.create_channel(topic, "passing#ephemeral")
    publish(broker, topic, numbered(1000))
    stop(server)
    names = {"t": (False, {})} if topic == "t" else {}
    assert in_file(data_path) == names
    assert not list(data_path.glob("*ephemeral*"))
    peer = nsqd(**ON_DISK)
    assert by_nsqd(peer) == names
    quoted = topic.replace("#", "%23")
    peer.publish(quoted, numbered(1000))
    peer.post(f"/channel/create?topic={quoted}&channel=passing%23ephemeral")
    peer.stop()
    serve()
    assert by_shmq(attach()) == names


def test_an_ordinary_channel_of_an_ephemeral_topic_finds_its_messages_when_made_again(
    serve: Serve, attach: Attach, nsqd: Start, data_path: Path
) -> None:
    server = serve(**SMALL)
    broker = attach()
    broker.create_channel("t#ephemeral", "c")
    bodies = numbered(1000)
    publish(broker, "t#ephemeral", bodies)
    stop(server)
    peer = nsqd(**ON_DISK)
    assert by_nsqd(peer) == {}
    peer.post("/topic/create?topic=t%23ephemeral")
    assert peer.take("t#ephemeral", "c", 400).bodies == bodies[:400]
    peer.stop()
    serve()
    broker = attach()
    assert by_shmq(broker) == {}
    assert take_all(broker, "t#ephemeral", "c").bodies == bodies[400:]


def test_a_backlog_that_shmq_left_is_its_first_channels(
    serve: Serve, attach: Attach, nsqd: Start
) -> None:
    server = serve(**SMALL)
    broker = attach()
    bodies = numbered(5000)
    publish(broker, "t", bodies)
    stop(server)
    peer = nsqd(**ON_DISK)
    assert peer.stats()["t"]["depth"] == len(bodies)
    peer.post("/channel/create?topic=t&channel=first")
    eventually(lambda: peer.channel("t", "first")["depth"] == len(bodies))
    peer.post("/channel/create?topic=t&channel=second")
    assert peer.channel("t", "second")["depth"] == 0
    assert peer.take_all("t", "first").bodies == bodies
    peer.stop()
    assert complaints(peer, "t:first") == []


def test_a_backlog_that_nsqd_left_is_its_first_channels(
    serve: Serve, attach: Attach, nsqd: Start
) -> None:
    peer = nsqd(**ON_DISK)
    bodies = numbered(5000)
    peer.publish("t", bodies)
    peer.stop()
    server = serve(**SMALL)
    broker = attach()
    assert broker.stats().topic("t").depth == len(bodies)
    for channel in ("first", "second"):
        broker.create_channel("t", channel)
    assert broker.stats().channel("t", "second").depth == 0
    stop(server)  # with its files under the channel's name
    peer = nsqd(**ON_DISK)
    assert peer.channel("t", "first")["depth"] == len(bodies)
    assert peer.take_all("t", "first").bodies == bodies
    assert complaints(peer, "t:first") == []


def test_a_paused_topic_of_shmq_keeps_its_backlog_for_all_channels(
    serve: Serve, attach: Attach, nsqd: Start
) -> None:
    server = serve(**SMALL)
    broker = attach()
    for channel in ("one", "two", "empty"):
        broker.create_channel("t", channel)
    before, after = numbered(2000), numbered(2000, 2000)
    publish(broker, "t", before)
    take_all(broker, "t", "empty")
    broker.pause_topic("t")
    publish(broker, "t", after)
    stop(server)
    peer = nsqd(**ON_DISK)
    assert peer.stats()["t"]["depth"] == len(after)
    assert peer.channel("t", "one")["depth"] == len(before)
    peer.post("/topic/unpause?topic=t")
    for channel, bodies in (("one", before + after), ("two", before + after), ("empty", after)):
        eventually(lambda: peer.stats()["t"]["depth"] == 0)
        assert peer.take_all("t", channel).bodies == bodies
        assert complaints(peer, f"t:{channel}") == []


def test_a_paused_topic_of_nsqd_keeps_its_backlog_for_all_channels(
    serve: Serve, attach: Attach, nsqd: Start
) -> None:
    peer = nsqd(**ON_DISK)
    for channel in ("one", "two", "empty"):
        peer.post("/topic/create?topic=t")
        peer.post(f"/channel/create?topic=t&channel={channel}")
    before, after = numbered(2000), numbered(2000, 2000)
    peer.publish("t", before)
    eventually(lambda: peer.stats()["t"]["depth"] == 0)
    peer.take_all("t", "empty")
    peer.post("/topic/pause?topic=t")
    peer.publish("t", after)
    peer.stop()
    serve(**SMALL)
    broker = attach()
    assert broker.stats().topic("t").depth == len(after)
    assert broker.stats().channel("t", "one").depth == len(before)
    broker.unpause_topic("t")
    for channel, bodies in (("one", before + after), ("two", before + after), ("empty", after)):
        eventually(lambda: broker.stats().topic("t").depth == 0)
        assert take_all(broker, "t", channel).bodies == bodies
