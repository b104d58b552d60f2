"""The tasks of programs of joblib. Workers import this module, so it is small."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

LONG = 600.0
begun: list[str] = []
state = ["of the module"]


class TwoArguments(Exception):
    """Pickle calls it with one."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


class WithLock(Exception):
    """Pickle refuses it."""

    def __init__(self) -> None:
        super().__init__("with a lock")
        self.lock = threading.Lock()


class Unreadable:
    """An object that arrives nowhere."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise KeyError("unreadable")


class Holder:
    """An object with an array."""

    def __init__(self, array: Any) -> None:
        self.array = array


def begin_worker(word: str) -> None:
    begun.append(word)
    if word == "raises":
        raise ValueError(word)


def array(text: str) -> Any:
    """The array of such a text: bytes, layout and dtype."""
    size, layout, dtype = text.split(",")
    of = np.dtype("i4,f4" if dtype == "record" else dtype)
    length = int(size) // of.itemsize
    if layout == "steps":
        found: Any = np.zeros(2 * length, of)[::2]
    elif layout in ("F", "C"):
        found = np.zeros((length // 2, 2), of, order=layout)
    elif layout == "T":
        found = np.zeros((length // 2, 2), of).T
    elif layout == "read-only":
        found = np.zeros(length, of)
        found.flags.writeable = False
    else:
        found = np.zeros(length, of)
    return found


def work(index: int, task: str, gates: str, argument: Any = None) -> tuple[int, Any]:
    """Do a task. Returns its number too, since results may come in any order."""
    name, _, rest = task.partition(":")
    return index, globals()[f"_{name}"](rest, gates, argument)


def _int(rest: str, gates: str, argument: Any) -> int:
    return int(rest)


def _bytes(rest: str, gates: str, argument: Any) -> bytes:
    return b"x" * int(rest)


def _made(rest: str, gates: str, argument: Any) -> Any:
    found = array(rest.replace("read-only", "plain"))
    found[...] = 7 if found.dtype.names is None else (7, 7)
    return found


def _echo(rest: str, gates: str, argument: Any) -> Any:
    return argument


def _length(rest: str, gates: str, argument: Any) -> int:
    return len(argument)


def _look(rest: str, gates: str, argument: Any) -> str:
    """The things that a task can see of an array."""
    flags = argument.flags
    order = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "steps"
    return f"{argument.shape} {argument.dtype} {order} {'w' if flags.writeable else 'r'}"


def _write(rest: str, gates: str, argument: Any) -> str:
    try:
        argument[0] = argument[-1]
    except (ValueError, IndexError) as exc:
        return type(exc).__name__
    return "written"


def _nested(rest: str, gates: str, argument: Any) -> str:
    return _write(rest, gates, argument["one"][0].array)


def _view(rest: str, gates: str, argument: Any) -> Any:
    """A part of an argument."""
    return argument[1:3]


def _fill(rest: str, gates: str, argument: Any) -> str:
    """Write into a file that is mapped."""
    argument[int(rest)] = int(rest) + 1
    return "written"


def _share(rest: str, gates: str, argument: Any) -> float:
    """Write, and see what the other task has written."""
    argument[int(rest)] = 1
    Path(gates, f"written{rest}").touch()
    while not Path(gates, f"written{1 - int(rest)}").exists():
        time.sleep(0.001)
    return float(argument[:2].sum())


def _gate(rest: str, gates: str, argument: Any) -> None:
    while not Path(argument).exists():
        time.sleep(0.001)


def _raise(rest: str, gates: str, argument: Any) -> None:
    raise {
        "ValueError": lambda: ValueError("one", 2),
        "TwoArguments": lambda: TwoArguments(1, 2),
        "WithLock": WithLock,
        "KeyError": lambda: KeyError("key"),
        "SystemExit": lambda: SystemExit(3),
        "KeyboardInterrupt": KeyboardInterrupt,
        "GeneratorExit": GeneratorExit,
        "StopIteration": lambda: StopIteration(1),
        "TimeoutError": lambda: TimeoutError("of a task"),
        "OSError": lambda: FileNotFoundError(2, "none", "name"),
        "UnicodeDecodeError": lambda: UnicodeDecodeError("ascii", b"x", 0, 1, "why"),
        "large": lambda: ValueError("x" * 3_000_000),
        "ExceptionGroup": lambda: ExceptionGroup("some", [ValueError(1), TypeError(2)]),
        "local": _local,
    }[rest]()


def _local() -> Exception:
    class OfAFunction(Exception):
        pass

    return OfAFunction("local")


def _closure(rest: str, gates: str, argument: Any) -> Any:
    return lambda: int(rest)


def _class(rest: str, gates: str, argument: Any) -> Any:
    class Local:
        value = int(rest)

        def __call__(self) -> int:
            return self.value

    return Local()


def _lock(rest: str, gates: str, argument: Any) -> Any:
    return threading.Lock()


def _unreadable(rest: str, gates: str, argument: Any) -> Any:
    return Unreadable()


def _die(rest: str, gates: str, argument: Any) -> None:
    if rest == "_exit":
        os._exit(5)
    if rest == "once":  # the next attempt lives
        if not Path(gates, "died").exists():
            Path(gates, "died").touch()
            os._exit(5)
        return
    os.kill(os.getpid(), getattr(signal, rest))
    time.sleep(LONG)


def _forever(rest: str, gates: str, argument: Any) -> None:
    time.sleep(LONG)


def _thread(rest: str, gates: str, argument: Any) -> str:
    found: list[str] = []
    name = threading.current_thread()
    helper = threading.Thread(target=lambda: found.append(str(name is threading.main_thread())))
    helper.start()
    helper.join()
    return f"{found} {helper.daemon} {name.daemon}"


def _child(rest: str, gates: str, argument: Any) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def _process(rest: str, gates: str, argument: Any) -> Any:
    import multiprocessing

    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    return child.exitcode


def _parallel(rest: str, gates: str, argument: Any) -> str:
    """A call within a call."""
    import joblib

    parallel = joblib.Parallel(n_jobs=2)
    found = parallel(joblib.delayed(work)(0, f"int:{each}", gates) for each in range(3))
    return f"{type(parallel._backend).__name__} {found}"


def _twice(rest: str, gates: str, argument: Any) -> str:
    """A call within a call within a call."""
    import joblib

    parallel = joblib.Parallel(n_jobs=2)
    return str(parallel(joblib.delayed(work)(0, "parallel", gates) for _ in range(2)))


def _threads(rest: str, gates: str, argument: Any) -> str:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return ",".join(os.environ.get(name, "-") for name in names)


def _begun(rest: str, gates: str, argument: Any) -> str:
    return ",".join(begun)


def _state(rest: str, gates: str, argument: Any) -> str:
    return state[0]


def _warn(rest: str, gates: str, argument: Any) -> str:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.warn("of a task", stacklevel=1)
    return str(len(found))


def _recursion(rest: str, gates: str, argument: Any) -> str:
    return str(sys.getrecursionlimit())


def _deep(rest: str, gates: str, argument: Any) -> Any:
    found: list[Any] = []
    for _ in range(int(rest)):
        found = [found]
    return found


def _main(rest: str, gates: str, argument: Any) -> str:
    return f"{__name__} {sys.modules['__main__'] is not None}"


def _daemon(rest: str, gates: str, argument: Any) -> str:
    import multiprocessing

    return str(multiprocessing.current_process().daemon)


def _place(rest: str, gates: str, argument: Any) -> str:
    return f"{os.getcwd()} {os.environ.get('DIFFER_WORD')}"


def _signals(rest: str, gates: str, argument: Any) -> str:
    names = ("SIGINT", "SIGTERM", "SIGCHLD", "SIGUSR1")
    handlers = [signal.getsignal(getattr(signal, name)) for name in names]
    return f"{[callable(each) or int(each or 0) for each in handlers]} " + str(
        sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    )


def _random(rest: str, gates: str, argument: Any) -> str:
    """Whether two workers draw the same numbers is nothing to rely on; that one does is."""
    return str(np.random.default_rng(int(rest)).integers(100))


def _callable(rest: str, gates: str, argument: Any) -> Any:
    return argument(int(rest))


def _generator(rest: str, gates: str, argument: Any) -> Any:
    return (each for each in range(3))


def _none(rest: str, gates: str, argument: Any) -> None:
    return None
