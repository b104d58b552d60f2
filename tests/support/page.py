"""A person who presses buttons and fills in forms of the page."""

from __future__ import annotations

import json

from support.browser import Tab


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
