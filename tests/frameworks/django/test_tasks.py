"""Tasks of a real project, from processes like a web server's to `manage.py shmq_worker`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.django_project import Project, now_ns, until

from shmq import shm
from shmq.integrations.django.home import instance_of


def test_a_task_is_done_and_its_result_is_there(project: Project) -> None:
    web = project.session()
    key = web.enqueue("add", 2, 3)
    before = web.result(key)
    assert (before["status"], before["attempts"], before["times"][1:]) == ("READY", 0, [None] * 3)
    project.worker()
    found = web.finished(key)
    assert (found["status"], found["value"], found["errors"]) == ("SUCCESSFUL", 5, [])
    assert found["args"] == [2, 3]
    assert found["attempts"] == 1
    assert found["times"] == sorted(found["times"])


def test_failures_have_their_class_and_traceback(project: Project) -> None:
    web = project.session()
    keys = [web.enqueue("fail", "no luck"), web.enqueue("no_json"), web.enqueue("add")]
    project.worker()
    found = [web.finished(key) for key in keys]
    assert [each["status"] for each in found] == ["FAILED"] * 3
    assert found[0]["errors"][0][0] == "builtins.ValueError"
    assert "ValueError: no luck" in found[0]["errors"][0][1]
    assert "TypeError" in found[1]["errors"][0][1]
    assert found[2]["errors"][0][0] == "builtins.TypeError"
    said = web.ask("answer = tasks.fail.get_result(key).return_value", key=keys[0])
    assert "ValueError: Task failed" in said["error"]


def test_async_tasks_and_callers(project: Project) -> None:
    web = project.session()
    project.worker()
    value = web.do(
        """
        import asyncio
        async def main():
            result = await tasks.add_async.aenqueue(3, right=4)
            while not result.is_finished:
                await asyncio.sleep(0.01)
                await result.arefresh()
            return (await tasks.add_async.aget_result(result.id)).return_value
        answer = asyncio.run(main())
        """
    )
    assert value == 7


def test_a_deferred_task_waits(project: Project) -> None:
    web = project.session()
    project.worker()
    began = now_ns()
    web.enqueue("note", "later", run_after=1.5)
    web.enqueue("note", "past", run_after=-100)
    web.enqueue("note", "now")
    until(lambda: len(project.lines("note")) == 3)
    at = {words[1]: int(words[3]) for words in project.lines("note")}
    assert at.keys() == {"later", "past", "now"}
    assert at["later"] - began >= 1.5e9


def test_a_task_is_deferred_for_longer_than_the_broker_allows(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(options={"broker": {"max_req_timeout": 0.4}})
    web = project.session()
    project.worker()
    began = now_ns()
    key = web.enqueue("note", "later", run_after=1.5)
    assert web.finished(key)["attempts"] == 1
    assert int(project.lines("note")[0][3]) - began >= 1.5e9


def test_priorities_go_first(make_project: Callable[..., Project]) -> None:
    project = make_project(queues=["default", "a", "b"])
    web = project.session()
    web.do("from app.tasks import *")
    for priority in (-100, -1, 0, 1, 49, 50, 100):
        for queue in ("a", "b"):
            web.enqueue("note", f"{queue}{priority}", priority=priority, queue_name=queue)
    project.worker("--queues=b,a")
    until(lambda: len(project.lines("note")) == 14)
    done = [words[1] for words in project.lines("note")]
    lanes = [["50", "100"], ["1", "49"], ["0"], ["-100", "-1"]]
    assert done == [f"{queue}{each}" for lane in lanes for queue in "ba" for each in lane]


def test_queues_take_turns(make_project: Callable[..., Project]) -> None:
    project = make_project(queues=["default", "a", "b"])
    web = project.session()
    for queue in ("a", "b"):
        for number in range(3):
            web.enqueue("note", f"{queue}{number}", queue_name=queue)
    project.worker()
    until(lambda: len(project.lines("note")) == 6)
    done = [words[1] for words in project.lines("note")]
    assert sorted(done[:2]) == ["a0", "b0"]
    assert sorted(done[4:]) == ["a2", "b2"]


def test_a_rolled_back_transaction_enqueues_nothing(make_project: Callable[..., Project]) -> None:
    project = make_project(ENQUEUE_ON_COMMIT=True)
    web = project.session()
    project.worker()
    kept, dropped = web.do(
        """
        from django.db import transaction
        try:
            with transaction.atomic():
                dropped = tasks.note.enqueue("dropped")
                raise KeyError
        except KeyError:
            pass
        with transaction.atomic():
            kept = tasks.note.enqueue("kept")
            assert kept.enqueued_at is None
            try:
                kept.refresh()
            except Exception as exc:
                assert type(exc).__name__ == "TaskResultDoesNotExist", exc
            else:
                raise AssertionError("there is a result before the commit")
        assert kept.enqueued_at is not None
        answer = [kept.id, dropped.id]
        """
    )
    assert web.finished(kept)["value"] == "kept"
    assert "TaskResultDoesNotExist" in web.ask(f"tasks.note.get_result({dropped!r})")["error"]
    assert [words[1] for words in project.lines("note")] == ["kept"]


def test_without_the_option_a_transaction_does_not_matter(project: Project) -> None:
    web = project.session()
    project.worker()
    key = web.do(
        """
        from django.db import transaction
        with transaction.atomic():
            answer = tasks.note.enqueue("now").id
            transaction.set_rollback(True)
        """
    )
    assert web.finished(key)["value"] == "now"


def test_signals(project: Project) -> None:
    project.write(
        "app/__init__.py",
        """
