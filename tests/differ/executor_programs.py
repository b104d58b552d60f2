"""Programs of an executor: drawn, and run on `ProcessPoolExecutor` or on `shmq.Executor`.

Tasks that wait do so for a gate, a file that a later step makes. Fewer wait than there are workers,
so all others end; a model says how.
"""

from __future__ import annotations

import concurrent.futures as futures
import functools
import multiprocessing
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from differ.machine import Unfit
from differ.queue_programs import ARRAYS, SIZES, named
from support.drop_in_matrix import kind

LONG = 600.0
#: The error of a task's future, by the name of the task.
RAISES = {
    "ValueError": "ValueError",
    "KeyError": "KeyError",
    "SystemExit": "SystemExit",
    "TwoArguments": "TypeError",
    "TimeoutError": "TimeoutError",
    "CancelledError": "CancelledError",
    "BrokenProcessPool": "BrokenProcessPool",
    "StopIteration": "StopIteration",
}
#: The steps about a task's future.
OF_A_FUTURE = (
    "result",
    "exception",
    "done",
    "cancel",
    "cancelled",
    "short",
    "callback",
)
BREAKS = {"die": "a worker died", "raise": "an outcome that cannot be unpickled"}
ENDS = {
    "lambda": "function",
    "lock": "TypeError",
    "thread": "int:1",
    "child": "int:0",
    "bad": "int:1",
}
DEATHS = ("_exit", "SIGKILL", "SIGTERM")


