"""`manage.py shmq_worker`: its options, its stops, reload, the system checks, an instance that
somebody else runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.django_project import Project, until
from support.processes import Child


def test_sigterm_lets_the_task_in_hand_finish(project: Project) -> None:
    web = project.session()
    keys = [web.enqueue("gated", word) for word in ("a", "b")]
    worker = project.worker()
    until(lambda: project.lines("begin"))
    worker.process.send_signal(signal.SIGTERM)
    until(lambda: "finishing the tasks in hand" in worker.errors)
    project.open_gate("a")
    assert worker.wait() == 0
    assert web.result(keys[0])["status"] == "SUCCESSFUL"
    assert web.result(keys[1])["status"] == "READY"
    assert not project.workers()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_worker_stops_at_once(project: Project, number: signal.Signals) -> None:
    worker = project.worker("--processes=2")
    until(lambda: len(project.workers()) == 2)
    assert worker.kill(number) == 0
    assert not project.workers()


def test_a_second_signal_gives_the_task_back(project: Project) -> None:
    web = project.session()
    key = web.enqueue("gated", "a")
    worker = project.worker()
    until(lambda: project.lines("begin"))
    assert web.result(key)["status"] == "RUNNING"
    worker.process.send_signal(signal.SIGTERM)
    until(lambda: "finishing" in worker.errors)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert web.result(key)["status"] == "READY"
    project.open_gate("a")
    project.worker()
    found = web.finished(key)
    assert (found["value"], found["attempts"]) == ("a", 1)


def test_sigterm_to_every_process_at_once_gives_nothing_back(project: Project) -> None:
    """As a service manager does."""
    web = project.session()
    key = web.enqueue("gated", "a")
    worker = project.worker()
    until(lambda: project.lines("begin"))
    for pid in [*project.workers(), worker.pid]:
        os.kill(pid, signal.SIGTERM)
    until(lambda: "finishing" in worker.errors)
    project.open_gate("a")
    assert worker.wait() == 0
    assert web.result(key)["attempts"] == 1
    assert len(project.lines("begin")) == 1


def test_workers_end_after_their_task_when_their_parent_is_killed(project: Project) -> None:
    web = project.session()
    key = web.enqueue("gated", "a")
    worker = project.worker()
    until(lambda: project.lines("begin"))
    worker.process.kill()  # `worker.kill()` waits for the pipes, which the task holds
    worker.process.wait()
    pid = int(project.lines("begin")[0][2])
    project.open_gate("a")
    assert web.finished(key)["attempts"] == 1
    processes.wait_ended(pid)


def test_burst_ends_when_nothing_waits(project: Project) -> None:
    web = project.session()
    keys = [web.enqueue("add", number) for number in range(10)]
    later = web.enqueue("add", 1, run_after=1000)
    project.manage("shmq_worker", "--burst").succeed()
    assert [web.result(key)["value"] for key in keys] == [number + 1 for number in range(10)]
    assert web.result(later)["status"] == "READY"


def test_a_process_is_replaced_after_max_tasks(project: Project) -> None:
    web = project.session()
    for number in range(5):
        web.enqueue("note", number)
    project.worker("--max-tasks=2")
    until(lambda: len(project.lines("note")) == 5)
    pids = [words[2] for words in project.lines("note")]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


def test_only_the_named_queues_are_served(make_project: Callable[..., Project]) -> None:
    project = make_project(queues=["default", "mail"])
    web = project.session()
    rest = web.enqueue("note", "rest")
    web.enqueue("note", "mail", queue_name="mail")
    project.manage("shmq_worker", "--burst", "--queues=mail").succeed()
    assert [words[1] for words in project.lines()] == ["mail"]
    assert web.result(rest)["status"] == "READY"


def test_any_queue_is_allowed_without_a_list(make_project: Callable[..., Project]) -> None:
    project = make_project(queues=[])
    web = project.session()
    project.worker()
    key = web.enqueue("note", "x", queue_name="made.up", priority=7)
    assert web.finished(key)["queue"] == "made.up"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--queues=none"], "no queue 'none'; the backend has default"),
        (["--backend=none"], "--backend: "),
        (["--processes=0"], "--processes must be 1 or more"),
        (["--max-tasks=0"], "--max-tasks must be 1 or more"),
        (["--backend=other"], "has another backend than shmq's"),
    ],
)
def test_mistakes_are_told(project: Project, words: list[str], error: str) -> None:
    dummy = f"{project.package}.backends.dummy.DummyBackend"
    project.set_tasks({**project.tasks, "other": {"BACKEND": dummy}})
    child = project.manage("shmq_worker", *words)
    assert child.wait() == 1
    assert error in child.errors


def test_two_backends_share_a_broker(project: Project) -> None:
    backend = project.tasks["default"]
    project.set_tasks({"default": backend, "other": backend})
    web = project.session()
    mine, other = web.enqueue("note", "mine"), web.enqueue("note", "other", backend="other")
    project.manage("shmq_worker", "--burst", "--backend=other").succeed()
    assert web.result(mine)["status"] == "READY"
    assert web.result(other, "other")["backend"] == "other"
    assert web.result(other, "other")["value"] == "other"
    assert "TaskResultDoesNotExist" in web.ask(f"tasks.note.get_result({other!r})")["error"]


# ---- what can never fit ----


def test_an_outcome_that_can_never_fit_is_a_failure_of_one_run(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(options={"broker": {"max_msg_size": 20_000}})
    web = project.session()
    keys = [web.enqueue("long_value", 30_000), web.enqueue("long_failure", 30_000)]
    # its arguments leave no room for a long traceback
    keys.append(web.enqueue("fail", "y" * 15_000))
    worker = project.worker()
    found = [web.finished(key) for key in keys]
    assert [each["status"] for each in found] == ["FAILED"] * 3
    assert [each["attempts"] for each in found] == [1] * 3
    assert len(project.lines("long")) == 2
    path, text = found[0]["errors"][0]
    assert path.endswith("MessageTooBig")
    assert "max_msg_size" in text
    for each in found[1:]:
        path, text = each["errors"][0]
        assert path == "builtins.ValueError"
        assert text.startswith("Traceback")
        assert "characters are left out" in text
    assert found[2]["args"] == ["y" * 15_000]
    assert len({words[2] for words in project.lines("long")}) == 1
    assert worker.process.poll() is None
    assert "ended" not in worker.errors


@pytest.mark.parametrize("room", [0, 4000])
def test_a_task_without_room_for_its_outcome_is_refused(project: Project, room: int) -> None:
    web = project.session()
    said = web.ask(f"tasks.note.enqueue('x' * {(1 << 20) - room})")
    assert "MessageTooBig" in said["error"]
    assert "--max-msg-size" in said["error"]
    assert not web.do(
        "from shmq.integrations.django.api import tasks as t\n"
        "backend = t.task_backends['default']\n"
        "answer = len(backend.store(backend.home.broker()))"
    )


# ---- reload ----


def test_a_changed_file_is_loaded(project: Project) -> None:
    web = project.session()
    worker = project.worker(env={"PROJECT_DEBUG": "1"})
    web.finished(web.enqueue("add", 1, 1))
    path = project.path / "app" / "tasks.py"
    text = path.read_text()
    path.write_text(text.replace("return left + right", "return 'changed'"))
    until(lambda: web.finished(web.enqueue("add", 1, 1))["value"] == "changed")
    assert "app/tasks.py has changed" in worker.errors
    assert worker.kill(signal.SIGTERM) == 0
    until(lambda: not project.workers())


def test_a_broken_file_is_waited_for(project: Project) -> None:
    web = project.session()
    worker = project.worker("--reload")
    path = project.path / "app" / "__init__.py"
    path.write_text("this is no Python")
    until(lambda: "waiting for a change" in worker.errors)
    path.write_text("")
    assert web.finished(web.enqueue("add", 1, 1))["value"] == 2
    assert worker.kill(signal.SIGTERM) == 0


def test_a_reloading_command_that_is_killed_takes_its_processes_along(project: Project) -> None:
    worker = project.worker("--reload")
    until(lambda: len(project.workers()) == 2)  # the inner command, and its worker
    left = project.workers()
    worker.kill()
    for pid in left:
        processes.wait_ended(pid)


# ---- an instance that somebody else runs ----


def test_an_instance_of_a_service(
    make_project: Callable[..., Project], instance: str, serve: Callable[..., Child]
) -> None:
    project = make_project(options={"instance": instance})
    server = serve()
    web = project.session()
    project.worker()
    assert web.finished(web.enqueue("add", 1, 1))["value"] == 2
    assert not (project.path / ".shmq").exists()
    assert server.kill(signal.SIGTERM) == 0
    said = web.ask("tasks.add.enqueue(1)")
    assert "NotRunning" in said["error"]
    serve()
    assert web.finished(web.enqueue("add", 2, 2))["value"] == 4


def test_a_full_store_refuses_tasks_and_goes_on(make_project: Callable[..., Project]) -> None:
    project = make_project(options={"max_results": 3, "result_ttl": 0.05})
    web = project.session()
    keys = [web.enqueue("note", word) for word in "abc"]
    assert "Full" in web.ask("tasks.note.enqueue('d')")["error"]
    project.worker()
    until(lambda: "error" not in web.ask("tasks.note.enqueue('e')"))
    until(lambda: len(project.lines("note")) == 4)
    assert keys


# ---- system checks ----


def _checked(project: Project, **backend: Any) -> str:
    project.set_tasks({"default": {**project.tasks["default"], **backend}})
    child = project.manage("check")
    child.wait()
    return child.errors


@pytest.mark.parametrize(
    ("backend", "found"),
    [
        ({"OPTIONS": {"instanec": "x", "queue": 1}}, "(shmq.E001)"),
        ({"OPTIONS": {"instance": "no such/name"}}, "(shmq.E002)"),
        ({"QUEUES": ["a queue"]}, "(shmq.E004)"),
        ({"QUEUES": ["q" * 60]}, "(shmq.E004)"),
        ({"OPTIONS": {"ENQUEUE_ON_COMMIT": True}}, "(shmq.E005)"),
        ({"OPTIONS": {"directory": None}}, "(shmq.E003)"),
    ],
)
def test_checks_find_mistakes(project: Project, backend: dict[str, Any], found: str) -> None:
    settings = (project.path / "settings.py").read_text()
    if found == "(shmq.E005)":
        settings += "\nDATABASES = {}\n"
    if found == "(shmq.E003)":
        settings += "\ndel BASE_DIR\n"
    project.write("settings.py", settings)
    said = _checked(project, **backend)
    assert found in said
    assert said.count("shmq.E") == 1


def test_checks_find_the_missing_app(project: Project) -> None:
    project.write("app/models.py", f"import {project.package}")  # which brings its checks
    path: Path = project.path / "settings.py"
    path.write_text(path.read_text().replace("'shmq.integrations.django', ", ""))
    assert "(shmq.W001)" in _checked(project)


def test_checks_are_content(project: Project) -> None:
    child = project.manage("check")
    assert child.succeed() == ["System check identified no issues (0 silenced)."]