import os
from pathlib import Path

def hear(name):
    def heard(sender, task_result, **kwargs):
        from app.tasks import write
        status, error = task_result.status.value, len(task_result.errors)
        write("signal", name, sender.__name__, task_result.id, status, error)
    return heard

KEPT = [hear("enqueued"), hear("started"), hear("finished")]
""",
    )
    project.write(
        "app/apps.py",
        """
from django.apps import AppConfig
from shmq.integrations.django.api import signals
import app

class App(AppConfig):
    name = "app"
    def ready(self):
        for heard, name in zip(app.KEPT, ("enqueued", "started", "finished")):
            getattr(signals, f"task_{name}").connect(heard)
""",
    )
    web = project.session()
    good = web.enqueue("add", 1)
    bad = web.enqueue("fail", "x")
    project.worker()
    web.finished(good)
    web.finished(bad)
    until(lambda: len(project.lines("signal")) == 6)
    heard = [words[1:] for words in project.lines("signal")]
    assert [words for words in heard if words[2] == good] == [
        ["enqueued", "Backend", good, "READY", "0"],
        ["started", "Backend", good, "RUNNING", "0"],
        ["finished", "Backend", good, "SUCCESSFUL", "0"],
    ]
    assert [words[3:] for words in heard if words[2] == bad][2] == ["FAILED", "1"]


@pytest.mark.parametrize("what", ["object()", "b'\\xff'", "{1: {2}}"])
def test_arguments_that_are_no_json_are_refused(project: Project, what: str) -> None:
    web = project.session()
    said = web.ask(f"tasks.note.enqueue({what})")
    assert "TypeError" in said["error"] or "ValueError" in said["error"]


@pytest.mark.parametrize("key", ["'no such id'", "''", "'x' * 256", "'\\udcff'", "'\\0'"])
def test_an_unknown_id(project: Project, key: str) -> None:
    web = project.session()
    said = web.ask(f"tasks.note.get_result({key})")["error"].splitlines()
    assert any("TaskResultDoesNotExist" in line for line in said[-2:])


def test_a_result_of_another_task_is_a_mismatch(project: Project) -> None:
    web = project.session()
    key = web.enqueue("add", 1)
    assert "TaskResultMismatch" in web.ask(f"tasks.note.get_result({key!r})")["error"]


def test_results_expire(make_project: Callable[..., Project]) -> None:
    project = make_project(options={"result_ttl": 0.05})
    web = project.session()
    key = web.enqueue("note", "x")
    project.worker()
    until(lambda: "error" in web.ask(f"tasks.note.get_result({key!r})"))
    assert len(project.lines("note")) == 1


def test_directories_beside_each_other_are_apart(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    made = []
    for name in ("one", "two"):
        project = make_project(options={"directory": str(tmp_path / name)})
        project.instance = instance_of(tmp_path / name)
        made.append((project, project.session()))
        made[-1][1].enqueue("note", name)
    for project, _ in made:
        project.manage("shmq_worker", "--burst").succeed()
    assert [[words[1] for words in project.lines()] for project, _ in made] == [["one"], ["two"]]


def test_what_the_backend_can(project: Project) -> None:
    web = project.session()
    flags = ["defer", "async_task", "get_result", "priority"]
    code = "from shmq.integrations.django import Backend\nanswer = ["
    assert web.do(code + ",".join(f"Backend.supports_{flag}" for flag in flags) + "]") == [True] * 4


_TESTS = """
import os
from django.core.management import call_command
from django.test import TestCase
from app import tasks

