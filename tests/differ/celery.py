"""Programs of Celery: calls of one application, on Redis and on shmq.

A worker with two processes and one with one process serve all programs of a side.
"""

from __future__ import annotations

import datetime
import importlib
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from differ.celery_steps import LONG, STEPS, error, shown
from differ.framework_servers import Server
from differ.machine import Unfit

GOES_ON = True
#: Bytes, around the limits of the core and of messages.
SIZES = (0, 1, 4000, 65_000, 65_536, 150_000, 900_000, 1_100_000)
#: With `result_extended` a result has the arguments, too.
ARGUMENTS = (*SIZES[:-2], 400_000, SIZES[-1])
VALUES: tuple[Any, ...] = (
    None,
    0,
    -1,
    2**70,
    1.5,
    "",
    "ä\0b",
    [1, [2, None]],
    {"a": {"b": 1}},
    True,
)
MADE = (
    "bytes",
    "set",
    "tuple",
    "datetime",
    "decimal",
    "uuid",
    "nan",
    "large",
    "nested",
    "keys",
    "lambda",
    "lock",
    "exception",
)
FAILS = (
    "ValueError",
    "KeyError",
    "Odd",
    "WithLock",
    "bytes",
    "long",
    "TimeoutError",
    "local",
)
SERIALIZERS = ("json", "json", "pickle", "yaml")
COMPRESSIONS = (None, None, None, "zlib", "bzip2")
#: The questions that a result is asked.
QUESTIONS = ("get", "state", "quiet", "info", "forget", "flags", "children", "traceback")


# ---- drawing ----


def some_options(rng: random.Random) -> dict[str, Any]:
    """Options of `apply_async`."""
    found: dict[str, Any] = {}
    if rng.random() < 0.3:
        found["queue"] = rng.choice(("first", "second", "celery"))
    if rng.random() < 0.3:
        found["serializer"] = rng.choice(SERIALIZERS)
    if rng.random() < 0.2:
        found["compression"] = rng.choice(COMPRESSIONS)
    if rng.random() < 0.3:
        found["priority"] = rng.choice((0, 3, 5, 6, 9))
    if rng.random() < 0.15:
        found["countdown"] = rng.choice((0, 0.05, 0.2))
    elif rng.random() < 0.15:
        found["eta"] = rng.choice((-100, 0.1))
    if rng.random() < 0.15:
        found["expires"] = rng.choice((100, 1000.5, -5, "date"))
    if rng.random() < 0.1:
        found["ignore_result"] = rng.random() < 0.5
    if rng.random() < 0.1:
        found["headers"] = {"word": "x"}
    if rng.random() < 0.1:
        found["shadow"] = "shadow"
    if rng.random() < 0.1:
        found["acks_late"] = True
    return found


def a_step(rng: random.Random) -> list[Any]:
    what = rng.random()
    options = some_options(rng)
    if what < 0.2:
        return ["call", "echo", [rng.choice(VALUES)], options, rng.choice(QUESTIONS)]
    if what < 0.28:
        return ["call", "made", ["text", rng.choice(SIZES)], options, "get"]
    if what < 0.32:
        return ["argument", rng.choice(ARGUMENTS), options]
    if what < 0.4:
        return ["call", "made", [rng.choice(MADE)], options, rng.choice(QUESTIONS)]
    if what < 0.52:
        return ["call", "fails", [rng.choice(FAILS)], options, rng.choice(QUESTIONS)]
    if what < 0.56:
        return ["call", "looks", [], options, "get"]
    if what < 0.6:
        args = [rng.randrange(5), rng.choice((0, 0.05)), rng.choice((None, 1, 3))]
        return ["call", "flaky", args, {}, rng.choice(QUESTIONS)]
    if what < 0.63:
        return ["call", "auto", [rng.randrange(4)], {}, rng.choice(QUESTIONS)]
    if what < 0.75:
        name = rng.choice(list(CANVAS))
        return ["canvas", name, rng.choice((1, 2, 5)), rng.choice(("", "", "", "fails"))]
    return rng.choice(
        [
            *(["step", name] for name in STEPS),
            ["call", rng.choice(("routed", "ignores", "spawns", "replaces")), [], {}, "get"],
        ]
    )


