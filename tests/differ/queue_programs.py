"""Programs of queues and processes: drawn, and run on `multiprocessing`'s queues or on shmq's.

The process of the program is actor 0. It tells each other actor, thread by thread, what to do next,
so there is one order of all calls; a call that waits returns when a later one lets it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import multiprocessing
import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from differ.machine import Unfit
from differ.queue_model import BAD, JOINABLE, SIMPLE, TRAPS, Model, Step, walked
from support.drop_in_matrix import kind

PIPE = 1 << 20  # bytes of the original's pipes, so that none of our items fills one
SIZES = (0, 1, 100, 4095, 4096, 16_000, 65_535, 65_536, 65_537, 150_000)
ARRAYS = (1, 8191, 8192, 8193, 20_000)  # of 8 bytes: 64 KiB are 8192
NAMES = ("Queue", JOINABLE, SIMPLE)
ARGUMENTS: tuple[list[Any], ...] = (
    [True, None],
    [False, None],
    [True, 0],
    [True, 0.005],
    [True, -1],
    [False, 5],
    [True, 900],
)


class FromHandler(Exception):
    """Raised by a handler."""


# ---- drawing ----


def an_item(rng: random.Random) -> str:
    what = rng.random()
    if what < 0.35:
        return f"int:{rng.randrange(1 << rng.choice((4, 31, 64)))}"
    if what < 0.65:
        size = rng.choice(SIZES)
        return f"bytes:{size}:{rng.randrange(256) if size else 0}"
    if what < 0.8:
        return f"array:{rng.choice(ARRAYS)}:{rng.randrange(100)}"
    if what < 0.86:
        return f"text:{rng.choice(SIZES)}"
    if what < 0.92:
        return rng.choice(("none", "nested", "error", "class", "bytearray"))
    return rng.choice((*BAD, *TRAPS))


def a_step(rng: random.Random, program: dict[str, Any]) -> Step:
    who = rng.randrange(program["actors"] + 1)
    index = rng.randrange(len(program["queues"]))
    what = rng.random()
    if what < 0.05:
        return ["start", max(1, who)]
    if what < 0.08:
        return ["kill", who, rng.choice(("SIGKILL", "SIGKILL", "SIGTERM", "exit"))]
    if what < 0.09:
        return ["leave", who]
    if what < 0.11:
        return [rng.choice(("stop", "cont")), who]
    if what < 0.14:
        return ["handle", who, rng.choice(("put", "raise", "nothing")), index, "int:77"]
    if what < 0.19:
        return ["signal", who]
    thread = 1 if who and rng.random() < 0.3 else 0
    name = rng.choice(
        ["put"] * 9
        + ["get"] * 9
        + ["empty", "qsize", "full"] * 2
        + ["task_done"] * 5
        + ["join", "join"]
        + (["close", "join_thread", "make"] if rng.random() < 0.3 else [])
    )
    simple = program["queues"][index][0] == SIMPLE
    args = [] if simple else rng.choice(ARGUMENTS)
    if name == "put":
        return [who, thread, name, index, an_item(rng), *args]
    return [who, thread, name, index, *(args if name == "get" else [])]


def draw(rng: random.Random) -> dict[str, Any]:
    """A program whose steps the model allows."""
    method = "fork" if rng.random() < 0.98 else rng.choice(("spawn", "forkserver"))
    kinds = [rng.choice(NAMES) for _ in range(rng.choice((1, 1, 2, 3)))]
    program: dict[str, Any] = {
        "shape": "queues",
        "method": method,
        "queues": [[name, 0 if name == SIMPLE else rng.choice((0, 0, 1, 2, 3))] for name in kinds],
        "actors": rng.choice((1, 2, 2, 3)),
        "steps": [],
    }
    wanted, tries = rng.choice((5, 12, 30)), 0
    steps: list[Step] = []
    for who in range(1, program["actors"] + 1):
        if rng.random() < 0.8:
            steps.append(["start", who])
    while len(steps) < wanted and tries < 300:
        tries += 1
        step = a_step(rng, program)
        try:
            walked(program | {"steps": [*steps, step]})
        except Unfit:
            continue
        steps.append(step)
    program["steps"] = steps
    return program


def smaller(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Programs with fewer steps, smaller items and fewer queues."""
    steps = program["steps"]
    size = len(steps) // 2
    while size:
        for start in range(0, len(steps), size):
            yield program | {"steps": steps[:start] + steps[start + size :]}
        size //= 2
    if program["method"] != "fork":
        yield program | {"method": "fork"}
    for number, step in enumerate(steps):
        for place, word in enumerate(step):
            if isinstance(word, str) and ":" in word and word != "int:1" and word not in BAD:
                less = [*step[:place], "int:1", *step[place + 1 :]]
                yield program | {"steps": [*steps[:number], less, *steps[number + 1 :]]}


