"""shmq: a message broker for one host, with the data path in shared memory.

    import shmq

    with shmq.Broker() as broker:                       # embedded: starts a supervisor
        broker.producer("topic").publish(b"body")
        joined = shmq.attach(broker.instance)           # as another process does
        consumer = joined.consumer("topic", "channel")
        with consumer.take() as message:                # finished at the end, requeued if it raises
            print(message.body)

`help(shmq.Broker)`, `help(shmq.Producer)` and `help(shmq.Consumer)` say the rest.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any


def _installed_version() -> str | None:
    """As importlib.metadata finds it, whose import would take longer than that of all the rest."""
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
    """Load the extension, another build of it if SHMQ_NATIVE names one, and check its version.

    The environment is inherited, so child processes load the same one.
    """
    path = os.environ.get("SHMQ_NATIVE")
    if path and "shmq._native" not in sys.modules:
        import importlib.util

        spec = importlib.util.spec_from_file_location("shmq._native", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"SHMQ_NATIVE={path} is not a file that Python can load")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["shmq._native"] = module
        globals()["_native"] = module

    from shmq import _native

    installed = _installed_version()
    if installed is None:  # run from a checkout
        return _native.__version__
    if installed != _native.__version__:
        raise ImportError(
            f"shmq {installed} is installed but {_native.__file__} was compiled for "
            f"{_native.__version__}: that file is stale; run `tools/dev build` or install shmq anew"
        )
    return installed


__version__ = _load_native()

if TYPE_CHECKING:
    from shmq.broker import Broker, attach
    from shmq.client import Batch, Consumer, Lease, LeasedBatch, Lessee, Loan, Message, Producer
    from shmq.errors import (
        BadArgument,
        BadName,
        Full,
        Gone,
        LayoutMismatch,
        LeaseFenced,
        LeaseLost,
        MessageTooBig,
        NotInFlight,
        NotRunning,
        ShmqError,
        TooManyClients,
    )
    from shmq.layout import LeaseEntry, Peeked
    from shmq.options import OptionError
    from shmq.stats import (
        BrokerStats,
        ChannelStats,
        ClientStats,
        Latency,
        SessionStats,
        TopicStats,
    )

#: Public name -> module that has it, imported when it is first asked for: a gateway or a command
#: that needs few of them starts sooner.
_HOMES = {
    "shmq.broker": ("Broker", "attach"),
    "shmq.client": (
        "Batch",
        "Consumer",
        "Lease",
        "LeasedBatch",
        "Lessee",
        "Loan",
        "Message",
        "Producer",
    ),
    "shmq.errors": (
        "BadArgument",
        "BadName",
        "Full",
        "Gone",
        "LayoutMismatch",
        "LeaseFenced",
        "LeaseLost",
        "MessageTooBig",
        "NotInFlight",
        "NotRunning",
        "ShmqError",
        "TooManyClients",
    ),
    "shmq.layout": ("LeaseEntry", "Peeked"),
    "shmq.options": ("OptionError",),
    "shmq.stats": (
        "BrokerStats",
        "ChannelStats",
        "ClientStats",
        "Latency",
        "SessionStats",
        "TopicStats",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = {*_HOMES, "shmq.names", "shmq.segments", "shmq.storage"}


def __getattr__(name: str) -> Any:
    if f"shmq.{name}" in _MODULES:  # a module, which the import makes an attribute
        return importlib.import_module(f"shmq.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "BadArgument",
    "BadName",
    "Batch",
    "Broker",
    "BrokerStats",
    "ChannelStats",
    "ClientStats",
    "Consumer",
    "Full",
    "Gone",
    "Latency",
    "LayoutMismatch",
    "Lease",
    "LeaseEntry",
    "LeaseFenced",
    "LeaseLost",
    "LeasedBatch",
    "Lessee",
    "Loan",
    "Message",
    "MessageTooBig",
    "NotInFlight",
    "NotRunning",
    "OptionError",
    "Peeked",
    "Producer",
    "SessionStats",
    "ShmqError",
    "TooManyClients",
    "TopicStats",
    "__version__",
    "attach",
]