def draw(rng: random.Random) -> dict[str, Any]:
    steps: list[Any] = []
    for _ in range(rng.choice((2, 5, 10))):
        step = a_step(rng)
        if step[0] == "call" and step[1] in ("spawns", "replaces"):
            step[2] = [rng.randrange(3)]
        steps.append(step)
    program = {"steps": steps}
    steps[:] = [step for step in steps if fits(step)]
    return program


def fits(step: list[Any]) -> bool:
    """Whether its outcome is the same whenever it is asked for."""
    if step[0] == "call":
        options, question = step[3], step[4]
        if options.get("ignore_result") or step[1] == "ignores":
            return question == "get"
    return True


def smaller(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Programs with fewer steps, and with fewer options."""
    steps = program["steps"]
    size = max(len(steps) // 2, 1)
    while size:
        for start in range(0, len(steps), size):
            yield {"steps": steps[:start] + steps[start + size :]}
        size //= 2
    for number, step in enumerate(steps):
        if step[0] == "call":
            for name in step[3]:
                fewer = {key: value for key, value in step[3].items() if key != name}
                less = [*step[:3], fewer, *step[4:]]
                yield {"steps": [*steps[:number], less, *steps[number + 1 :]]}


def plan(program: dict[str, Any]) -> list[tuple[int, str, str]]:
    """Number, label and nothing of each step."""
    if not program["steps"]:
        raise Unfit
    found = []
    for number, step in enumerate(program["steps"]):
        if step[0] == "call":
            about = " ".join(str(each) for each in step[2]) if step[1] in _NAMED else ""
            options = "".join(f" {name}={value}" for name, value in sorted(step[3].items()))
            label = f"{step[4]} of {step[1]} {about}".rstrip() + options
        elif step[0] == "argument":
            label = f"argument of {step[1]} bytes"
        else:
            label = " ".join(str(each) for each in step[1:]).rstrip()
        found.append((number, label, ""))
    return found


_NAMED = ("fails", "made")

# ---- running ----

_server: Any = None


def begin(side: str) -> None:
    """Start the broker and the workers of this side."""
    global _server
    _server = Server(side)
    os.environ["DIFFER_URL"] = _server.url
    importlib.import_module("differ.celery_app")  # programs are forked with it
    argv = ["-m", "celery", "-A", "differ.celery_app", "worker", "--loglevel=INFO"]
    quiet = ["--without-gossip", "--without-mingle", "-E"]
    try:
        _server.work(
            *argv,
            *quiet,
            "-c",
            "2",
            "-n",
            "one@differ",
            "-Q",
            "celery,first,second",
            ready=" ready.",
        )
        _server.work(
            *argv,
            *quiet,
            "-c",
            "1",
            "-P",
            "prefork",
            "-n",
            "two@differ",
            "-Q",
            "busy,slow",
            ready=" ready.",
        )
    except BaseException:
        _server.close()
        raise


def end(side: str) -> None:
    """Stop them."""
    _server.close()


def run(side: str, program: dict[str, Any], say: Callable[..., None]) -> None:
    from differ import celery_app

    with tempfile.TemporaryDirectory(prefix="differ-") as gates:
        Program(celery_app, Path(gates)).run(program, say)


class Program:
    def __init__(self, module: Any, gates: Path) -> None:
        self.module, self.app, self.gates = module, module.app, gates
        self.count = 0

    def run(self, program: dict[str, Any], say: Callable[..., None]) -> None:
        for number, (what, *args) in enumerate(program["steps"]):
            try:
                seen = getattr(self, "_" + what)(*args)
            except Exception as exc:
                seen = error(exc)
            say(number, seen)

    def gate(self) -> str:
        self.count += 1
        return str(self.gates / f"gate{self.count}")

    # ---- calls ----

    def _call(self, name: str, args: list[Any], options: dict[str, Any], question: str) -> str:
        given = dict(options)
        now = datetime.datetime.now(datetime.UTC)
        if "eta" in given:
            given["eta"] = now + datetime.timedelta(seconds=given["eta"])
        if given.get("expires") == "date":
            given["expires"] = now + datetime.timedelta(seconds=100)
        result = getattr(self.module, name).apply_async(args, **given)
        if given.get("ignore_result") or name == "ignores":
            done = self.module.echo.apply_async((1,), queue=given.get("queue"))
            return f"{done.get(LONG)} {result.state}"
        if name == "spawns":
            found = result.get(LONG)
            children = [each.get(LONG) for each in result.children]
            return f"{len(found)} {len(children)} {children}"
        return getattr(self, f"_of_{question}")(result)

    def _argument(self, size: int, options: dict[str, Any]) -> str:
        given = {
            key: options[key] for key in ("serializer", "compression", "queue") if key in options
        }
        return shown(self.module.echo.apply_async(("x" * size,), **given).get(LONG))

    def _of_get(self, result: Any) -> str:
        return shown(result.get(LONG))

    def _of_quiet(self, result: Any) -> str:
        return shown(result.get(LONG, propagate=False))

    def _of_state(self, result: Any) -> str:
        result.get(LONG, propagate=False)
        return f"{result.state} {result.status}"

    def _of_info(self, result: Any) -> str:
        result.get(LONG, propagate=False)
        return f"{shown(result.info)} {result.name} {result.queue} {result.retries}"

    def _of_forget(self, result: Any) -> str:
        result.get(LONG, propagate=False)
        result.forget()
        return f"{self.app.AsyncResult(result.id).state}"

    def _of_flags(self, result: Any) -> str:
        result.get(LONG, propagate=False)
        flags = result.ready(), result.successful(), result.failed()
        return f"{flags} {type(result.date_done).__name__}"

    def _of_children(self, result: Any) -> str:
        result.get(LONG, propagate=False)
        return f"{result.children} {result.parent} {result.worker}"

    def _of_traceback(self, result: Any) -> str:
        result.get(LONG, propagate=False)
        lines = (result.traceback or "").strip().splitlines()
        return lines[-1][:80] if lines else "none"

    # ---- several calls ----

    def _canvas(self, name: str, count: int, fails: str) -> str:
        made = CANVAS[name](self.module, count, fails)
        result = made.apply_async()
        try:
            return shown(result.get(LONG))
        except Exception as exc:
            return error(exc)

    def _step(self, name: str) -> str:
        return str(STEPS[name](self))


def _chain(module: Any, count: int, fails: str) -> Any:
    from celery import chain

    middle = [module.fails.si("ValueError")] if fails else []
    return chain(
        module.echo.s(1), *(module.add.s(each) for each in range(count)), *middle, module.add.s(1)
    )


def _group(module: Any, count: int, fails: str) -> Any:
    from celery import group

    return group(*(module.echo.s(each) for each in range(count)), *_bad(module, fails))


def _bad(module: Any, fails: str) -> list[Any]:
    return [module.fails.si("ValueError")] if fails else []


def _chord(module: Any, count: int, fails: str) -> Any:
    from celery import chord

    header = [*(module.echo.s(each) for each in range(count)), *_bad(module, fails)]
    return chord(header, module.total.s())


def _deep(module: Any, count: int, fails: str) -> Any:
    """A chain of a chord of chains."""
    from celery import chain, chord, group

    parts = group(chain(module.echo.si(each), module.add.s(1)) for each in range(count))
    return chain(
        module.echo.si(0), chord(parts, module.total.s()), *_bad(module, fails), module.add.s(1)
    )


def _group_in_chain(module: Any, count: int, fails: str) -> Any:
    from celery import chain, group

    return chain(
        module.echo.s(3),
        group(module.add.s(each) for each in range(count)),
        *_bad(module, fails),
        module.total.s(),
    )


def _map(module: Any, count: int, fails: str) -> Any:
    return module.echo.map(list(range(count)))


def _starmap(module: Any, count: int, fails: str) -> Any:
    return module.add.starmap([(each, 1) for each in range(count)])


def _chunks(module: Any, count: int, fails: str) -> Any:
    return module.add.chunks([(each, 1) for each in range(count)], 2).group()


def _chord_of_text(module: Any, count: int, fails: str) -> Any:
    from celery import chord

    header = [*(module.made.s("text", 50_000) for _ in range(count)), *_bad(module, fails)]
    return chord(header, module.echo.s())


CANVAS: dict[str, Callable[[Any, int, str], Any]] = {
    "chain": _chain,
    "group": _group,
    "chord": _chord,
    "deep": _deep,
    "group in a chain": _group_in_chain,
    "map": _map,
    "starmap": _starmap,
    "chunks": _chunks,
    "chord of texts": _chord_of_text,
}

WITNESSES: list[Any] = [
    {
        "steps": [
            ["step", "inspect scheduled"],
            ["step", "queues in turn"],
            ["call", "made", ["text", 1_100_000], {}, "get"],
            ["argument", 1_100_000, {}],
        ]
    }
]