class Works(TestCase):
    def test_it(self):
        from shmq.integrations.django.api import tasks as t
        tasks.write("broker", t.task_backends["default"].home.broker().instance, os.getpid())
        result = tasks.note.enqueue("from the tests")
        if "WORK" in os.environ:
            call_command("shmq_worker", burst=True, verbosity=0)
            result.refresh()
            assert result.return_value == "from the tests", result

class WorksToo(Works):
    pass
"""


@pytest.mark.parametrize("words", [[], ["--parallel=2"]])
@pytest.mark.parametrize("named", [False, True])
def test_a_run_of_tests_never_meets_the_projects_queue(
    make_project: Callable[..., Project],
    serve: Callable[..., Any],
    instance: str,
    words: list[str],
    named: bool,
) -> None:
    """The project's own worker is there all the time, with an embedded broker or a service."""
    if named:
        serve()
    project = make_project(options={"instance": instance} if named else None)
    project.write("app/tests.py", _TESTS)
    web = project.session()
    worker = project.worker()
    project.manage("test", "app", *words).succeed()
    project.manage("test", "app", env={"WORK": "1"}).succeed()
    assert web.finished(web.enqueue("note", "real"))["value"] == "real"
    done = [entry[1:] for entry in project.lines("note")]
    assert [" ".join(entry[:-2]) for entry in done] == ["from the tests"] * 2 + ["real"]
    mine = web.do(
        "from shmq.integrations.django.api import tasks as t\n"
        "answer = t.task_backends['default'].home.broker().instance"
    )
    used = [entry[1] for entry in project.lines("broker")]
    assert len(used) == 4
    assert mine not in used
    until(lambda: not any(shm.list_objects(name, everybodys=True) for name in used))
    if words:
        assert len({*used[:2]}) == len({entry[2] for entry in project.lines("broker")[:2]})
    assert worker.process.poll() is None


def test_a_run_of_tests_may_have_an_instance_of_its_own(
    make_project: Callable[..., Project], serve: Callable[..., Any], instance: str
) -> None:
    serve()
    project = make_project(options={"test_instance": instance})
    project.write("app/tests.py", _TESTS)
    project.manage("test", "app", env={"WORK": "1"}).succeed()
    assert {entry[1] for entry in project.lines("broker")} == {instance}


def test_a_directory_that_cannot_be_made_is_told_with_the_option(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    project = make_project(options={"directory": str(tmp_path / "file" / "shmq")})
    said = project.session().ask("tasks.note.enqueue('x')")["error"]
    assert "OPTIONS['directory']" in said
