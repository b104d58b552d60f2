"""The page acts: each button does what the command that it shows does."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.browser import Page, Tab, axe_core
from support.page import answer, ask, press_and_confirm, write
from support.processes import eventually

import shmq

Browse = Callable[[Callable[[Tab], Awaitable[None]]], Page]
StartPage = Callable[..., str]


def run(command: str) -> str:
    """Run a command that the page showed, as a shell does; what it prints."""
    words = shlex.split(command)
    assert words[0] == "shmq"
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def focus(tab: Tab, text: str) -> None:
    """Move to a control by the Tab key."""
    for _ in range(120):
        await tab.press("Tab")
        if await tab.run("document.activeElement?.textContent") == text:
            return
    raise AssertionError(f"the Tab key does not lead to {text!r}")


# ---- who holds what ----


def test_what_hangs_is_taken_away_with_the_keyboard(
    open_broker: Callable[..., shmq.Broker],
    start_page: StartPage,
    browse: Browse,
    tmp_path: Path,
) -> None:
    broker = open_broker(msg_timeout=900)
    consumer = broker.consumer("jobs", "work")
    broker.producer("jobs").publish_many([b"one", b"two"])
    held = consumer.take_many(2, 10)
    log = tmp_path / "audit.log"
    url = start_page(broker.instance, "--admin", f"--audit-log={log}")

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("jobs/work")
        await tab.run("location.hash = '#/channel/jobs/work'")
        await tab.shows("Who holds what", str(os.getpid()), held[1].id)
        await focus(tab, "Requeue")
        await tab.press("Enter")
        command = await tab.until("document.querySelector('dialog[open] code')?.textContent")
        assert "shmq message requeue --pid" in command
        assert await tab.run("document.activeElement.textContent") == "Cancel"
        # The row is written again meanwhile, and the focus comes back to the same button.
        await tab.run(
            "(() => { window.old = document.querySelector('td .act'); "
            "window.said = window.old.closest('tr').textContent; return true; })()"
        )
        await tab.until("window.old.closest('tr').textContent !== window.said", "it changes")
        await tab.press("Escape")
        await tab.until("document.querySelector('dialog') === null")
        assert await tab.run("document.activeElement === window.old")
        assert broker.stats().channel("jobs", "work").in_flight == 2
        await tab.press("Enter")
        await tab.until("document.querySelector('dialog[open]') !== null")
        await tab.run("document.querySelector('dialog button[value=yes]').focus()")
        await tab.press("Enter")
        await tab.shows("of jobs/work requeued")
        await tab.until("document.querySelectorAll('td .act').length === 2", "one is held")
        await press_and_confirm(tab, "Finish")
        await tab.shows("of jobs/work finished")

    assert not browse(person).errors
    counts = broker.stats().channel("jobs", "work")
    assert (counts.in_flight, counts.requeue_count, counts.finished) == (0, 1, 1)
    for message in held:
        with pytest.raises(shmq.NotInFlight):
            message.finish()
    first, second = log.read_text().splitlines()
    assert "action=page_requeue_message topic=jobs channel=work by=127.0.0.1:" in first
    assert "action=page_finish_message topic=jobs channel=work by=127.0.0.1:" in second
    for line in (first, second):
        assert "result=done id=" in line
        assert f"pid={os.getpid()}" in line


def test_a_message_that_is_gone_is_refused_with_words(
    open_broker: Callable[..., shmq.Broker], start_page: StartPage, browse: Browse
) -> None:
    broker = open_broker(msg_timeout=900)
    consumer = broker.consumer("jobs", "work")
    broker.producer("jobs").publish(b"one")
    (held,) = consumer.take_many(1, 10)
    url = start_page(broker.instance, "--admin")

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("jobs/work")
        await tab.run("location.hash = '#/channel/jobs/work'")
        command = await ask(tab, "Finish")
        run(command)
        await answer(tab, True)
        await tab.shows(f"process {os.getpid()} does not hold it")

    browse(person)
    with pytest.raises(shmq.NotInFlight):
        held.finish()


# ---- dead letters ----


def letters(broker: shmq.Broker) -> dict[str | None, int]:
    groups = broker.dead("orders", "pack").ls()
    return {group.error: group.count for group in groups}


@pytest.fixture
def graveyard(open_broker: Callable[..., shmq.Broker]) -> shmq.Broker:
    """Groups of which one has the other's error in its own, and one has none."""
    broker = open_broker()
    broker.configure("orders", "pack", max_attempts=1)
    consumer = broker.consumer("orders", "pack")
    broker.producer("orders").publish_many([b"order"] * 6)
    for error in ("no such", "no such", "no such customer's", "no such customer's", None, None):
        message = consumer.take(10)
        assert message is not None
        if error is None:
            message.requeue()
        else:
            message.reject(error)
    eventually(lambda: sum(letters(broker).values()) == 6, what="six are dead")
    return broker


