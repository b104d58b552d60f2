"""A backend of Django's tasks, with the extra `django`.

    INSTALLED_APPS = [..., "shmq.integrations.django"]
    TASKS = {"default": {"BACKEND": "shmq.integrations.django.Backend"}}

`manage.py shmq_worker` runs the tasks. Django 6 has `django.tasks`; for Django before 6 the package
`django-tasks` has the same. docs/django.md has the options.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # Django imports this package as an app before it is ready for the modules of tasks.
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.backend").Backend


__all__ = ["Backend"]
