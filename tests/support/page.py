"""A person who presses buttons and fills in forms of the page, and a program that has its
pass."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request

from support.browser import Tab
from support.processes import WATCHDOG


def login(url: str) -> tuple[str, dict[str, str]]:
    """Do with a printed address what the page's script does: its base, and the header that opens
    it."""
    base, _, fragment = url.partition("#")
    token = urllib.parse.unquote(fragment.removeprefix("token="))
    bearer = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{base}login", headers=bearer)
    with urllib.request.urlopen(request, timeout=WATCHDOG) as answer:
        return base, {"X-Shmq-Page": json.loads(answer.read())["pass"]}


async def ask(tab: Tab, title: str) -> str:
    """Press the first button of this title that may be pressed; the command that the page names."""
    await tab.until(
        "(() => { const b = [...document.querySelectorAll('button.act, button[type=submit]')].find("
        f"(b) => b.textContent === {json.dumps(title)} && !b.hidden && !b.disabled); "
        "b?.click(); return b !== undefined; })()",
        f"the button {title} may be pressed",
    )
    return str(await tab.until("document.querySelector('dialog[open] code')?.textContent"))


async def answer(tab: Tab, yes: bool) -> None:
    """Answer the question."""
    which = "yes" if yes else "no"
    await tab.run(f"document.querySelector('dialog button[value={which}]').click()")
    await tab.until("document.querySelector('dialog') === null", "the question is gone")


async def press_and_confirm(tab: Tab, title: str) -> str:
    """Press a button and say yes; the command that the page named."""
    command = await ask(tab, title)
    await answer(tab, True)
    return command


async def write(tab: Tab, setting: str, text: str) -> None:
    """Write into the field of a setting, or choose."""
    await tab.until(
        f"(() => {{ const field = document.querySelector('.fields [name={setting}]'); "
        f"if (!field) return false; field.value = {json.dumps(text)}; "
        "field.dispatchEvent(new Event('input', { bubbles: true })); return true; })()",
        f"there is a field for {setting}",
    )
