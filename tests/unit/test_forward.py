"""Addresses and markers of `shmq forward`."""

from __future__ import annotations

from typing import Any

import pytest

from shmq.errors import ShmqError
from shmq.forward.forwarder import Forwarder
from shmq.forward.jetstream import JetStream
from shmq.forward.marker import Marker
from shmq.forward.nats_streams import matches
from shmq.forward.target import Source, open_target

SOURCE = Source("host", "instance", "topic", "channel")


@pytest.mark.parametrize(
    "url",
    [
        "kafka://host",
        "kafka://host/a topic",
        "nats://host:4222",
        "nats://host:99999/S",
        "nats:///S",
        "nats://host/S?subjects=s",
        "nats://host/S?subject=a.*",
        "nats://host/S?subject=",
        "nats://host/S?subject=m&marker=m",
        "nats://host/S.T",
        "nats://host/a/b",
        "nsq://host/bad name",
        "nsq://user@host/topic",
        "nsq://host/topic#ephemeral",
        "nats://host/S?subject=a#b",
        "nats://host/S?subject=a&subject=b",
        "nsq://host/topic?subject=s",
        "host:4222/S",
    ],
)
def test_an_address_that_names_no_target_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        open_target(url, SOURCE)


def test_errors_do_not_show_a_password() -> None:
    with pytest.raises(ValueError) as raised:
        open_target("nats://me:secret@host", SOURCE)
    assert "secret" not in str(raised.value)
    found = open_target("nats://me:secret@host/S", SOURCE)
    assert isinstance(found, JetStream)
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    "password", ["sec#ret", "sec/ret", "sec?ret", "sec@ret", "sec]ret", "[sec"]
)
def test_errors_do_not_show_a_password_that_breaks_an_address(password: str) -> None:
    with pytest.raises(ValueError) as raised:
        open_target(f"nats://me:{password}@host/S?wish=x", SOURCE)
    assert "sec" not in str(raised.value)


def test_the_name_of_an_ephemeral_topic_is_written_with_percent_signs() -> None:
    assert str(open_target("nsq://host/t%23ephemeral", SOURCE)) == "nsq://host:4150/t#ephemeral"


@pytest.mark.parametrize("topic", [".", "a..b", ".a", "a."])
def test_a_topic_that_is_no_subject_needs_others(topic: str) -> None:
    source = Source("host", "instance", topic, "channel")
    with pytest.raises(ValueError, match=r"give \?subject=SUBJECT"):
        open_target("nats://host/S", source)
    with pytest.raises(ValueError, match=r"give \?marker=SUBJECT"):
        open_target("nats://host/S?subject=s", source)
    open_target("nats://host/S?subject=s&marker=m", source)


def test_a_marker_is_read_as_it_was_written() -> None:
    marker = Marker(str(SOURCE), "memory-1", 7, (1, 2, 1 << 63), (4,))
    assert Marker.decoded(marker.encoded(), "here") == marker
    for body in (b"", b"text", b'{"v":2}\n', marker.encoded()[:-1], b"[]\n", b'{"v":1}\n'):
        with pytest.raises(ShmqError, match="read the last marker of here"):
            Marker.decoded(body, "here")


@pytest.mark.parametrize(
    ("pattern", "subject", "fits"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.>", "a.b.c", True),
        (">", "a", True),
        ("a.>", "a", False),
        ("a.*", "a.b.c", False),
        ("a", "a.b", False),
        ("a.b", "a", False),
    ],
)
def test_a_stream_has_the_subjects_of_its_patterns(pattern: str, subject: str, fits: bool) -> None:
    assert matches(pattern, subject) is fits


class Empty:
    """A holder of a channel's leases, and a target, that have nothing."""

    def __init__(self) -> None:
        self.most, self.most_bytes, self.exact = 10, 1000, True
        self.timeouts: list[float] = []

    def open(self) -> None: ...

    def leases(self) -> list[Any]:
        return []

    def lease(self, n: int, max_bytes: int, parent: int, timeout: float) -> None:
        self.timeouts.append(timeout)

    def idle(self) -> None: ...

    def close(self) -> None: ...


def test_until_empty_waits_only_while_there_are_messages() -> None:
    """Those that are on disk are read back meanwhile."""
    empty: Any = Empty()
    depths = iter((3, 3, 0, 0))
    Forwarder(empty, "1-2", lambda: next(depths), SOURCE, empty).run(True, print)
    first, last = empty.timeouts
    assert first > 0
    assert last == 0