def plan(program: dict[str, Any]) -> list[tuple[int, str, str]]:
    return walked(program).plan()


# ---- items ----


class Trap:
    """An object whose pickling, or unpickling, raises."""

    def __init__(self, error: str, late: bool) -> None:
        self.error, self.late = error, late

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.late:
            raise _error(self.error)
        return _raise, (self.error,)


def _error(name: str) -> BaseException:
    return {"ValueError": ValueError, "KeyError": KeyError, "StopIteration": StopIteration}[name](1)


def _raise(name: str) -> None:
    raise _error(name)


def made(item: str) -> Any:
    """The object of an item."""
    name, *rest = item.split(":")
    if name == "int":
        return int(rest[0])
    if name == "bytes":
        return bytes([int(rest[1])]) * int(rest[0])
    if name == "text":
        return "ä" * int(rest[0])
    if name == "array":
        return np.full(int(rest[0]), float(rest[1]))
    if name == "lambda":
        return lambda: 1
    if name == "lock":
        return threading.Lock()
    if name in ("no", "late"):
        return Trap(rest[0], name == "late")
    return {
        "none": None,
        "nested": [{"a": (1, None)}, {2, 3}],
        "error": ValueError("v", 1),
        "class": FromHandler,
        "bytearray": bytearray(100_000),
    }[name]


_CRC: dict[tuple[int, int], int] = {}


def named(value: Any) -> str:
    """The item that this object is, or a description of it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"int:{value}"
    if isinstance(value, bytes):
        same = not value or zlib.crc32(value) == zlib.crc32(value[:1] * len(value))
        return f"bytes:{len(value)}:{value[0] if value else 0}" if same else "other bytes"
    if isinstance(value, str):
        return f"text:{len(value)}" if value == "ä" * len(value) else "other text"
    if isinstance(value, np.ndarray):
        return f"array:{len(value)}:{int(value[0])}" if (value == value[0]).all() else "other array"
    if isinstance(value, ValueError):
        return "error" if value.args == ("v", 1) else repr(value)
    if isinstance(value, bytearray):
        value[0] = 0  # it may be changed
        return "bytearray" if value == bytearray(100_000) else "other bytearray"
    if value is FromHandler:
        return "class"
    if value is None:
        return "none"
    if callable(value):
        return "function"
    return "nested" if value == [{"a": (1, None)}, {2, 3}] else repr(value)


def tried(name: str, queue: Any, args: list[Any]) -> str:
    """The value of a call, or its error."""
    try:
        if name == "put":
            args = [made(args[0]), *args[1:]]
        elif name == "get":
            return named(queue.get(*args))
        elif name == "make":
            mine = type(queue)() if "shmq" in type(queue).__module__ else multiprocessing.Queue()
            mine.put("mine")
            return str(mine.get())
        return str(getattr(queue, name)(*args))
    except BaseException as exc:
        found = kind(exc)
        return "PicklingError" if "pickle" in str(exc) and found == "AttributeError" else found


# ---- actors ----


def settle(queue: Any) -> None:
    """Wait until the thread of an original's queue has written what it was given."""
    condition = getattr(queue, "_notempty", None)
    if condition is None or queue._thread is None:
        return
    while queue._thread.is_alive() and not (not queue._buffer and condition._waiters):
        time.sleep(0.0002)


