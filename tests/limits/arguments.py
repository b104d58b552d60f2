"""Which public methods take numbers, by their annotations, and values that nobody expects."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import shmq
from shmq import remote
from shmq.remote import consumer, lease, producer

#: Classes that only carry what was read: nobody gives them numbers.
CARRIERS = re.compile(r".*Stats|Latency|DeadGroup|DeadLetter|Lease|LeaseEntry|LeasedBatch|Peeked")
#: Made by a method of another class, which checks, and not by a user.
MADE = ("Consumer", "Producer", "Results", "LeaseHolder", "RemoteMessage", "RemoteLeaseHolder")
#: For the rest of the package, or no limit of anything: `Class.method.parameter` -> why.
LEFT_OUT = {
    "Batch.import_arrow.importer": "a function",
    "Consumer.redrive.queue": "an internal number of a queue",
    "Consumer.redrive.serial": "an internal number of a queue",
    "RemoteConsumer.answer.of": "for the rest of the package",
    "RemoteBroker.lease_holder_if_free.ttl": "for the rest of the package",
}

_WHOLE = (0, -1, 1, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 10**30, 1.5, math.nan, math.inf, "1", b"1")
_NUMBERS = (
    *(0, -1, -1e-9, 1e10, 1 << 63, 1e300, 10**400, math.nan, math.inf, -math.inf, "1", b"1", ()),
)


class Argument(NamedTuple):
    """One parameter."""

    method: str  # `Class.method`
    name: str
    whole: bool

    @property
    def values(self) -> tuple[Any, ...]:
        return _WHOLE if self.whole else _NUMBERS

    def __str__(self) -> str:
        return f"{self.method}.{self.name}"


def public_classes() -> Iterator[type]:
    for name in shmq.__all__:
        found = getattr(shmq, name)
        if inspect.isclass(found) and not issubclass(found, BaseException):
            yield found
    for module in (producer, consumer, lease):
        for name, found in vars(module).items():
            if name.startswith("Remote") and found.__module__ == module.__name__:
                yield found
    assert remote.RemoteBroker.__name__ in shmq.__all__


@cache
def _stub() -> dict[str, dict[str, str]]:
    """`Class.method` of the extension -> annotations."""
    path = Path(shmq.__file__).with_name("_native.pyi")
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    every = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs]
                    texts = {a.arg: ast.unparse(a.annotation) for a in every if a.annotation}
                    found.setdefault(f"{node.name}.{item.name}", {}).update(texts)
    return found


def _annotations(owner: Any, name: str) -> dict[str, str]:
    if not callable(getattr(owner, name)):
        return {}
    if inspect.isclass(owner):
        definer = next(base for base in owner.__mro__ if name in vars(base))
        if definer.__module__ == "shmq._native":
            return _stub().get(f"{definer.__name__}.{name}", {})
    found = inspect.signature(getattr(owner, name)).parameters.values()
    return {one.name: str(one.annotation) for one in found}


def arguments() -> Iterator[Argument]:
    """All numbers that a user gives to a method or function."""
    for name in shmq.__all__:
        if inspect.isfunction(getattr(shmq, name)):
            for parameter, text in _annotations(shmq, name).items():
                if re.search(r"\b(int|float)\b", text):
                    yield Argument(f"shmq.{name}", parameter, "float" not in text)
    for owner in public_classes():
        for name in dir(owner):
            if name.startswith("_") and (name != "__init__" or owner.__name__ in MADE):
                continue
            if CARRIERS.fullmatch(owner.__name__) and name != "percentile":
                continue
            for parameter, text in _annotations(owner, name).items():
                found = Argument(f"{owner.__name__}.{name}", parameter, "float" not in text)
                if re.search(r"\b(int|float)\b", text) and str(found) not in LEFT_OUT:
                    yield found
