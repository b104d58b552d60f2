"""The classes of a package for programs of others that have an end and no row: `python -m
lifecycle.covered spark`."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator

from lifecycle.handles import ROWS

PACKAGES = {
    "celery": "shmq.integrations.celery",
    "django": "shmq.integrations.django",
    "dramatiq": "shmq.integrations.dramatiq",
    "taskiq": "shmq.integrations.taskiq",
    "spark": "shmq.spark",
}
#: Methods that end something.
ENDINGS = {"close", "close_connection", "shutdown", "stop", "forget", "terminate", "abort"}
#: Classes without a row of their own, and why.
OTHERS = {
    "Source": "of a channel of Celery's, with its row",
    "Inbox": "of a connection of Celery's, with its row",
    "GreenInbox": "the same with gevent",
    "Leftovers": "what killed programs left; it holds nothing",
    "Home": "of Django's backend, with its row",
    "TestsHome": "while Django's tests run",
    "DeadLetters": "a middleware of Taskiq, which holds nothing",
    "AsyncLink": "of Taskiq's objects, with their rows",
    "Chain": "of a stream's reader, with its row",
    "Fleet": "of readers of many instances: tests/spark/test_many.py",
    "Host": "of readers of many instances: tests/spark/test_many.py",
    "ManyStreamReader": "of readers of many instances: tests/spark/test_many.py",
    "Lookout": "a look at other processes; it holds nothing",
    "ShmqStreamWriter": "stages as ShmqWriter does, and needs a task of Spark",
}


def classes(package: str) -> Iterator[type]:
    """Those that are defined there and have a method that ends something."""
    path = importlib.import_module(package).__path__
    for found in pkgutil.iter_modules(path):
        module = importlib.import_module(f"{package}.{found.name}")
        for name, cls in vars(module).items():
            if isinstance(cls, type) and cls.__module__ == module.__name__ and name[0] != "_":
                methods = {method for base in cls.__mro__ for method in vars(base)}
                if ENDINGS & methods:
                    yield cls


def main() -> None:
    package = sys.argv[1]
    importlib.import_module(f"lifecycle.rows_of_{package}")
    covered = {cls for row in ROWS.values() for cls in row.covers}
    found = list(classes(PACKAGES[package]))
    print(len(found), *(cls.__name__ for cls in found if cls not in covered))


if __name__ == "__main__":
    main()
