"""A real nsqlookupd as a process."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator

from support.external_programs import peer
from support.processes import Child, eventually

_LISTENING = re.compile(r" (TCP|HTTP): listening on [^ ]+:(\d+)")


class Lookupd:
    """A nsqlookupd whose ports stay."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """host: where instances reach its TCP interface; its HTTP interface is on 127.0.0.1."""
        self._host, self.port, self.web_port = host, 0, 0
        self.start()

    def start(self) -> None:
        """Start it, also again after `kill`: it knows nothing then."""
        words = [f"--tcp-address={self._host}:{self.port}"]
        words += [f"--http-address=127.0.0.1:{self.web_port}", "--broadcast-address=127.0.0.1"]
        self._child = Child([peer("nsqlookupd"), *words])

        def found() -> dict[str, str]:
            return dict(_LISTENING.findall(self._child.errors))

        try:
            eventually(lambda: len(found()) == 2 or self._child.process.poll() is not None)
            assert self._child.process.poll() is None, f"nsqlookupd ended\n{self._child.errors}"
        except BaseException:
            self.close()
            raise
        self.port, self.web_port = int(found()["TCP"]), int(found()["HTTP"])

    @property
    def web(self) -> str:
        """The address of its HTTP interface."""
        return f"127.0.0.1:{self.web_port}"

    def kill(self) -> None:
        """SIGKILL."""
        self._child.kill(signal.SIGKILL)
        self._child.close()

    def close(self) -> None:
        """Kill it if it lives."""
        self._child.close()


@contextlib.contextmanager
def nsqlookupd() -> Iterator[tuple[str, str]]:
    """The addresses of its TCP and its HTTP interface."""
    with contextlib.closing(Lookupd()) as made:
        yield f"127.0.0.1:{made.port}", made.web
