"""Programs of joblib: calls of `Parallel` on its own workers, loky, and on those of shmq."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joblib as library
import numpy as np
from differ import joblib_tasks
from differ.joblib_tasks import LONG, Holder, array, work
from differ.machine import Unfit
from support.drop_in_matrix import kind

GOES_ON = True
#: Bytes, around joblib's `max_nbytes` and the limits of shmq.
SIZES = (
    0,
    16,
    1016,
    1024,
    1032,
    65_528,
    65_536,
    65_544,
    1_048_568,
    1_048_576,
    1_048_584,
    3_000_000,
)
LAYOUTS = ("plain", "plain", "C", "F", "T", "steps", "read-only")
DTYPES = ("f8", "f8", "i4", ">i4", "record", "datetime64[s]", "u1")
RAISES = (
    "ValueError",
    "KeyError",
    "TwoArguments",
    "WithLock",
    "SystemExit",
    "KeyboardInterrupt",
    "GeneratorExit",
    "StopIteration",
    "TimeoutError",
    "OSError",
    "UnicodeDecodeError",
    "large",
    "ExceptionGroup",
    "local",
)
DEATHS = ("_exit", "SIGKILL", "SIGTERM", "SIGSEGV", "once")
QUIET = (
    "thread",
    "child",
    "process",
    "parallel",
    "twice",
    "threads",
    "begun",
    "state",
    "warn",
    "recursion",
    "deep:300",
    "main",
    "daemon",
    "place",
    "signals",
    "random:5",
    "none",
    "closure:3",
    "class:4",
)
#: Bytes of the smallest array that is a view.
LARGE = 65_536
#: The tasks of a call that two workers must do at once.
SHARED = ["share:0", "share:1"]
AGAIN = ["int:1", "gate"]
#: Tasks whose argument is an array.
OF_ARRAYS = ("look", "write", "echo", "nested", "view")
#: Tasks that end their call with an error.
ENDS = ("raise", "die", "lock", "generator", "unreadable", "forever", "argument")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "n_jobs": (2, 2, 2, 2, 2, 3, 1, -1, None),
    "return_as": ("list", "list", "generator", "generator_unordered"),
    "batch_size": ("auto", "auto", 1, 2, 100),
    "pre_dispatch": ("2 * n_jobs", "all", 1, 3, "n_jobs"),
    "timeout": (None, None, LONG),
    "max_nbytes": ("1M", "1M", "1M", None, "1K", 65_536, 0),
    "mmap_mode": ("r", "r", "r", "r", "c", "r+", "w+", None),
    "inner": (None, None, None, None, None, None, 1, 2),
    "initializer": (None, None, None, None, None, None, None, None, None, "word", "raises"),
    "prefer": (None, None, None, None, "processes"),
    "idle": (None, None, None, None, None, 100),
}
#: The options of most calls: other workers need seconds to start.
USUAL: dict[str, Any] = {name: values[0] for name, values in OPTIONS.items()}
HOWS = (
    "all",
    "all",
    "all",
    "all",
    "close",
    "drop",
    "again",
    "iterable raises",
    "interrupt",
    "threads",
)


# ---- drawing ----


def a_task(rng: random.Random) -> str:
    what = rng.random()
    if what < 0.25:
        return f"int:{rng.randrange(1000)}"
    if what < 0.32:
        return f"bytes:{rng.choice(SIZES)}"
    if what < 0.38:
        return f"length:{rng.choice(SIZES)}"
    if what < 0.72:
        of = f"{rng.choice(SIZES)},{rng.choice(LAYOUTS)},{rng.choice(DTYPES)}"
        return f"{rng.choice((*OF_ARRAYS, 'made'))}:{of}"
    if what < 0.76:
        return f"callable:{rng.randrange(9)}"
    if what < 0.78:
        return f"fill:{rng.randrange(1000)}"
    return rng.choice(QUIET)


def an_end(rng: random.Random) -> str:
    what = rng.random()
    if what < 0.6:
        return f"raise:{rng.choice(RAISES)}"
    if what < 0.75:
        return f"die:{rng.choice(DEATHS)}"
    return rng.choice(("lock", "generator", "unreadable", "forever", "argument"))


def a_call(rng: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    count = rng.choice((0, 1, 2, 5, 10, 30))
    call: dict[str, Any] = {
        "options": {**options},
        "tasks": [a_task(rng) for _ in range(count)],
        "how": rng.choice(HOWS),
    }
    own = call["options"]
    for name in ("return_as", "batch_size", "pre_dispatch", "timeout"):
        own[name] = rng.choice(OPTIONS[name])
    if call["how"] == "again" or rng.random() < 0.03:
        call["tasks"] = [*(AGAIN if call["how"] == "again" else SHARED)]
        own["batch_size"] = 1
    elif rng.random() < 0.1:
        call["tasks"] = [an_end(rng)]
    elif rng.random() < 0.1:
        call["tasks"].insert(rng.randrange(count + 1), an_end(rng))
    return call


def draw(rng: random.Random) -> dict[str, Any]:
    options = {
        name: rng.choice(values) if rng.random() < 0.4 else USUAL[name]
        for name, values in OPTIONS.items()
    }
    program: dict[str, Any] = {"shape": rng.choice(("each", "each", "config", "with")), "calls": []}
    for _ in range(rng.choice((2, 6, 12))):
        for _ in range(20):
            call = a_call(rng, options)
            if program["shape"] == "with" and program["calls"]:
                call["options"] = program["calls"][0]["options"]
            tried = program | {"calls": [*program["calls"], call]}
            try:
                plan(tried)
            except Unfit:
                continue
            program = tried
            break
    return program


def smaller(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Programs with fewer calls, fewer tasks and usual options."""
    calls = program["calls"]
    size = max(len(calls) // 2, 1)
    while size:
        for start in range(0, len(calls), size):
            yield program | {"calls": calls[:start] + calls[start + size :]}
        size //= 2
    if program["shape"] != "each":
        yield program | {"shape": "each"}
    for number, call in enumerate(calls):
        rest = calls[:number], calls[number + 1 :]
        tasks = call["tasks"]
        size = max(len(tasks) // 2, 1)
        while size:
            for start in range(0, len(tasks), size):
                fewer = call | {"tasks": tasks[:start] + tasks[start + size :]}
                yield program | {"calls": [*rest[0], fewer, *rest[1]]}
            size //= 2
        if call["how"] != "all":
            yield program | {"calls": [*rest[0], call | {"how": "all"}, *rest[1]]}
    for name, value in USUAL.items():
        if any(call["options"][name] != value for call in calls):
            changed = [call | {"options": call["options"] | {name: value}} for call in calls]
            yield program | {"calls": changed}


def failing(call: dict[str, Any]) -> str | None:
    """The task that ends the call."""
    ends = [task for task in call["tasks"] if task.partition(":")[0] in ENDS]
    if len(ends) > 1:
        raise Unfit
    return ends[0] if ends else None


def plan(program: dict[str, Any]) -> list[tuple[int, str, str]]:
    """Number, label and nothing of each observation. Raises Unfit."""
    found: list[tuple[int, str, str]] = []
    for number, call in enumerate(program["calls"]):
        check(program, call, number)
        options, how = call["options"], call["how"]
        end = failing(call)
        label = "Parallel" if how == "all" else f"Parallel, {how},"
        if breaks(call):
            label += " of an array, mmap_mode=None"
        elif how == "all" and end is None and options["initializer"] != "raises":
            for index, task in enumerate(call["tasks"]):
                found.append((number * 1000 + index, f"task {labelled(task, options)}", ""))
        elif options["initializer"] == "raises":
            label += " initializer raises"
        if end is not None:
            label += f" of {end}"
        found.append((number * 1000 + 999, label, ""))
    return found


def labelled(task: str, options: dict[str, Any]) -> str:
    """A task and what its outcome depends on."""
    name, _, rest = task.partition(":")
    if name in OF_ARRAYS and rest:
        return f"{name} {way(rest, options)} {rest}, {options['mmap_mode']}"
    return f"{name} {options['mmap_mode']}" if name == "share" else task


@functools.cache
def length(text: str) -> int:
    """Bytes of the array of this text."""
    return int(array(text).nbytes)


def way(text: str, options: dict[str, Any]) -> str:
    """How joblib passes an array: copied, mapped, or mapped though it is small."""
    most = options["max_nbytes"]
    limit = {"1M": 1 << 20, "1K": 1024}.get(most, most)
    if limit is None or length(text) <= limit:
        return "copied"
    return "small" if length(text) < LARGE else "mapped"


def breaks(call: dict[str, Any]) -> bool:
    """Whether it maps an array with no mode, of which the original's workers die."""
    if call["options"]["mmap_mode"] is not None:
        return False
    of = [
        rest
        for task in call["tasks"]
        if (name := task.partition(":")[0]) in OF_ARRAYS
        for rest in [task[len(name) + 1 :]]
    ]
    shared = any(task.startswith("share") for task in call["tasks"])
    return shared or any(way(text, call["options"]) != "copied" for text in of)


def sequential(options: dict[str, Any]) -> bool:
    return options["n_jobs"] in (1, None) or (options["n_jobs"] == -1 and (os.cpu_count() or 1) < 2)


def check(program: dict[str, Any], call: dict[str, Any], number: int) -> None:
    """Raise Unfit for a call that means nothing, or ends the process that asks."""
    options, how, tasks = call["options"], call["how"], call["tasks"]
    end = failing(call)
    if options["n_jobs"] == -1 and sequential(options):
        raise Unfit
    if breaks(call) and (end or how != "all" or options["initializer"]):
        raise Unfit
    if breaks(call) and (program["shape"] == "with" or sequential(options)):
        raise Unfit
    if sequential(options):
        if end is not None or options["initializer"] or how != "all":
            raise Unfit
        odd = {"threads", "daemon", "begun", "signals", "state", "parallel", "twice", "thread"}
        if odd & set(tasks):
            raise Unfit
        if any(task.split(":")[0] in (*OF_ARRAYS, "fill", "share") for task in tasks):
            raise Unfit
    if options["initializer"] == "raises" and (not tasks or end or how != "all"):
        raise Unfit
    shares = [task for task in tasks if task.startswith("share")]
    if shares and (tasks != SHARED or options["batch_size"] != 1 or how != "all"):
        raise Unfit
    if how == "again":
        if tasks != AGAIN or options["batch_size"] != 1 or options["return_as"] == "list":
            raise Unfit
        if sequential(options) or options["pre_dispatch"] == 1 or program["shape"] == "with":
            raise Unfit
    elif "gate" in tasks:
        raise Unfit
    elif how in ("close", "drop"):
        if not options["return_as"].startswith("generator") or end or not tasks:
            raise Unfit
    elif how == "iterable raises":
        if end or options["initializer"] or not tasks:
            raise Unfit
    elif how == "interrupt":
        if end != "forever" or options["return_as"] != "list":
            raise Unfit
    elif how == "threads" and (end or options["return_as"] != "list"):
        raise Unfit
    if end == "forever" and how != "interrupt" and number % 2:
        raise Unfit  # each costs a second
    if program["shape"] == "with":
        check_with(program, call, number)


def check_with(program: dict[str, Any], call: dict[str, Any], number: int) -> None:
    """Of a call in a `with` block: after an error joblib forgets the options of its workers there,
    and may give results of the call that failed."""
    usual = all(call["options"][name] == USUAL[name] for name in ("max_nbytes", "mmap_mode"))
    end, is_last = failing(call), number == len(program["calls"]) - 1
    if call["how"] != "all" or call["options"]["initializer"] == "raises":
        raise Unfit
    if end and not is_last:
        alone = call["tasks"] == [end] and call["options"]["return_as"] == "list"
        if not (alone and usual):
            raise Unfit


# ---- running ----

_folder = ""


def begin(side: str) -> None:
    """Make the name known."""
    global _folder
    _folder = tempfile.mkdtemp(prefix="differ-")
    os.environ["JOBLIB_TEMP_FOLDER"] = _folder
    os.environ["DIFFER_WORD"] = "inherited"
    if side == "shmq":
        import shmq.integrations.joblib  # noqa: F401


def end(side: str) -> None:
    shutil.rmtree(_folder, ignore_errors=True)


def after(pid: int) -> None:
    """Remove what a killed program has left: loky's semaphores."""
    for path in Path("/dev/shm").glob(f"sem.loky-{pid}-*"):
        with contextlib.suppress(OSError):
            path.unlink()


def run(side: str, program: dict[str, Any], say: Callable[..., None]) -> None:
    joblib_tasks.state[0] = "of the program"
    gates = tempfile.mkdtemp(prefix="differ-", dir=_folder)
    warnings.simplefilter("ignore")
    Program("loky" if side == "original" else "shmq", program, gates).run(say)
    if side == "original":
        from joblib.externals.loky import get_reusable_executor

        with contextlib.suppress(Exception):
            get_reusable_executor().shutdown(wait=True, kill_workers=True)
    from multiprocessing.util import _exit_function

    _exit_function()


class Program:
    def __init__(self, backend: str, program: dict[str, Any], gates: str) -> None:
        self.backend, self.program, self.gates = backend, program, gates
        self.kept: dict[str, Any] = {}
        self.opened: list[str] = []
        self.gate = ""

    def run(self, say: Callable[..., None]) -> None:
        shape, calls = self.program["shape"], self.program["calls"]
        if not calls:
            return
        with contextlib.ExitStack() as stack:
            parallel = None
            if shape == "config":
                options = self._backends(calls[0]["options"])
                stack.enter_context(library.parallel_config(self.backend, **options))
            elif shape == "with":
                parallel = stack.enter_context(self._parallel(calls[0]["options"], shape))
            for number, call in enumerate(calls):
                self._call(number, call, parallel, say)

    @staticmethod
    def _backends(options: dict[str, Any]) -> dict[str, Any]:
        """The options of the backend."""
        found: dict[str, Any] = {}
        if options["inner"] is not None:
            found["inner_max_num_threads"] = options["inner"]
        if options["initializer"] is not None:
            found["initializer"] = joblib_tasks.begin_worker
            found["initargs"] = (options["initializer"],)
        if options["idle"] is not None:
            found["idle_worker_timeout"] = options["idle"]
        return found

    def _parallel(self, options: dict[str, Any], shape: str, end: str | None = None) -> Any:
        names = ("n_jobs", "return_as", "batch_size", "pre_dispatch", "max_nbytes", "mmap_mode")
        given = {name: options[name] for name in names}
        given["timeout"] = 1.0 if end == "forever" else options["timeout"]
        given["prefer"] = options["prefer"]
        if shape != "config":
            if options["inner"] is None:
                given |= self._backends(options)
                given["backend"] = self.backend
            else:
                with library.parallel_config(self.backend, **self._backends(options)):
                    return library.Parallel(**given)
        return library.Parallel(**given)

    def _call(self, number: int, call: dict[str, Any], parallel: Any, say: Any) -> None:
        how, end = call["how"], failing(call)
        first, last = number * 1000, number * 1000 + 999
        try:
            if parallel is None:
                waits = "" if how == "interrupt" else end
                parallel = self._parallel(call["options"], self.program["shape"], waits)
            elif end == "forever":
                parallel.timeout = 1.0
            seen = getattr(self, "_" + how.replace(" ", "_"))(parallel, call)
        except BaseException as exc:
            say(last, error(exc))
            return
        if how == "all" and end is None:
            for index, each in enumerate(seen):
                say(first + index, each)
        of_file = f", file {self.kept['file'].sum()}" if "file" in self.kept else ""
        say(last, f"{len(seen)} results{of_file}" if isinstance(seen, list) else seen)

    def _tasks(self, call: dict[str, Any]) -> Iterator[Any]:
        for index, task in enumerate(call["tasks"]):
            yield library.delayed(work)(index, task, self.gates, self._argument(task))

    def _argument(self, task: str) -> Any:
        name, _, rest = task.partition(":")
        if name == "length":
            return b"x" * int(rest)
        if name == "callable":
            return lambda number: number + len(self.gates) - len(self.gates)
        if name == "argument":
            return threading.Lock()
        if name == "gate":
            self.gate = f"{self.gates}/open{len(self.opened)}"
            return self.gate
        if name in OF_ARRAYS:
            found = array(rest)
            return {"one": [Holder(found)]} if name == "nested" else found
        if name == "fill":
            if "file" not in self.kept:
                self.kept["file"] = np.memmap(
                    Path(self.gates, "file"), dtype="i8", mode="w+", shape=(1000,)
                )
            return self.kept["file"]
        if name == "share":
            return self.kept.setdefault("share", np.zeros(1000))
        return None

    def _all(self, parallel: Any, call: dict[str, Any]) -> list[str]:
        found = list(parallel(self._tasks(call)))
        if call["options"]["return_as"] == "generator_unordered":
            found.sort(key=lambda each: each[0])
        return [f"{index} {named(value)}" for index, value in found]

    def _close(self, parallel: Any, call: dict[str, Any]) -> str:
        found = parallel(self._tasks(call))
        next(found)
        found.close()
        return "closed"

    def _drop(self, parallel: Any, call: dict[str, Any]) -> str:
        found = parallel(self._tasks(call))
        next(found)
        del found
        return "dropped"

    def _again(self, parallel: Any, call: dict[str, Any]) -> str:
        """Another call before the first has ended."""
        found = parallel(self._tasks(call))
        next(found)
        try:
            answer = f"{len(list(parallel(self._tasks(call))))}"
        except RuntimeError as exc:
            answer = error(exc)
        self.opened.append(self.gate)
        Path(self.gate).touch()
        return f"{answer} {len(list(found)) + 1}"

    def _iterable_raises(self, parallel: Any, call: dict[str, Any]) -> str:
        def tasks() -> Iterator[Any]:
            yield from self._tasks(call)
            raise ZeroDivisionError("of the iterable")

        return str(len(list(parallel(tasks()))))

    def _interrupt(self, parallel: Any, call: dict[str, Any]) -> str:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        return str(len(parallel(self._tasks(call))))

    def _threads(self, parallel: Any, call: dict[str, Any]) -> str:
        found: list[str] = []

        def one() -> None:
            try:
                mine = self._parallel(call["options"], "each")
                found.append(str(len(mine(self._tasks(call)))))
            except BaseException as exc:
                found.append(error(exc))

        helpers = [threading.Thread(target=one) for _ in range(2)]
        for each in helpers:
            each.start()
        for each in helpers:
            each.join()
        return str(sorted(found))


def error(exc: BaseException) -> str:
    """An error as a program sees it."""
    found = kind(exc)
    if found in ("BrokenProcessPool", "PicklingError"):
        return found
    if found in ("ValueError", "KeyError", "ZeroDivisionError", "SystemExit", "FileNotFoundError"):
        text = repr(exc.args)
        return f"{found} {text if len(text) < 60 else len(text)}"
    if isinstance(exc, BaseExceptionGroup):
        return f"{found} {exc.exceptions}"
    return found


def named(value: Any) -> str:
    """A result as a program sees it."""
    if isinstance(value, np.ndarray):
        changed = "w" if value.flags.writeable else "r"
        order = "C" if value.flags.c_contiguous else "F" if value.flags.f_contiguous else "steps"
        first = value.ravel()[0] if value.size else ""
        return f"array {value.shape} {value.dtype} {order} {changed} {first}"
    if isinstance(value, bytes):
        return f"bytes {len(value)}"
    if callable(value):
        return f"callable {value()}"
    if isinstance(value, list):
        return f"list {len(value)}"
    return repr(value)


def _call(*tasks: str, **options: Any) -> dict[str, Any]:
    return {"options": USUAL | options, "tasks": list(tasks), "how": "all"}


def _each(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"shape": "each", "calls": list(calls)}


WITNESSES: list[Any] = [
    _each(
        _call("state", "look:2000000,steps,f8", "view:2000000,plain,datetime64[s]"),
        _call("raise:TwoArguments"),
        _call("argument"),
        _call("die:once"),
    ),
    _each(
        _call("look:2000,plain,f8", "nested:2000,C,f8", max_nbytes="1K"),
        _call(*SHARED, max_nbytes="1K", mmap_mode="r+", batch_size=1),
        _call("look:2000,plain,f8", max_nbytes="1K", mmap_mode=None),
    ),
]
