"""Bodies as text for people: bounded in size, whatever they are."""

from __future__ import annotations

import json
from collections.abc import Callable

import shmq
from shmq import peek
from shmq.page import bodies
from shmq.views import QueueEntry


def test_kinds_of_bodies() -> None:
    assert bodies.shown(b'{"a":[1]}')["kind"] == "json"
    assert bodies.shown(b"plain \xe2\x82\xac")["kind"] == "text"
    assert bodies.shown(b"\x1b[31mred\x07")["kind"] == "hex"
    assert bodies.shown(b"\x80\x04\x95")["kind"] == "hex"


def test_nested_json_is_indented_only_as_far_as_it_stays_short() -> None:
    deep = b"[" * 900 + b"1," * 30_000 + b"1" + b"]" * 900
    assert json.loads(deep)
    found = bodies.shown(deep)
    assert (found["kind"], found["text"]) == ("text", deep.decode())
    assert bodies.shown(b"[" * 60_000)["kind"] == "text"


def test_the_beginning_of_a_body_is_marked_as_such() -> None:
    found = bodies.shown(b'{"cut": ', 200, length=1 << 26)
    assert (found["length"], found["kind"], found["cut"]) == (1 << 26, "text", True)
    assert not bodies.shown(b"whole")["cut"]


def test_a_look_copies_no_more_than_is_asked_for(
    open_broker: Callable[..., shmq.Broker],
) -> None:
    broker = open_broker()
    broker.create_channel("films", "watch")
    producer = broker.producer("films")
    producer.publish(b"x" * 500_000, properties={"trace": b"t" * 300})
    producer.publish(b"short")
    directory = broker.directory()
    topic = directory.find_topic("films")
    entry = topic and directory.find_queue(topic.index, "watch")
    assert isinstance(entry, QueueEntry)
    view = broker.views().queue(entry)
    first, second = peek.peek(view, most=100)
    assert (first.body, first.length) == (b"x" * 100, 500_000)
    assert first.properties == {"trace": b"t" * 300}
    assert (second.body, second.length) == (b"short", 5)
    whole = peek.find(view, int(first.id, 16))
    assert whole is not None
    assert len(whole.body) == whole.length == 500_000
    assert peek.find(view, 1) is None
