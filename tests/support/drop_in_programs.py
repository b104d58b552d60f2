"""Programs that run on the standard library and on shmq: `python -m support.drop_in_programs
IMPLEMENTATION PROGRAM METHOD`. They print the same on both.

They are a module of their own because children that are not forked import their functions.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

PROGRAMS: dict[str, tuple[Callable[[Any, Any], None], tuple[str, ...]]] = {}
ANY = ("fork", "spawn", "forkserver")


class Standard:
    """The library that shmq replaces."""

    JoinableQueue: Any = staticmethod(multiprocessing.JoinableQueue)
    Queue: Any = staticmethod(multiprocessing.Queue)
    SimpleQueue: Any = staticmethod(multiprocessing.SimpleQueue)
    Executor: Any = concurrent.futures.ProcessPoolExecutor


def program(*methods: str) -> Callable[[Any], Any]:
    """Make a function a program, for these start methods."""

    def register(function: Any) -> Any:
        PROGRAMS[function.__name__] = function, methods
        return function

    return register


def say(*words: object) -> None:
    """One line, at once."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def run(function: Callable[..., None], *args: Any) -> None:
    process = multiprocessing.Process(target=function, args=args)
    process.start()
    process.join()
    say("exit", process.exitcode)


# ---- JoinableQueue: the end in order of who got an item ----


def work(queue: Any) -> None:
    while (job := queue.get()) is not None:
        say("job", job)
        queue.task_done()


@program(*ANY)
def sentinels_without_task_done(lib: Any, context: Any) -> None:
    queue = lib.JoinableQueue()
    for job in "abc":
        queue.put(job)
        queue.put(None)
        run(work, queue)


def get_some(queue: Any, count: int) -> None:
    say(*(queue.get() for _ in range(count)))


def get_and_fail(queue: Any) -> None:
    say(queue.get())
    sys.exit(queue.get())


@program(*ANY)
def no_task_done_at_all(lib: Any, context: Any) -> None:
    queue = lib.JoinableQueue()
    for number in range(6):
        queue.put(number)
    run(get_some, queue, 2)
    run(get_and_fail, queue)
    run(get_some, queue, 2)


def get_and_close(queue: Any) -> None:
    say(queue.get())
    queue.close()


@program("fork")
def closed_with_an_item(lib: Any, context: Any) -> None:
    queue = lib.JoinableQueue()
    queue.put(1)
    queue.put(2)
    run(get_and_close, queue)
    run(get_some, queue, 1)


def leave_a_thread(queue: Any) -> None:
    got = threading.Event()

    def slow() -> None:
        item = queue.get()
        got.set()
        time.sleep(0.2)  # the main thread ends
        say("thread", item)
        queue.task_done()
        say("thread", queue.get())

    threading.Thread(target=slow).start()
    got.wait()
    say("main ends")


@program("fork", "spawn")
def a_thread_outlives_the_main_thread(lib: Any, context: Any) -> None:
    queue = lib.JoinableQueue()
    for number in range(3):
        queue.put(number)
    run(leave_a_thread, queue)
    run(get_some, queue, 1)


@program("fork")
def join_after_all_is_done(lib: Any, context: Any) -> None:
    queue = lib.JoinableQueue()
    for number in range(4):
        queue.put(number)
    queue.put(None)
    worker = multiprocessing.Process(target=work, args=(queue,))
    worker.start()
    worker.join()
    queue.task_done() if lib is Standard else None  # for the sentinel; here the end did it
    queue.join()
    say("joined")


# ---- Executor: how its workers are started ----

LOCK = threading.Lock()


def with_lock(number: int) -> int:
    with LOCK:
        return number


@program("fork")
def the_program_uses_a_lock_of_the_tasks(lib: Any, context: Any) -> None:
    executor = lib.Executor(4, context)
    futures = []
    for number in range(40):
        futures.append(executor.submit(with_lock, number))
        with LOCK:
            time.sleep(0.005)
    say(sum(future.result() for future in futures))
    executor.shutdown()


STATE = "imported"


def state(_: int) -> str:
    time.sleep(0.002)
    return STATE


@program("fork")
def workers_have_the_state_of_the_first_submit(lib: Any, context: Any) -> None:
    global STATE
    with lib.Executor(3, context) as executor:
        STATE = "at the first submit"
        futures = [executor.submit(state, 0)]
        STATE = "later"
        futures += [executor.submit(state, number) for number in range(50)]
        say({future.result() for future in futures})


def number_of(number: int) -> int:
    return number * 2


def ask(lib: Any, context: Any) -> None:
    with lib.Executor(2, context) as executor:
        say(*executor.map(number_of, range(20)))
    say("ended")


@program(*ANY)
def sigchld_ignored(lib: Any, context: Any) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ask(lib, context)


