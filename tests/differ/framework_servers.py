"""The broker of a framework on each side, a Redis or an instance of shmq, and its workers."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.external_programs import peer
from support.processes import eventually, remove_instance

WATCHDOG = 120.0
#: Of the broker, so that messages of 1 MiB and results of a little more fit on both sides.
SETTINGS = ("--tcp-address=", "--http-address=")


class Server:
    """A broker and the workers of programs. `url` is its address."""

    def __init__(self, side: str, extra: tuple[str, ...] = ()) -> None:
        self.side = side
        self.directory = Path(tempfile.mkdtemp(prefix="differ-"))
        self.instance = f"differ-{os.getpid()}-{secrets.token_hex(4)}"
        self._workers: list[subprocess.Popen[bytes]] = []
        if side == "original":
            path = self.directory / "redis.sock"
            argv = [peer("redis-server"), "--port", "0", "--unixsocket", str(path), "--save", ""]
            self.url = f"redis+socket://{path}"
            self.socket = str(path)
        else:
            (self.directory / "data").mkdir()
            words = ["--instance", self.instance, "--data-path", str(self.directory / "data")]
            argv = [sys.executable, "-m", "shmq", "serve", *words, *SETTINGS, *extra]
            self.url = f"shmq://{self.instance}"
        self.log = open(self.directory / "log", "ab", buffering=0)
        self.process = subprocess.Popen(argv, stdout=self.log, stderr=self.log, cwd=self.directory)
        eventually(self._is_ready, WATCHDOG, "the broker runs")

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.text()
        if self.side == "original":
            return Path(self.socket).exists()
        import shmq

        shmq.attach(self.instance, timeout=WATCHDOG).close()
        return True

    def work(self, *argv: str, ready: str, **env: str) -> None:
        """Start a worker, and wait until it has said so."""
        log = self.directory / f"worker{len(self._workers)}"
        with open(log, "ab") as out:
            worker = subprocess.Popen(
                [sys.executable, *argv],
                stdout=out,
                stderr=out,
                env=os.environ | {"DIFFER_URL": self.url, "C_FORCE_ROOT": "1"} | env,
                start_new_session=True,
            )
        self._workers.append(worker)

        def is_ready() -> bool:
            assert worker.poll() is None, log.read_text()
            return ready in log.read_text()

        eventually(is_ready, WATCHDOG, "the worker is ready")

    def text(self) -> str:
        """The output of the broker."""
        return (self.directory / "log").read_text()

    def close(self) -> None:
        """End the workers and the broker."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        self.process.terminate()
        self.process.wait()
        self.log.close()
        if self.side == "shmq":
            remove_instance(self.instance)
        shutil.rmtree(self.directory, ignore_errors=True)


def value_of(error: BaseException) -> Any:
    """An error as programs see it: its class, and what it was made with."""
    return f"{type(error).__name__} {str(error)[:80]!r}"
