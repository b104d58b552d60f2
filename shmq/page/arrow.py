"""Bodies that are Arrow data: an IPC stream, or a file of one.

Anybody who may publish decides about these bytes, and pyarrow trusts them more than this server
may: lengths that are not true can crash it, and a few compressed bytes can become gigabytes. So a
process of its own reads them (arrow_reader.py), with limits of memory and time, one at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

#: Bytes of a body that are read.
MOST: Final = 16 << 20
_MOST_ANSWER: Final = 256 << 10  # bytes
_SECONDS: Final = 60.0  # more than the processor time that it may use, for a busy host
_PROGRAM: Final = Path(__file__).with_name("arrow_reader.py")

_FILE: Final = b"ARROW1\0\0"
_STREAM: Final = b"\xff\xff\xff\xff"


def begins(head: bytes) -> bool:
    """Whether a body that begins like this may be Arrow data."""
    if head.startswith(_FILE):
        return True
    size = int.from_bytes(head[4:8], "little")
    return head.startswith(_STREAM) and len(head) > 8 and 0 < size < MOST and size % 8 == 0


class Reader:
    """Reads Arrow data for one server."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def describe(self, data: bytes, length: int) -> dict[str, Any]:
        """Describe a body of `length` bytes that begins with `data`: `format` ("stream" or
        "file"), `columns`, `fields` (name, type, nullable, of the first columns), `rows`,
        `complete` (whether these are all rows), `stopped` (why not, or None) and `first`: texts of
        the first rows. Only `error`, a sentence, if it cannot be read."""
        async with self._turn:
            try:
                async with asyncio.timeout(_SECONDS):
                    status, said = await _read(data, length)
            except TimeoutError:
                return {"error": f"Reading it took more than {_SECONDS:g} s."}
        if len(said) > _MOST_ANSWER:
            return {"error": "Its description is too long to be shown."}
        try:
            found = json.loads(said)
        except ValueError:
            if status in (-signal.SIGXCPU, -signal.SIGKILL):
                return {"error": "Reading it takes more time or memory than the page allows."}
            return {"error": f"Its reader died of it (status {status}), so it is not sound."}
        return dict(found)


async def _read(data: bytes, length: int) -> tuple[int, bytes]:
    """The reader's exit status, and what it said."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(_PROGRAM), str(length)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"},  # another reserves gigabytes
    )
    assert child.stdin is not None
    assert child.stdout is not None
    feeding = asyncio.create_task(_feed(child.stdin, data))
    try:
        said = b""
        while len(said) <= _MOST_ANSWER and (more := await child.stdout.read(_MOST_ANSWER)):
            said += more
    finally:
        feeding.cancel()
        if child.returncode is None:
            child.kill()
        status = await child.wait()
    return status, said


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    try:
        pipe.write(data)
        await pipe.drain()
        pipe.close()
    except ConnectionError:
        pass  # it has read enough, or died
