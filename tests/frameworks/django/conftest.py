"""Fixtures for tests with real Django projects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("django", reason="needs Django: the extra `django`")

from support.django_project import Project

from shmq import shm


@pytest.fixture
def make_project(tmp_path: Path) -> Iterator[Callable[..., Project]]:
    """`make_project(**settings)`: see Project. All its processes end with the test, and nothing of
    it may be left in shared memory."""
    made: list[Project] = []

    def make(**settings: Any) -> Project:
        made.append(Project(tmp_path / f"project-{len(made)}", **settings))
        return made[-1]

    yield make
    for project in made:
        project.close()
        assert not shm.list_objects(project.instance, everybodys=True)


@pytest.fixture
def project(make_project: Callable[..., Project]) -> Project:
    """A project with the default settings."""
    return make_project()
