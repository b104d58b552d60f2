"""The table of all channels with as many rows as there can be queues, and rows that somebody uses
while they change. Work is counted in values read and nodes made, not in time."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.browser import Page, Tab

import shmq
from shmq import layout
from shmq.page.snapshot import COLUMNS

Browse = Callable[[Callable[[Tab], Awaitable[None]]], Page]
StartPage = Callable[..., str]

QUEUES = layout.constant("QUEUES")
#: Rows that may exist at once, and cells of one.
SHOWN, CELLS = 60, 16
ROWS = "document.querySelectorAll('shmq-table tbody tr:not(.spacer)').length"
FRAME = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"

#: Puts an overview of its own into the page, fed by `feed(name, tick)` instead of a server, and
#: counts the values it reads and the nodes it makes.
STAGE = """(async () => {
    const { Model } = await import("/page/static/model.js");
    const { Overview } = await import("/page/static/overview.js");
    let source;
    const stream = new ReadableStream({ start(controller) { source = controller; } });
    const real = window.fetch;
    window.fetch = (path, how) => path === "ticks" ? new Response(stream) : real(path, how);
    const model = window.model = new Model();
    const counted = window.counted = { values: 0, nodes: 0 };
    const value = model.value.bind(model);
    model.value = (row, name) => { counted.values++; return value(row, name); };
    const create = document.createElement.bind(document);
    document.createElement = (name) => { counted.nodes++; return create(name); };
    const view = new Overview(model);
    model.addEventListener("change", () => view.update());
    document.getElementById("view").replaceChildren(view.element);
    model.connect();
    const bytes = new TextEncoder();
    window.feed = (name, tick) =>
        source.enqueue(bytes.encode(`event: ${name}\\ndata: ${JSON.stringify(tick)}\\n\\n`));
})()"""


def row(number: int, **values: Any) -> list[Any]:
    found = dict.fromkeys(COLUMNS, 0)
    found |= {"topic": f"topic-{number:05}", "channel": "channel", "oldest": None, "paused": False}
    return [(found | values)[name] for name in COLUMNS]


def tick(rows: dict[int, list[Any]], **facts: Any) -> str:
    return json.dumps({"time": 1.0, "went": [], "rows": rows} | facts)


async def work(tab: Tab, script: str) -> tuple[int, int]:
    """(values read, nodes made) until what a script asks for is drawn."""
    await tab.run("Object.assign(counted, { values: 0, nodes: 0 }), 0")
    await tab.run(f"{script}; 0")
    await tab.run(FRAME)
    found = await tab.run("counted")
    return found["values"], found["nodes"]


def names() -> str:
    return "[...document.querySelectorAll('shmq-table tbody a')].map((each) => each.textContent)"


def press_head(title: str) -> str:
    return (
        "[...document.querySelectorAll('shmq-table thead button')]"
        f".find((each) => each.textContent === {json.dumps(title)}).click()"
    )


def test_with_all_queues_only_the_rows_in_sight_exist_and_cost(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url = start_page(shop.instance)

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run(STAGE)
        state = tick({number + 1: row(number) for number in range(QUEUES)}, columns=COLUMNS)
        await work(tab, f"feed('state', {state})")
        await tab.shows(f"{QUEUES:,} queues", "topic-00000/channel")
        assert 0 < await tab.run(ROWS) <= SHOWN

        # a tick: the rows that changed, and those in sight
        busy = {number + 1: row(number, ready=7, **{"in": 2.5}) for number in range(0, 5000, 100)}
        values, nodes = await work(tab, f"feed('tick', {tick(busy)})")
        assert values < len(busy) * 40 + SHOWN * CELLS * 4
        assert nodes < SHOWN * 3 + 100
        assert "350" in await tab.run("document.querySelector('.chart p').textContent")

        # to the end and back
        for place, name in (
            ("1e9", f"topic-{QUEUES - 1:05}/channel"),
            ("0", "topic-00000/channel"),
        ):
            scroll = f"document.querySelector('shmq-table .scroller').scrollTop = {place}"
            values, nodes = await work(tab, scroll)
            assert name in await tab.run(names())
            assert await tab.run(ROWS) <= SHOWN
            assert values < SHOWN * CELLS * 8
            assert nodes < SHOWN * (CELLS + 6)

        # each row once to sort, and the few that are drawn
        values, nodes = await work(tab, press_head("in/s"))
        assert (await tab.run(names()))[0] == "topic-00000/channel"
        assert (await tab.run(names()))[10] == "topic-01000/channel"
        assert values < QUEUES + SHOWN * CELLS * 8
        assert nodes < SHOWN * (CELLS + 6)
        values, nodes = await work(tab, f"feed('tick', {tick({9: row(8, **{'in': 9.0})})})")
        assert (await tab.run(names()))[0] == "topic-00008/channel"
        assert values < QUEUES + SHOWN * CELLS * 8
        assert nodes < SHOWN * 3 + 100

        # and to filter
        values, nodes = await work(
            tab,
            "{ const filter = document.getElementById('filter'); filter.value = '777'; "
            "filter.dispatchEvent(new Event('input')) }",
        )
        assert all("777" in name for name in await tab.run(names()))
        assert values < 4 * QUEUES + SHOWN * CELLS * 8
        assert nodes < SHOWN * (CELLS + 6)

    browse(person)


def test_sums_and_small_lines_follow_rows_that_change_come_and_go(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url = start_page(shop.instance)

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run(STAGE)
        await tab.run(f"{TICKS}.forEach(([name, tick]) => feed(name, tick))")
        await tab.run(FRAME)
        found = await tab.run(
            "(({ history }) => ({ ready: history.ready.slice(-5), in: history.in.slice(-5), "
            "oldest: history.oldest.slice(-5), lines: ['1', '2', '3'].map((e) => model.line(e)), "
            "serials: model.serials }))(model)"
        )
        assert found["ready"] == [3, 8, 8, 12, 1]
        assert found["in"] == [0.1, 0.3, 0.3, 0.2, 0]
        assert found["oldest"] == [2, 2, 2, 9, 0]
        assert found["lines"] == [[3, 3, 3, 3, 4], [], [0, 0]]
        assert found["serials"] == ["1", "3"]

    browse(person)


TICKS = json.dumps(
    [
        (name, {"time": place, "went": went, "rows": rows, "columns": COLUMNS})
        for place, (name, went, rows) in enumerate(
            [
                ("state", [], {1: row(1, ready=3, oldest=2000, **{"in": 0.1})}),
                ("tick", [], {2: row(2, ready=5, oldest=100, **{"in": 0.2})}),
                ("tick", [], {}),
                (
                    "tick",
                    [],
                    {
                        2: row(2, ready=9, oldest=9000, **{"in": 0.1}),
                        3: row(3),
                    },
                ),
                ("tick", ["2"], {1: row(1, ready=1, disk=3)}),
            ]
        )
    ]
)


def test_a_click_reaches_a_button_whose_row_changes_meanwhile(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url = start_page(shop.instance, "--admin")
    button = "document.querySelector('shmq-table[caption=\"Who holds what\"] button.act')"
    looks = "performance.getEntriesByType('resource').filter((e) => e.name.includes('channel?'))"

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run("location.hash = '#/channel/orders/pack'")
        await tab.until(f"{button} && !{button}.hidden", "there is a button")
        await tab.run(f"{button}.dataset.mine = 'yes', {button}.scrollIntoView(), 0")
        await tab.run(FRAME)
        before = await tab.run(f"{looks}.length")
        await tab.until(f"{looks}.length > {before + 1}", "the view looked twice")
        await tab.run(FRAME)
        assert await tab.run(f"{button}.dataset.mine") == "yes"

        box = await tab.run(
            f"(({{x, y}}) => ({{x: x + 4, y: y + 4}}))({button}.getBoundingClientRect())"
        )
        how = {**box, "button": "left", "clickCount": 1}
        await tab.tell("Input.dispatchMouseEvent", type="mousePressed", **how)
        before = await tab.run(f"{looks}.length")
        await tab.until(f"{looks}.length > {before + 1}", "the view looked twice")
        await tab.run(FRAME)
        await tab.tell("Input.dispatchMouseEvent", type="mouseReleased", **how)
        await tab.until("document.querySelector('dialog[open]') !== null", "the button asks")

    assert not browse(person).errors


def test_a_row_that_sorts_elsewhere_stays_while_it_is_pressed(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url = start_page(shop.instance)
    second = "document.querySelectorAll('shmq-table tbody a')[1]"

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run(STAGE)
        state = tick({n + 1: row(n, ready=9 - n) for n in range(9)}, columns=COLUMNS)
        await work(tab, f"feed('state', {state})")
        await work(tab, press_head("ready"))
        await tab.run(f"{second}.scrollIntoView(), 0")
        await tab.run(FRAME)
        name = await tab.run(f"{second}.textContent")
        box = await tab.run(
            f"(({{x, y}}) => ({{x: x + 4, y: y + 4}}))({second}.getBoundingClientRect())"
        )
        how = {**box, "button": "left", "clickCount": 1}
        await tab.tell("Input.dispatchMouseEvent", type="mousePressed", **how)
        changed = tick({n + 1: row(n, ready=n) for n in range(9)})
        await work(tab, f"feed('tick', {changed})")
        assert await tab.run(f"{second}.textContent") == name
        await tab.tell("Input.dispatchMouseEvent", type="mouseReleased", **how)
        await tab.until("location.hash.startsWith('#/channel/')", "the link was followed")
        assert name == "topic-00001/channel"
        assert await tab.run("location.hash") == "#/channel/topic-00001/channel"

    browse(person)


@pytest.mark.deep
@pytest.mark.deep
def test_ten_thousand_channels_scroll_and_are_found(
    open_broker: Callable[..., shmq.Broker], start_page: StartPage, browse: Browse
) -> None:
    broker = open_broker(mem_queue_size=16, in_flight_slots=16)
    for number in range(10_000):
        broker.create_channel(f"topic-{number:05}", "channel")
    url = start_page(broker.instance)

    async def person(tab: Tab) -> None:
        await tab.tell("Network.disable")  # else the browser keeps every tick for us
        await tab.go(url)
        await tab.shows("10,000 queues")
        assert await tab.run(ROWS) <= SHOWN
        await tab.run("document.querySelector('shmq-table .scroller').scrollTop = 1e9")
        await tab.shows("topic-09999/channel")
        assert await tab.run(ROWS) <= SHOWN
        broker.producer("topic-09998").publish(b"here")
        await tab.until(
            "[...document.querySelectorAll('tbody tr')].some((row) => "
            "row.textContent.startsWith('topic-09998/channel1'))",
            "one message waits",
        )

    assert not browse(person).errors
