"""The settings, commands and the unit of docs/django.md work as they are pasted."""

from __future__ import annotations

import configparser
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support.django_project import Project, until
from support.documented_programs import in_markdown
from support.processes import ROOT, WATCHDOG, Child

from shmq import shm


def _block(first: str) -> str:
    [found] = [
        one.text for one in in_markdown(ROOT / "docs" / "django.md") if one.text.startswith(first)
    ]
    return found


def _add(project: Project, text: str) -> None:
    settings = project.path / "settings.py"
    settings.write_text(settings.read_text().replace("'shmq.integrations.django', ", "") + text)


def _run(project: Project, text: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-ec", text],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
        timeout=WATCHDOG,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_switch(project: Project) -> None:
    _add(project, _block("# settings.py"))
    words = shlex.split(_block("python manage.py shmq_worker"))
    worker = project.worker(*words[3:])
    until(lambda: len(project.workers()) == 2)
    web = project.session()
    assert web.finished(web.enqueue("add", 1, 1))["value"] == 2
    assert worker.kill(signal.SIGTERM) == 0


def test_the_settings(project: Project, instance: str, serve: Callable[..., Child]) -> None:
    text = _block("TASKS = {")
    assert '"instance": "shop"' in text
    web_settings = text.replace('"shop"', repr(instance))
    _add(project, f"INSTALLED_APPS += ['shmq.integrations.django']\n{web_settings}")
    assert project.manage("check").succeed()
    serve()
    web = project.session()
    project.worker()
    assert web.finished(web.enqueue("note", "x", queue_name="mail"))["value"] == "x"


def test_looking_inside(project: Project) -> None:
    web = project.session()
    key = web.enqueue("gated", "a")
    project.worker()
    until(lambda: project.lines("begin"))
    text = _block("shmq ls  ")
    text = text.replace("django-0123456789abcdef", project.instance).replace("RESULT_ID", key)
    said = _run(project, text)
    assert project.instance in said
    assert "django.default.normal.default" in said
    assert f'"id":"{key}"' in said
    project.open_gate("a")
    web.finished(key)
    assert shm.list_objects(project.instance)


def test_the_unit(project: Project) -> None:
    parser = configparser.ConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(_block("# /etc/systemd/system/"))
    service = parser["Service"]
    assert service["KillMode"] == "mixed"  # the command tells its processes itself
    python, manage, *words = shlex.split(service["ExecStart"])
    assert (python.rpartition("/")[2], manage) == ("python", "manage.py")
    project.worker(*words[1:])
    until(lambda: len(project.workers()) == 4)
