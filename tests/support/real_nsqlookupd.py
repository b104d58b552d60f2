"""A real nsqlookupd as a process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from support.external_programs import peer
from support.processes import Child, eventually

_LISTENING = re.compile(r" (TCP|HTTP): listening on (127\.0\.0\.1:\d+)")


@contextlib.contextmanager
def nsqlookupd() -> Iterator[tuple[str, str]]:
    """The addresses of its TCP and its HTTP interface."""
    host = "127.0.0.1"
    words = [f"--tcp-address={host}:0", f"--http-address={host}:0", f"--broadcast-address={host}"]
    with contextlib.closing(Child([peer("nsqlookupd"), *words])) as child:

        def found() -> dict[str, str]:
            return dict(_LISTENING.findall(child.errors))

        eventually(lambda: len(found()) == 2 or child.process.poll() is not None)
        assert child.process.poll() is None, f"nsqlookupd ended\n{child.errors}"
        yield found()["TCP"], found()["HTTP"]
