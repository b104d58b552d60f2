"""Failed TLS handshakes, without a clock and without sockets."""

from __future__ import annotations

import logging

import pytest

from shmq.door.handshakes import BURST, QUIET, RATE, Handshakes


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def desk(clock: Clock) -> Handshakes:
    return Handshakes(clock)


def fail(desk: Handshakes, peer: str, times: int) -> int:
    """Begin so many handshakes, all of which fail. Returns how many could begin."""
    begun = 0
    for _ in range(times):
        if desk.begin(peer):
            begun += 1
            desk.failed(peer, peer, "bad certificate")
    return begun


def test_an_address_that_fails_has_a_budget(desk: Handshakes, clock: Clock) -> None:
    assert fail(desk, "192.0.2.1", 100) == 1 + BURST
    clock.now += 10
    assert fail(desk, "192.0.2.1", 100) == min(BURST, 10 * RATE)
    for _ in range(100):
        clock.now += 0.1
        fail(desk, "192.0.2.1", 10)
    assert desk.failures <= 1 + 2 * BURST + 10 * RATE + 1
    assert desk.counts()["handshakes_refused"] == 1200 - desk.failures


def test_the_hosts_of_one_network_have_one_budget(desk: Handshakes) -> None:
    assert sum(fail(desk, f"2001:db8::{host:x}", 1) for host in range(100)) == 1 + BURST
    assert desk.begin("2001:db8:0:1::1")


def test_right_ones_cost_nothing(desk: Handshakes) -> None:
    fail(desk, "192.0.2.1", 5)
    for _ in range(1000):
        assert desk.begin("192.0.2.1")
        desk.passed("192.0.2.1")
    for _ in range(1000):
        assert desk.begin("192.0.2.2")


def test_an_address_is_logged_once_until_it_was_quiet(
    desk: Handshakes, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(20):
        clock.now += QUIET / 2
        fail(desk, "192.0.2.1", 1)
        desk.is_nobody("192.0.2.1", "192.0.2.1:1", "certificate CN=a")
    assert len(caplog.records) == 2
    clock.now += QUIET
    fail(desk, "192.0.2.1", 1)
    desk.is_nobody("192.0.2.1", "192.0.2.1:1", "certificate CN=a")
    assert len(caplog.records) == 4


def test_memory_is_bounded(desk: Handshakes) -> None:
    for number in range(20_000):
        fail(desk, f"10.0.{number >> 8}.{number & 255}", 1)
    assert len(desk._entries) == 8192
