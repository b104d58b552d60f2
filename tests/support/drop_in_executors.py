"""Cases of the executor and its futures for `drop_in_matrix`."""

from __future__ import annotations

import asyncio
import concurrent.futures as futures
import functools
import gc
import logging
import multiprocessing
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from support.drop_in_matrix import (
    ERRORS,
    HUGE,
    LONG,
    ODD,
    FromHandler,
    Raises,
    alarm,
    cases,
    eventually,
    kind,
    raise_it,
    tried,
)
from support.drop_in_programs import Standard, implementation


def nothing() -> None:
    return None


def returned(value: Any) -> Any:
    return value


def waited(seconds: float, value: Any = None) -> Any:
    time.sleep(seconds)
    return value


def wait_for(path: str) -> str:
    eventually(lambda: os.path.exists(path))
    return "came"


class TwoArguments(Exception):
    """Pickle calls it with one."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


class Holding(Exception):
    """Has what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holding")
        self.lock = threading.Lock()


class Described(Exception):
    """Has attributes."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def raise_new(name: str) -> None:
    raise {"two": lambda: TwoArguments(1, 2), "holding": Holding}[name]()


def raise_from() -> None:
    try:
        raise KeyError("inner")
    except KeyError as exc:
        raise ValueError("outer") from exc


def raise_described() -> None:
    error = Described(7)
    error.add_note("a note")
    raise error


def raise_group() -> None:
    raise BaseExceptionGroup("several", [ValueError(1), SystemExit(2)])


def a_lock() -> Any:
    return threading.Lock()


def a_generator() -> Any:
    return (number for number in range(3))


def outcome(future: Any) -> str:
    """The fate of a future, as its own methods and an `except` say."""
    value = tried(future.result, LONG)
    return f"{value} {tried(future.exception)[:60]} {future.done()} {future.cancelled()}"


FORK = multiprocessing.get_context("fork")


@cases
def arguments_of_an_executor(lib: Any) -> Iterator[tuple[str, Any]]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with lib.Executor(*args, **kwargs) as executor:
            return executor.submit(abs, -1).result(LONG)

    for label, value in (*ODD.items(), ("two", 2), ("integral float", 2.0)):
        yield f"max_workers {label}", tried(run, value, FORK)
        if label != "true":
            yield (
                f"max_tasks_per_child {label}",
                tried(run, 1, multiprocessing.get_context("spawn"), max_tasks_per_child=value)
                if label in ("none",)
                else tried(lib.Executor, 1, None, max_tasks_per_child=value).split("<")[0],
            )
    yield "mp_context text", tried(run, 1, "fork")
    yield "mp_context none", tried(run, 1, None)
    yield "mp_context module", tried(run, 1, multiprocessing)
    for label, value in (("text", "abs"), ("number", 1), ("zero", 0), ("class", int)):
        yield f"initializer {label}", tried(run, 1, FORK, value)
    yield "initargs list", tried(run, 1, FORK, int, ["1"])
    yield "initargs text", tried(run, 1, FORK, int, "1")
    yield "initargs of another number", tried(run, 1, FORK, nothing, (1,))
    yield "unknown keyword", tried(run, workers=1)
    with lib.Executor(1, FORK, raise_it, (ValueError("no"),)) as executor:
        future = executor.submit(abs, 1)
        yield "initializer raises", tried(future.result, LONG)
        yield "submit after that", tried(executor.submit, abs, 1)
        yield "map after that", tried(lambda: list(executor.map(abs, [1])))
    yield "shutdown after that", tried(executor.shutdown)


@cases
def names_of_executors(lib: Any) -> Iterator[tuple[str, Any]]:
    original = futures.ProcessPoolExecutor(1, FORK)
    with lib.Executor(1, FORK) as executor:
        future = executor.submit(abs, -1)
        for label, mine, theirs in (
            ("Executor", executor, original),
            ("Future", future, futures.Future()),
        ):
            yield (
                f"{label}: missing",
                [one for one in dir(theirs) if one[0] != "_" and not hasattr(mine, one)],
            )
            mine.of_the_program = 1
            yield f"{label}: an attribute", mine.of_the_program
            yield f"{label}: a weak reference", weakref.ref(mine)() is mine
            yield f"{label}: truth", bool(mine)
            yield f"{label}: pickle", tried(pickle.dumps, mine)
        yield (
            "isinstance",
            [
                isinstance(executor, futures.Executor),
                isinstance(future, futures.Future),
            ],
        )
        yield "with", executor.__enter__() is executor
        future.result()
    original.shutdown()


@cases
def submitted(lib: Any) -> Iterator[tuple[str, Any]]:
    with lib.Executor(2, FORK) as executor:
        yield "no function", tried(executor.submit)
        yield "keyword fn", tried(executor.submit, fn=abs)
        yield "fn and fn", outcome(executor.submit(dict, fn=1, self=2))
        nothing_to_call: dict[str, Any] = {"number": 1, "none": None, "text": "abs"}
        for label, function in nothing_to_call.items():
            yield f"not callable: {label}", outcome(executor.submit(function, 1))
        yield "partial", outcome(executor.submit(functools.partial(pow, 2), 5))
        yield "method", outcome(executor.submit("a".upper))
        yield "class", outcome(executor.submit(Fraction, 1, 2))
        yield "wrong arguments", outcome(executor.submit(nothing, 1))
        yield "a lock as an argument", outcome(executor.submit(returned, threading.Lock()))
        yield "a generator as an argument", outcome(executor.submit(returned, a_generator()))
        for result in (a_lock, a_generator):
            yield f"result: {result.__name__}", outcome(executor.submit(result))
        for error in ERRORS:
            yield f"raises {kind(error)}", outcome(executor.submit(raise_it, error))
            yield (
                f"an argument whose pickling raises {kind(error)}",
                outcome(executor.submit(returned, Raises(error, late=False)))
                if isinstance(error, Exception)
                else "",
            )
            yield (
                f"a result whose pickling raises {kind(error)}",
                outcome(executor.submit(Raises, error, False)),
            )
        yield "raises what cannot be pickled", outcome(executor.submit(raise_new, "holding"))
        for raising in (raise_from, raise_described, raise_group):
            raised: Any = executor.submit(raising).exception(LONG)
            yield (
                f"error of {raising.__name__}",
                [
                    kind(raised),
                    str(raised)[:40],
                    type(raised.__cause__).__name__,
                    raising.__name__ in str(raised.__cause__),
                    raised.__context__ is None,
                    getattr(raised, "__notes__", None),
                    {key: value for key, value in vars(raised).items() if key[0] != "_"},
                ],
            )
        yield "afterwards", outcome(executor.submit(abs, -1))
    yield "submit after shutdown", tried(executor.submit, abs, 1)
    yield "map after shutdown", tried(executor.map, abs, [1])
    yield "map of nothing after shutdown", tried(lambda: list(executor.map(abs, [])))


def each_noted(taken: list[int]) -> Iterator[int]:
    for number in range(5):
        taken.append(number)
        yield number


@cases
def mapped(lib: Any) -> Iterator[tuple[str, Any]]:
    def broken() -> Iterator[int]:
        yield 1
        raise FromHandler

    with lib.Executor(2, FORK) as executor:

        def all_of(*args: Any, **kwargs: Any) -> list[Any]:
            return list(executor.map(*args, **kwargs))

        yield "no iterable", tried(all_of, abs)
        yield "no function", tried(executor.map)
        yield "not iterable", tried(all_of, abs, 1)
        yield "not callable", tried(all_of, None, [1])
        yield "two", tried(all_of, pow, [1, 2, 3], [2, 2])
        yield "an iterable that raises", tried(executor.map, abs, broken())
        yield "in order", tried(all_of, waited, [0.05, 0.01, 0], "abc")
        for label, value in (*ODD.items(), ("two", 2), ("integral float", 2.0), ("large", 10**6)):
            yield f"chunksize {label}", tried(all_of, abs, [-1, -2, -3], chunksize=value)
        for label, value in (ODD | HUGE).items():
            yield f"timeout {label}, of nothing", tried(all_of, abs, [], timeout=value)
            if label not in ("nan", "true", "zero", "zero float", "small", "fraction"):
                yield (
                    f"timeout {label}",
                    tried(all_of, waited, [0.02], "a", timeout=value),
                )
        values = executor.map(raise_it_if, [1, 2, 3], [None, ValueError("two"), None])
        yield "an error in between", [tried(next, values) for _ in range(4)]
        values = executor.map(waited, [3.0, 0, 0], timeout=0.01)
        yield "too late", [tried(next, values) for _ in range(3)]
        values = executor.map(waited, [0, 0.05, 0])
        next(values)
        values.close()
        yield "closed", tried(next, values)
        yield "send", tried(executor.map(abs, [1]).send, None)
        yield "type", hasattr(executor.map(abs, [1]), "close")
        values = executor.map(abs, [-1, -2, -3], chunksize=2)
        yield "chunks", [tried(next, values) for _ in range(4)]
        values = executor.map(raise_it_if, [1, 2, 3], [None, ValueError(), None], chunksize=3)
        yield "an error in a chunk", [tried(next, values) for _ in range(2)]
        taken: list[int] = []
        executor.map(abs, each_noted(taken))
        yield "taken at once", taken


def raise_it_if(value: Any, error: BaseException | None) -> Any:
    if error is not None:
        raise error
    return value


def ended(thread: threading.Thread) -> bool:
    thread.join()
    return not thread.is_alive()


@cases
def futures_of_tasks(lib: Any) -> Iterator[tuple[str, Any]]:
    with lib.Executor(1, FORK) as executor:
        gate = f"/tmp/{os.getpid()}.{lib is implementation('shmq')}"
        pending = executor.submit(wait_for, gate)
        eventually(pending.running)
        for label, timeout in ODD.items():
            if label != "none":
                yield f"pending.result({label})", tried(pending.result, timeout)
                yield f"pending.exception({label})", tried(pending.exception, timeout)
        yield (
            "pending",
            [
                pending.done(),
                pending.running(),
                pending.cancelled(),
                pending.cancel(),
            ],
        )
        behind = [executor.submit(returned, number) for number in range(8)]
        last = behind[-1]
        said: list[Any] = []
        last.add_done_callback(lambda future: said.append(future.cancelled()))
        yield (
            "cancel",
            [last.cancel(), last.cancel(), last.cancelled(), last.done(), last.running()],
        )
        yield "cancelled", [tried(last.result), tried(last.exception), said]
        found: list[str] = []
        waiter = threading.Thread(target=lambda: found.append(tried(behind[-2].result, LONG)))
        waiter.start()
        time.sleep(0.1)  # it waits
        yield "cancelled while a thread waits", [behind[-2].cancel(), ended(waiter), found]
        last.add_done_callback(lambda future: said.append(future is last))
        yield "a callback after that", said
        yield "not all", [len(part) for part in futures.wait([pending], 0.01)]
        order: list[Any] = []
        for number in range(3):
            pending.add_done_callback(lambda _, number=number: order.append(number))
        logging.disable(logging.CRITICAL)
        pending.add_done_callback(lambda _: raise_it(ValueError("of a callback")))
        pending.add_done_callback(lambda _: order.append("after an error"))
        pending.add_done_callback(lambda future: order.append(future.result()))
        with open(gate, "w"):
            pass
        yield "result", pending.result(LONG)
        eventually(lambda: len(order) == 5)
        os.unlink(gate)
        yield "callbacks", order
        logging.disable(logging.NOTSET)
        yield (
            "done",
            [
                pending.done(),
                pending.running(),
                pending.cancelled(),
                pending.cancel(),
                pending.exception(),
            ],
        )
        yield "the others", [future.result(LONG) for future in behind[:-2]]


@cases
def done_futures(lib: Any) -> Iterator[tuple[str, Any]]:
    with lib.Executor(1, FORK) as executor:
        pending = executor.submit(abs, -1)
        pending.result(LONG)
        behind = [executor.submit(returned, number) for number in range(3)]
        for label, timeout in (ODD | HUGE).items():
            yield f"done.result({label})", tried(pending.result, timeout)
        yield "set_result", tried(pending.set_result, 1)
        yield "set_exception", tried(pending.set_exception, ValueError())
        yield "callback that is no function", tried(pending.add_done_callback, None)
        error = executor.submit(raise_it, ValueError("a"))
        yield "the same error twice", tried(error.result) and error.exception() is error.exception()
        yield (
            "as_completed",
            sorted(future.result() for future in futures.as_completed([*behind, behind[0]], LONG)),
        )
        yield (
            "as_completed too late",
            tried(lambda: list(futures.as_completed([executor.submit(waited, 3.0)], 0.01))),
        )
        yield "wait for nothing", len(futures.wait([]).done)
        for how in (futures.FIRST_COMPLETED, futures.FIRST_EXCEPTION):
            yield (
                f"wait {how}",
                tried(
                    lambda how=how: len(
                        futures.wait([executor.submit(raise_it, KeyError())], LONG, how).done
                    )
                ),
            )
        late = executor.submit(waited, 1.0)  # of futures that are done nobody asks how to wait
        yield "wait nonsense", tried(lambda: len(futures.wait([late], LONG, "nonsense").done))
        with futures.ThreadPoolExecutor(1) as threads:
            both = [threads.submit(abs, -1), executor.submit(abs, -2)]
            yield "with other futures", sorted(f.result() for f in futures.as_completed(both))
        made: list[Any] = []
        first = executor.submit(abs, -3)
        first.add_done_callback(lambda _: made.append(executor.submit(abs, -4)))
        eventually(lambda: made)
        yield "submitted in a callback", made[0].result(LONG)


def gated(executor: Any) -> tuple[Any, Callable[[], Any]]:
    """A future, and what lets its task end, which runs."""
    path = f"/tmp/{os.getpid()}.{time.monotonic_ns()}"
    future = executor.submit(wait_for, path)
    eventually(future.running)

    def let_go() -> Any:
        with open(path, "w"):
            pass
        future.add_done_callback(lambda _: os.unlink(path))

    return future, let_go


def note(said: list[Any], call: Callable[[], Any]) -> Any:
    said.append(call())


@cases
def signals_in_result(lib: Any) -> Iterator[tuple[str, Any]]:
    with lib.Executor(2, FORK) as executor:
        future, let_go = gated(executor)
        with alarm(lambda: raise_it(FromHandler())):
            yield "raises in result", tried(future.result)
        let_go()
        yield "result after that", future.result(LONG)
        future, let_go = gated(executor)
        with alarm(lambda: raise_it(KeyboardInterrupt())):
            yield "raises in wait", tried(futures.wait, [future])
        let_go()
        yield "result after that wait", future.result(LONG)
        calls: dict[str, Callable[[Any], Any]] = {
            "asks done": lambda future: future.done(),
            "waits for the same, a little": lambda future: tried(future.result, 0.01),
            "submits": lambda _: executor.submit(abs, -5).result(LONG),
            "cancels": lambda future: future.cancel(),
        }
        for label, call in calls.items():
            future, let_go = gated(executor)
            said: list[Any] = []
            with alarm(lambda: note(said, lambda: call(future)) or let_go()):  # noqa: B023
                yield label, [future.result(LONG), said]
        future, let_go = gated(executor)
        said = []
        with alarm(lambda: let_go() or note(said, future.result)):
            yield "waits for the same", [future.result(LONG), said]


@cases
def ends_of_executors(lib: Any) -> Iterator[tuple[str, Any]]:
    executor = lib.Executor(1, FORK)
    yield "unused", [tried(executor.shutdown), tried(executor.shutdown)]
    yield "submit", tried(executor.submit, abs, 1)
    executor = lib.Executor(1, FORK)
    pending = [executor.submit(waited, 0.01, number) for number in range(5)]
    yield "without waiting", tried(executor.shutdown, False)
    yield "submit then", tried(executor.submit, abs, 1)
    yield "all are done", [future.result(LONG) for future in pending]
    executor = lib.Executor(1, FORK)
    pending = [executor.submit(waited, 0.5, number) for number in range(20)]
    eventually(pending[0].running)
    yield "cancelling", tried(executor.shutdown, True, cancel_futures=True)
    yield (
        "first, last",
        [
            pending[0].result(LONG),
            pending[-1].cancelled(),
            all(future.done() for future in pending),
        ],
    )
    yield "positional cancel_futures", tried(lib.Executor(1, FORK).shutdown, True, True)
    try:
        with lib.Executor(1, FORK) as executor:
            future = executor.submit(waited, 0.05, "done")
            raise FromHandler
    except FromHandler:
        yield "a block that raises", [future.done(), future.result()]
    executor = lib.Executor(1, FORK)
    future = executor.submit(waited, 0.1, "kept")
    del executor
    gc.collect()
    yield "a pool that nobody has", future.result(LONG)
    executor = lib.Executor(1, FORK)
    executor.submit(waited, 0.05)
    gc.collect()
    yield "a future that nobody has", outcome(executor.submit(abs, -1))
    executor.shutdown()
    executor = lib.Executor(1, FORK)
    executor.submit(abs, 1).add_done_callback(lambda _: executor.shutdown(wait=False))
    eventually(lambda: tried(executor.submit, abs, 1) == "RuntimeError")
    yield "ended in a callback", tried(executor.submit, abs, 1)
    executor.shutdown()
    executor = lib.Executor(1, FORK)
    dead = executor.submit(os._exit, 3)
    yield "a worker that ends", tried(dead.result, LONG)
    executor.shutdown()
    for method in ("kill_workers", "terminate_workers"):  # the standard library: since Python 3.14
        if hasattr(lib.Executor, method):
            executor = lib.Executor(1, FORK)
            future = executor.submit(waited, 60)
            eventually(future.running)
            getattr(executor, method)()
            yield f"{method}", [tried(future.result, LONG), tried(executor.submit, abs)]


@cases
def ended_while_threads_submit(lib: Any) -> Iterator[tuple[str, Any]]:
    if lib is Standard:  # where tasks that were not cancelled may stay for ever
        return
    lock, stopped = threading.Lock(), []
    executor = lib.Executor(2, FORK)
    many: list[Any] = []

    def submit_more() -> None:
        try:
            while True:
                found = executor.submit(abs, -1)
                with lock:
                    many.append(found)
        except RuntimeError as exc:
            stopped.append(kind(exc))

    threads = [threading.Thread(target=submit_more) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(many) > 50)
    executor.shutdown(cancel_futures=True)
    for thread in threads:
        thread.join()
    ended = futures.wait(many, LONG)
    yield "ended while threads submit", [stopped, len(ended.not_done)]


@cases
def executors_and_processes(lib: Any) -> Iterator[tuple[str, Any]]:
    executor = lib.Executor(2, FORK)
    future = executor.submit(waited, 0.2, "of the parent")
    eventually(future.running)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with lib.Executor(1, FORK) as own:
            os.write(writer, str(own.submit(abs, -7).result()).encode())
        os._exit(0)
    yield "forked while a task runs", [os.read(reader, 10).decode(), os.waitpid(pid, 0)[1]]
    yield "the parent", future.result(LONG)
    executor.shutdown()

    async def run(executor: Any) -> list[Any]:
        loop = asyncio.get_running_loop()
        one = loop.run_in_executor(executor, abs, -1)
        two = asyncio.wrap_future(executor.submit(returned, 2))
        three = asyncio.wrap_future(executor.submit(raise_it, ValueError("x")))
        late = await asyncio.wait([loop.run_in_executor(executor, waited, 3.0)], timeout=0.01)
        return [
            await one,
            await two,
            tried(lambda: None) if kind(await _error(three)) else "",
            len(late[1]),
        ]

    with lib.Executor(2, FORK) as executor:
        yield "asyncio", asyncio.run(run(executor))
    with lib.Executor(1, FORK) as outer:
        yield "pools in pools", outer.submit(pools, lib.__name__, 2).result(LONG)


async def _error(awaited: Any) -> BaseException | None:
    try:
        await awaited
    except BaseException as exc:
        return exc
    return None


def pools(library: str, depth: int) -> int:
    if depth == 0:
        return os.getpid() > 0
    with implementation(library).Executor(1, FORK) as executor:
        found: int = executor.submit(pools, library, depth - 1).result()
        return found + 1
