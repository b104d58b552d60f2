"""Fixtures: an instance, workers, and the application in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

celery = pytest.importorskip("celery")

from support.celery_worker import Worker  # noqa: E402
from support.processes import Child  # noqa: E402


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """The file to which tasks append."""
    return tmp_path / "notes"


@pytest.fixture
def server(serve: Callable[..., Child]) -> Child:
    """A supervisor of the test's instance."""
    return serve()


@pytest.fixture
def worker(
    server: Child, instance: str, notes: Path, keep: Callable[[Any], Any]
) -> Callable[..., Worker]:
    """`worker(*words, **settings)`: a worker that is ready."""
    return lambda *words, **settings: keep(Worker(instance, notes, *words, **settings)).ready()


@pytest.fixture
def app(
    server: Child, instance: str, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """The application, whose broker and results are those of the test's instance."""
    from support import celery_app

    from shmq.integrations.celery import attachment

    application = celery_app.app
    url = f"shmq://{instance}"
    monkeypatch.setenv("CELERY_NOTES", str(notes))
    application.conf.update(broker_url=url, result_backend=url)
    forget(application)
    yield application
    forget(application)
    attachment.detach(instance)


def forget(application: Any) -> None:
    """Have an application connect anew."""
    application.pool.force_close_all()
    application._pool = None
    application.amqp._producer_pool = None
    application._local.__dict__.pop("backend", None)
    application._backend_cache = None
    from kombu import pools

    pools.reset()


@pytest.fixture
def lines(notes: Path) -> Callable[[], list[list[str]]]:
    """`lines()`: the words of the notes' lines so far."""

    def read() -> list[list[str]]:
        if not notes.exists():
            return []
        return [line.split() for line in notes.read_text().splitlines()]

    return read
