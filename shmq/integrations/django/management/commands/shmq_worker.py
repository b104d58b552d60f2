"""`manage.py shmq_worker`: runs the tasks of a backend."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any, Final

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import autoreload

import shmq
from shmq.integrations.django import api, files
from shmq.integrations.django.backend import Backend
from shmq.integrations.django.crew import Crew
from shmq.integrations.django.worker import Duty
from shmq.printing import Formatter

#: The process that a reloading command runs ends with this status to be run again.
_AGAIN: Final = 3


class Command(BaseCommand):
    """Runs worker processes until SIGTERM or Ctrl-C, which let them finish the tasks in hand. A
    second one gives these tasks back."""

    help = "Run the tasks of a shmq backend until SIGTERM or Ctrl-C."

    def add_arguments(self, parser: CommandParser) -> None:
        """Options, beside those of every command."""
        parser.add_argument("--backend", default="default", help="alias in TASKS [default]")
        parser.add_argument(
            "--queues",
            default="",
            help="queues, with commas, in the order of service within a priority [all, in turns]",
        )
        parser.add_argument(
            "--processes", type=int, default=1, help="how many tasks run at a time [1]"
        )
        parser.add_argument(
            "--max-tasks", type=int, help="tasks after which a process is replaced [no limit]"
        )
        parser.add_argument(
            "--burst", action="store_true", help="end when no task waits, for cron and tests"
        )
        parser.add_argument(
            "--reload",
            action="store_true",
            default=None,
            help="start again when a file has changed [if DEBUG]",
        )
        parser.add_argument("--no-reload", dest="reload", action="store_false", default=None)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run it. Raises CommandError."""
        backend = self._backend(options["backend"])
        if options["processes"] < 1:
            raise CommandError("--processes must be 1 or more")
        if options["max_tasks"] is not None and options["max_tasks"] < 1:
            raise CommandError("--max-tasks must be 1 or more")
        queues = [name.strip() for name in options["queues"].split(",") if name.strip()] or None
        for name in queues or []:
            if backend.queues and name not in backend.queues:
                known = ", ".join(sorted(backend.queues))
                raise CommandError(f"--queues: no queue {name!r}; the backend has {known}")
        reload = settings.DEBUG if options["reload"] is None else options["reload"]
        reload = reload and not options["burst"]
        reloads = files.Reloads.from_environment()
        if reload and reloads is None:
            sys.exit(_again_and_again())
        _log_to_stderr(options["verbosity"])
        duty = Duty(queues, options["max_tasks"], options["burst"])
        crew = Crew(backend, duty, options["processes"], reloads if reload else None)
        try:
            crew.run()
        except shmq.ShmqError as exc:
            raise CommandError(f"cannot {exc}") from exc
        if crew.reload:
            sys.exit(_AGAIN)

    def _backend(self, alias: str) -> Backend:
        try:
            backend = api.tasks.task_backends[alias]
        except Exception as exc:
            raise CommandError(f"--backend: {exc}") from exc
        if not isinstance(backend, Backend):
            raise CommandError(f"--backend: TASKS[{alias!r}] has another backend than shmq's")
        return backend


def _log_to_stderr(verbosity: int) -> None:
    """Show the progress, unless the project's LOGGING does so."""
    log = logging.getLogger("shmq.integrations.django")
    if verbosity and not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(Formatter("%(asctime)s shmq_worker: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def _again_and_again() -> int:
    """Run the command in a process of its own, again whenever it ends for a changed file. If it
    fails, wait for a change. Returns its exit status."""
    child: subprocess.Popen[bytes] | None = None
    is_over = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal is_over
        is_over = True
        if child is not None:
            child.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child, too
    while True:
        reloads = files.Reloads(os.getpid(), time.time())
        child = subprocess.Popen(autoreload.get_child_arguments(), env=reloads.environment())
        status = child.wait()
        if is_over or status <= 0:
            return status if status >= 0 else 128 - status
        if status != _AGAIN:
            print("shmq_worker: waiting for a change of a file", file=sys.stderr, flush=True)
            files.Watch(reloads.since).wait(lambda: is_over)
