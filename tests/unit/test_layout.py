"""shmq.layout, views and peek: dtypes, what a view refuses, rings, heaps, messages."""

from __future__ import annotations

import enum
import os

import numpy as np
import pytest
from support.fake_segments import SECOND, FakeDirectory, FakeQueue

from shmq import _native, layout, peek, sources, views
from shmq.errors import Gone, LayoutMismatch
from shmq.layout import Ready, State
from shmq.options import Options


@pytest.mark.parametrize("structure", sorted(_native.LAYOUT))
def test_a_dtype_covers_its_structure(structure: str) -> None:
    made = layout.dtype(structure)
    assert made.itemsize == _native.SIZES[structure]
    assert made.fields is not None
    for name, (_, offset, size, count) in _native.LAYOUT[structure].items():
        field, at = made.fields[name][:2]
        assert (at, field.itemsize) == (offset, size * count)


@pytest.mark.parametrize(
    ("numbers", "prefix"),
    [
        (layout.Role, "ROLE_"),
        (layout.ClientKind, "AS_"),
        (layout.ClientState, "CLIENT_"),
        (layout.EntryState, "ENTRY_"),
        (layout.SegmentKind, "SEGMENT_"),
        (layout.SpillSource, "SPILL_"),
        (layout.Ring, "RING_"),
    ],
)
def test_every_number_of_the_core_has_a_name(numbers: type[enum.Enum], prefix: str) -> None:
    names = {name.removeprefix(prefix) for name in _native.CONSTANTS if name.startswith(prefix)}
    assert names == set(numbers.__members__)


def test_every_state_of_the_core_has_a_name() -> None:
    assert sorted(State) == list(range(layout.constant("STATES")))


def test_a_state_word_comes_apart() -> None:
    words = np.array([4 | 77 << 8 | 123456789 << 24], np.uint64)
    assert layout.state(words).tolist() == [4]
    assert layout.owner(words).tolist() == [77]
    assert layout.generation(words).tolist() == [123456789]


def test_names_are_decoded() -> None:
    assert layout.names(np.array([b"orders", b"a#ephemeral"], "S80")) == ["orders", "a#ephemeral"]


def test_a_new_directory_can_be_viewed() -> None:
    fd = os.memfd_create("directory")
    try:
        _native.create_directory(fd, **Options(node_id=5).limits())
        size = os.fstat(fd).st_size
        view = views.DirectoryView(sources.map_readonly(os.dup(fd), "directory"))
    finally:
        os.close(fd)
    assert size == _native.directory_bytes()
    assert int(view.limits["node_id"]) == 5
    assert int(view.limits["msg_timeout"]) == 60 * SECOND
    assert view.live_topics() == []
    assert view.live_queues() == []
    assert view.free_clients == 1024


def test_views_are_read_only() -> None:
    view = FakeQueue().view()
    for array in (view.header, view.slots, view.arena, view.sessions):
        assert not array.flags.writeable


def test_a_view_ends_where_pages_end() -> None:
    queue = FakeQueue(slots=8)
    queue.header["slots_committed"] = 3
    queue.header["arena_committed"] = 100
    queue.ring("ready", [0, 5, 2])
    view = queue.view()
    assert len(view.slots) == 3
    assert len(view.arena) == 100
    assert view.ready.tolist() == [0, 2]


def test_a_committed_word_beyond_the_table_is_not_believed() -> None:
    queue = FakeQueue(slots=8)
    queue.header["slots_committed"] = 10**6
    queue.header["sessions_committed"] = 10**6
    view = queue.view()
    assert len(view.slots) == 8
    assert len(view.sessions) == layout.constant("SESSIONS")


@pytest.mark.parametrize("head", [0, 5, 2**32 - 3])
def test_a_ring_is_read_in_its_order_also_around_the_end(head: int) -> None:
    queue = FakeQueue(slots=8)
    queue.ring("ready", [3, 1, 4, 0, 5], head=head)
    assert queue.view().ready.tolist() == [3, 1, 4, 0, 5]
    assert queue.view().ring_length("ready") == 5


def test_a_full_and_an_empty_ring() -> None:
    queue = FakeQueue(slots=4)
    queue.ring("ready", [3, 2, 1, 0], head=6)
    assert queue.view().ready.tolist() == [3, 2, 1, 0]
    assert queue.view().requeue.tolist() == []


def test_a_ring_whose_indices_are_torn_reads_as_empty() -> None:
    queue = FakeQueue(slots=4)
    queue.header["ready_head"], queue.header["ready_tail"] = 9, 5
    assert queue.view().ready.tolist() == []


