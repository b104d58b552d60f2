"""SIGKILL of workers, of their parent, of the supervisor and of all of them: what was enqueued is
done."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable

import pytest
from support import processes
from support.django_project import Project, Session, until

from shmq import shm


def _enqueue(web: Session, first: int, after: int) -> list[str]:
    keys: list[str] = web.do(
        "answer = [tasks.note.enqueue(number).id for number in range(first, after)]",
        first=first,
        after=after,
    )
    return keys


def _statuses(web: Session, keys: list[str]) -> Counter[str]:
    found = web.do("answer = [tasks.note.get_result(key).status.value for key in keys]", keys=keys)
    return Counter(found)


def _all_done(web: Session, project: Project, keys: list[str]) -> Counter[str]:
    """Wait until every task is done and has its result; how often each ran."""
    until(lambda: _statuses(web, keys) == {"SUCCESSFUL": len(keys)}, "all tasks are done")
    ran = Counter(words[1] for words in project.lines("note"))
    assert len(ran) == len(keys)
    return ran


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("kills", "count"),
    [
        pytest.param(10, 500, marks=pytest.mark.shallow),
        pytest.param(100, 5000, marks=pytest.mark.deep),
    ],
)
def test_workers_are_killed_at_random_instants(project: Project, kills: int, count: int) -> None:
    random.seed(count)
    web = project.session()
    project.worker("--processes=2", "--verbosity=0", ready=False)
    until(lambda: len(project.workers()) == 2)
    keys = _enqueue(web, 0, count)
    killed = 0
    for mark in sorted(random.sample(range(count * 9 // 10), kills)):
        until(lambda mark=mark: len(project.lines("note")) >= mark, f"{mark} tasks ran")
        pids: list[int] = until(project.workers)
        for _ in range(random.randrange(20_000)):
            pass  # somewhere in a task, not always just after its line
        _kill(random.choice(pids))
        killed += 1
    ran = _all_done(web, project, keys)
    assert killed == kills
    assert sum(ran.values()) <= count + kills  # each death repeats one task at most


def test_a_task_whose_worker_died_is_done_by_another(project: Project) -> None:
    web = project.session()
    project.worker("--processes=2")
    key = web.enqueue("dies", 2)
    found = web.finished(key)
    assert (found["value"], found["attempts"]) == (3, 3)
    assert len(set(found["workers"])) == 3


def test_a_task_that_kills_its_workers_fails(make_project: Callable[..., Project]) -> None:
    project = make_project(options={"max_attempts": 3})
    web = project.session()
    project.worker()
    key, after = web.enqueue("dies", 100), web.enqueue("add", 1)
    found = web.finished(key)
    assert (found["status"], found["attempts"]) == ("FAILED", 3)
    assert found["errors"][0][0] == "shmq.integrations.django.errors.WorkersDied"
    assert "3 workers died" in found["errors"][0][1]
    assert web.finished(after)["value"] == 2


def test_a_long_task_runs_once(make_project: Callable[..., Project]) -> None:
    project = make_project(options={"broker": {"msg_timeout": 0.2}})
    web = project.session()
    project.worker("--processes=2")
    key = web.enqueue("work", "long", 1.0)
    found = web.finished(key)
    assert found["attempts"] == 1
    assert len(project.lines("begin")) == 1


@pytest.mark.parametrize("owner", ["web", "worker", "nobody"])
def test_the_supervisor_is_killed_in_the_middle(project: Project, owner: str) -> None:
    """Its owner starts it again, or the workers do if the owner is gone."""
    if owner == "worker":
        project.worker("--processes=2", "--verbosity=0", ready=False)
        until(lambda: len(project.workers()) == 2)
    web = project.session()
    keys = _enqueue(web, 0, 50)
    if owner != "worker":
        project.worker("--processes=2", "--verbosity=0", ready=False)
        until(lambda: len(project.workers()) == 2)
    if owner == "nobody":
        web.close()
        web = project.session()
    keys += _enqueue(web, 50, 200)
    first = processes.supervisor_pid(project.instance)
    _kill(first)
    keys += _enqueue(web, 200, 400)
    late = web.enqueue("note", 1000, run_after=0.5)
    ran = _all_done(web, project, [*keys, late])
    assert set(ran.values()) == {1}
    second = processes.supervisor_pid(project.instance)
    assert second != first


def test_a_supervisor_that_is_stopped_comes_back(project: Project) -> None:
    web = project.session()
    worker = project.worker("--processes=2")
    key = web.enqueue("gated", "a")
    until(lambda: project.lines("begin"))
    keys = _enqueue(web, 0, 20)
    first = processes.supervisor_pid(project.instance)
    os.kill(first, signal.SIGTERM)
    processes.wait_ended(first)
    project.open_gate("a")
    keys += _enqueue(web, 20, 40)
    _all_done(web, project, keys)
    assert web.finished(key)["value"] == "a"
    assert worker.process.poll() is None


def test_all_processes_are_killed_and_started_again(project: Project) -> None:
    web = project.session()
    worker = project.worker("--processes=2", "--verbosity=0", ready=False)
    until(lambda: len(project.workers()) == 2)
    keys = _enqueue(web, 0, 300)
    later = web.enqueue("note", "later", run_after=1.0)
    until(lambda: len(project.lines("note")) >= 20)
    pids = [*project.workers(), worker.pid, web.pid, *processes.supervisors(project.instance)]
    for pid in pids:
        _kill(pid)
    for pid in pids:
        processes.wait_ended(pid)
    web = project.session()
    project.worker("--processes=2", "--verbosity=0", ready=False)
    ran = _all_done(web, project, [*keys, later])
    assert sum(ran.values()) <= 301 + 2


def test_all_processes_end_and_are_started_again(project: Project) -> None:
    """When the last process of the project has ended, all is on disk and nothing in memory."""
    web = project.session()
    keys = _enqueue(web, 0, 100)
    keys.append(web.enqueue("note", "later", run_after=0.5))
    worker = project.worker()
    until(lambda: len(project.lines("note")) >= 20)
    assert worker.kill(signal.SIGTERM) == 0
    web.close()
    until(lambda: not shm.list_objects(project.instance), "the broker has ended")
    web = project.session()
    assert _statuses(web, keys).total() == 101
    project.worker()
    ran = _all_done(web, project, keys)
    assert set(ran.values()) == {1}


def test_many_processes_start_at_once(project: Project) -> None:
    """One of them starts the broker; the others attach."""
    webs = [project.session() for _ in range(4)]
    for web in webs:
        web.child.tell('"answer = tasks.add.enqueue(1).id"')
        web._calls += 1
    for web in webs:
        web.child.said('= {"answer": ')
    assert len(processes.supervisors(project.instance)) == 1
    project.manage("shmq_worker", "--burst").succeed()


def test_processes_that_come_and_go_lose_nothing(project: Project) -> None:
    """Each is the last one for a moment, so the broker ends and is started again all the time."""
    keys = []
    for number in range(4):
        web = project.session()
        keys += _enqueue(web, number, number + 1)
        web.close()
    web = project.session()
    project.worker()
    _all_done(web, project, keys)


def test_a_forked_server_enqueues_from_its_children(project: Project) -> None:
    """As gunicorn does that loads the project before it forks."""
    web = project.session()
    code = """
    import os
    keys = [tasks.note.enqueue("parent").id]
    reader, writer = os.pipe()
    for number in range(3):
        if os.fork() == 0:
            os.write(writer, (tasks.note.enqueue(f"child{number}").id + "\\n").encode())
            os._exit(0)
        os.wait()
    keys += os.read(reader, 4096).decode().split()
    answer = keys
    """
    keys = web.do(code)
    assert len(keys) == 4
    project.worker()
    _all_done(web, project, keys)
