"""The broker of a run of tests: never that of the project, whose workers would run the tests' tasks
on the real database."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass
from typing import Final

import shmq
from shmq.integrations.django.home import OPTIONS, Home
from shmq.integrations.django.home import home as named
from shmq.integrations.django.options import Settings

#: Seconds to wait for an instance.
_BRIEF: Final = 0.5


@dataclass
class TestsHome(Home):
    """A broker in memory, which ends with the process that tests. The workers that it forks attach
    to it."""

    tester: int = 0
    """The process."""

    def _open(self, last: shmq.Broker | None) -> shmq.Broker:
        if os.getpid() == self.tester:
            return shmq.Broker.owned(self.instance, **self.options)
        return shmq.attach(self.instance, _BRIEF)


#: For each process of a parallel run, and each broker of the settings.
_homes: dict[tuple[int, str], TestsHome] = {}


def runs() -> bool:
    """Whether this process runs tests: a runner, that of `manage.py test` or of pytest-django, has
    called `django.test.utils.setup_test_environment`."""
    state = getattr(sys.modules.get("django.test.utils"), "_TestState", None)
    return hasattr(state, "saved_data")


def home(chosen: Settings) -> Home:
    """The home that takes the place of the one in the settings."""
    if chosen.test_instance is not None:
        return named(chosen.test_instance, None, chosen.owner)
    number = int(getattr(sys.modules.get("django.test.runner"), "_worker_id", 0))
    key = number, f"{chosen.instance} {chosen.directory}"
    found = _homes.get(key)
    if found is None:
        name = f"django-test-{os.getpid()}-{secrets.token_hex(4)}"
        found = TestsHome(name, None, None, {**OPTIONS, **chosen.broker}, tester=os.getpid())
        found = _homes.setdefault(key, found)
    return found