def test_a_group_is_what_the_page_shows_and_its_command_means_the_same(
    graveyard: shmq.Broker, start_page: StartPage, browse: Browse, tmp_path: Path
) -> None:
    log = tmp_path / "audit.log"
    url = start_page(graveyard.instance, "--admin", f"--audit-log={log}")

    async def command_of(tab: Tab, title: str, error: str) -> str:
        await tab.until(
            f"(() => {{ const [title, error] = {json.dumps([title, error])}; "
            "const row = [...document.querySelectorAll('tbody tr')].find((row) => "
            "row.children[3]?.textContent === error); const button = "
            "[...(row?.querySelectorAll('.act') ?? [])].find((b) => b.textContent === title); "
            "if (!button || button.hidden) return false; button.click(); return true; })()",
            f"{title} of {error}",
        )
        return str(await tab.until("document.querySelector('dialog[open] code')?.textContent"))

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run("location.hash = '#/dead'")
        command = await command_of(tab, "Send back", "no such")
        await answer(tab, False)
        assert run(command) == "2 messages redriven\n"
        assert letters(graveyard) == {"no such customer's": 2, None: 2}
        assert "page_" not in log.read_text()

        command = await command_of(tab, "Drop", "no such customer's")
        assert "--error 'no such customer'\\''s'" in command
        await answer(tab, True)
        await tab.shows("2 dead letters of orders/pack dropped")
        assert letters(graveyard) == {None: 2}
        assert run(command) == "0 messages dropped\n"

        command = await command_of(tab, "Drop", "–")
        await answer(tab, False)
        assert run(command) == "2 messages dropped\n"
        assert letters(graveyard) == {}

    assert not browse(person).errors
    (line,) = log.read_text().splitlines()
    assert "action=page_drop topic=orders channel=pack by=127.0.0.1:" in line
    assert "result=done reason=rejected error=no%20such%20customer%27s exact=True" in line


# ---- topics, channels, settings ----


def test_every_button_of_a_place_shows_a_command_that_does_it(
    open_broker: Callable[..., shmq.Broker], start_page: StartPage, browse: Browse
) -> None:
    broker = open_broker()
    broker.create_channel("-jobs", "-work")  # a shell takes neither for an option
    broker.producer("-jobs").publish(b"one")
    url = start_page(broker.instance, "--admin")

    def channel() -> shmq.stats.ChannelStats:
        return broker.stats().channel("-jobs", "-work")

    async def shown(tab: Tab, title: str) -> str:
        command = await ask(tab, title)
        await answer(tab, False)
        return command

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("-jobs/-work")
        await tab.run("location.hash = '#/channel/-jobs/-work'")
        await tab.shows("Topic -jobs")
        run(await shown(tab, "Pause"))
        assert channel().paused
        run(await shown(tab, "Unpause"))
        assert not channel().paused
        assert run(await shown(tab, "Empty")) == "1 messages dropped\n"
        run(await shown(tab, "Delete"))
        assert not broker.stats().topic("-jobs").channels
        await tab.run("location.hash = '#/topic/-jobs'")
        await tab.shows("bytes published")
        run(await shown(tab, "Pause"))
        assert broker.stats().topic("-jobs").paused
        await press_and_confirm(tab, "Unpause")
        await tab.shows("topic -jobs unpaused")
        await press_and_confirm(tab, "Delete")
        await tab.shows("there is no topic '-jobs'")

    browse(person)
    assert not broker.stats().topics