class TwoArguments(Exception):
    """Pickle calls it with one."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


# ---- what workers run ----

_begun: list[str] = []


def begin_worker(word: str) -> None:
    _begun.append(word)
    if word == "raises":
        raise ValueError(word)


def work(task: str, gates: str, argument: Any = None) -> Any:
    name, _, rest = task.partition(":")
    if name == "int":
        return int(rest)
    if name == "bytes":
        size, value = rest.split(":")
        return bytes([int(value)]) * int(size)
    if name == "array":
        size, value = rest.split(":")
        return np.full(int(size), float(value))
    if name == "echo":
        return argument
    if name == "bad":
        return 1
    if name == "begun":
        return ",".join(_begun)
    if name == "gate":
        while not os.path.exists(f"{gates}/{rest}"):
            time.sleep(0.001)
        return int(rest)
    if name == "raise":
        raise {
            "TwoArguments": lambda: TwoArguments(1, 2),
            "CancelledError": futures.CancelledError,
            "BrokenProcessPool": BrokenProcessPool,
            "TimeoutError": TimeoutError,
        }.get(rest, functools.partial(builtin, rest))()
    if name == "lambda":
        return lambda: 1
    if name == "lock":
        return threading.Lock()
    if name == "die":
        if rest == "_exit":
            os._exit(5)
        os.kill(os.getpid(), 9 if rest == "SIGKILL" else 15)
        time.sleep(LONG)
    if name == "thread":
        helper = threading.Thread(target=int)
        helper.start()
        helper.join()
        return 1
    if name == "child":
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        return os.waitpid(pid, 0)[1]
    raise AssertionError(task)


def builtin(name: str) -> BaseException:
    import builtins

    return getattr(builtins, name)(1)


def negative(number: int) -> int:
    return -number


def odd(number: int) -> int:
    if number == 7:
        raise ValueError(number)
    return number


MAPPED: dict[str, Callable[[int], Any]] = {"negative": negative, "text": str, "odd": odd}


def expected(task: str, program: dict[str, Any]) -> str:
    """How the future of a task ends."""
    name, _, rest = task.partition(":")
    if name == "raise":
        return RAISES[rest]
    if name == "begun":
        return program["initializer"] or ""
    if name == "die":
        return "BrokenProcessPool"
    if name == "gate":
        return f"int:{rest}"
    return ENDS.get(name, rest if name == "echo" else task)


# ---- drawing ----


def a_task(rng: random.Random) -> str:
    size = rng.choice(SIZES)
    value = rng.randrange(256) if size else 0
    what = rng.random()
    if what < 0.3:
        return f"int:{rng.randrange(1 << 40)}"
    if what < 0.4:
        return f"bytes:{size}:{value}"
    if what < 0.5:
        return f"array:{rng.choice(ARRAYS)}:{value}"
    if what < 0.6:
        return f"echo:bytes:{size}:{value}"
    if what < 0.65:
        return f"echo:array:{rng.choice(ARRAYS)}:{value}"
    if what < 0.8:
        return f"raise:{rng.choice(list(RAISES))}"
    if what < 0.82:
        return f"die:{rng.choice(DEATHS)}"
    return rng.choice(("begun", "thread", "child", "lock", "lambda", "bad"))


def a_step(rng: random.Random, tasks: int, gates: int) -> list[Any]:
    what = rng.random()
    if what < 0.3 or not tasks:
        return ["submit", a_task(rng)]
    if what < 0.38:
        return ["submit", f"gate:{gates}"]
    if what < 0.45:
        return ["open", rng.randrange(gates + 1)]
    if what < 0.8:
        name = rng.choice(("result", *OF_A_FUTURE))
        return [name, rng.randrange(tasks)]
    if what < 0.9:
        count = rng.choice((0, 1, 5, 20))
        return ["map", rng.choice(list(MAPPED)), count, rng.choice((1, 1, 3, 100))]
    if what < 0.96:
        return [rng.choice(("wait", "as_completed"))]
    return ["shutdown", rng.random() < 0.7, rng.random() < 0.4]


def draw(rng: random.Random) -> dict[str, Any]:
    program: dict[str, Any] = {
        "shape": "executor",
        "method": "fork" if rng.random() < 0.97 else rng.choice(("spawn", "forkserver")),
        "workers": rng.choice((1, 2, 2, 3)),
        "initializer": rng.choice((None, None, "word", "raises")) if rng.random() < 0.3 else None,
        "steps": [],
    }
    steps: list[Any] = []
    wanted, tries = rng.choice((3, 8, 16)), 0
    while len(steps) < wanted and tries < 200:
        tries += 1
        tasks = sum(step[0] == "submit" for step in steps)
        gates = sum(step[0] == "submit" and step[1].startswith("gate") for step in steps)
        step = a_step(rng, tasks, gates)
        try:
            plan(program | {"steps": [*steps, step]})
        except Unfit:
            continue
        steps.append(step)
    program["steps"] = steps
    return program


def smaller(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Programs with fewer steps and simpler ones."""
    steps = program["steps"]
    size = max(len(steps) // 2, 1)
    while size:
        for start in range(0, len(steps), size):
            yield program | {"steps": steps[:start] + steps[start + size :]}
        size //= 2
    for change in ({"method": "fork"}, {"workers": 1}, {"initializer": None}):
        if any(program[key] != value for key, value in change.items()):
            yield program | change
    for number, step in enumerate(steps):
        if step[0] == "submit" and not step[1].startswith("gate") and step[1] != "int:1":
            yield program | {"steps": [*steps[:number], ["submit", "int:1"], *steps[number + 1 :]]}


class Model:
    """The label and the result of each step, and after which the original's pool is broken."""

    def __init__(self, program: dict[str, Any]) -> None:
        self.program = program
        self.tasks: list[str] = []
        self.closed: set[str] = set()
        self.opened: set[str] = set()
        self.finished: set[int] = set()
        self.shut = False
        self.broken = ""

    def label(self, name: str, args: list[Any]) -> str:
        if name in OF_A_FUTURE and args[0] < len(self.tasks):
            what, _, rest = self.tasks[args[0]].partition(":")
            about = f" {rest}" if what == "raise" else ""
            return f"Future.{name} of {what}{about}"
        return f"Executor.{name}"

    def result(self, name: str, args: list[Any]) -> str:
        if self.program["initializer"] == "raises":
            return self._unbegun(name, args)
        if name in OF_A_FUTURE:
            return self._of_a_future(name, args[0])
        return str(getattr(self, f"_{name}")(*args))

    def _unbegun(self, name: str, args: list[Any]) -> str:
        """Of a pool whose workers cannot begin. How early `submit` raises is not known."""
        if name == "submit" and not self.tasks and args[0].startswith("int"):
            self.tasks.append(args[0])
            return "submitted"
        if name == "result" and self.tasks and not args[0]:
            return "BrokenProcessPool"
        raise Unfit

    def _of_a_future(self, name: str, index: int) -> str:
        if index >= len(self.tasks):
            raise Unfit
        task = self.tasks[index]
        waits = task.startswith("gate") and task[5:] not in self.opened
        if name == "short":
            if waits:
                return "TimeoutError"
            raise Unfit
        if name in ("result", "exception", "callback"):
            if waits:
                raise Unfit
            self.finished.add(index)
            ends = expected(task, self.program)
            if name == "callback":
                return "called"
            returns = ":" in ends or ends in ("", "word", "function")
            return "None" if name == "exception" and returns else ends
        if name == "done":
            if waits or index in self.finished:
                return str(not waits)
            raise Unfit
        if name == "cancel" and index not in self.finished:
            raise Unfit
        return "False"

    def _submit(self, task: str) -> str:
        what, _, rest = task.partition(":")
        if what == "gate":
            full = len(self.closed) >= self.program["workers"] - 1
            if rest in self.opened or rest in self.closed or full:
                raise Unfit
        if self.shut:
            return "RuntimeError"
        if what == "gate":
            self.closed.add(rest)
        if what == "die" or rest == "TwoArguments":
            if self.closed:
                raise Unfit
            self.broken = self.broken or BREAKS[what]
        self.tasks.append(task)
        return "submitted"

    def _open(self, gate: int) -> str:
        if str(gate) not in self.closed:
            raise Unfit
        self.closed.discard(str(gate))
        self.opened.add(str(gate))
        return "opened"

    def _map(self, name: str, count: int, chunk: int) -> str:
        return "RuntimeError" if self.shut and count else mapped(name, count, chunk)

    def _wait(self) -> str:
        if self.closed:
            raise Unfit
        self.finished |= set(range(len(self.tasks)))
        return str(len(self.tasks))

    _as_completed = _wait

    def _shutdown(self, wait: bool, cancel: bool) -> str:
        if self.closed or (cancel and len(self.finished) < len(self.tasks)):
            raise Unfit
        self.shut = True
        return "None"


def plan(program: dict[str, Any]) -> list[tuple[int, str, str]]:
    """Number, label and expected observation of each step. Raises Unfit."""
    model = Model(program)
    found: list[tuple[int, str, str]] = []
    for number, (name, *args) in enumerate(program["steps"]):
        label = model.label(name, args)
        lost = model.broken if name not in ("open", "shutdown") else ""
        result = model.result(name, args)
        found.append((number, f"{label} after {lost}" if lost else label, result))
    if model.closed:
        raise Unfit
    return found


def mapped(name: str, count: int, chunk: int) -> str:
    values = []
    for number in range(count):
        if name == "odd" and number == 7:
            return f"{values[: number - number % chunk]} ValueError"
        values.append(MAPPED[name](number))
    return str(values)


# ---- running ----


def run(side: str, program: dict[str, Any], say: Callable[..., None]) -> None:
    gates = tempfile.mkdtemp(prefix="differ-")
    try:
        Program(side, program, gates).run(say)
    finally:
        shutil.rmtree(gates, ignore_errors=True)


class Program:
    """The process of the program."""

    def __init__(self, side: str, program: dict[str, Any], gates: str) -> None:
        make: Any = futures.ProcessPoolExecutor
        if side == "shmq":
            import shmq

            make = shmq.Executor
        self.program, self.gates, self.side = program, gates, side
        word = program["initializer"]
        context = multiprocessing.get_context(program["method"])
        begin = {"initializer": begin_worker, "initargs": (word,)} if word else {}
        self.executor = make(program["workers"], context, **begin)
        self.tasks: list[Any] = []

    def run(self, say: Callable[..., None]) -> None:
        for number, label, _ in plan(self.program):
            name, *args = self.program["steps"][number]
            if self.side == "original" and " after " in label:
                if name == "submit":
                    self.tasks.append(None)
                say(number, "lost")
                continue
            say(number, getattr(self, f"_{name}")(*args))
        self.executor.shutdown()

    def _submit(self, task: str) -> str:
        name, _, rest = task.partition(":")
        argument: Any = None
        if name == "echo":
            argument = work(rest, self.gates)
        if name == "bad":
            argument = lambda: 1  # noqa: E731
        try:
            self.tasks.append(self.executor.submit(work, task, self.gates, argument))
        except RuntimeError as exc:
            return kind(exc)
        return "submitted"

    def _open(self, gate: int) -> str:
        Path(self.gates, str(gate)).touch()
        return "opened"

    def _result(self, index: int) -> str:
        try:
            found = self.tasks[index].result(LONG)
            return named(found) if not isinstance(found, str) or found[:1] == "ä" else found
        except BaseException as exc:
            return pickling(exc)

    def _exception(self, index: int) -> str:
        try:
            found = self.tasks[index].exception(LONG)
        except BaseException as exc:
            return pickling(exc)
        return "None" if found is None else pickling(found)

    def _done(self, index: int) -> str:
        return str(self.tasks[index].done())

    def _cancel(self, index: int) -> str:
        return str(self.tasks[index].cancel())

    def _cancelled(self, index: int) -> str:
        return str(self.tasks[index].cancelled())

    def _short(self, index: int) -> str:
        try:
            return str(self.tasks[index].result(0.01))
        except TimeoutError as exc:
            return kind(exc)

    def _callback(self, index: int) -> str:
        called = threading.Event()
        self.tasks[index].add_done_callback(lambda _: called.set())
        called.wait()
        return "called"

    def _map(self, name: str, count: int, chunk: int) -> str:
        values: list[Any] = []
        try:
            for value in self.executor.map(
                MAPPED[name], range(count), timeout=LONG, chunksize=chunk
            ):
                values.append(value)
        except RuntimeError as exc:
            return kind(exc)
        except ValueError:
            return f"{values} ValueError"
        return str(values)

    def _wait(self) -> str:
        done, _ = futures.wait(self.tasks, LONG)
        return str(len(done))

    def _as_completed(self) -> str:
        return str(len({id(each) for each in futures.as_completed(self.tasks, LONG)}))

    def _shutdown(self, wait: bool, cancel: bool) -> str:
        return str(self.executor.shutdown(wait, cancel_futures=cancel))


def pickling(exc: BaseException) -> str:
    found = kind(exc)
    if found == "AttributeError" and "pickle" in str(exc):
        return "PicklingError"
    return found


def _witness(*steps: list[Any], initializer: str | None = None) -> dict[str, Any]:
    return {
        "shape": "executor",
        "method": "fork",
        "workers": 2,
        "initializer": initializer,
        "steps": list(steps),
    }


WITNESSES: list[Any] = [
    *(
        _witness(["submit", task], [name, 0])
        for task in ("lambda", "bad")
        for name in ("result", "exception")
    ),
    _witness(["submit", "die:SIGKILL"], ["result", 0], ["submit", "int:1"], ["result", 1]),
    _witness(["submit", "raise:TwoArguments"], ["result", 0], ["submit", "int:1"], ["result", 1]),
]
