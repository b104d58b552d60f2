"""How the gateway processes of one instance ask each other: a Unix socket each, in a directory that
is their supervisor's; one JSON line there, one back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

_SECONDS: Final = 2.0  # for an answer; one that is starting or stuck is left out
_MOST_BYTES: Final = 64 << 20

_log = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


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

    def _path(self, index: int) -> Path:
        return self._directory / f"{index}.sock"

    async def _ask(self, index: int, question: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(_SECONDS):
                reader, writer = await asyncio.open_unix_connection(
                    self._path(index), limit=_MOST_BYTES
                )
                try:
                    writer.write(json.dumps(question).encode() + b"\n")
                    return json.loads(await reader.readline())
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError) as exc:
            _log.warning("gateway %d does not answer: %s", index, exc)
            return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError):
            answer = await self._handler(json.loads(await reader.readline()))
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()
