"""The network of a fleet's storm: what it loses is lost, and nothing of it is left."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import network
from support.network import Cable
from support.processes import WATCHDOG, eventually, python_child, say

PORT = 4150
ANSWERS = {b"LEASE t": b"done", b"COMMIT t": b"did it"}


def answer(address, port, answers):
    import socket
    import threading

    def one(client):
        with client:
            client.sendall(answers[client.recv(100).decode()].encode())

    with socket.create_server((address, port)) as server:
        say("listens")
        while True:
            threading.Thread(target=one, args=server.accept()[:1]).start()


@pytest.fixture
def cable() -> Iterator[Cable]:
    """With a server at its other end."""
    if (reason := network.why_not()) is not None:
        pytest.skip(reason)
    answers = {asked.decode(): said.decode() for asked, said in ANSWERS.items()}
    with contextlib.closing(Cable()) as made:
        child = python_child(answer, made.address, PORT, answers, before=made.nsenter)
        with contextlib.closing(child):
            child.said("listens")
            yield made


def asked(cable: Cable, patience: float) -> bool:
    """Whether the server answers in time."""
    try:
        with socket.create_connection((cable.address, PORT), patience) as client:
            client.sendall(b"LEASE t")
            return client.recv(100) == ANSWERS[b"LEASE t"]
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    "break_it",
    [
        lambda cable: setattr(cable.there, "passes", False),
        lambda cable: setattr(cable.back, "passes", False),
    ],
)
def test_packets_of_one_direction_are_lost_until_it_is_healed(
    cable: Cable, break_it: Callable[[Cable], None]
) -> None:
    assert asked(cable, WATCHDOG)
    break_it(cable)
    assert not asked(cable, 0.2)
    cable.heal()
    assert asked(cable, WATCHDOG)


def test_packets_are_late_and_in_order(cable: Cable) -> None:
    cable.there.delay = cable.back.delay = 0.1
    begun = time.monotonic()
    assert asked(cable, WATCHDOG)
    assert time.monotonic() - begun >= 0.4  # to connect, and to ask


def test_an_answer_is_lost_and_what_was_asked_is_not(cable: Cable) -> None:
    with socket.create_connection((cable.address, PORT), WATCHDOG) as client:
        cable.lose_answer(b"LEASE t")
        client.sendall(b"LEASE t")
        assert cable.caught(WATCHDOG)
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(100)
        cable.heal()
        client.settimeout(WATCHDOG)
        assert client.recv(100) == ANSWERS[b"LEASE t"]


@pytest.mark.parametrize("word", [b"COMMIT t", b"did"])
def test_nothing_passes_from_the_packet_with_a_word_on(cable: Cable, word: bytes) -> None:
    """In a question, or in its answer."""
    with socket.create_connection((cable.address, PORT), WATCHDOG) as client:
        cable.lose_from(word)
        assert asked(cable, WATCHDOG)
        client.sendall(b"COMMIT t")
        assert cable.caught(WATCHDOG)
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(100)
        assert not asked(cable, 0.2)
        cable.heal()
        client.settimeout(WATCHDOG)
        assert client.recv(100) == ANSWERS[b"COMMIT t"]  # the kernel has sent it again


def test_devices_end_with_the_cable(cable: Cable) -> None:
    number = cable.address.split(".")[2]
    device = Path("/sys/class/net", f"shmqtest{number}")
    assert device.exists()
    extra = Cable()
    other = Path("/sys/class/net", f"shmqtest{extra.address.split('.')[2]}")
    assert other.exists()
    extra.close()
    eventually(lambda: not other.exists())
