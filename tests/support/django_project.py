"""A real Django project in a directory: its `manage.py`, its settings, an app with tasks, workers.

`Project.session()` is a process like a web server's: it runs statements in the project, one call
after the other. The tasks write to a file, one line in one write, what they did and when.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from shmq.integrations.django.api import PACKAGE
from shmq.integrations.django.home import instance_of
from support import processes
from support.processes import WATCHDOG, Child

#: Before Django 6 the app has the checks and the signals' receivers.
_APPS: Final = [
    *(["django_tasks"] if PACKAGE == "django_tasks" else []),
    "shmq.integrations.django",
]

_MANAGE: Final = """
import os, sys
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""

_SETTINGS: Final = f"""
import json, os
from pathlib import Path
BASE_DIR = Path(__file__).resolve().parent
SECRET_KEY = "a secret of a test"
DEBUG = "PROJECT_DEBUG" in os.environ
USE_TZ = True
TIME_ZONE = "UTC"
INSTALLED_APPS = {[*_APPS, "app"]!r}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "db"}}}}
TASKS = json.loads((BASE_DIR / "tasks.json").read_text())
"""

_TASKS: Final = f"""
import os, signal, time
from pathlib import Path
from {PACKAGE} import task

HERE = Path(__file__).resolve().parent.parent
LOG = os.open(HERE / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

def write(*words):
    os.write(LOG, (" ".join(map(str, words)) + "\\n").encode())

@task
def note(word):
    write("note", word, os.getpid(), time.time_ns())
    return word

@task
def add(left, right=1):
    return left + right

@task
async def add_async(left, right):
    return left + right

@task
def fail(text):
    raise ValueError(text)

@task
def no_json():
    return object()

@task(takes_context=True)
def attempt(context, word):
    write("attempt", word, context.attempt)
    return context.attempt

@task(takes_context=True)
def dies(context, times):
    write("dies", context.attempt)
    if context.attempt <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return context.attempt

@task
def long_value(length):
    write("long", length, os.getpid())
    return "x" * length

@task
def long_failure(length):
    write("long", length, os.getpid())
    raise ValueError("x" * length)

@task
def gated(word):
    write("begin", word, os.getpid())
    while not (HERE / f"gate.{{word}}").exists():
        time.sleep(0.005)
    write("end", word, os.getpid())
    return word

@task
def work(word, seconds):
    write("begin", word, os.getpid(), time.time_ns())
    time.sleep(seconds)
    write("end", word, os.getpid())
    return word
"""

_SESSION: Final = """
import json, os, sys, traceback
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
import django
django.setup()
space = {}
exec("from app import tasks", space)
os.write(1, b"ready\\n")
for line in sys.stdin:
    space["answer"] = None
    try:
        exec(json.loads(line), space)
        said = {"answer": space["answer"]}
    except BaseException:
        said = {"error": traceback.format_exc()}
    os.write(1, b"= " + json.dumps(said).encode() + b"\\n")
"""


class Session:
    """A process of the project that runs statements."""

    def __init__(self, project: Project, env: dict[str, str] | None = None) -> None:
        code = f"import os; os.chdir({str(project.path)!r}); import sys; sys.path.insert(0, '')\n"
        self.child = Child([sys.executable, "-c", code + _SESSION], env)
        self.pid = self.child.pid
        self._calls = 0
        try:
            self.child.said("ready")
        except BaseException:
            self.child.close()
            raise

    def do(self, code: str, **values: Any) -> Any:
        """Run statements, with `values` as names; what they assigned to `answer`. AssertionError
        with the traceback if they raised."""
        said = self.ask(code, **values)
        assert "error" not in said, said["error"]
        return said["answer"]

    def ask(self, code: str, **values: Any) -> dict[str, Any]:
        """The same, as {"answer": ...} or {"error": traceback}."""
        given = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        self.child.tell(json.dumps(given + textwrap.dedent(code)))
        self._calls += 1
        said: dict[str, Any] = json.loads(self.child.said("= ", self._calls)[2:])
        return said

    def enqueue(self, task: str, *args: Any, **using: Any) -> str:
        """Enqueue a task of the app; its id. using: of `Task.using`; `run_after` in seconds."""
        after = using.pop("run_after", None)
        if after is not None:
            self.do("import datetime; from django.utils import timezone")
            using_after = f", run_after=timezone.now() + datetime.timedelta(seconds={after!r})"
        else:
            using_after = ""
        words = ", ".join(f"{name}={value!r}" for name, value in using.items())
        code = f"answer = tasks.{task}.using({words or 'priority=None'}{using_after})"
        found: str = self.do(f"{code}.enqueue(*{args!r}).id")
        return found

    def result(self, key: str, backend: str = "default") -> dict[str, Any]:
        """The TaskResult of an id, as a dictionary."""
        found: dict[str, Any] = self.do(
            f"""
            from {PACKAGE} import task_backends
            r = task_backends[{backend!r}].get_result({key!r})
            answer = dict(
                id=r.id, status=r.status.value, value=r._return_value, attempts=r.attempts,
                workers=r.worker_ids, args=r.args, kwargs=r.kwargs,
                errors=[[e.exception_class_path, e.traceback] for e in r.errors],
                priority=r.task.priority, queue=r.task.queue_name, backend=r.backend,
                times=[t and t.isoformat() for t in
                       (r.enqueued_at, r.started_at, r.last_attempted_at, r.finished_at)],
            )
            """
        )
        return found

    def finished(self, key: str, watchdog: float = WATCHDOG) -> dict[str, Any]:
        """Wait until the task has finished; its result."""

        def look() -> dict[str, Any] | None:
            found = self.result(key)
            return found if found["status"] in ("SUCCESSFUL", "FAILED") else None

        found: dict[str, Any] = processes.eventually(look, watchdog, f"task {key} has finished")
        return found

    def close(self) -> None:
        """Kill it."""
        self.child.close()


