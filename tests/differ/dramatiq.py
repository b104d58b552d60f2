"""Programs of Dramatiq: messages of one application, on Redis and on shmq.

One worker process with four threads serves all programs of a side.
"""

from __future__ import annotations

import importlib
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from differ.framework_servers import Server
from differ.machine import Unfit

GOES_ON = True
#: Milliseconds after which an answer does not come.
LONG = 10_000
SIZES = (0, 1, 4000, 65_000, 65_536, 150_000, 900_000, 1_100_000)
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
MADE = ("bytes", "set", "tuple", "nan", "large", "nested", "keys", "lambda")
#: Results that JSON does not know: they are not stored, and nobody is told.
UNSTORED = (["bytes"], ["set"], ["lambda"])
FAILS = ("ValueError", "KeyError", "Odd", "long")


# ---- drawing ----


def some_options(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.2:
        found["delay"] = rng.choice((0, 20, 150))
    if rng.random() < 0.1:
        found["max_age"] = 100_000
    if rng.random() < 0.2:
        found["priority"] = rng.choice((0, 5, 9))
    return found


def a_step(rng: random.Random) -> list[Any]:
    what, options = rng.random(), some_options(rng)
    if what < 0.25:
        return ["call", rng.choice(("echo", "other")), [rng.choice(VALUES)], options]
    if what < 0.35:
        return ["call", "made", ["text", rng.choice(SIZES)], options]
    if what < 0.4:
        return ["argument", rng.choice(SIZES)]
    if what < 0.5:
        return ["call", "made", [rng.choice(MADE)], options]
    if what < 0.6:
        return ["call", "fails", [rng.choice(FAILS)], options]
    if what < 0.7:
        return ["flaky", rng.randrange(6)]
    if what < 0.75:
        return ["call", rng.choice(("looks", "throws", "no_result")), [], {}]
    return ["step", rng.choice(list(STEPS))]


def draw(rng: random.Random) -> dict[str, Any]:
    return {"steps": [a_step(rng) for _ in range(rng.choice((2, 5, 10)))]}


def smaller(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Programs with fewer steps."""
    steps = program["steps"]
    size = max(len(steps) // 2, 1)
    while size:
        for start in range(0, len(steps), size):
            yield {"steps": steps[:start] + steps[start + size :]}
        size //= 2


def plan(program: dict[str, Any]) -> list[tuple[int, str, str]]:
    """Number, label and nothing of each step."""
    if not program["steps"]:
        raise Unfit
    found = []
    for number, (what, *args) in enumerate(program["steps"]):
        if what == "call":
            about = " ".join(str(each) for each in args[1]) if args[0] in ("made", "fails") else ""
            options = "".join(f" {name}={value}" for name, value in sorted(args[2].items()))
            label = f"{args[0]} {about}".rstrip() + options
        elif what == "argument":
            label = f"argument of {args[0]} bytes"
        else:
            label = f"{what} {args[0]}"
        found.append((number, label.removeprefix("step "), ""))
    return found


# ---- running ----

_server: Any = None


def begin(side: str) -> None:
    """Start the broker and the worker of this side."""
    global _server
    _server = Server(side)
    os.environ["DIFFER_URL"] = _server.url
    argv = ["-m", "dramatiq", "differ.dramatiq_app", "-p", "1", "-t", "4"]
    try:
        _server.work(*argv, ready="ready for action")
    except BaseException:
        _server.close()
        raise


def end(side: str) -> None:
    """Stop them."""
    _server.close()


def run(side: str, program: dict[str, Any], say: Callable[..., None]) -> None:
    module = importlib.import_module("differ.dramatiq_app")
    with tempfile.TemporaryDirectory(prefix="differ-") as gates:
        Program(module, Path(gates)).run(program, say)


class Program:
    def __init__(self, module: Any, gates: Path) -> None:
        self.module, self.gates = module, gates
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

    def _call(self, name: str, args: list[Any], options: dict[str, Any]) -> str:
        message = getattr(self.module, name).send_with_options(args=args, **options)
        return self.outcome(message, timeout=500 if args[:1] in UNSTORED else LONG)

    def _argument(self, size: int) -> str:
        return self.outcome(self.module.echo.send("x" * size))

    def _flaky(self, failures: int) -> str:
        path = self.gate()
        answer = self.outcome(self.module.flaky.send(path, failures), failures > 0)
        return f"{answer} {os.path.getsize(path)}"

    def _step(self, name: str) -> str:
        return str(STEPS[name](self))

    def outcome(self, message: Any, again: bool = False, timeout: int = LONG) -> str:
        """The result. again: errors of attempts that are not the last may be stored meanwhile."""
        from dramatiq.results import ResultFailure

        until_ = time.monotonic() + timeout / 1000
        while True:
            try:
                return shown(message.get_result(block=True, timeout=timeout))
            except ResultFailure as exc:
                if not again or time.monotonic() > until_ - timeout / 1000 + 1:
                    return error(exc)
                time.sleep(0.01)
            except Exception as exc:
                return error(exc)


def _pipeline(program: Program) -> str:
    from dramatiq import pipeline

    made = program.module
    pipe = pipeline([made.echo.message(1), made.add.message(2), made.add.message(3)]).run()
    last = pipe.get_result(block=True, timeout=LONG)
    return f"{last} {list(pipe.get_results(block=True, timeout=LONG))} {pipe.completed}"


def _broken_pipeline(program: Program) -> str:
    made = program.module
    pipe = (
        made.echo.message(1)
        | made.fails.message_with_options(args=("ValueError",), pipe_ignore=True)
        | made.add.message(3)
    ).run()
    try:
        return f"{pipe.get_result(block=True, timeout=500)}"
    except Exception as exc:
        return error(exc)


def _group(program: Program) -> str:
    from dramatiq import group

    made = program.module
    found = group(made.echo.message(each) for each in range(6)).run()
    found.wait(timeout=LONG)
    return f"{list(found.get_results(block=True, timeout=LONG))} {found.completed_count}"


def _group_callback(program: Program) -> str:
    from dramatiq import group

    made, path = program.module, program.gate()
    found = group(made.echo.message(each) for each in range(4))
    found.add_completion_callback(made.touch.message(path))
    found.run()
    until(lambda: os.path.exists(path))
    return "called"


def _failing_group(program: Program) -> str:
    from dramatiq import group

    made = program.module
    found = group([made.echo.message(1), made.fails.message("ValueError")]).run()
    try:
        return str(list(found.get_results(block=True, timeout=LONG)))
    except Exception as exc:
        return error(exc)


def _callback(program: Program, name: str, actor: str, args: tuple[Any, ...]) -> str:
    path = program.gate()
    chosen = getattr(program.module, actor)
    chosen.send_with_options(args=args, note=path, **{name[0]: name[1]})
    until(lambda: os.path.exists(path))
    return Path(path).read_text()


def _success(program: Program) -> str:
    return _callback(program, ("on_success", "succeeded"), "echo", (5,))


def _failure(program: Program) -> str:
    return _callback(program, ("on_failure", "failed"), "fails", ("ValueError",))


def _limited(program: Program) -> str:
    return program.outcome(program.module.too_long.send())


def _aged(program: Program) -> str:
    """A message that is too old when a worker takes it."""
    message = program.module.echo.send_with_options(args=(1,), max_age=50, delay=300)
    program.outcome(program.module.echo.send_with_options(args=(1,), delay=350))
    return program.outcome(message, timeout=500)


def _nobody(program: Program) -> str:
    import dramatiq

    message: Any = dramatiq.Message(
        queue_name="default", actor_name="nobody", args=(), kwargs={}, options={}
    )
    program.module.broker.enqueue(message)
    return program.outcome(program.module.echo.send(1))


def _missing(program: Program) -> str:
    from dramatiq.results import ResultMissing

    path = program.gate()
    message = program.module.gate.send(path)
    try:
        found = str(message.get_result())
    except ResultMissing:
        found = "missing"
    late = program.outcome(message, timeout=100)
    Path(path).touch()
    return f"{found} {late} {program.outcome(message)} {program.outcome(message)}"


def _forgotten(program: Program) -> str:
    backend, message = program.module.results, program.module.echo.send(3)
    first = backend.get_result(message, block=True, timeout=LONG, forget=True)
    return f"{first} {program.outcome(message, timeout=50)}"


def _retried(program: Program) -> str:
    path = program.gate()
    return program.outcome(program.module.retries.send(path), True)


def _limiters(program: Program) -> str:
    from dramatiq.rate_limits import BucketRateLimiter, ConcurrentRateLimiter, WindowRateLimiter

    backend, key = program.module.limits, program.gate()
    found: list[Any] = []
    two = ConcurrentRateLimiter(backend, f"two {key}", limit=2)
    third: Any = two.acquire(raise_on_failure=False)
    with two.acquire() as first, two.acquire() as second, third as got:
        found.append((first, second, got))
    with two.acquire(raise_on_failure=False) as again:
        found.append(again)
    for limiter in (
        BucketRateLimiter(backend, f"bucket {key}", limit=2, bucket=100_000),
        WindowRateLimiter(backend, f"window {key}", limit=2, window=50),
    ):
        for _ in range(4):
            with limiter.acquire(raise_on_failure=False) as got:
                found.append(got)
    return str(found)


def _barrier(program: Program) -> str:
    from dramatiq.rate_limits import Barrier

    barrier = Barrier(program.module.limits, program.gate())
    made = barrier.create(parties=2), barrier.create(parties=3)
    return f"{made} {barrier.wait(block=False)} {barrier.wait(block=False)}"


def _many(program: Program) -> str:
    messages = [program.module.add.send(each, 1) for each in range(50)]
    return str(sum(each.get_result(block=True, timeout=LONG) for each in messages))


def _threads(program: Program) -> str:
    found: list[str] = []

    def one(number: int) -> None:
        found.append(program.outcome(program.module.echo.send(number)))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return str(sorted(found))


STEPS: dict[str, Callable[[Program], str]] = {
    "a pipeline": _pipeline,
    "a pipeline that fails": _broken_pipeline,
    "a group": _group,
    "a group with a callback": _group_callback,
    "a group that fails": _failing_group,
    "on_success": _success,
    "on_failure": _failure,
    "a time limit": _limited,
    "a message that is too old": _aged,
    "an actor that nobody has": _nobody,
    "a result that is not there yet": _missing,
    "a result that is forgotten": _forgotten,
    "Retry": _retried,
    "rate limiters": _limiters,
    "a barrier": _barrier,
    "many": _many,
    "threads that wait": _threads,
}


def until(condition: Callable[[], Any]) -> None:
    ends = time.monotonic() + LONG / 1000
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError
        time.sleep(0.005)


def shown(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) < 100 else f"{type(value).__name__} of {len(value)}: {text[:30]}"


def error(exc: BaseException) -> str:
    original = getattr(exc, "orig_exc_type", "")
    text = str(exc)
    return f"{type(exc).__name__} {original} {text[:40] if original else ''!r}"


WITNESSES: list[Any] = [
    {"steps": [["call", "made", ["text", 1_100_000], {}], ["argument", 1_100_000]]},
]
