"""Django's system checks of a backend."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from django.apps import apps
from django.conf import settings
from django.core import checks

from shmq.integrations.django import lanes
from shmq.integrations.django.options import ON_COMMIT, Settings

#: Names of instances and of topics.
_NAME: Final = re.compile(r"[.a-zA-Z0-9_-]{1,64}")
_HINT: Final = "A name has the characters a-z, A-Z, 0-9, '.', '_' and '-', together at most 64."


def check_backend(
    alias: str, queues: Collection[str], chosen: Settings
) -> Iterator[checks.CheckMessage]:
    """Yield what is wrong with the settings of a backend."""
    where = f"TASKS[{alias!r}]"
    if chosen.unknown:
        yield checks.Error(
            f"{where}['OPTIONS'] has keys that the shmq backend does not know: "
            f"{', '.join(chosen.unknown)}.",
            hint="docs/django.md lists the options.",
            id="shmq.E001",
        )
    if chosen.instance is not None:
        if not _NAME.fullmatch(str(chosen.instance)):
            yield checks.Error(
                f"{where}['OPTIONS']['instance'] is {chosen.instance!r}, which no instance can "
                "be named.",
                hint=_HINT,
                id="shmq.E002",
            )
    elif chosen.directory is None:
        yield checks.Error(
            f"{where} has no place for its embedded broker.",
            hint="Set BASE_DIR, or 'directory' or 'instance' in OPTIONS.",
            id="shmq.E003",
        )
    for name, words in chosen.faults().items():
        yield checks.Error(
            f"{where}['OPTIONS'][{name!r}] {words}.",
            hint="docs/django.md lists the options.",
            id="shmq.E006",
        )
    for queue in sorted(map(str, queues)):
        if not _NAME.fullmatch(lanes.topic(alias, queue, 100)) or not _NAME.fullmatch(queue):
            yield checks.Error(
                f"{where}['QUEUES'] has {queue!r}, which is no name of topics, or too long.",
                hint=_HINT,
                id="shmq.E004",
            )
    if chosen.on_commit and not _has_database():
        yield checks.Error(
            f"{where} has {ON_COMMIT}, and the project has no database.", id="shmq.E005"
        )
    if not apps.is_installed("shmq.integrations.django"):
        yield checks.Warning(
            "manage.py has no command shmq_worker.",
            hint="Add 'shmq.integrations.django' to INSTALLED_APPS.",
            id="shmq.W001",
        )


def _has_database() -> bool:
    engine = settings.DATABASES.get("default", {}).get("ENGINE", "")
    return bool(engine) and engine != "django.db.backends.dummy"
