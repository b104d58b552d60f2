"""Pages as a person sees them: Chromium without a screen, told what to do by its own protocol
(Chrome DevTools Protocol over a WebSocket)."""

from __future__ import annotations

import asyncio
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

from support.external_programs import peer
from support.processes import WATCHDOG, eventually

PROGRAM = "chromium-headless-shell"
_LISTENING = re.compile(r"DevTools listening on (ws://\S+)")


@dataclass
class Page:
    """One that was opened."""

    text: str = ""
    """What can be read on it."""
    errors: list[str] = field(default_factory=list)
    """Exceptions of its scripts, what its console calls an error, requests that failed."""


def look(directory: Path, pages: Sequence[tuple[str, Sequence[str]]]) -> list[Page]:
    """Open each address until all its words are on the page; AssertionError if they never are."""

    async def look_at_all() -> list[Page]:
        async with _browser(directory) as browser:
            return [await browser.open(url, words) for url, words in pages]

    return asyncio.run(look_at_all())


@asynccontextmanager
async def _browser(directory: Path) -> AsyncIterator[_Browser]:
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
                yield _Browser(socket)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


class _Browser:
    """Commands and their answers, in one connection; events are kept for the page that is open."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._page = Page()

    async def open(self, url: str, words: Sequence[str]) -> Page:
        page = self._page = Page()
        target = (await self._tell("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self._tell("Target.attachToTarget", targetId=target, flatten=True))[
            "sessionId"
        ]
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self._tell(f"{domain}.enable", session)
        await self._tell("Page.navigate", session, url=url)
        deadline = time.monotonic() + WATCHDOG
        while lacking := [word for word in words if word not in page.text]:
            assert time.monotonic() < deadline, f"{url} lacks {lacking}: {page}"
            answer = await self._tell(
                "Runtime.evaluate", session, expression="document.body?.innerText ?? ''"
            )
            page.text = answer["result"]["value"]
            await asyncio.sleep(0.02)
        await self._tell("Target.closeTarget", targetId=target)
        return page

    async def _tell(self, method: str, session: str | None = None, **params: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        await self._socket.send_json(message)
        async with asyncio.timeout(WATCHDOG):
            while (answer := await self._socket.receive_json()).get("id") != number:
                self._note(answer.get("method"), answer.get("params", {}))
        assert "result" in answer, answer
        return answer["result"]

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        errors = self._page.errors
        if method == "Runtime.exceptionThrown":
            errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.loadingFailed":
            errors.append(params["errorText"])
        elif method == "Network.responseReceived" and params["response"]["status"] >= 400:
            errors.append(f"{params['response']['status']} {params['response']['url']}")
