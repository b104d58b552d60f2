"""Django's own tests of its tasks, and those of django-tasks-db and django-tasks-rq, pass with the
shmq backend in the place of theirs.

docs/django.md lists those that do not, each with the reason. A test that passes and is listed there
is a failure here too. On a Django before 6, Django's tests run with the backport under their
names."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.django_project import Project
from support.external_programs import missing
from support.processes import ROOT, Child

FOLDER = ROOT / "build" / "peers" / "django"
PAGE = ROOT / "docs" / "django.md"
ROW = re.compile(r"^\| `(\w+\.\w+)` \| (\w+) \| .+ \|$", re.MULTILINE)
GROUPS = {
    "django-tasks": "django",
    "django-dummy_backend": "django",
    "django-immediate_backend": "django",
    "rq": "django_tasks_rq",
    "db-backend": "django_tasks_db",
    "db-worker": "django_tasks_db",
    "db-processes": "django_tasks_db",
}
#: Of the tests of processes, the one that does not expect a start within a second.
ONLY = {"db-processes": ["test_run_subprocess"]}


def listed(package: str) -> set[str]:
    """The tests that do not pass with this package of tasks."""
    mine = {"all", "backport"} if package == "django_tasks" else {"all"}
    return {name for name, when in ROW.findall(PAGE.read_text()) if when in mine}


@pytest.mark.parametrize("group", GROUPS)
def test_their_tests_pass(group: str, make_project: Callable[..., Project]) -> None:
    folder = FOLDER / GROUPS[group]
    if not folder.is_dir():
        missing(f"{group}: {folder}", "`tools/dev test tests/frameworks/django` unpacks it")
    project = make_project(queues=["default", "queue-1"])
    if group == "rq" and project.package != "django_tasks":
        pytest.skip("django-tasks-rq's tests name the backport's classes, even with Django 6")
    (project.path / "tests").mkdir()
    project.write("tests/__init__.py", "")
    shutil.copy(Path(__file__).with_name("their_tasks.py"), project.path / "tests" / "tasks.py")
    runner = str(Path(__file__).with_name("theirs.py"))
    here = f"import os, runpy; os.chdir({str(project.path)!r})"
    code = f"{here}; runpy.run_path({runner!r}, None, '__main__')"
    argv = [sys.executable, "-c", code, group, str(folder), *ONLY.get(group, [])]
    child = Child(argv, {"DJANGO_SETTINGS_MODULE": "settings"})
    try:
        lines = [json.loads(line) for line in child.succeed(300)]
    finally:
        child.close()
    passed = {line["test"] for line in lines if line["outcome"] == "passed"}
    texts = {line["test"]: line["text"] for line in lines if line["outcome"] == "failed"}
    expected = listed(project.package)
    assert passed
    unexpected = {name: text for name, text in texts.items() if name not in expected}
    assert not unexpected, "\n".join(unexpected.values())
    assert not (passed - texts.keys()) & expected, "these pass: take them from the list"
