"""Pages as a person sees them: Chromium without a screen, told what to do by its own protocol
(Chrome DevTools Protocol over a WebSocket)."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from support.external_programs import missing, peer
from support.processes import WATCHDOG, eventually

PROGRAM = "chromium-headless-shell"
_LISTENING = re.compile(r"DevTools listening on (ws://\S+)")


def axe_core() -> Path:
    """The script of axe-core, which checks a page for people with disabilities. A package of Python
    brings it along."""
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        missing("axe-core", "`tools/dev test tests/page` installs it")
    return Path(found.origin).with_name("axe.min.js")


@dataclass
class Page:
    """One that was opened."""

    text: str = ""
    """The text that can be read on it."""
    errors: list[str] = field(default_factory=list)
    """Exceptions of its scripts, what its console calls an error, requests that failed."""
    requests: list[str] = field(default_factory=list)
    """The addresses that it asked for."""
    cut: bool = False
    """A part that it cannot do without has not come, for a reason that is the host's."""


def look(directory: Path, pages: Sequence[tuple[str, Sequence[str]]]) -> list[Page]:
    """Open each address until all its words are on the page; AssertionError if they never are."""

    async def look_at_all() -> list[Page]:
        found = []
        async with opened(directory) as browser:
            for url, words in pages:
                tab = await browser.tab()
                await tab.go(url)
                await tab.shows(*words)
                await tab.close()
                found.append(tab.page)
        return found

    return asyncio.run(look_at_all())


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Browser]:
    """A browser of its own, which ends with the block. directory: for its profile and log."""
    log = directory / "browser.log"
    argv = [
        peer(PROGRAM),
        "--no-sandbox",
        "--remote-debugging-port=0",
        "--disable-gpu",
        f"--user-data-dir={directory / 'browser'}",
        "about:blank",
    ]
    with (
        open(log, "wb") as file,
        # it is many processes, none of which may outlive the test
        subprocess.Popen(argv, stdout=file, stderr=file, start_new_session=True) as process,
    ):
        try:
            found = eventually(lambda: _LISTENING.search(log.read_text()), what="Chromium listens")
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(found[1], max_msg_size=0) as socket,
            ):
                yield Browser(socket)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


class Browser:
    """Commands and their answers, in one connection."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._pages: dict[str, Page] = {}

    async def tab(self) -> Tab:
        """A new empty tab."""
        target = (await self.tell("Target.createTarget", url="about:blank"))["targetId"]
        answer = await self.tell("Target.attachToTarget", targetId=target, flatten=True)
        session = answer["sessionId"]
        self._pages[session] = page = Page()
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.tell(f"{domain}.enable", session)
        return Tab(self, target, session, page)

    async def tell(self, method: str, session: str | None = None, **params: Any) -> Any:
        """Send a command and return its answer; events meanwhile are noted."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        await self._socket.send_json(message)
        async with asyncio.timeout(WATCHDOG):
            while (answer := await self._socket.receive_json()).get("id") != number:
                page = self._pages.get(answer.get("sessionId"))
                if page is not None:
                    _note(page, answer.get("method"), answer.get("params", {}))
        assert "result" in answer, answer
        return answer["result"]


class Tab:
    """An open page."""

    def __init__(self, browser: Browser, target: str, session: str, page: Page) -> None:
        self._browser = browser
        self._target = target
        self._session = session
        self.page = page

    async def tell(self, method: str, **params: Any) -> Any:
        """Send a command of the protocol for this tab."""
        return await self._browser.tell(method, self._session, **params)

    async def go(self, url: str) -> None:
        """Open an address."""
        await self.tell("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        answer = await self.tell(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str, what: str = "") -> Any:
        """Wait until a JavaScript expression is true; return its value."""
        deadline = time.monotonic() + WATCHDOG
        while not (value := await self.run(script)):
            await self.load_again()
            assert time.monotonic() < deadline, f"never {what or script}: {await self.text()}"
            await asyncio.sleep(0.05)
        return value

    async def text(self) -> str:
        """All that can be read on the page."""
        self.page.text = str(await self.run("document.body?.innerText ?? ''"))
        return self.page.text

    async def shows(self, *words: str) -> None:
        """Wait until all these words are on the page."""
        deadline = time.monotonic() + WATCHDOG
        while lacking := [word for word in words if word not in await self.text()]:
            await self.load_again()
            assert time.monotonic() < deadline, f"lacks {lacking}: {self.page}"
            await asyncio.sleep(0.02)

    async def load_again(self) -> None:
        """Load a page again of which the host has cut off a part."""
        if self.page.cut:
            self.page.cut = False
            await self.tell("Page.reload")

    async def press(self, *keys: str) -> None:
        """Press keys by their names ("Tab", "Enter", "ArrowDown", or a character)."""
        codes = {"Tab": 9, "Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "Escape": 27, " ": 32}
        for key in keys:
            code = codes.get(key, ord(key[0]))
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            how = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
            down = "keyDown" if text else "rawKeyDown"
            await self.tell("Input.dispatchKeyEvent", type=down, **how)
            await self.tell("Input.dispatchKeyEvent", type="keyUp", **how)

    async def window(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window and the colours that the person prefers."""
        await self.tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.tell("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path) -> None:
        """Write what is seen as PNG."""
        answer = await self.tell("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    async def renderers(self) -> list[int]:
        """The processes that draw the browser's pages."""
        answer = await self._browser.tell("SystemInfo.getProcessInfo")
        return [each["id"] for each in answer["processInfo"] if each["type"] == "renderer"]

    async def close(self) -> None:
        """Close the tab."""
        await self._browser.tell("Target.closeTarget", targetId=self._target)


#: Chromium ends the requests under way when an interface of the host comes or goes.
_OF_THE_HOST = "net::ERR_NETWORK_CHANGED"


def _note(page: Page, method: str | None, params: dict[str, Any]) -> None:
    errors = page.errors
    if method == "Runtime.exceptionThrown":
        errors.append(str(params["exceptionDetails"]))
    elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
        errors.append(str(params["args"]))
    elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
        errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
    elif method == "Network.requestWillBeSent":
        page.requests.append(params["request"]["url"])
    elif method == "Network.loadingFailed":
        errors.append(params["errorText"])
        if params["errorText"] == _OF_THE_HOST:
            page.cut |= params["type"] in {"Document", "Script", "Stylesheet"}
    elif method == "Network.responseReceived" and params["response"]["status"] >= 400:
        errors.append(f"{params['response']['status']} {params['response']['url']}")
    page.errors = [error for error in errors if _OF_THE_HOST not in error]
