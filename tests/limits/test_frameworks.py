"""Every number that a task framework's user gives to shmq: keyword arguments of Dramatiq's and
Taskiq's brokers, backends and schedules, transport options of Celery, settings of Django."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shmq
from limits.machine import Sheet
from limits.site import Site

NUMBERS = (
    *(0, -1, -1e-9, 0.5, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 1e10, 1e300, 10**400),
    *(math.nan, math.inf, -math.inf, "1", "64k", "", b"1", ()),
)
_names = itertools.count()


def need(name: str) -> None:
    if not importlib.util.find_spec(name):
        pytest.skip(f"{name} is not installed", allow_module_level=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("site")
    made = Site(path, f"limits-{path.parent.name[-20:]}-frameworks", max_topics=500)
    yield made
    made.close()


def numbers_of(owner: type, name: str) -> list[str]:
    """The parameters of a method that may be numbers."""
    found = inspect.signature(getattr(owner, name)).parameters.values()
    return [one.name for one in found if re.search(r"\b(int|float)\b", str(one.annotation))]


# ---- Dramatiq ----


def dramatiq_broker(site: Site, **given: Any) -> None:
    import dramatiq

    from shmq.integrations.dramatiq import Broker

    broker = Broker(site.instance, middleware=[], namespace=f"n{next(_names)}", **given)
    try:
        broker.declare_queue("q")
        message: Any = dramatiq.Message("q", "a", (), {}, {})
        broker.enqueue(message)
        consumer = broker.consume("q")
        found = next(consumer)
        assert found is not None
        consumer.ack(found)
        consumer.close()
    finally:
        broker.close()
        for topic in broker.topics("q"):
            with contextlib.suppress(shmq.ShmqError):
                site.broker.delete_topic(topic)


def dramatiq_results(site: Site, **given: Any) -> None:
    import dramatiq

    from shmq.integrations.dramatiq import ResultBackend

    how = {"store": f"s{next(_names)}", "max_keys": 16, "max_bytes": 1 << 16} | given
    backend = ResultBackend(site.instance, **how)
    try:
        message: Any = dramatiq.Message("q", "a", (), {}, {})
        backend.store_result(message, 1, 10_000)
        assert backend.get_result(message, block=True, timeout=10_000) == 1
    finally:
        backend.close()
        with contextlib.suppress(shmq.ShmqError):
            site.broker.delete_results(how["store"])


def dramatiq_limits(site: Site, **given: Any) -> None:
    from shmq.integrations.dramatiq import RateLimiterBackend

    backend = RateLimiterBackend(site.instance, **given)
    try:
        key = f"k{next(_names)}"
        assert backend.add(key, 1, 10_000)
        assert backend.incr(key, 1, 5, 10_000)
        assert backend.decr(key, 1, 0, 10_000)
    finally:
        backend.close()


# ---- Taskiq ----


def taskiq_broker(site: Site, **given: Any) -> None:
    from shmq.integrations.taskiq import Broker

    async def main() -> None:
        app = Broker(site.instance, queue_name=f"q{next(_names)}", **given)

        @app.task
        async def add(a: int, b: int) -> int:
            return a + b

        try:
            await app.startup()
            await add.kiq(1, 2)
            async for message in app.listen():
                ack: Any = message.ack  # type: ignore[union-attr]
                done = ack()
                if inspect.isawaitable(done):
                    await done
                break
        finally:
            await app.shutdown()
            for topic in app.topics():
                with contextlib.suppress(shmq.ShmqError):
                    site.broker.delete_topic(topic)

    asyncio.run(main())


def taskiq_results(site: Site, **given: Any) -> None:
    from taskiq import TaskiqResult

    from shmq.integrations.taskiq import ResultBackend

    how = {"store": f"s{next(_names)}", "max_keys": 16, "max_bytes": 1 << 16} | given
    backend: Any = ResultBackend(site.instance, **how)

    async def main() -> None:
        await backend.startup()
        try:
            result: Any = TaskiqResult(is_err=False, return_value=1, execution_time=0.1)
            await backend.set_result("t", result)
            assert (await backend.wait_result("t", timeout=10)).return_value == 1
        finally:
            await backend.shutdown()
            with contextlib.suppress(shmq.ShmqError):
                site.broker.delete_results(how["store"])

    asyncio.run(main())


def taskiq_schedules(site: Site, **given: Any) -> None:
    from shmq.integrations.taskiq import ScheduleSource

    async def main() -> None:
        source = ScheduleSource(site.instance, **given)
        await source.startup()
        try:
            assert await source.get_schedules() == []
        finally:
            await source.shutdown()

    asyncio.run(main())


# ---- Celery ----

#: The names of numbers, and where a user gives them.
CELERY = {
    "priority_steps": "broker",
    "max_keys": "results",
    "max_bytes": "results",
    "result_expires": "app",
}


def celery_app(site: Site, **given: Any) -> None:
    from celery import Celery

    import shmq.integrations.celery.alias  # as the entry points do

    app = Celery("limits", broker=f"shmq://{site.instance}", backend=f"shmq://{site.instance}")
    store = f"s{next(_names)}"
    results: dict[str, Any] = {"store": store, "max_keys": 16, "max_bytes": 1 << 16}
    for name, value in given.items():
        if CELERY[name] == "results":
            results[name] = value
        elif CELERY[name] == "broker":
            app.conf.broker_transport_options = {name: value}
        else:
            app.conf[name] = value
    app.conf.result_backend_transport_options = results
    queue = f"q{next(_names)}"
    try:
        with app.connection_for_write() as connection:
            made = connection.SimpleQueue(queue)
            made.put(b"x")
            assert made.get(timeout=10).payload == b"x"
            made.clear()
            made.close()
        app.backend.store_result("t", 1, "SUCCESS")
        assert app.AsyncResult("t").get(timeout=10) == 1
    finally:
        with contextlib.suppress(shmq.ShmqError):
            site.broker.delete_results(store)


# ---- Django ----


def _django() -> Any:
    import django
    from django.conf import settings

    if not settings.configured:
        settings.configure(USE_TZ=True, INSTALLED_APPS=["shmq.integrations.django"])
        django.setup()
    from shmq.integrations.django.backend import Backend

    return Backend


#: The task, which a result finds by its name: see `_task`.
nothing_to_do: Any = None


def _task() -> Any:
    from django.conf import settings

    from shmq.integrations.django.api import PACKAGE, Task

    global nothing_to_do
    if nothing_to_do is None:
        settings.TASKS = {"default": {"BACKEND": f"{PACKAGE}.backends.dummy.DummyBackend"}}

        def work() -> None:
            pass

        work.__qualname__ = "nothing_to_do"
        how = {"backend": "default", "queue_name": "default", "run_after": None}
        nothing_to_do = Task(priority=0, func=work, **how)
    return nothing_to_do


def django_backend(site: Site, **given: Any) -> None:
    from django.core.exceptions import ImproperlyConfigured

    options = {"instance": site.instance} | given
    if given.keys() & {"max_results", "max_result_bytes"}:  # they count when the store is made
        with contextlib.suppress(shmq.ShmqError):
            site.broker.delete_results("django")
    backend = _django()("default", {"QUEUES": [], "OPTIONS": options})
    wrong = [each for each in backend.check() if each.id == "shmq.E006"]
    try:
        result = backend.enqueue(_task(), [], {})
    except ImproperlyConfigured as exc:
        raise ValueError(f"{exc}; the checks: {wrong[0].msg}") from None
    assert not wrong, wrong
    assert backend.get_result(result.id).id == result.id


# ---- the table ----

#: Each thing that takes numbers: the framework, the parameters, a call with some of them.
TABLE: dict[str, tuple[str, Callable[..., None]]] = {
    "dramatiq.Broker": ("dramatiq", dramatiq_broker),
    "dramatiq.ResultBackend": ("dramatiq", dramatiq_results),
    "dramatiq.RateLimiterBackend": ("dramatiq", dramatiq_limits),
    "taskiq.Broker": ("taskiq", taskiq_broker),
    "taskiq.ResultBackend": ("taskiq", taskiq_results),
    "taskiq.ScheduleSource": ("taskiq", taskiq_schedules),
    "celery": ("celery", celery_app),
    "django": ("django", django_backend),
}
#: Made by a broker, which checks, and not by a user.
MADE = ("Consumer",)


def parameters(name: str) -> list[str]:
    framework, _, made = name.partition(".")
    need(framework)
    if framework == "celery":
        return list(CELERY)
    if framework == "django":
        from shmq.integrations.django.options import NUMBERS as FOUND
        from shmq.integrations.django.options import Settings

        _django()
        found = [
            each
            for each, text in Settings.__annotations__.items()
            if re.search(r"\b(int|float)\b", text)
        ]
        assert set(found) - {"owner"} == set(FOUND)  # who is attached looks at no owner
        return list(FOUND)
    module = importlib.import_module(f"shmq.integrations.{framework}")
    return numbers_of(getattr(module, made), "__init__")


def test_each_class_of_a_framework_has_a_row() -> None:
    for framework in ("dramatiq", "taskiq"):
        need(framework)
        module = importlib.import_module(f"shmq.integrations.{framework}")
        for name in module.__all__:
            made = getattr(module, name)
            if inspect.isclass(made) and not issubclass(made, BaseException) and name not in MADE:
                assert not numbers_of(made, "__init__") or f"{framework}.{name}" in TABLE


@pytest.mark.parametrize("name", TABLE)
def test_a_number_given_to_a_framework_is_taken_or_refused_by_name(site: Site, name: str) -> None:
    found = parameters(name)
    call = TABLE[name][1]
    sheet = Sheet()
    for parameter, value in itertools.product(found, NUMBERS):
        sheet.cell(
            f"{name}.{parameter}={value!r:.30}",
            lambda parameter=parameter, value=value: call(site, **{parameter: value}),
            rf"\b{parameter}\b",
            lambda: call(site),
            may_return=value != "" and not (isinstance(value, float) and value != value),
        )
    assert sheet.tried >= len(NUMBERS)
    site.check()
    sheet.verdict()


def test_what_somebody_deleted_is_made_again_for_django(site: Site) -> None:
    need("django")
    need("django_tasks" if sys.version_info < (3, 12) else "django.tasks")
    backend = _django()("default", {"QUEUES": [], "OPTIONS": {"instance": site.instance}})
    for _ in range(3):
        result = backend.enqueue(_task(), [], {})
        assert backend.get_result(result.id).id == result.id
        site.broker.delete_topic("django.default.normal.default")
        site.broker.delete_results("django")
