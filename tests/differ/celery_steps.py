"""Single things that programs of Celery do, each of which gives a line."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Seconds after which an answer does not come: fewer than those after which a program hangs.
LONG = 10.0


def _revoked(program: Any) -> str:
    """A task that is revoked while it waits to be due."""
    gate = program.gate()
    result = program.module.touch.apply_async((gate,), countdown=1)
    result.revoke()
    answer = outcome(result)
    return f"{answer} {result.state} {os.path.exists(gate)}"


def _terminated(program: Any) -> str:
    """A task that is killed while it runs."""
    gate = program.gate()
    result = program.module.gate.apply_async((gate,), queue="slow")
    until(lambda: _active(program, result.id))
    result.revoke(terminate=True, signal="SIGKILL")
    return f"{outcome(result).split()[0]} {result.state}"


def _active(program: Any, task: str) -> bool:
    found = program.app.control.inspect(timeout=2, destination=["two@differ"]).active() or {}
    return any(each["id"] == task for tasks in found.values() for each in tasks)


def _short(program: Any) -> str:
    gate = program.gate()
    result = program.module.gate.apply_async((gate,))
    first = outcome(result, 0.05)
    Path(gate).touch()
    return f"{first} {outcome(result)}"


def _half(program: Any) -> str:
    gate = program.gate()
    result = program.module.states.apply_async((gate,))
    until(lambda: result.state == "HALF")
    found = f"{result.info}"
    Path(gate).touch()
    return f"{found} {outcome(result)}"


def _links(program: Any) -> str:
    gate = program.gate()
    result = program.module.echo.apply_async((1,), link=program.module.touch.s(gate))
    until(lambda: os.path.exists(gate))
    return outcome(result)


def _link_errors(program: Any) -> str:
    gate = program.gate()
    result = program.module.fails.apply_async(
        ("ValueError",), link_error=program.module.touch.si(gate)
    )
    until(lambda: os.path.exists(gate))
    return outcome(result)


def _unknown(program: Any) -> str:
    return outcome(program.app.send_task("nobody.has.it"))


def _by_name(program: Any) -> str:
    return outcome(program.app.send_task("differ.celery_app.add", (1, 2)))


def _wrong_arguments(program: Any) -> str:
    return outcome(program.app.send_task("differ.celery_app.add", (1,)))


def _nobody(program: Any) -> str:
    result = program.app.AsyncResult("none")
    return f"{result.state} {result.result} {result.ready()} {outcome(result, 0.05)}"


def _lost(program: Any) -> str:
    result = program.module.dies.delay("SIGKILL")
    return f"{outcome(result)[:20]} {result.state}"


def _exits(program: Any) -> str:
    result = program.module.dies.delay("_exit")
    return f"{outcome(result)[:20]} {result.state}"


def _lives(program: Any) -> str:
    return outcome(program.module.dies_once.delay(program.gate()))


def _soft(program: Any) -> str:
    return outcome(program.module.too_long.delay())


def _hard(program: Any) -> str:
    return outcome(program.module.far_too_long.delay())


def _ignored(program: Any) -> str:
    result = program.module.fails.delay("Ignore")
    program.module.echo.delay(1).get(LONG)
    return f"{outcome(result, 0.1)} {result.state}"


def _rejected(program: Any) -> str:
    result = program.module.fails.delay("Reject")
    program.module.echo.delay(1).get(LONG)
    return f"{outcome(result, 0.1)} {result.state}"


def _purged(program: Any) -> str:
    """Tasks of a queue that nobody consumes."""
    name = f"idle-{secrets.token_hex(8)}"
    for countdown in (None, None, 0, 50):
        program.module.echo.apply_async((1,), queue=name, countdown=countdown)
    for priority in (0, 9):
        program.module.echo.apply_async((1,), queue=name, priority=priority)
    with program.app.connection_for_write() as connection:
        channel = connection.default_channel
        before = channel.queue_declare(name, passive=True).message_count
        purged = channel.queue_purge(name)
        after = channel.queue_purge(name)
        channel.queue_delete(name)
    return f"{before} {purged} {after}"


def _expired(program: Any) -> str:
    """A task that is too old when a worker takes it."""
    gate = program.gate()
    blocker = program.module.gate.apply_async((gate,), queue="slow")
    result = program.module.echo.apply_async((1,), queue="slow", expires=0.2)
    time.sleep(0.4)
    Path(gate).touch()
    return f"{outcome(blocker)} {outcome(result)} {result.state}"


def _priorities(program: Any) -> str:
    """The order of tasks that wait."""
    gate = program.gate()
    blocker = program.module.gate.apply_async((gate,), queue="slow")
    until(lambda: _active(program, blocker.id))
    second = program.gate()
    waits = program.module.gate.apply_async((second,), queue="slow")  # the one that is prefetched
    until(lambda: _reserved(program, waits.id))
    paths = [(priority, program.gate()) for priority in (9, 5, 0, 3, 7)]
    results = [
        program.module.touch.apply_async((path,), queue="slow", priority=priority)
        for priority, path in paths
    ]
    Path(gate).touch()
    Path(second).touch()
    for each in results:
        each.get(LONG)
    found = sorted((noted(path), priority) for priority, path in paths)
    return str([priority for _, priority in found])


def _reserved(program: Any, task: str) -> bool:
    found = program.app.control.inspect(timeout=2, destination=["two@differ"]).reserved() or {}
    return any(each["id"] == task for tasks in found.values() for each in tasks)


def _turns(program: Any) -> str:
    """One task in a queue beside one that has many."""
    paths = [program.gate() for _ in range(12)]
    gate = program.gate()
    blocker = program.module.gate.apply_async((gate,), queue="slow")
    until(lambda: _active(program, blocker.id))
    many = [program.module.touch.apply_async((path,), queue="busy") for path in paths]
    last = program.gate()
    one = program.module.touch.apply_async((last,), queue="slow")
    Path(gate).touch()
    one.get(LONG)
    for each in many:
        each.get(LONG)
    before = sum(noted(path) < noted(last) for path in paths)
    return "early" if before < 8 else f"after {before} others"


def _groups(program: Any) -> str:
    from celery import group
    from celery.result import GroupResult

    result = group(program.module.echo.s(each) for each in range(4)).apply_async()
    result.save()
    again = GroupResult.restore(result.id, app=program.app)
    found = f"{again.join(LONG)} {again.completed_count()} {again.successful()} {len(again)}"
    native = sorted(meta["result"] for _, meta in again.iter_native(timeout=LONG))
    again.delete()
    gone = GroupResult.restore(result.id, app=program.app)
    return f"{found} {native} {gone}"


def _ping(program: Any) -> str:
    found = program.app.control.ping(timeout=3, destination=["one@differ"])
    return str(found)


def _registered(program: Any) -> str:
    inspect = program.app.control.inspect(timeout=3, destination=["one@differ"])
    queues = inspect.active_queues() or {}
    names = inspect.registered() or {}
    return f"{sorted(q['name'] for q in queues.get('one@differ', []))} {len(names['one@differ'])}"


def _scheduled(program: Any) -> str:
    result = program.module.echo.apply_async((1,), countdown=2, queue="slow")
    time.sleep(0.3)
    inspect = program.app.control.inspect(timeout=2, destination=["two@differ"])
    found = (inspect.scheduled() or {}).get("two@differ", [])
    seen = sum(each["request"]["id"] == result.id for each in found)
    return f"{seen} {outcome(result)}"


def _many(program: Any) -> str:
    results = [program.module.add.delay(each, 1) for each in range(50)]
    return str(sum(each.get(LONG) for each in results))


def _same_id(program: Any) -> str:
    task = f"id-{program.gate()}"
    first = program.module.echo.apply_async((1,), task_id=task)
    found = outcome(first)
    second = program.module.echo.apply_async((2,), task_id=task)
    return f"{found} {outcome(second)}"


def _two_waits(program: Any) -> str:
    """Threads that wait for results at once."""
    import threading

    found: list[str] = []

    def one(number: int) -> None:
        found.append(outcome(program.module.add.delay(number, number)))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return str(sorted(found))


STEPS: dict[str, Callable[[Any], str]] = {
    "a task that is revoked": _revoked,
    "a task that is terminated": _terminated,
    "get with a short timeout": _short,
    "a state of its own": _half,
    "link": _links,
    "link_error": _link_errors,
    "a task that nobody knows": _unknown,
    "a task by its name": _by_name,
    "wrong arguments": _wrong_arguments,
    "a result that nobody has": _nobody,
    "a task that is killed": _lost,
    "a task that exits": _exits,
    "a task that is killed once": _lives,
    "a soft time limit": _soft,
    "a hard time limit": _hard,
    "Ignore": _ignored,
    "Reject": _rejected,
    "purge": _purged,
    "a task that expires": _expired,
    "priorities": _priorities,
    "queues in turn": _turns,
    "a group's result": _groups,
    "ping": _ping,
    "inspect": _registered,
    "inspect scheduled": _scheduled,
    "many": _many,
    "the same id": _same_id,
    "threads that wait": _two_waits,
}


def noted(path: str) -> int:
    """When `touch` has made a file."""
    return int(Path(path).read_text())


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.005)


def outcome(result: Any, timeout: float = LONG) -> str:
    try:
        return shown(result.get(timeout))
    except Exception as exc:
        return error(exc)


def shown(value: Any) -> str:
    if isinstance(value, BaseException):
        return f"as a value: {error(value)}"
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) < 100 else f"{type(value).__name__} of {len(value)}: {text[:30]}"


def error(exc: BaseException) -> str:
    module = type(exc).__module__
    text = str(exc)
    for word in text.split():  # ids of tasks
        if len(word.strip("(),.:'")) == 36:
            text = text.replace(word.strip("(),.:'"), "ID")
    return f"{module}.{type(exc).__name__} {text[:60]!r}"