class Project:
    """The project in a directory."""

    def __init__(
        self,
        path: Path,
        queues: list[str] | None = None,
        options: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.path = path
        self.package = PACKAGE
        self.instance = instance_of(path / ".shmq")
        self._keep: list[Any] = []
        (path / "app").mkdir(parents=True)
        self.write("manage.py", _MANAGE)
        self.write("settings.py", _SETTINGS)
        self.write("app/__init__.py", "")
        self.write("app/tasks.py", _TASKS)
        default: dict[str, Any] = {"BACKEND": "shmq.integrations.django.Backend", **more}
        if queues is not None:
            default["QUEUES"] = queues
        if options is not None:
            default["OPTIONS"] = options
        self.set_tasks({"default": default})

    def write(self, name: str, text: str) -> None:
        """A file of the project."""
        (self.path / name).write_text(text)

    def set_tasks(self, tasks: dict[str, Any]) -> None:
        """The setting TASKS, for processes that start from now on."""
        self.tasks = tasks
        self.write("tasks.json", json.dumps(tasks))

    def manage(self, *words: str, env: dict[str, str] | None = None) -> Child:
        """`manage.py` with these words."""
        child = Child([sys.executable, str(self.path / "manage.py"), *words], env)
        self._keep.append(child)
        return child

    def worker(self, *words: str, ready: bool = True, env: dict[str, str] | None = None) -> Child:
        """`manage.py shmq_worker`. ready: wait until it has reached the broker."""
        child = self.manage("shmq_worker", *words, env=env)
        if ready:
            processes.eventually(
                lambda: "processes for" in child.errors or child.process.poll() is not None
            )
            assert child.process.poll() is None, child.errors
        return child

    def session(self, env: dict[str, str] | None = None) -> Session:
        """A process like a web server's."""
        session = Session(self, env)
        self._keep.append(session)
        return session

    def lines(self, first: str = "") -> list[list[str]]:
        """The lines that tasks wrote, as words. first: only lines that begin with this word."""
        path = self.path / "log"
        text = path.read_text() if path.exists() else ""
        return [
            words
            for line in text.splitlines()
            if (words := line.split()) and first in ("", words[0])
        ]

    def open_gate(self, word: str) -> None:
        """Let a task `gated` go on."""
        self.write(f"gate.{word}", "")

    def workers(self) -> list[int]:
        """The worker processes of every `shmq_worker`, without their parents."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                words, parent = _look(int(entry))
                mine = str(self.path / "manage.py").encode() in words and b"shmq_worker" in words
                if mine and _look(parent)[0] == words:
                    found.append(int(entry))
        return found

    def close(self) -> None:
        """Kill every process of the project, and remove what is in shared memory."""
        # Workers whose parent was killed finish their tasks, and hold its pipes until then.
        for gate in {words[1] for words in self.lines("begin")}:
            self.open_gate(gate)
        for thing in self._keep:
            with contextlib.suppress(ProcessLookupError):
                os.kill(thing.pid, signal.SIGKILL)
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for thing in reversed(self._keep):
            thing.close()
        processes.remove_instance(self.instance)


def _look(pid: int) -> tuple[list[bytes], int]:
    """The command line of a process, and its parent."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return [], 0
    return words, int(status.rpartition(")")[2].split()[1])


def until(condition: Callable[[], Any], what: str = "") -> Any:
    """`processes.eventually`, with room for a busy machine: a Django takes seconds to start."""
    return processes.eventually(condition, 2 * WATCHDOG, what)


def now_ns() -> int:
    """The clock of the tasks."""
    return time.time_ns()