def reap_all(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@program(*ANY)
def children_reaped_by_the_program(lib: Any, context: Any) -> None:
    signal.signal(signal.SIGCHLD, reap_all)
    ask(lib, context)


@program("fork", "spawn")  # with a fork server the standard library hangs
def signals_blocked(lib: Any, context: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
    ask(lib, context)
    queue = lib.Queue()
    queue.put(1)
    say(queue.get())


@program("fork")
def signals_ignored(lib: Any, context: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    ask(lib, context)
    queue = lib.Queue()
    queue.put(1)
    say(queue.get())


def daemon(lib: Any, context: Any) -> None:
    executor = lib.Executor(1, context)
    try:
        executor.submit(number_of, 1)
    except AssertionError as exc:
        say(exc)


@program("fork")
def in_a_daemon(lib: Any, context: Any) -> None:
    process = multiprocessing.Process(target=daemon, args=(lib, context), daemon=True)
    process.start()
    process.join()


def nested(library: str, number: int) -> int:
    with implementation(library).Executor(1, multiprocessing.get_context()) as executor:
        found: int = executor.submit(number_of, number).result()
        return found


@program("fork")
def a_pool_in_a_task(lib: Any, context: Any) -> None:
    with lib.Executor(2, context) as executor:
        say(*executor.map(nested, [getattr(lib, "__name__", "")] * 3, range(3)))


@program("fork")
def address_space_limited(lib: Any, context: Any) -> None:
    """As by `ulimit -v`, on clusters. The present size does not count: numeric libraries
    map memory for each CPU."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30),) * 2)
    queues = [lib.Queue() for _ in range(3)]
    for number, queue in enumerate(queues):
        queue.put(number)
    say(*(queue.get() for queue in queues))
    ask(lib, context)


# ---- Executor: what a task finds ----


def surroundings() -> tuple[Any, ...]:
    parent = multiprocessing.parent_process()
    thread = threading.current_thread()
    started: list[bool] = []
    other = threading.Thread(target=lambda: started.append(threading.current_thread().daemon))
    other.start()
    other.join()
    return (
        parent is not None and parent.pid,
        parent is not None and parent.is_alive(),
        thread.name,
        thread.daemon,
        thread is threading.main_thread(),
        started,
        multiprocessing.current_process().daemon,
    )


@program(*ANY)
def surroundings_of_a_task(lib: Any, context: Any) -> None:
    with lib.Executor(1, context) as executor:
        found = executor.submit(surroundings).result()
    say(found[0] == os.getpid(), *found[1:])


def mine(*_: object) -> None:
    """A handler."""


def handlers() -> list[str]:
    numbers = (signal.SIGCHLD, signal.SIGUSR2, signal.SIGHUP, signal.SIGPIPE)
    return [
        getattr(found := signal.getsignal(number), "__name__", str(found)) for number in numbers
    ]


@program(*ANY)
def handlers_of_a_task(lib: Any, context: Any) -> None:
    signal.signal(signal.SIGUSR2, mine)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, mine)
    with lib.Executor(1, context) as executor:
        say(*executor.submit(handlers).result())


def upload(path: str) -> None:
    def late() -> None:
        time.sleep(0.3)
        Path(path).write_text("uploaded")

    threading.Thread(target=late).start()


@program(*ANY)
def a_task_leaves_a_thread(lib: Any, context: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "late")
        with lib.Executor(1, context) as executor:
            executor.submit(upload, str(path)).result()
        say(path.read_text())


class Ending:
    """Its destructor ends every process but the one that made it."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.home:
            os._exit(0)


def touch(what: Ending, path: str) -> int:
    with open(path, "a") as file:
        file.write("x")
    return 42


def touch_and_raise(what: Ending, path: str) -> int:
    touch(what, path)
    raise ValueError("of the task")


@program(*ANY)
def a_destructor_of_an_argument_ends_the_worker(lib: Any, context: Any) -> None:
    for function in (touch, touch_and_raise):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "runs")
            executor = lib.Executor(1, context)
            future = executor.submit(function, Ending(), str(path))
            say(future.exception() or future.result(), path.read_text())
            with contextlib.suppress(BrokenProcessPool):
                executor.shutdown()


def memory_of(number: int) -> int:
    return ctypes.c_int(number).value


@program("fork")
def initializer_with_what_cannot_be_pickled(lib: Any, context: Any) -> None:
    lock, lines = threading.Lock(), iter("ab")
    with lib.Executor(1, context, lambda *_: say("ready"), (lock, lines)) as executor:
        say(*executor.map(memory_of, range(3)))


def implementation(name: str) -> Any:
    if name == "shmq":
        import shmq

        return shmq
    return Standard


def names() -> Iterator[tuple[str, str]]:
    """Each program with each of its start methods."""
    for name, (_, methods) in PROGRAMS.items():
        for method in methods:
            yield name, method


if __name__ == "__main__":
    from support import drop_in_programs as itself  # the module that children import

    library, name, method = sys.argv[1:]
    multiprocessing.set_start_method(method)
    itself.PROGRAMS[name][0](itself.implementation(library), multiprocessing.get_context(method))
