"""How the gateway processes of one instance ask each other: a Unix socket each, in a directory that
is their supervisor's; one JSON line there, one back.

An option that one of them changes must be changed in all before whoever asked hears of it, and in
those that start later too. So the change is first written to a file of the directory, with a
number, and told after that. A process listens on its socket before it reads the file: one that
cannot be told, because it does not listen yet, will find the change there. Of two changes at once
the one with the higher number holds everywhere, whichever is told last.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

_SECONDS: Final = 2.0  # for an answer; one that is starting or stuck is left out
_MOST_BYTES: Final = 64 << 20
_CHANGE_SECONDS: Final = 10.0  # for all to have a change
_AGAIN: Final = 0.02

_log = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


class Pending(Exception):
    """Not every process has the change yet; those that do not answer get it when they can."""


class Control:
    """One process's socket, and the way to the others'."""

    def __init__(self, directory: str, index: int, workers: int, handler: Handler) -> None:
        """handler: answers a question with something that JSON can say."""
        self._directory = Path(directory)
        self._index = index
        self._workers = workers
        self._handler = handler
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. One that died may have left its socket."""
        path = self._path(self._index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path, limit=_MOST_BYTES)

    async def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def ask_all(self, question: dict[str, Any]) -> list[Any]:
        """The answers of all processes, this one's first; of those that answer."""
        others = [index for index in range(self._workers) if index != self._index]
        mine, *theirs = await asyncio.gather(
            self._handler(question), *(self._ask(index, question) for index in others)
        )
        return [mine, *(answer for answer in theirs if answer is not None)]

    async def ask(self, index: int, question: dict[str, Any]) -> Any:
        """One process's answer; None if it does not answer."""
        if index == self._index:
            return await self._handler(question)
        return await self._ask(index, question)

    # ---- changes of options ----

    def changes(self) -> tuple[int, dict[str, Any]]:
        """The number of the last change, and all options that differ from what the processes were
        started with."""
        try:
            version, options = json.loads(self._changes.read_text())
        except FileNotFoundError:
            return 0, {}
        return version, options

    async def change(self, options: dict[str, Any]) -> None:
        """Change options in all processes, and wait until they say that they have. Pending."""
        until = time.monotonic() + _CHANGE_SECONDS
        version, changed = await asyncio.to_thread(self._store, options, until)
        question = {"ask": "change", "version": version, "options": changed}
        await self._handler(question)
        others = [index for index in range(self._workers) if index != self._index]
        told = await asyncio.gather(*(self._tell(index, question, until) for index in others))
        silent = [str(index) for index, done in zip(others, told, strict=True) if not done]
        if silent:
            raise Pending(f"gateway {', '.join(silent)} did not answer")

    @property
    def _changes(self) -> Path:
        return self._directory / "changes.json"

    def _store(self, options: dict[str, Any], until: float) -> tuple[int, dict[str, Any]]:
        """Write the change down; its number and all changes so far."""
        with (self._directory / "changes.lock").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:  # a stopped process has it
                        raise Pending("another change takes its time") from None
                    time.sleep(_AGAIN)
            version, before = self.changes()
            changed = {**before, **options}
            new = self._directory / f"changes.{self._index}"
            new.write_text(json.dumps([version + 1, changed]))
            os.replace(new, self._changes)  # a process that is killed here leaves all or nothing
            return version + 1, changed

    async def _tell(self, index: int, question: dict[str, Any], until: float) -> bool:
        """Whether the process has it, or is not there and will read the file when it is."""
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    if await self._exchange(index, question) is True:
                        return True
            except (FileNotFoundError, ConnectionRefusedError):
                return True
            except (OSError, TimeoutError, ValueError) as exc:
                _log.debug("gateway %d: %s", index, exc)
            await asyncio.sleep(_AGAIN)
        return False

    # ---- one question ----

    def _path(self, index: int) -> Path:
        return self._directory / f"{index}.sock"

    async def _ask(self, index: int, question: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(_SECONDS):
                return await self._exchange(index, question)
        except (OSError, TimeoutError, ValueError) as exc:
            _log.warning("gateway %d does not answer: %s", index, exc)
            return None

    async def _exchange(self, index: int, question: dict[str, Any]) -> Any:
        reader, writer = await asyncio.open_unix_connection(self._path(index), limit=_MOST_BYTES)
        try:
            writer.write(json.dumps(question).encode() + b"\n")
            return json.loads(await reader.readline())
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError):
            answer = await self._handler(json.loads(await reader.readline()))
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()