def serve(lane: Any, queues: list[Any]) -> bool:
    """Do what is asked in this thread; returns whether the process ends by `exit`."""
    while True:
        asked = lane.recv()
        if asked == "leave":
            return False
        if asked == "exit":
            os._exit(3)
        name, *args = asked
        if name == "handle":
            what, index, item = args
            signal.signal(signal.SIGUSR1, functools.partial(_handled, what, queues[index], item))
            lane.send("set")
            continue
        index, *args = args
        lane.send("begins")
        result = tried(name, queues[index], args)
        if name in ("put", "close"):
            settle(queues[index])
        lane.send(result)


def _handled(what: str, queue: Any, item: str, *_: object) -> None:
    if what == "raise":
        raise FromHandler
    if what == "put":
        queue.put(made(item))


def act(queues: list[Any], lanes: list[Any]) -> None:
    """The main function of an actor."""
    second = threading.Thread(target=serve, args=(lanes[1], queues), daemon=True)
    second.start()
    serve(lanes[0], queues)
    second.join()


class Program:
    """The process of the program: actor 0."""

    def __init__(self, side: str, program: dict[str, Any], say: Callable[..., None]) -> None:
        self.side, self.program, self.say = side, program, say
        self.model = Model(program)
        self.context: Any = multiprocessing.get_context(program["method"])
        library: Any = self.context
        if side == "shmq":
            import shmq

            library = shmq
        self.queues: list[Any] = []
        for name, size in program["queues"]:
            make = getattr(library, name)
            self.queues.append(make() if name == SIMPLE else make(size))
            if side == "original":
                with contextlib.suppress(OSError):
                    fcntl.fcntl(self.queues[-1]._writer.fileno(), fcntl.F_SETPIPE_SZ, PIPE)
        self.actors: dict[int, Any] = {}
        self.lanes: dict[tuple[int, int], Any] = {}
        self.waiting: dict[int, tuple[int, int]] = {}

    def run(self) -> None:
        if self.program["method"] != "fork":
            multiprocessing.set_start_method(self.program["method"], force=True)
        for number, step in enumerate(self.program["steps"]):
            returned = self.model.apply(number, step)
            self._settle()
            if self.side == "original" and number in self.model.lost:
                self._lose(returned)
                continue
            self._do(number, step)
            for index, _ in returned:
                if self.side == "original" and index in self.model.lost:
                    self._lose([(index, "")])
                elif index in self.waiting:
                    self._answer(index)
            if number in self.model.returning and self.side == "shmq":
                self._came_back(self.model.returning[number])

    def _lose(self, returned: list[tuple[int, str]]) -> None:
        """The original cannot do this step any more. Others that wait for it do so for ever."""
        for index, _ in returned:
            self.waiting.pop(index, None)
            self.say(index, "lost")

    def _do(self, number: int, step: Step) -> None:
        first = step[0]
        if isinstance(first, str):
            result = getattr(self, f"_{first}")(*step[1:])
            if result is not None:
                self.say(number, result)
            return
        who, thread, name, index, *args = step
        if who == 0:
            result = tried(name, self.queues[index], args)
            if name == "put":
                settle(self.queues[index])
            self.say(number, result)
            return
        lane = self.lanes[who, thread]
        lane.send((name, index, *args))
        assert lane.recv() == "begins"
        self.waiting[number] = who, thread

    def _answer(self, number: int) -> None:
        lane = self.lanes[self.waiting.pop(number)]
        self.say(number, lane.recv())

    def _settle(self) -> None:
        """Wait until each item that is in an original's queue is in its pipe."""
        if self.side != "original":
            return
        for queue, of in zip(self.queues, self.model.queues, strict=True):
            if not of.lost and isinstance(of.kind, str) and hasattr(queue, "_buffer"):
                settle(queue)

    def _came_back(self, index: int) -> None:
        """Wait until items of a dead process are back in shmq's queue."""
        wanted = len(self.model.queues[index].items)
        ends = time.monotonic() + 60
        while self.queues[index].qsize() < wanted and time.monotonic() < ends:
            time.sleep(0.001)

    # ---- processes ----

    def _start(self, who: int) -> str:
        ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(2)), strict=True)
        process = self.context.Process(target=act, args=(self.queues, list(theirs)))
        process.start()
        for each in theirs:
            each.close()
        self.actors[who] = process
        self.lanes[who, 0], self.lanes[who, 1] = ours
        return "started"

    def _asleep(self, who: int) -> None:
        """Wait until the threads of an actor sleep, as those that wait do."""
        pid = self.actors[who].pid
        calm = 0
        while calm < 3:
            states = []
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(FileNotFoundError):
                    text = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
                    states.append(text.rsplit(")", 1)[1].split()[0])
            calm = calm + 1 if all(state in "St" for state in states) else 0
            time.sleep(0.0005)

    def _kill(self, who: int, name: str) -> str:
        process = self.actors.pop(who)
        if name == "exit":
            self.lanes[who, 0].send("exit")
        else:
            os.kill(process.pid, getattr(signal, name))
            if name == "SIGTERM":
                os.kill(process.pid, signal.SIGCONT)
        process.join()
        self.waiting = {step: lane for step, lane in self.waiting.items() if lane[0] != who}
        return str(process.exitcode)

    def _leave(self, who: int) -> str:
        process = self.actors.pop(who)
        for thread in (0, 1):
            self.lanes[who, thread].send("leave")
        process.join()
        return str(process.exitcode)

    def _stop(self, who: int) -> str:
        os.kill(self.actors[who].pid, signal.SIGSTOP)
        return "sent"

    def _cont(self, who: int) -> str:
        os.kill(self.actors[who].pid, signal.SIGCONT)
        return "sent"

    def _handle(self, who: int, what: str, index: int, item: str) -> str:
        lane = self.lanes[who, 0]
        lane.send(("handle", what, index, item))
        return str(lane.recv())

    def _signal(self, who: int) -> str:
        self._asleep(who)
        os.kill(self.actors[who].pid, signal.SIGUSR1)
        return "sent"


