"""The app, which brings the command `manage.py shmq_worker`."""

from __future__ import annotations

import importlib

from django.apps import AppConfig


class ShmqConfig(AppConfig):
    """The app `shmq.integrations.django`."""

    name = "shmq.integrations.django"
    label = "shmq"
    verbose_name = "shmq"

    def ready(self) -> None:
        """Have Django check the backends, also if nothing has imported its tasks yet."""
        from shmq.integrations.django.api import PACKAGE

        importlib.import_module(f"{PACKAGE}.checks")
