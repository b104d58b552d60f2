"""Tasks for pools: functions that every worker can import."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np


def same(value: Any) -> Any:
    return value


def add(left: Any, right: Any) -> Any:
    return left + right


def fail(text: str) -> NoReturn:
    raise ValueError(text)


def pid() -> int:
    return os.getpid()


def double(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array * 2


def change_in_place(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array[0] += 1.0
    return array


def is_writeable(array: np.ndarray[Any, Any]) -> bool:
    return bool(array.flags.writeable)


def die(number: int = signal.SIGKILL) -> None:
    """End the worker by a signal."""
    os.kill(os.getpid(), number)


def leave(status: int) -> None:
    """The end of the worker in the middle of a task."""
    os._exit(status)


def die_once(path: str) -> str:
    """Kill the first worker that runs this with the path."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "survived"
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def note(path: str, text: str) -> None:
    """Append a line in one write."""
    fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


def noted(path: str, value: Any) -> Any:
    """Note that the task runs, and return the value."""
    note(path, str(value))
    return value


def hold(begun: str, until: str) -> int:
    """Note that the task runs, and run until a file is there."""
    note(begun, str(os.getpid()))
    while not Path(until).exists():
        time.sleep(0.002)
    return os.getpid()


def has_begun(path: Path) -> bool:
    """Whether `hold` has noted that it runs. The file is there before its line is."""
    return path.exists() and path.read_text().endswith("\n")


def square_slowly(number: int) -> int:
    time.sleep(0.0003)
    return number * number


class Closed:
    """An object that cannot be pickled."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Closed cannot be pickled")


def closed() -> Closed:
    return Closed()


class ClosedError(Exception):
    """An exception that cannot be pickled."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ClosedError cannot be pickled")


class TwoWordsError(Exception):
    """An exception that can be pickled and not unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fail_closed() -> NoReturn:
    raise ClosedError("said in the worker")


def fail_with_two_words() -> NoReturn:
    raise TwoWordsError("said in", "the worker")


class DeadlyToUnpickle:
    """An object that kills the process that unpickles it."""

    def __reduce__(self) -> Any:
        return _kill_self, ()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_greeting = "nobody"


def greet(name: str) -> None:
    """An initializer."""
    global _greeting
    _greeting = name


def greeting() -> str:
    return _greeting


def refuse() -> NoReturn:
    """An initializer that raises."""
    raise RuntimeError("this worker does not want to")


def exit_at_once() -> NoReturn:
    """An initializer that ends the process by itself."""
    os._exit(3)


def die_with_parent() -> None:
    """Kill the process that started this worker, and this worker before it notices."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def record_and_hang(path: str) -> None:
    """Say which worker has the task, and do not end."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    while True:
        time.sleep(1)


def hang_once(path: str) -> str:
    """Hang in the first worker."""
    if Path(path).exists():
        return "second"
    record_and_hang(path)
    return "never"


def sleep_and_say(seconds: float) -> str:
    time.sleep(seconds)
    return "done"
