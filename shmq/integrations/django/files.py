"""Whether a source file of the project has changed, as Django's runserver finds out."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from django.utils import autoreload

_log = logging.getLogger("shmq.integrations.django")

#: Seconds between two looks at all files.
_EVERY: Final = 1.0

_VARIABLE: Final = "SHMQ_WORKER_RELOADS"

#: The signal by which a worker tells its parent that a file has changed.
CHANGED: Final = signal.SIGHUP


@dataclass(frozen=True)
class Reloads:
    """How a command that reloads runs the process that has the workers."""

    parent: int
    """The process that runs it again, and whose end ends it."""
    since: float
    """When it was started, in seconds since 1970."""

    @classmethod
    def from_environment(cls) -> Self | None:
        """The way that `environment` told; None: this is not such a process."""
        words = os.environ.get(_VARIABLE, "").split()
        return cls(int(words[0]), float(words[1])) if words else None

    def environment(self) -> dict[str, str]:
        """The environment of that process."""
        return {**os.environ, _VARIABLE: f"{self.parent} {self.since}"}


class Watch:
    """The times of the files of all modules that this process has imported."""

    def __init__(self, since: float) -> None:
        """since: before this process imported anything, in seconds since 1970."""
        self._since = since
        self._reloader: Any = autoreload.StatReloader()
        self._times: dict[Path, float] = {}

    def changed(self) -> str | None:
        """A file that has changed since its module was imported, or may have."""
        now = time.time()
        for path, when in self._reloader.snapshot_files():
            known = self._times.setdefault(path, when)
            if known != when or self._since < when <= now:
                return str(path)
        return None

    def wait(self, is_over: Callable[[], bool] = lambda: False) -> str | None:
        """Wait until a file has changed; its name. is_over: asked every second; None if it says
        so."""
        while not is_over():
            changed = self.changed()
            if changed is not None:
                return changed
            time.sleep(_EVERY)
        return None


def tell(parent: int, since: float) -> None:
    """Start a thread that tells the parent of this process when a file has changed. The processes
    that run tasks watch, because their parent does not import the modules of tasks."""

    def watch() -> None:
        _log.info("%s has changed: starting again", Watch(since).wait())
        if os.getppid() == parent:
            os.kill(parent, CHANGED)

    threading.Thread(target=watch, name="shmq-worker-files", daemon=True).start()
