"""Cases of queues for `drop_in_matrix`."""

from __future__ import annotations

import copy
import functools
import gc
import multiprocessing
import os
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from support.drop_in_matrix import (
    ERRORS,
    HUGE,
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
from support.drop_in_programs import Standard


def with_item(made: Any, item: object = "item") -> Any:
    made.put(item)
    eventually(lambda: not made.empty())
    return made


@cases
def names_of_queues(lib: Any) -> Iterator[tuple[str, Any]]:
    for name in ("Queue", "JoinableQueue", "SimpleQueue"):
        original = getattr(multiprocessing, name)()
        mine = getattr(lib, name)()
        missing = [
            one for one in dir(original) if not one.startswith("_") and not hasattr(mine, one)
        ]
        yield f"{name}: missing", missing
        mine.of_the_program = 1
        yield f"{name}: an attribute of the program's", mine.of_the_program
        yield f"{name}: a weak reference", weakref.ref(mine)() is mine
        yield f"{name}: hash", hash(mine) == hash(mine)
        yield f"{name}: truth", bool(mine)
        yield f"{name}: len", tried(len, mine)
        yield f"{name}: pickle", tried(pickle.dumps, mine)
        yield f"{name}: copy", tried(copy.copy, mine)
        mine.close()


@cases
def sizes_of_queues(lib: Any) -> Iterator[tuple[str, Any]]:
    for name in ("Queue", "JoinableQueue"):
        for label, size in (*ODD.items(), ("large", 30_000), ("integral float", 2.0)):
            if label in ("infinity", "small"):
                continue
            yield (
                f"{name}(maxsize={label})",
                tried(lambda n=name, s=size: getattr(lib, n)(s).full()),
            )
        bounded = getattr(lib, name)(2)
        yield (
            f"{name}: bounded",
            [
                tried(bounded.put, 1, False),
                tried(bounded.put_nowait, 2),
                bounded.full(),
                bounded.qsize(),
                tried(bounded.put, 3, False),
                tried(bounded.put_nowait, 3),
                tried(bounded.put, 3, True, 0.01),
                tried(bounded.put, obj=3, block=True, timeout=0.01),
                bounded.get(),
                tried(bounded.put, 3, timeout=5),
                bounded.get(True),
                bounded.get(block=True, timeout=5),
            ],
        )
        yield f"{name}: too many arguments", tried(bounded.put, 1, True, 1, 1)
        yield f"{name}: put nothing", tried(bounded.put)
        yield f"{name}: unknown keyword", tried(bounded.get, wait=True)
    yield "SimpleQueue(1)", tried(lambda: type(lib.SimpleQueue(1)).__name__)


@cases
def timeouts_of_get(lib: Any) -> Iterator[tuple[str, Any]]:
    for name in ("Queue", "JoinableQueue"):
        for label, timeout in ODD.items():
            if label != "none":
                empty = getattr(lib, name)()
                yield f"{name}.get(timeout={label})", tried(empty.get, True, timeout)
            empty = getattr(lib, name)()
            yield f"{name}.get(False, {label})", tried(empty.get, False, timeout)
            yield (
                f"{name}.get(False, {label}) of an item",
                tried(with_item(getattr(lib, name)()).get, False, timeout),
            )
        for label, timeout in (ODD | HUGE).items():
            full = with_item(getattr(lib, name)())
            yield f"{name}.get(True, {label}) of an item", tried(full.get, True, timeout)
            yield f"{name}: left after get(True, {label})", full.empty()
        no: tuple[Any, ...] = (0, "", [], None)
        for block in no:
            empty = getattr(lib, name)()
            yield f"{name}.get({block!r})", tried(empty.get, block)
        for block in (1, "yes", [0]):
            full = with_item(getattr(lib, name)())
            yield f"{name}.get({block!r}) of an item", tried(full.get, block)
        yield f"{name}.get_nowait()", tried(getattr(lib, name)().get_nowait)


@cases
def timeouts_of_put(lib: Any) -> Iterator[tuple[str, Any]]:
    for name in ("Queue", "JoinableQueue"):
        for label, timeout in ODD.items():
            full = getattr(lib, name)(1)
            full.put(0)
            if label != "none":
                yield f"full {name}.put(timeout={label})", tried(full.put, 1, True, timeout)
            yield f"full {name}.put(False, {label})", tried(full.put, 1, False, timeout)
            yield f"full {name} after put(timeout={label})", full.qsize()
        for label, timeout in (ODD | HUGE).items():
            empty = getattr(lib, name)(5)
            yield f"{name}.put(timeout={label})", tried(empty.put, 1, True, timeout)
            yield f"{name} after put(timeout={label})", empty.qsize()
            yield f"{name}.put(False, {label})", tried(empty.put, 1, False, timeout)


@cases
def closed_queues(lib: Any) -> Iterator[tuple[str, Any]]:
    for name in ("Queue", "JoinableQueue"):
        made = with_item(getattr(lib, name)(3))
        yield f"{name}.join_thread before close", tried(made.join_thread)
        yield f"{name}.close", [tried(made.close), tried(made.close)]
        for method, args in (
            ("put", (1,)),
            ("put_nowait", (1,)),
            ("put", (1, True, -1)),
            ("get", ()),
            ("get_nowait", ()),
            ("get", (True, 0.01)),
            ("qsize", ()),
            ("empty", ()),
            ("full", ()),
            ("join_thread", ()),
            ("join_thread", ()),
            ("cancel_join_thread", ()),
        ):
            yield f"closed {name}.{method}{args}", tried(getattr(made, method), *args)
        fresh = getattr(lib, name)()
        fresh.cancel_join_thread()
        yield f"{name}: cancel_join_thread first", tried(fresh.put, 1)
        unused = getattr(lib, name)()
        unused.close()
        yield f"{name}: join_thread of an unused one", tried(unused.join_thread)
        yield f"{name}: empty of an unused one", tried(unused.empty)
    simple = lib.SimpleQueue()
    simple.put(1)
    yield "SimpleQueue", [simple.empty(), simple.get(), simple.empty()]
    yield "SimpleQueue.put(block)", tried(simple.put, 1, True)
    yield "SimpleQueue.get(timeout)", tried(simple.get, timeout=1)
    simple.close()
    yield (
        "closed SimpleQueue",
        [
            tried(simple.close),
            tried(simple.put, 1),
            tried(simple.get),
            tried(simple.empty),
        ],
    )


@cases
def done_and_joined(lib: Any) -> Iterator[tuple[str, Any]]:
    made = lib.JoinableQueue()
    yield "join of an empty one", tried(made.join)
    yield "task_done too early", tried(made.task_done)
    for number in range(3):
        made.put(number)
    yield "three", [(made.get(), tried(made.task_done)) for _ in range(3)]
    yield "join after all", tried(made.join)
    yield "task_done too often", tried(made.task_done)
    made.put(1)
    threading.Timer(0.05, lambda: (made.get(), made.task_done())).start()
    yield "join waits for another thread", tried(made.join)
    yield "join with a timeout", tried(made.join, 1)
    made.put(1)
    made.get()
    helper = threading.Thread(target=made.task_done)
    helper.start()
    helper.join()
    yield "task_done in another thread", tried(made.join)


@cases
def objects_in_queues(lib: Any) -> Iterator[tuple[str, Any]]:
    for name in ("Queue", "JoinableQueue", "SimpleQueue"):
        for error in ERRORS:
            made = getattr(lib, name)()
            made.put(Raises(error, late=True))
            made.put("behind")
            yield (
                f"{name}: unpickling raises {kind(error)}",
                [tried(made.get), tried(made.get), made.empty()],
            )
        made = getattr(lib, name)()
        for item in (None, False, b"", "", 0, (), [None], {"a": 1}, float("inf"), len, kind, ODD):
            made.put(item)
            got = made.get()
            yield f"{name}: {str(item)[:20]}", got == item or repr(got)
        if name == "SimpleQueue":  # its pickling is done when `put` returns
            items = [1, 2]
            made.put(items)
            items.append(3)
            yield f"{name}: changed after put", made.get()
        else:
            made.put(bytearray(200_000))
            found = made.get()
            found[0] = 1  # a bytearray may be changed, however large
            yield f"{name}: large bytearray", [type(found).__name__, len(found), found[0]]
    for error in ERRORS:
        made = lib.SimpleQueue()
        yield (
            f"SimpleQueue: pickling raises {kind(error)}",
            [tried(made.put, Raises(error, late=False)), made.empty(), tried(made.put, 1)],
        )
    made = lib.SimpleQueue()
    yield "SimpleQueue: a lambda", tried(made.put, lambda: 1)
    yield "SimpleQueue: a lock", tried(made.put, threading.Lock())
    yield "SimpleQueue: itself", tried(made.put, made)


@cases
def queues_and_threads(lib: Any) -> Iterator[tuple[str, Any]]:
    for name in ("Queue", "JoinableQueue", "SimpleQueue"):
        made = getattr(lib, name)()
        got: list[int] = []

        def produce(start: int, made: Any = made) -> None:
            for number in range(start, start + 100):
                made.put(number)

        def consume(made: Any = made, got: list[int] = got) -> None:
            while (item := made.get()) is not None:
                got.append(item)

        consumers = [threading.Thread(target=consume) for _ in range(3)]
        producers = [threading.Thread(target=produce, args=(n * 100,)) for n in range(4)]
        for thread in consumers + producers:
            thread.start()
        for thread in producers:
            thread.join()
        for _ in consumers:
            made.put(None)
        for thread in consumers:
            thread.join()
        yield f"{name}: threads", [len(got), sum(got), made.empty()]


@cases
def queues_and_signals(lib: Any) -> Iterator[tuple[str, Any]]:
    for name in ("Queue", "JoinableQueue", "SimpleQueue"):
        made = getattr(lib, name)()
        with alarm(functools.partial(made.put, "from the handler")):
            yield f"{name}: a handler puts", tried(made.get)
        with alarm(lambda: raise_it(FromHandler())):
            yield f"{name}: a handler raises in get", tried(made.get)
        made.put(1)
        yield f"{name}: after that", [made.get(), made.empty()]
    for name in ("Queue", "JoinableQueue"):
        made = getattr(lib, name)(1)
        made.put(1)
        with alarm(lambda: raise_it(FromHandler())):
            yield f"{name}: a handler raises in put", tried(made.put, 2)
        yield f"{name}: what is in it", [made.get(), made.empty(), tried(made.put, 3), made.get()]
    joined = lib.JoinableQueue()
    joined.put(1)
    with alarm(lambda: raise_it(FromHandler())):
        yield "a handler raises in join", tried(joined.join)
    joined.get()
    if lib is not Standard:  # where `join` has a lock that the handler needs
        with alarm(joined.task_done):
            yield "a handler ends a join", tried(joined.join)


def echo(source: Any, target: Any) -> None:
    target.put(source.get())


@cases
def queues_and_processes(lib: Any) -> Iterator[tuple[str, Any]]:
    for name in ("Queue", "JoinableQueue", "SimpleQueue"):
        there, back = getattr(lib, name)(), getattr(lib, name)()
        for number in range(3):
            pid = os.fork()  # without multiprocessing
            if pid == 0:
                there.put(number)
                there.close()
                getattr(there, "join_thread", int)()
                os._exit(0)
            os.waitpid(pid, 0)
            yield f"{name}: a forked child puts", there.get()
        child = multiprocessing.Process(target=echo, args=(there, back))
        child.start()
        there.put(("nested", [1]))
        yield f"{name}: a child echoes", back.get()
        child.join()
        yield f"{name}: it ended", child.exitcode
        keeping = {"queue": there}
        del there
        gc.collect()
        keeping["queue"].put(1)
        yield f"{name}: in a dict", keeping["queue"].get()
