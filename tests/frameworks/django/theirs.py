"""Runs one of Django's or of other backends' own classes of tests with the shmq backend in the
place of theirs, in a project's directory, and writes one line of JSON for each test:

    DJANGO_SETTINGS_MODULE=settings python theirs.py django-tasks FOLDER [TEST]...
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import django

BACKEND = "shmq.integrations.django.Backend"


class Lines(unittest.TestResult):
    """Writes the outcome of each test when it is known."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def _write(self, test: unittest.TestCase, outcome: str, text: str = "") -> None:
        name = f"{type(test).__name__}.{test._testMethodName}"
        line = {"test": name, "outcome": outcome, "text": text}
        print(json.dumps(line), file=self._file, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._write(test, "passed")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._write(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addFailure(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._write(test, "skipped", reason)


def work(alias: str = "default", queues: list[str] | None = None, most: int | None = None) -> None:
    """Run what waits, in this process."""
    from shmq.integrations.django.api import tasks
    from shmq.integrations.django.worker import Duty, Worker

    Worker(tasks.task_backends[alias], Duty(queues, most, burst=True)).run()


def clear() -> None:
    """Forget all tasks and results."""
    from shmq.integrations.django.home import home

    here = Path.cwd() / ".shmq"
    broker = home(None, here).broker()
    for topic in broker.stats().topics:
        for channel in topic.channels:
            broker.empty_channel(topic.name, channel.name)
    for name in broker.results_names():
        store = broker.results(name)
        for key in list(store):
            store.delete(key)


def module(name: str, **names: Any) -> types.ModuleType:
    """A module that others can import, with these names. Those above it are made as well."""
    above, _, last = name.rpartition(".")
    made = sys.modules.setdefault(name, types.ModuleType(name))
    made.__path__ = []
    vars(made).update(names)
    if above:
        setattr(module(above), last, made)
    return made


def load(path: Path, name: str) -> Any:
    """Import a file under a name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


# ---- Django's own ----


def alias_backport() -> None:
    """Let the backport be found under the names of Django 6."""
    from shmq.integrations.django.api import PACKAGE

    if PACKAGE == "django.tasks":
        return
    import django_tasks

    django_tasks.Task = importlib.import_module("django_tasks.base").Task
    exceptions = importlib.import_module("django_tasks.exceptions")
    exceptions.InvalidTask = exceptions.InvalidTaskError
    exceptions.InvalidTaskBackend = exceptions.InvalidTaskBackendError
    parts = "base exceptions signals backends backends.base backends.dummy backends.immediate"
    for part in ("", *parts.split()):
        found = importlib.import_module(f"django_tasks.{part}".rstrip("."))
        sys.modules[f"django.tasks.{part}".rstrip(".")] = found
    importlib.import_module("django_tasks.signals").logger = logging.getLogger("django.tasks")
    django.tasks = django_tasks  # type: ignore[attr-defined]


def of_django(folder: Path, name: str) -> list[type[unittest.TestCase]]:
    """Django's `tests/tasks`: the tests of its two backends, and those of tasks on them."""
    from shmq.integrations.django.backend import Backend

    alias_backport()

    class Lists(Backend):
        """Has `results` and `clear`, as Django's backend for tests has."""

        def __init__(self, alias: str, params: dict[str, Any]) -> None:
            super().__init__(alias, params)
            self.results: list[Any] = []

        def clear(self) -> None:
            self.results.clear()
            clear()

        def _publish(self, result: Any) -> None:
            super()._publish(result)
            self.results.append(result)

    class AtOnce(Backend):
        """Runs each task before `enqueue` returns, as Django's immediate backend does."""

        def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
            result = super().enqueue(task, args, kwargs)
            work(self.alias)
            result.refresh()
            return result

    importlib.import_module("django.tasks.backends.dummy").DummyBackend = Lists
    importlib.import_module("django.tasks.backends.immediate").ImmediateBackend = AtOnce
    sys.path.insert(0, str(folder / "tests"))
    tests = importlib.import_module(f"tasks.test_{name}")
    return [
        case
        for case in vars(tests).values()
        if isinstance(case, type)
        and issubclass(case, unittest.TestCase)
        and case.__module__ == tests.__name__
    ]


# ---- django-tasks-rq ----


def of_rq(folder: Path) -> list[type[unittest.TestCase]]:
    """The tests of `RQBackend`. The modules of RQ are stand-ins: the tests reach for them only to
    run a worker and to forget all."""
    from shmq.integrations.django.backend import Backend

    connection = types.SimpleNamespace(flushall=clear)
    module("django_rq", get_connection=lambda: connection)
    module("django_rq.connection_utils", get_redis_connection=None)
    module("fakeredis", FakeRedis=object, FakeStrictRedis=object)
    module("rq.defaults", UNSERIALIZABLE_RETURN_VALUE_PAYLOAD="Unsupported type")
    module("rq.timeouts", TimerDeathPenalty=object)
    module("django_tasks_rq", RQBackend=Backend, compat=None)
    module("django_tasks_rq.backend", RQBackend=Backend, Job=object)
    tests = load(folder / "tests" / "tests.py", "rq_tests")
    tests.RQBackendTestCase.run_worker = lambda self: work()
    return [tests.RQBackendTestCase]


# ---- django-tasks-db ----


class Row:
    """A task, as the tests see its row of the database."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.id, self.status = fields["id"], fields["status"]
        self.worker_ids = fields["workers"]
        self.task_path, self._fields = fields["task"], fields
        self.traceback = "".join(text for _, text in fields["errors"])

    def refresh_from_db(self) -> None:
        """Look again."""
        self.__init__(Rows().get(self.id)._fields)  # type: ignore[misc]

    @property
    def task(self) -> Any:
        """The task, if there is one."""
        from shmq.integrations.django import record

        return record.restore(self._fields).task


class Rows:
    """Tasks, as the tests see the table of the database."""

    def __init__(self, *statuses: str) -> None:
        self._statuses = statuses

    def __iter__(self) -> Iterator[Row]:
        from django.utils import timezone

        from shmq.integrations.django import record
        from shmq.integrations.django.home import home

        store = home(None, Path.cwd() / ".shmq").broker().results("django")
        for packed in dict(store.items()).values():
            fields = record.parse(packed)
            after = record.run_after(fields)
            waits = "READY" in self._statuses and after is not None and after > timezone.now()
            if not waits and (not self._statuses or fields["status"] in self._statuses):
                yield Row(fields)

    def count(self) -> int:
        return len(list(self))

    def get(self, id: str) -> Row:
        return next(row for row in self if row.id == id)

    def ready(self) -> Rows:
        return Rows("READY")

    def successful(self) -> Rows:
        return Rows("SUCCESSFUL")

    def failed(self) -> Rows:
        return Rows("FAILED")

    def create(self, task_path: str, args_kwargs: dict[str, Any], backend_name: str) -> Row:
        """Enqueue a task that may not exist."""
        import dataclasses

        from shmq.integrations.django import record
        from shmq.integrations.django.api import tasks

        noop = importlib.import_module("tests.tasks").noop_task
        pack = record.pack

        def packed(result: Any) -> bytes:
            fields = {**record.parse(pack(result)), "task": task_path, **args_kwargs}
            return json.dumps(fields).encode()

        with mock.patch.object(record, "pack", packed):
            result = tasks.task_backends[backend_name].enqueue(dataclasses.replace(noop), [], {})
        return self.get(result.id)


def _run_worker(
    queue_name: str = "default",
    backend_name: str = "default",
    max_tasks: int | None = None,
    **others: Any,
) -> None:
    assert not set(others) - {"verbosity"}, others
    work(backend_name, None if queue_name == "*" else queue_name.split(","), max_tasks)


def _start_worker(self: Any, args: list[str] | None = None, **ignored: Any) -> Any:
    words = ["--burst" if word == "--batch" else word for word in args or []]
    argv = [sys.executable, "manage.py", "shmq_worker", *words]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    self.processes.append(process)
    return process


def of_db(folder: Path, name: str) -> list[type[unittest.TestCase]]:
    """The tests of `DatabaseBackend`, of its worker and of its worker's processes. The model is a
    stand-in that reads the results store; queries of the database are not counted."""
    from django.test import TransactionTestCase

    from shmq.integrations.django.backend import Backend

    table = types.SimpleNamespace(objects=Rows())
    module("django_tasks_db", DatabaseBackend=Backend, compat=None)
    module("django_tasks_db.admin", DBTaskResultAdmin=None)
    commands = "django_tasks_db.management.commands"
    module(f"{commands}.prune_db_task_results", logger=None)
    module("django_tasks_db.models", DBTaskResult=table, get_date_max=None)

    def exclusive_transaction(using: str = "default") -> Any:
        return contextlib.ContextDecorator()

    module(
        "django_tasks_db.utils", exclusive_transaction=exclusive_transaction, normalize_uuid=None
    )
    uncounted: Callable[..., Any] = lambda self, *args, **named: contextlib.nullcontext()  # noqa: E731
    TransactionTestCase.assertNumQueries = uncounted  # type: ignore[method-assign]
    tests = load(folder / "tests" / "tests.py", "db_tests")
    tests.DatabaseBackendWorkerTestCase.run_worker = staticmethod(_run_worker)
    process_tests = tests.DatabaseWorkerProcessTestCase
    process_tests.start_worker = _start_worker
    process_tests._overridden_settings = None
    cases = {
        "backend": tests.DatabaseBackendTestCase,
        "worker": tests.DatabaseBackendWorkerTestCase,
        "processes": process_tests,
    }
    return [cases[name]]


def main() -> None:
    """Run a group."""
    group, folder = sys.argv[1], Path(sys.argv[2])
    sys.path.insert(0, os.getcwd())
    django.setup()
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, _, name = group.partition("-")
    if kind == "django":
        cases = of_django(folder, name.replace("-", "_"))
    else:
        cases = of_rq(folder) if kind == "rq" else of_db(folder, name)
    for case in cases:
        set_up = case.setUp
        case.setUp = lambda self, set_up=set_up: (clear(), set_up(self))  # type: ignore[misc]
        names = sys.argv[3:] or unittest.defaultTestLoader.getTestCaseNames(case)
        unittest.TestSuite(map(case, names)).run(Lines(lines))


if __name__ == "__main__":
    main()
