"""Django's tasks: those of Django 6 if they are there, or else those of the package `django-tasks`,
which has the same names."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

#: The package: `django.tasks` or `django_tasks`.
PACKAGE: Final = "django.tasks" if importlib.util.find_spec("django.tasks") else "django_tasks"

try:
    tasks: Any = importlib.import_module(PACKAGE)
except ImportError as exc:
    raise ImportError(
        "shmq.integrations.django needs Django 6, or an older Django and django-tasks: install "
        "shmq with the extra `django`, and django-tasks beside a Django before 6"
    ) from exc

_base: Any = importlib.import_module(f"{PACKAGE}.base")
_exceptions: Any = importlib.import_module(f"{PACKAGE}.exceptions")
signals: Any = importlib.import_module(f"{PACKAGE}.signals")

BaseTaskBackend: Any = importlib.import_module(f"{PACKAGE}.backends.base").BaseTaskBackend
Task: Any = _base.Task
TaskContext: Any = _base.TaskContext
TaskError: Any = _base.TaskError
TaskResult: Any = _base.TaskResult
TaskResultStatus: Any = _base.TaskResultStatus
TaskResultDoesNotExist: Any = _exceptions.TaskResultDoesNotExist
#: Raised for a task that the backend cannot run. The two packages name it differently.
InvalidTask: Any = getattr(_exceptions, "InvalidTask", None) or _exceptions.InvalidTaskError

_of_json = "django.utils.json" if PACKAGE == "django.tasks" else f"{PACKAGE}.utils"
normalize_json: Any = importlib.import_module(_of_json).normalize_json