def damage(field: str, value: int) -> FakeQueue:
    queue = FakeQueue()
    place = (
        queue.header["segment"] if field in queue.header["segment"].dtype.names else queue.header
    )
    place[field] = value
    return queue


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("magic", 1, "not made by shmq"),
        ("layout_version", 99, "layout version 99"),
        ("fingerprint", 1, "another build"),
        ("kind", 1, "kind 1"),
        ("ready", Ready.RAW, "not ready"),
        ("size", 1 << 40, "bytes but has"),
        ("size", 0, "bytes but has"),
        ("slots_at", 8, "slots_at"),
        ("arena_at", 1 << 39, "arena_at"),
        ("slots_max", 1 << 30, "slots_at"),
        ("ready_at", (1 << 64) - 8, "ready_at"),
    ],
)
def test_a_segment_that_is_not_right_is_refused_by_name(field: str, value: int, words: str) -> None:
    with pytest.raises(LayoutMismatch, match=words):
        damage(field, value).view()


def test_a_closed_segment_is_gone() -> None:
    with pytest.raises(Gone):
        damage("ready", Ready.CLOSED).view()


def test_a_segment_that_is_too_short_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="only 7 bytes"):
        views.QueueView(bytes(7))
    with pytest.raises(LayoutMismatch, match="not ready"):
        views.QueueView(bytes(4096))


def test_live_entries_are_found_by_name() -> None:
    directory = FakeDirectory()
    directory.topic(1, "orders")
    directory.topic(3, "a#ephemeral")
    directory.topics[3]["flags"] = layout.FLAG_EPHEMERAL
    directory.queue(0, 1, "billing", 11)
    directory.queue(2, 1, None, 12)
    view = directory.view()
    assert [(topic.index, topic.name) for topic in view.live_topics()] == [
        (1, "orders"),
        (3, "a#ephemeral"),
    ]
    found = view.find_topic("a#ephemeral")
    assert found is not None
    assert found.ephemeral
    assert view.find_topic("x") is None
    backlog, channel = view.find_queue(1, None), view.find_queue(1, "billing")
    assert backlog is not None
    assert channel is not None
    assert (backlog.index, backlog.serial, backlog.channel) == (2, 12, None)
    assert (channel.index, channel.serial, channel.channel) == (0, 11, "billing")
    assert view.find_queue(3, None) is None


def test_peek_shows_messages_in_the_order_of_delivery() -> None:
    queue = FakeQueue()
    ready = [queue.message(State.READY, f"r{number}".encode()) for number in range(3)]
    back = queue.message(State.REQUEUED, b"back")
    queue.ring("ready", ready, head=3)
    queue.ring("requeue", [back])
    found = peek.peek(queue.view(), "ready", 3)
    assert [message.body for message in found] == [b"back", b"r0", b"r1"]
    assert found[1].id == "0000000000000001"
    assert found[2].attempts == 1
    assert {message.state for message in found} == {"ready"}


def test_peek_shows_who_holds_a_message_and_until_when() -> None:
    queue = FakeQueue()
    first = queue.message(State.IN_FLIGHT, deadline=300, client=9)
    second = queue.message(State.IN_FLIGHT, deadline=100, client=8)
    never = queue.message(State.IN_FLIGHT, deadline=np.iinfo(np.int64).max, client=7)
    entries = [(300, first), (100, second), (np.iinfo(np.int64).max, never)]
    queue.heap("in_flight", entries)
    found = peek.peek(queue.view(), "in_flight")
    assert [(message.deadline, message.client) for message in found] == [
        (100, 8),
        (300, 9),
        (None, 7),
    ]


def test_peek_shows_deferred_messages_by_due_time_also_those_not_yet_in_the_heap() -> None:
    queue = FakeQueue()
    late = queue.message(State.DEFERRED, b"late", deadline=300)
    soon = queue.message(State.DEFERRED, b"soon", deadline=200)
    queue.heap("deferred", [(300, late)])
    queue.ring("defer", [soon])
    found = peek.peek(queue.view(), "deferred")
    assert [(message.body, message.due) for message in found] == [(b"soon", 200), (b"late", 300)]


def test_peek_leaves_out_what_was_taken_meanwhile_and_bodies_without_pages() -> None:
    queue = FakeQueue()
    taken = queue.message(State.IN_FLIGHT)
    gone = queue.message(State.READY, b"gone")
    queue.slots[gone]["body"] = 10**9
    stays = queue.message(State.READY, b"stays")
    queue.ring("ready", [taken, gone, stays])
    assert [message.body for message in peek.peek(queue.view())] == [b"stays"]


def test_peek_refuses_a_state_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="ready, in_flight, deferred"):
        peek.peek(FakeQueue().view(), "done")
