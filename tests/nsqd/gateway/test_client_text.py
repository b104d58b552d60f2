"""The words of a client about itself, in the statistics that people read."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from support.hostile import EVIL, evil_in
from support.nsq_client import Server, sized

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours."""
    return "shmq"


@pytest.mark.parametrize("role", ["consumer", "producer"])
def test_a_client_forges_no_line_of_the_statistics(start: Start, role: str) -> None:
    server = start()
    client = server.connect()
    names = dict.fromkeys(("client_id", "hostname", "user_agent"), EVIL)
    client.identify(feature_negotiation=True, **names)
    if role == "consumer":
        client.sub("t", "c")
    else:
        client.pub("t", b"x")
    shown = server.http("GET", "/stats").body.decode()
    assert not evil_in(shown)
    assert "\nshmq: forged" not in shown
    assert "shmq: forged" in shown  # it is there, as text
    assert not evil_in(server.log)


def test_names_that_can_be_printed_are_shown_as_they_are(start: Start) -> None:
    server = start()
    client = server.connect()
    client.identify(feature_negotiation=True, hostname="hôst-日本", user_agent="a b/1 (ü)")
    client.sub("t", "c")
    assert "hôst-日本" in server.http("GET", "/stats").body.decode()
    assert "a b/1 (ü)" in server.http("GET", "/stats").body.decode()
    body = json.dumps({"hostname": "x"}).encode()
    assert sized(body)
