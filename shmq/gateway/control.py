"""Requests between the gateway processes of one instance. Each process has a Unix socket in a
directory of their supervisor. A request is one line of JSON, and so is its answer.

A change of an option must reach all processes before its author gets an answer, and also those that
start later. So the change is first written to a file in the directory, with a version number, and
then sent to the others. A process listens on its socket before it reads the file: one that cannot
be told because it does not listen yet will find the change in the file. Of two concurrent changes
the one with the higher version holds everywhere, in whichever order they arrive.
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

_SECONDS: Final = 2.0  # for an answer; a process that is starting or stuck is left out
_MOST_BYTES: Final = 64 << 20
_CHANGE_SECONDS: Final = 10.0  # until all processes have confirmed a change
_AGAIN: Final = 0.02

_log = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


class Pending(Exception):
    """Some processes have not confirmed a change; they apply it once they respond again."""


class Control:
    """One process's control socket, and requests to the others'."""

    def __init__(self, directory: str, index: int, workers: int, handler: Handler) -> None:
        """handler: answers a request with a value that JSON can represent."""
        self._directory = Path(directory)
        self._index = index
        self._workers = workers
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start to listen; remove the socket that a dead predecessor may have left."""
        path = self._path(self._index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path, limit=_MOST_BYTES)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def ask_all(self, question: dict[str, Any]) -> list[Any]:
        """Return the answers of the processes that answer, this one's first."""
        others = [index for index in range(self._workers) if index != self._index]
        mine, *theirs = await asyncio.gather(
            self._handler(question), *(self._ask(index, question) for index in others)
        )
        return [mine, *(answer for answer in theirs if answer is not None)]

    async def ask(self, index: int, question: dict[str, Any], seconds: float = _SECONDS) -> Any:
        """Return one process's answer; None if it does not answer within `seconds`."""
        if index == self._index:
            return await self._handler(question)
        return await self._ask(index, question, seconds)

    def ask_from_thread(self, index: int, question: dict[str, Any], seconds: float) -> Any:
        """As `ask`, for threads other than the event loop's; None after `seconds`, too."""
        asked = asyncio.run_coroutine_threadsafe(self.ask(index, question, seconds), self._loop)
        try:
            return asked.result(seconds)
        except TimeoutError:
            asked.cancel()
            return None

    # ---- changes of options ----

    def changes(self) -> tuple[int, dict[str, Any]]:
        """Return the version of the last change, and all options that differ from those with which
        the processes were started."""
        try:
            version, options = json.loads(self._changes.read_text())
        except FileNotFoundError:
            return 0, {}
        return version, options

    async def change(self, options: dict[str, Any]) -> None:
        """Change options in all processes and wait until they have confirmed it.

        Raises Pending if some do not confirm in time."""
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
        """Write the change to the file; return its version and all changes so far."""
        with (self._directory / "changes.lock").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:  # a stopped process holds the lock
                        raise Pending("another change takes its time") from None
                    time.sleep(_AGAIN)
            version, before = self.changes()
            changed = {**before, **options}
            new = self._directory / f"changes.{self._index}"
            new.write_text(json.dumps([version + 1, changed]))
            os.replace(new, self._changes)  # atomic, even if this process is killed
            return version + 1, changed

    async def _tell(self, index: int, question: dict[str, Any], until: float) -> bool:
        """Returns true if the process has the change, or is not running and will read the file when
        it starts."""
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

    # ---- one request ----

    def _path(self, index: int) -> Path:
        return self._directory / f"{index}.sock"

    async def _ask(self, index: int, question: dict[str, Any], seconds: float = _SECONDS) -> Any:
        try:
            async with asyncio.timeout(seconds):
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
