"""shmq: a message broker for one host, with the data path in shared memory.

    import shmq

    with shmq.Broker() as broker:                       # embedded: starts a supervisor
        broker.producer("topic").publish(b"body")
        joined = shmq.attach(broker.instance)           # as another process does
        consumer = joined.consumer("topic", "channel")
        with consumer.take() as message:                # finished at the end, requeued if it raises
            print(message.body)

See `help(shmq.Broker)`, `help(shmq.Producer)` and `help(shmq.Consumer)`.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from shmq.errors import (
    BadArgument,
    BadName,
    BadObject,
    Full,
    Gone,
    LayoutMismatch,
    LeaseFenced,
    LeaseLost,
    MemoryLost,
    MessageTooBig,
    NotInFlight,
    NotRunning,
    NotSealed,
    OtherNamespace,
    Rejected,
    ShmqError,
    ShutDown,
    TooManyClients,
    Unauthorized,
    Unconfirmed,
    Unreachable,
)


def _installed_version() -> str | None:
    """The version that importlib.metadata would find. Importing that module would take longer than
    importing everything else here."""
    for place in sys.path:
        try:
            names = os.listdir(place or ".")
        except OSError:
            continue
        for name in names:
            if name.startswith("shmq-") and name.endswith(".dist-info"):
                return name.removeprefix("shmq-").removesuffix(".dist-info")
    return None


def _load_native() -> str:
    """Load the extension, or the build of it that SHMQ_NATIVE names, and check its version.

    Child processes inherit the environment, so they load the same build.
    """
    path = os.environ.get("SHMQ_NATIVE")
    if path and "shmq._native" not in sys.modules:
        from importlib import util

        spec = util.spec_from_file_location("shmq._native", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"SHMQ_NATIVE={path} is not a file that Python can load")
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["shmq._native"] = module
        globals()["_native"] = module

    installed = _installed_version()
    try:
        _native = importlib.import_module("shmq._native")
    except ModuleNotFoundError as exc:
        if exc.name != "shmq._native":
            raise
        return installed or "unknown"  # here `shmq.connect` works, and nothing else
    if installed is None:  # run from a checkout
        return str(_native.__version__)
    if installed != _native.__version__:
        raise ImportError(
            f"shmq {installed} is installed but {_native.__file__} was compiled for "
            f"{_native.__version__}: that file is stale; run `tools/dev build` or reinstall shmq"
        )
    return installed


__version__ = _load_native()

if TYPE_CHECKING:
    from shmq.broker import Broker, attach
    from shmq.client import (
        Batch,
        Consumer,
        DeadGroup,
        DeadLetter,
        DeadLetters,
        Lease,
        LeasedBatch,
        LeaseHolder,
        Loan,
        Message,
        MultiConsumer,
        Producer,
        Results,
        ResultsStats,
    )
    from shmq.option_types import OptionError
    from shmq.peek import LeaseEntry, Peeked
    from shmq.pool import Executor, Future, TaskTimeout, WorkerDied
    from shmq.queues import JoinableQueue, Queue, SimpleQueue
    from shmq.remote import RemoteBroker, connect
    from shmq.stats import (
        BrokerStats,
        ChannelStats,
        ClientStats,
        Latency,
        SessionStats,
        TopicStats,
    )

#: Module -> its public names. It is imported when one of them is first used, so that a gateway or a
#: command that needs few of them starts sooner.
_HOMES = {
    "shmq.broker": ("Broker", "attach"),
    "shmq.client": (
        "Batch",
        "Consumer",
        "DeadGroup",
        "DeadLetter",
        "DeadLetters",
        "Lease",
        "LeasedBatch",
        "LeaseHolder",
        "Loan",
        "Message",
        "MultiConsumer",
        "Producer",
        "Results",
        "ResultsStats",
    ),
    "shmq.pool": ("Executor", "Future", "TaskTimeout", "WorkerDied"),
    "shmq.peek": ("LeaseEntry", "Peeked"),
    "shmq.queues": ("JoinableQueue", "Queue", "SimpleQueue"),
    "shmq.remote": ("RemoteBroker", "connect"),
    "shmq.option_types": ("OptionError",),
    "shmq.stats": (
        "BrokerStats",
        "ChannelStats",
        "ClientStats",
        "Latency",
        "SessionStats",
        "TopicStats",
    ),
}
#: Those that work without the extension.
_EVERYWHERE = {"shmq.remote"}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = {*_HOMES, "shmq.names", "shmq.shm", "shmq.storage"}


def __getattr__(name: str) -> Any:
    if f"shmq.{name}" in _MODULES:  # a module, which the import makes an attribute
        return importlib.import_module(f"shmq.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "shmq._native" not in sys.modules and _HOME_OF[name] not in _EVERYWHERE:
        raise ImportError(
            f"shmq.{name} needs shmq's extension, which is not installed here: it runs on Linux on "
            "x86-64 and arm64; shmq.connect works without it"
        )
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "BadArgument",
    "BadName",
    "BadObject",
    "Batch",
    "Broker",
    "BrokerStats",
    "ChannelStats",
    "ClientStats",
    "Consumer",
    "DeadGroup",
    "DeadLetter",
    "DeadLetters",
    "Executor",
    "Full",
    "Future",
    "Gone",
    "JoinableQueue",
    "Latency",
    "LayoutMismatch",
    "Lease",
    "LeaseEntry",
    "LeaseFenced",
    "LeaseHolder",
    "LeaseLost",
    "LeasedBatch",
    "Loan",
    "MemoryLost",
    "Message",
    "MessageTooBig",
    "MultiConsumer",
    "NotInFlight",
    "NotRunning",
    "NotSealed",
    "OptionError",
    "OtherNamespace",
    "Peeked",
    "Producer",
    "Queue",
    "Rejected",
    "RemoteBroker",
    "Results",
    "ResultsStats",
    "SessionStats",
    "ShmqError",
    "ShutDown",
    "SimpleQueue",
    "TaskTimeout",
    "TooManyClients",
    "TopicStats",
    "Unauthorized",
    "Unconfirmed",
    "Unreachable",
    "WorkerDied",
    "__version__",
    "attach",
    "connect",
]
