"""The page's server: strangers, wrong requests, large bodies, many browsers."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import urllib.parse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.page import login

import shmq
from shmq.page import bodies

StartPage = Callable[..., str]


def visit(url: str, person: Callable[[aiohttp.ClientSession, str], Awaitable[None]]) -> None:
    """Run `person(session, base)` with the pass for the address that was printed."""
    base, headers = login(url)

    async def run() -> None:
        async with aiohttp.ClientSession(headers=headers) as session:
            await person(session, base)

    asyncio.run(run())


async def asked(session: aiohttp.ClientSession, url: str, **how: Any) -> tuple[int, str, Any]:
    async with session.get(url, **how) as answer:
        return answer.status, await answer.text(), answer.headers


# ---- who may ask ----


def test_without_the_token_nothing_is_shown(shop: shmq.Broker, start_page: StartPage) -> None:
    url = start_page(shop.instance)
    base, passes = login(url)
    token = url.partition("#token=")[2]
    given = passes["X-Shmq-Page"]
    paths = ("state", "ticks", "login", "rights", "message?topic=orders", f"state?token={token}")

    async def stranger() -> None:
        async with aiohttp.ClientSession() as session:
            for path in paths:
                cookie = f"shmq_page={given}; shmq_page_{urllib.parse.urlsplit(url).port}={token}"
                for how in ({}, {"Cookie": cookie}):
                    status, text, headers = await asked(session, base + path, headers=how)
                    assert status == 403, path
                    assert "token" in text
                    assert "orders" not in text
                    assert "default-src 'none'" in headers["Content-Security-Policy"]
                    assert "Set-Cookie" not in headers
            for wrong in ({"X-Shmq-Page": token}, {"X-Shmq-Page": given[:-1]}):
                assert (await asked(session, base + "state", headers=wrong))[0] == 403
            for path in ("", f"?token={token}", "static/main.js"):  # what everybody has
                status, text, headers = await asked(session, base + path)
                assert (status, "orders" in text) == (200, False)
                assert "Set-Cookie" not in headers

    asyncio.run(stranger())


def test_the_name_of_another_site_is_refused(shop: shmq.Broker, start_page: StartPage) -> None:
    url = start_page(shop.instance)

    async def person(session: aiohttp.ClientSession, base: str) -> None:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.1.2.3"):
            status, text, _ = await asked(session, base + "state", headers={"Host": host})
            assert (status, host in text) == (403, True)
        status, _, _ = await asked(session, base + "state", headers={"Host": "localhost:1"})
        assert status == 200

    visit(url, person)


def test_every_answer_forbids_scripts_of_others_and_frames(
    shop: shmq.Broker, start_page: StartPage
) -> None:
    url = start_page(shop.instance)

    async def person(session: aiohttp.ClientSession, base: str) -> None:
        for path in ("", "state", "static/page.css", "static/nothing", "channel?topic=no", "nope"):
            _, _, headers = await asked(session, base + path)
            policy = headers["Content-Security-Policy"]
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert headers["X-Content-Type-Options"] == "nosniff"

    visit(url, person)


def test_a_socket_file_is_for_its_user_only(
    shop: shmq.Broker, start_page: StartPage, tmp_path: Path
) -> None:
    path = tmp_path / "page.sock"
    assert start_page(shop.instance, f"--socket={path}") == f"unix:{path}"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600

    async def person() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session:
            status, text, _ = await asked(session, "http://any/page/state")
            assert status == 200
            assert json.loads(text)["instance"] == shop.instance

    asyncio.run(person())


# ---- wrong requests ----


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("channel?topic=nothing&channel=here", 404, "there is no channel nothing/here"),
        ("messages?topic=orders&channel=pack&state=lost", 400, "state must be one of"),
        ("messages?topic=orders&channel=pack&n=0", 400, "n is a number from 1"),
        ("messages?topic=orders&channel=pack&n=1e9", 400, "n is a number from 1"),
        ("message?topic=orders&channel=pack&id=no", 404, "is not in the memory"),
        ("static/..%2F__init__.py", 404, ""),
        ("static/%2e%2e%2fserver.py", 404, ""),
    ],
)
def test_a_wrong_request_is_answered_with_words(
    shop: shmq.Broker, start_page: StartPage, path: str, status: int, words: str
) -> None:
    async def person(session: aiohttp.ClientSession, base: str) -> None:
        found, text, _ = await asked(session, base + path)
        assert (found, words in text) == (status, True), text
        assert "Traceback" not in text

    visit(start_page(shop.instance), person)


def test_nothing_can_be_written(shop: shmq.Broker, start_page: StartPage) -> None:
    async def person(session: aiohttp.ClientSession, base: str) -> None:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            for path in ("", "state", "channel?topic=orders&channel=pack"):
                async with session.request(method, base + path) as answer:
                    assert answer.status == 405, (method, path)

    before = shop.stats().channel("orders", "pack").message_count
    visit(start_page(shop.instance), person)
    assert shop.stats().channel("orders", "pack").message_count == before


def test_a_large_body_travels_in_part(
    open_broker: Callable[..., shmq.Broker], start_page: StartPage
) -> None:
    broker = open_broker(max_msg_size=64 << 20)
    broker.create_channel("films", "watch")
    broker.producer("films").publish(b"\x00" * (64 << 20))

    async def person(session: aiohttp.ClientSession, base: str) -> None:
        place = "?topic=films&channel=watch"
        _, text, _ = await asked(session, f"{base}messages{place}")
        (listed,) = json.loads(text)
        _, text, _ = await asked(session, f"{base}message{place}&id={listed['id']}")
        body = json.loads(text)["body"]
        assert (body["length"], body["kind"], body["cut"]) == (64 << 20, "hex", True)
        assert len(text) < 8 * bodies.MOST

    visit(start_page(broker.instance), person)


@pytest.mark.parametrize("start", [b"ARROW1\0\0", b"\xff" * 4 + b"\xf8\xff\xff\0", b"[" * 900])
def test_a_large_body_that_lies_about_itself_stops_nobody(
    open_broker: Callable[..., shmq.Broker], start_page: StartPage, start: bytes
) -> None:
    broker = open_broker(max_msg_size=64 << 20)
    broker.create_channel("films", "watch")
    broker.producer("films").publish(start + b"1," * (20 << 20))
    (seen,) = broker.peek("films", "watch")

    async def person(session: aiohttp.ClientSession, base: str) -> None:
        path = f"{base}message?topic=films&channel=watch&id={seen.id}"
        asked_for = [asyncio.create_task(asked(session, path)) for _ in range(4)]
        status, _, _ = await asked(session, base + "state")
        assert status == 200
        for status, text, _ in await asyncio.gather(*asked_for):
            assert status == 200
            assert len(text) < 16 * bodies.MOST
            body = json.loads(text)["body"]
            assert body["length"] == len(start) + (40 << 20)
            if start[:1] != b"[":
                assert "cannot be read" in body["arrow"]["error"]

    visit(start_page(broker.instance), person)


# ---- changes ----

WISH = {"action": "delete_channel", "topic": "orders", "channel": "pack"}
OURS: dict[str, str] = {}


def test_without_admin_no_wish_is_granted(shop: shmq.Broker, start_page: StartPage) -> None:
    async def person(session: aiohttp.ClientSession, base: str) -> None:
        async with session.post(base + "act", json=WISH, headers=OURS) as answer:
            assert (answer.status, "--admin" in await answer.text()) == (403, True)

    visit(start_page(shop.instance), person)
    assert shop.stats().channel("orders", "pack")


def test_a_page_of_another_site_can_change_nothing(
    shop: shmq.Broker, start_page: StartPage
) -> None:
    url = start_page(shop.instance, "--admin")

    async def person(session: aiohttp.ClientSession, base: str) -> None:
        for how in (
            {"json": WISH, "headers": {**OURS, "Origin": "http://evil.example"}},
            {"json": WISH, "headers": {**OURS, "Origin": "null"}},
            {"data": json.dumps(WISH), "headers": {**OURS, "Content-Type": "text/plain"}},
        ):
            async with session.post(base + "act", **how) as answer:
                assert answer.status == 403, how
        async with (
            aiohttp.ClientSession() as stranger,
            stranger.post(base + "act", json=WISH, headers={"X-Shmq-Page": "1"}) as answer,
        ):
            assert answer.status == 403

    visit(url, person)
    assert shop.stats().channel("orders", "pack")


@pytest.mark.parametrize(
    "wish",
    [
        [],
        {},
        {"action": "close"},
        {"action": "delete_channel", "topic": "orders"},
        {"action": "delete_channel", "topic": 7, "channel": "pack"},
        {"action": "pause_channel", "topic": "nothing", "channel": "here"},
        {"action": "configure", "topic": "orders", "channel": "pack", "settings": {"max": 1}},
        {"action": "configure", "topic": "orders", "channel": "pack"},
        {"action": "redrive", "topic": "orders", "channel": "pack", "reason": "hunger"},
        {"action": "redrive", "topic": "orders", "channel": "pack", "via": 7},
        {"action": "configure", "topic": "odrers", "settings": {"max_attempts": "1"}},
        {"action": "finish_message", "topic": "orders", "channel": "pack"},
        {"action": "finish_message", "topic": "orders", "channel": "pack", "id": "all"},
        {"action": "requeue_message", "topic": "orders", "channel": "pack", "id": "0" * 16},
        {"action": "requeue_message", "topic": "orders", "id": "0" * 16},
        {
            "action": "finish_message",
            "topic": "orders",
            "channel": "pack",
            "id": "0" * 16,
            "pid": "1",
        },
        {
            "action": "finish_message",
            "topic": "orders",
            "channel": "pack",
            "id": "0" * 16,
            "pid": -1,
        },
    ],
)
def test_a_wish_without_sense_is_refused_with_words(
    shop: shmq.Broker, start_page: StartPage, wish: Any
) -> None:
    async def person(session: aiohttp.ClientSession, base: str) -> None:
        async with session.post(base + "act", json=wish, headers=OURS) as answer:
            assert answer.status in (400, 404)
            assert len((await answer.json())["error"]) > 10

    visit(start_page(shop.instance, "--admin"), person)


def test_a_wish_of_thousands_of_nested_lists_is_refused(
    shop: shmq.Broker, start_page: StartPage
) -> None:
    async def person(session: aiohttp.ClientSession, base: str) -> None:
        headers = {**OURS, "Content-Type": "application/json"}
        for body in ("[" * 50_000, "{", "", "\ud800"):
            data = body.encode("utf-8", "surrogatepass")
            async with session.post(base + "act", data=data, headers=headers) as answer:
                assert answer.status == 400, body[:2]
                assert (await answer.json())["error"]

    visit(start_page(shop.instance, "--admin"), person)


def test_settings_are_changed(shop: shmq.Broker, start_page: StartPage) -> None:
    wish = {"action": "configure", "topic": "orders", "channel": "pack"}

    async def person(session: aiohttp.ClientSession, base: str) -> None:
        more = {"settings": {"max_messages": 500, "overflow": "reject"}}
        async with session.post(base + "act", json=wish | more, headers=OURS) as answer:
            assert answer.status == 200, await answer.text()

    visit(start_page(shop.instance, "--admin"), person)
    assert shop.settings("orders", "pack").max_messages == 500


# ---- many browsers ----


def test_all_browsers_get_the_same_ticks_and_one_too_many_is_told(
    shop: shmq.Broker, start_page: StartPage
) -> None:
    url = start_page(shop.instance, "--max-viewers=20")

    async def person(session: aiohttp.ClientSession, base: str) -> None:
        watching = [await session.get(base + "ticks") for _ in range(20)]
        status, text, _ = await asked(session, base + "ticks")
        assert (status, "20 browsers watch already" in text) == (503, True)
        ticks = [await _events(answer, 3) for answer in watching]
        assert {names for names, _ in ticks} == {("state", "tick", "tick")}
        last = {tuple(times) for _, times in ticks}
        assert len({time for times in last for time in times[1:]}) < 20
        for answer in watching:
            answer.close()

    visit(url, person)


def test_a_thousand_browsers_do_not_stop_it(shop: shmq.Broker, start_page: StartPage) -> None:
    url = start_page(shop.instance, "--max-viewers=1000")

    async def person(session: aiohttp.ClientSession, base: str) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        headers = session.headers
        async with aiohttp.ClientSession(connector=connector, headers=headers) as many:
            watching = await asyncio.gather(*(many.get(base + "ticks") for _ in range(1000)))
            assert all(answer.status == 200 for answer in watching)
            found = await asyncio.gather(*(_events(answer, 2) for answer in watching))
            assert {names for names, _ in found} == {("state", "tick")}
            for answer in watching:
                answer.close()
        status, _, _ = await asked(session, base + "state")
        assert status == 200

    visit(url, person)


async def _events(
    answer: aiohttp.ClientResponse, count: int
) -> tuple[tuple[str, ...], list[float]]:
    """The names of the first events, and the times in them."""
    names, times = [], []
    while len(names) < count:
        line = (await answer.content.readuntil(b"\n")).decode().strip()
        if line.startswith("event: "):
            names.append(line.removeprefix("event: "))
        elif line.startswith("data: "):
            times.append(json.loads(line.removeprefix("data: "))["time"])
    return tuple(names), times
