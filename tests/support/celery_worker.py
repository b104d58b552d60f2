"""Workers of `support.celery_app` as processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from support.processes import HELPERS, WATCHDOG, Child, eventually, wait_ended

#: Celery's workers refuse to unpickle as root unless they are told so.
_ENV = {**HELPERS, "C_FORCE_ROOT": "1", "PYTHONUNBUFFERED": "1"}


class Worker:
    """One `celery worker`, with the processes of its pool."""

    def __init__(self, instance: str, notes: Path, *words: str, **settings: Any) -> None:
        self.name = f"worker-{next(_numbers)}@{instance}"
        env = environment(instance, notes, settings)
        argv = [sys.executable, "-m", "celery", "-A", "support.celery_app", "worker"]
        argv += [f"--hostname={self.name}", "--loglevel=INFO", *words]
        self.child = Child(argv, env)
        self.pid = self.child.pid

    def ready(self) -> Worker:
        """Wait until it consumes."""
        eventually(
            lambda: " ready." in self.child.errors or self.child.process.poll() is not None,
            2 * WATCHDOG,
            "the worker is ready",
        )
        assert self.child.process.poll() is None, self.child.errors
        return self

    def pool(self) -> list[int]:
        """The processes of its pool."""
        try:
            return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """SIGKILL to all its processes, the main one first."""
        pool = self.pool()
        if self.child.process.poll() is None:
            self.child.kill()
        for pid in pool:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pool:
            wait_ended(pid)

    @staticmethod
    def shoot(pid: int) -> None:
        """SIGKILL to one process, which may have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> str:
        """A warm shutdown; what it wrote."""
        self.child.process.send_signal(signal.SIGTERM)
        status = self.child.wait(2 * WATCHDOG)
        assert status == 0, f"the worker ended with {status}\n{self.child.errors}"
        return self.child.errors

    def close(self) -> None:
        """Kill it if it lives."""
        self.kill()
        self.child.close()


def environment(instance: str, notes: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The environment of a process with the application."""
    return {
        **_ENV,
        "SHMQ_INSTANCE": instance,
        "CELERY_NOTES": str(notes),
        "CELERY_SETTINGS": json.dumps(settings),
    }


_numbers = itertools.count()
