"""The page in a real browser: every view, by mouse and keyboard, in light and dark."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.parse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.browser import Page, Tab, axe_core
from support.page import press_and_confirm
from support.processes import NO_GATEWAY, Child, eventually

import shmq
from shmq import history

SHMQ = [sys.executable, "-m", "shmq"]

Browse = Callable[[Callable[[Tab], Awaitable[None]]], Page]
StartPage = Callable[..., str]


def origin(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


async def shown_row(tab: Tab, name: str) -> dict[str, str]:
    """The cells of a channel's row by the titles of their columns; empty if it is not there."""
    script = """(() => {
        const row = [...document.querySelectorAll("shmq-table tbody tr")]
            .find((row) => row.querySelector("a")?.textContent === NAME);
        if (!row) return {};
        const heads = [...document.querySelectorAll("thead th")];
        const cells = [...row.children].map((cell) => cell.textContent);
        return Object.fromEntries(cells.map((text, at) => [heads[at].textContent, text]));
    })()"""
    found = await tab.run(script.replace("NAME", json.dumps(name)))
    return dict(found)


# ---- views ----


def test_the_overview_shows_what_stat_counts(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url = start_page(shop.instance)

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows(shop.instance, "OK", "orders/pack", "orders.pack.dead/dead")
        counts = shop.stats().channel("orders", "pack")
        row = await shown_row(tab, "orders/pack")
        assert row["ready"] == str(counts.depth - counts.backend_depth)
        assert row["in flight"] == str(counts.in_flight) == "2"
        assert row["deferred"] == str(counts.deferred) == "1"
        assert row["dead"] == str(counts.dead_lettered) == "3"
        assert row["consumers"] == str(len(counts.sessions)) == "1"
        assert "token" not in await tab.run("location.href")
        await tab.until("document.querySelectorAll('canvas').length > 4", "charts are drawn")

    page = browse(person)
    assert not page.errors
    assert {origin(address) for address in page.requests} == {origin(url)}


def test_the_page_has_the_numbers_of_stat_json(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url = start_page(shop.instance)

    def of_stat() -> dict[str, str]:
        argv = [*SHMQ, "stat", "--json", f"--instance={shop.instance}", "--topic=orders"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        [channel] = json.loads(done.stdout)["topics"][0]["channels"]
        counts = channel["shmq"]
        return {
            "waiting": f"{channel['depth']:,}",
            "of them on disk": f"{channel['backend_depth']:,}",
            "in flight": f"{channel['in_flight_count']:,}",
            "deferred": f"{channel['deferred_count']:,}",
            "leased": f"{counts['leased_count']:,}",
            "published": f"{channel['message_count']:,}",
            "delivered": f"{counts['delivered_count']:,}",
            "finished": f"{counts['finish_count']:,}",
            "requeued": f"{channel['requeue_count']:,}",
            "timed out": f"{channel['timeout_count']:,}",
            "dead letters": f"{counts['dead_lettered_count']:,}",
            "paused": "yes" if channel["paused"] else "no",
        }

    facts = """Object.fromEntries([...document.querySelector("main dl.facts").children]
        .map((pair) => [...pair.children].map((cell) => cell.textContent)))"""

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run("location.hash = '#/channel/orders/pack'")
        await tab.shows("oldest waiting")
        # a page between two answers of `stat` that agree has the same numbers
        producer, consumer = shop.producer("orders"), shop.consumer("orders", "pack")
        for _ in range(3):
            producer.publish_many([b"{}"] * 1234)
            for message in consumer.take_many(100, 10):
                message.finish()
            wanted = await asyncio.to_thread(of_stat)
            same = f"(() => {{ const found = {facts}, wanted = {json.dumps(wanted)};"
            same += "return Object.keys(wanted).every((name) => found[name] === wanted[name]); })()"
            await tab.until(same, f"the page has {wanted}")
            assert await asyncio.to_thread(of_stat) == wanted

    assert not browse(person).errors


def test_a_change_is_seen_without_a_reload(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url = start_page(shop.instance)

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        shop.consumer("letters", "read").close()
        producer = shop.producer("letters")
        for _ in range(7):
            producer.publish(b"dear")
        await tab.shows("letters/read")
        await tab.until(
            "[...document.querySelectorAll('tbody tr')].some((row) => "
            "row.textContent.startsWith('letters/read7'))",
            "seven letters wait",
        )
        shop.delete_topic("letters")
        await tab.until("!document.body.innerText.includes('letters/read')", "the topic went")

    assert not browse(person).errors


def test_a_channel_shows_who_holds_what_and_bodies_as_text(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url = start_page(shop.instance)

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run("location.hash = '#/channel/orders/pack'")
        await tab.shows("Who holds what", str(os.getpid()), "max_attempts", "Time from publish")
        await tab.until(
            "document.querySelectorAll("
            "'shmq-table[caption=\"Who holds what\"] tbody th a').length === 2",
            "two messages are held",
        )
        await tab.until(
            "(() => { const links = [...document.querySelectorAll("
            "'shmq-table[caption=Messages] tbody tr')].filter((row) => "
            "row.textContent.includes('<script>')); links[0]?.querySelector('a').click(); "
            "return links.length; })()",
            "the message with a script is in the list",
        )
        await tab.shows("trace: <b>bold</b>", "Shown as text", "onerror=alert(1)")
        assert "broken into" not in await tab.run("document.title")
        assert (
            await tab.run("document.querySelectorAll('main img, main script, main b').length") == 0
        )

    assert not browse(person).errors


def test_arrow_data_is_shown_as_a_table(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url, axe = start_page(shop.instance), axe_core()
    rows = pa.table({"fruit": ["<b>apple</b>", "pear"], "weight": [0.2, None]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    shop.consumer("fruit", "sell").close()
    shop.producer("fruit").publish(sink.getvalue())

    async def person(tab: Tab) -> None:
        await tab.window(380)
        await tab.go(url)
        await tab.shows("fruit/sell")
        await tab.run("location.hash = '#/channel/fruit/sell'")
        await tab.until(
            "(() => { const link = document.querySelector('shmq-table[caption=Messages] tbody a');"
            " link?.click(); return link !== null; })()",
            "the message is in the list",
        )
        await tab.shows("An Arrow stream of 2 columns and 2 rows", "<b>apple</b>", "double", "null")
        assert await tab.run("document.querySelectorAll('main b').length") == 0
        assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
        await tab.run(axe.read_text() + ";0")
        assert not await tab.run("axe.run().then((found) => found.violations.map((e) => e.id))")

    assert not browse(person).errors


def test_the_lists_show_dead_letters_processes_and_results(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url = start_page(shop.instance)

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        for link, words in {
            "Dead letters": ("orders/pack", "rejected", "no such customer", "3"),
            "Processes": ("supervisor", str(shop.supervisor_pid), str(os.getpid())),
            "Results": ("answers",),
            "Leases": ("No lease is open",),
            "Deaths": ("Nobody has died",),
        }.items():
            await tab.run(
                f"[...document.querySelectorAll('nav a')].find((link) => "
                f"link.textContent === {json.dumps(link)}).click()"
            )
            await tab.shows(*words)

    assert not browse(person).errors


def test_the_page_is_used_with_the_keyboard_alone(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url = start_page(shop.instance)

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        for _ in range(40):
            await tab.press("Tab")
            if await tab.run("document.activeElement.textContent") == "ready":
                break
        await tab.press("Enter")
        assert await tab.run("document.activeElement.closest('th').getAttribute('aria-sort')") in (
            "ascending",
            "descending",
        )
        for _ in range(40):
            await tab.press("Tab")
            if await tab.run("document.activeElement.className") == "scroller":
                break
        await tab.press("ArrowDown")
        name = await tab.run("document.activeElement.textContent")
        assert "/" in name
        await tab.press("Enter")
        await tab.until(f"document.querySelector('h2')?.textContent === {json.dumps(name)}")

    assert not browse(person).errors


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(380, False, marks=pytest.mark.deep),
        (380, True),
        pytest.param(1200, True, marks=pytest.mark.deep),
    ],
)
def test_narrow_and_dark_windows_show_all_without_scrolling_sideways(
    shop: shmq.Broker, start_page: StartPage, browse: Browse, width: int, dark: bool
) -> None:
    url = start_page(shop.instance, "--admin")

    async def person(tab: Tab) -> None:
        await tab.window(width, dark=dark)
        await tab.go(url)
        await tab.shows("orders/pack")
        for view in ("#/", "#/channel/orders/pack", "#/topic/orders", "#/dead", "#/processes"):
            await tab.run(f"location.hash = {json.dumps(view)}")
            await tab.until("document.querySelector('main').textContent.length > 20")
            assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
        ground = await tab.run("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") is not dark

    assert not browse(person).errors


def test_a_death_is_told_with_what_it_held(
    shop: shmq.Broker,
    child: Callable[..., Child],
    start_page: StartPage,
    browse: Browse,
) -> None:
    victim = child(_take_three, shop.instance)
    victim.said("has three")
    url = start_page(shop.instance)

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        victim.process.kill()
        await tab.run("location.hash = '#/deaths'")
        await tab.shows(str(victim.pid), "killed by signal 9", "3 of orders/pack")

    assert not browse(person).errors


def _take_three(instance: str) -> None:
    with shmq.attach(instance) as broker:
        held = broker.consumer("orders", "pack").take_many(3, 10)
        print(f"has {len(held) == 3 and 'three'}", flush=True)
        sys.stdin.read()


def test_the_charts_begin_before_the_page_was_opened(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    eventually(lambda: len(history.read(shop.instance).totals) > 2, what="seconds are recorded")
    url = start_page(shop.instance)

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        found = await tab.run(
            "import('/page/static/door.js').then(({ call }) => call('history'))"
            ".then((answer) => answer.json())"
        )
        assert len(found["time"]) > 2
        assert {"ready", "disk", "in", "oldest"} <= found.keys()
        assert found["in_flight"][-1] == 2
        await tab.run(
            "(() => { const period = document.getElementById('period'); period.value = 'day'; "
            "period.dispatchEvent(new Event('change')); })()"
        )
        await tab.until("document.querySelector('.chart p').textContent.includes('ready')")

    assert not browse(person).errors


# ---- doing ----


def test_with_admin_the_page_acts_and_the_audit_log_tells(
    shop: shmq.Broker, start_page: StartPage, browse: Browse, tmp_path: Path
) -> None:
    log = tmp_path / "audit.log"
    url = start_page(shop.instance, "--admin", f"--audit-log={log}")

    def counts() -> Any:
        return shop.stats().channel("orders", "pack")

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run("location.hash = '#/channel/orders/pack'")
        command = await press_and_confirm(tab, "Pause")
        assert command == f"shmq channel pause --instance {shop.instance} orders pack"
        await tab.shows("channel orders/pack paused")
        assert counts().paused
        await press_and_confirm(tab, "Unpause")
        await tab.shows("channel orders/pack unpaused")
        await tab.run("location.hash = '#/dead'")
        before = counts().depth
        command = await press_and_confirm(tab, "Send back")
        assert command == (
            "shmq dead redrive --exact --reason rejected --error 'no such customer' "
            f"--instance {shop.instance} orders pack"
        )
        await tab.shows("3 dead letters of orders/pack sent back")
        assert counts().depth == before + 3
        await tab.run("location.hash = '#/channel/orders/pack'")
        await press_and_confirm(tab, "Empty")
        await tab.shows("channel orders/pack emptied")
        assert counts().depth == 0

    assert not browse(person).errors
    lines = log.read_text().splitlines()
    assert [line.split("action=")[1].split()[0] for line in lines] == [
        "page_pause_channel",
        "page_unpause_channel",
        "page_redrive",
        "page_empty_channel",
    ]
    assert all("by=127.0.0.1:" in line and "result=done" in line for line in lines)


def test_a_question_that_is_cancelled_changes_nothing(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url = start_page(shop.instance, "--admin")

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run("location.hash = '#/channel/orders/pack'")
        await tab.until(
            "document.querySelector('button.act') && !document.querySelector('.act').hidden"
        )
        await tab.run("document.querySelectorAll('button.act')[3].click()")
        await tab.until("document.querySelector('dialog[open]') !== null")
        await tab.run("document.querySelector('dialog button[value=no]').click()")
        await tab.until("document.querySelector('dialog') === null")

    browse(person)
    assert shop.stats().channel("orders", "pack").depth


# ---- what may go wrong ----


def test_the_page_says_that_the_supervisor_is_dead_and_goes_on(
    instance: str,
    tmp_path: Path,
    keep: Callable[[Any], Any],
    start_page: StartPage,
    browse: Browse,
) -> None:
    words = ["serve", f"--instance={instance}", f"--data-path={tmp_path}", *NO_GATEWAY]
    server: Child = keep(Child([*SHMQ, *words]))
    eventually(lambda: "running, pid" in server.errors, what="the supervisor runs")
    with shmq.attach(instance) as broker:
        broker.create_channel("orders", "pack")
    url = start_page(instance)

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack", "OK")
        server.process.kill()
        await tab.shows("the supervisor is not running", "orders/pack")

    assert not browse(person).errors


def test_an_instance_that_ends_is_said_and_one_that_begins_is_shown(
    instance: str,
    tmp_path: Path,
    start_page: StartPage,
    browse: Browse,
) -> None:
    broker = shmq.Broker(tmp_path / "data", instance)
    broker.create_channel("before", "all")
    url = start_page(instance)

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("before/all")
        broker.close()
        await tab.shows("no shmq instance")
        with shmq.Broker(tmp_path / "data", instance) as again:
            again.create_channel("after", "all")
            await tab.shows("after/all", "OK")

    browse(person)


def test_an_address_with_an_old_token_says_so(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url = start_page(shop.instance)

    async def person(tab: Tab) -> None:
        await tab.go(url.partition("#")[0] + "#token=of-yesterday")
        await tab.shows("the token is missing or of an earlier start")

    browse(person)


# ---- for everybody ----


@pytest.mark.parametrize("dark", [pytest.param(False, marks=pytest.mark.deep), True])
def test_axe_finds_nothing_that_keeps_people_out(
    shop: shmq.Broker, start_page: StartPage, browse: Browse, dark: bool
) -> None:
    url, axe = start_page(shop.instance, "--admin"), axe_core()

    async def person(tab: Tab) -> None:
        await tab.window(1200, dark=dark)
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run(axe.read_text() + ";0")
        for view in (
            "#/",
            "#/channel/orders/pack",
            "#/dead",
            "#/processes",
            "#/results",
            "#/leases",
            "#/topic/orders",
        ):
            await tab.run(f"location.hash = {json.dumps(view)}")
            await tab.until("document.querySelector('main').textContent.length > 20")
            found = await tab.run(
                "axe.run().then((found) => found.violations.map((each) => "
                "`${each.id}: ${each.nodes.map((node) => node.html).join(' ')}`))"
            )
            assert not found, f"{view}: {found}"

    browse(person)


def test_pictures_for_the_documentation(
    shop: shmq.Broker, start_page: StartPage, browse: Browse, tmp_path: Path
) -> None:
    """SHMQ_PICTURES: the directory that gets them; there is traffic for them then. They show the
    command line and the directory of this process, so start it without a path of yours in them:
    PATH=$PWD/.venv/bin:$PATH SHMQ_PICTURES=docs python -m pytest --basetemp=/tmp/shop -k pictures
    """
    url, into = start_page(shop.instance), Path(os.environ.get("SHMQ_PICTURES", tmp_path))
    rounds = 300 if "SHMQ_PICTURES" in os.environ else 1

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run("location.hash = '#/channel/orders/pack'")
        producer, consumer = shop.producer("orders"), shop.consumer("orders", "pack")
        for number in range(rounds):
            producer.publish_many([b'{"order": %d}' % number] * (20 + number % 37))
            for message in consumer.take_many(20 + number % 31, 10):
                await asyncio.sleep(0.02 if number % 40 < 8 else 0.0005)
                message.finish()
        await tab.window(1200, 1250)
        await tab.shows("Who holds what", "max_attempts", "Recorded in")
        await tab.picture(into / "page-channel.png")
        await tab.window(1200)
        await tab.run("location.hash = '#/'")
        await tab.until("document.querySelector('.chart p')?.textContent.includes('ready')")
        await tab.picture(into / "page-overview.png")

    browse(person)
    for name in ("page-overview.png", "page-channel.png"):
        assert (into / name).stat().st_size > 20_000, name