def test_settings_are_changed_in_a_form_that_shows_the_command(
    shop: shmq.Broker, start_page: StartPage, browse: Browse, tmp_path: Path
) -> None:
    log = tmp_path / "audit.log"
    url = start_page(shop.instance, "--admin", f"--audit-log={log}")
    beside = "document.querySelector('.settings [role=status]').textContent"
    line = "document.querySelector('.settings code').textContent"

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run("location.hash = '#/channel/orders/pack'")
        await write(tab, "max_messages", "500")
        start = f"shmq channel set --instance {shop.instance} orders pack"
        assert await tab.run(line) == f"{start} max_messages=500"
        await press_and_confirm(tab, "Set")
        await tab.until(f"{beside}.includes('has no effect while overflow is disk')")
        assert shop.settings("orders", "pack").max_messages is None

        await write(tab, "overflow", "reject")
        await write(tab, "message_ttl", "5400s")
        shop.configure("orders", "pack", retry_delay=3)  # by somebody else meanwhile
        command = await press_and_confirm(tab, "Set")
        assert command == f"{start} max_messages=500 overflow=reject message_ttl=5400s"
        await tab.until(f"{beside}.includes('of channel orders/pack set')")
        await tab.until(
            "document.querySelector('.fields [name=message_ttl]').value === '90m' && "
            "document.querySelector('.fields [name=retry_delay]').value === '3s'",
            "the form shows what holds now",
        )
        assert await tab.run("document.querySelector('.settings [type=submit]').disabled")
        assert await tab.run(line) == start

        await tab.run("location.hash = '#/topic/orders'")
        await write(tab, "message_ttl", "1h")
        command = await ask(tab, "Set")
        await answer(tab, False)
        run(command)
        await tab.until("document.querySelector('.settings [type=submit]').disabled", "it holds")

    assert all("400" in error for error in browse(person).errors)  # the one that was refused
    held = shop.settings("orders", "pack")
    assert (held.max_messages, held.overflow, held.message_ttl) == (500, "reject", 5400)
    assert held.retry_delay == (3, 3)
    assert shop.settings("orders").message_ttl == 3600
    refused, done = log.read_text().splitlines()
    assert "result=refused settings=max_messages:500" in refused
    assert "result=done settings=max_messages:500,overflow:reject,message_ttl:5400s" in done


def test_every_field_has_a_label_and_a_help_and_the_form_needs_no_mouse(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    url, axe = start_page(shop.instance, "--admin"), axe_core()

    async def person(tab: Tab) -> None:
        await tab.window(380)
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run("location.hash = '#/topic/orders'")
        await tab.until("document.querySelectorAll('.fields [name]').length === 10")
        named = await tab.run(
            "[...document.querySelectorAll('.fields [name]')].every((field) => "
            "field.labels.length === 1 && "
            "document.getElementById(field.getAttribute('aria-describedby')).textContent)"
        )
        assert named
        assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
        await tab.run("document.querySelector('.fields [name=max_attempts]').select()")
        await tab.press("7", "Enter")  # Enter in a field asks
        command = await tab.until("document.querySelector('dialog[open] code')?.textContent")
        assert command.endswith(" orders max_attempts=7")
        await tab.run(axe.read_text() + ";0")
        found = await tab.run("axe.run().then((found) => found.violations.map((each) => each.id))")
        assert not found
        await tab.run("document.querySelector('dialog button[value=yes]').focus()")
        await tab.press("Enter")
        await tab.shows("max_attempts of topic orders set")

    assert not browse(person).errors
    assert shop.settings("orders").max_attempts == 7