def run(side: str, program: dict[str, Any], say: Callable[..., None]) -> None:
    Program(side, program, say).run()


def _witness(kind: str, *steps: Step) -> dict[str, Any]:
    return {
        "shape": "queues",
        "method": "fork",
        "queues": [[kind, 0]],
        "actors": 2,
        "steps": list(steps),
    }


#: Each shows rows of docs/differences.md.
WITNESSES: list[Any] = [
    *(_witness("Queue", [0, 0, "put", 0, item]) for item in ("lambda", "lock", "no:KeyError")),
    _witness("SimpleQueue", [0, 0, "close", 0], [0, 0, "put", 0, "no:KeyError"]),
    _witness("JoinableQueue", [0, 0, "put", 0, "lock"], [0, 0, "qsize", 0]),
    _witness(
        "JoinableQueue", [0, 0, "put", 0, "int:1"], [0, 0, "task_done", 0], [0, 0, "qsize", 0]
    ),
    _witness(
        "JoinableQueue",
        ["start", 1],
        [0, 0, "put", 0, "int:1"],
        [1, 0, "get", 0],
        ["leave", 1],
        [0, 0, "join", 0],
    ),
    _witness(
        "JoinableQueue",
        ["start", 1],
        [0, 0, "put", 0, "int:1"],
        [1, 0, "get", 0],
        [1, 0, "close", 0],
        [0, 0, "join", 0],
    ),
    _witness("Queue", ["start", 1], [1, 0, "get", 0], ["kill", 1, "SIGKILL"], [0, 0, "qsize", 0]),
    _witness(
        "JoinableQueue",
        ["start", 1],
        [0, 0, "put", 0, "int:1"],
        [1, 0, "join", 0],
        ["kill", 1, "SIGKILL"],
        [0, 0, "get", 0],
        [0, 0, "task_done", 0],
    ),
    _witness(
        "JoinableQueue",
        ["start", 1],
        [0, 0, "put", 0, "int:1"],
        [1, 0, "get", 0],
        ["kill", 1, "SIGKILL"],
        [0, 0, "get", 0],
    ),
    _witness("Queue", [0, 0, "join_thread", 0], [0, 0, "close", 0], [0, 0, "empty", 0]),
]
