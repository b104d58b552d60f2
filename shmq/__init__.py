"""shmq: a message broker for one host, with the data path in shared memory.

with shmq.Broker(data_path="...") as broker:       # embedded: starts a supervisor
    broker.producer("topic").publish(b"body")
    message = broker.consumer("topic", "channel").take(timeout=1.0)
    message.finish()

broker = shmq.attach("x")                          # join a running instance
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys


def _load_native() -> str:
    """Load the extension, another build of it if SHMQ_NATIVE names one, and check its version.

    The environment is inherited, so child processes load the same one.
    """
    path = os.environ.get("SHMQ_NATIVE")
    if path and "shmq._native" not in sys.modules:
        spec = importlib.util.spec_from_file_location("shmq._native", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"SHMQ_NATIVE={path} is not a file that Python can load")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["shmq._native"] = module
        globals()["_native"] = module

    from shmq import _native

    try:
        installed = importlib.metadata.version("shmq")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return _native.__version__
    if installed != _native.__version__:
        raise ImportError(
            f"shmq {installed} is installed but {_native.__file__} was compiled for "
            f"{_native.__version__}: that file is stale; run `tools/dev build` or install shmq anew"
        )
    return installed


__version__ = _load_native()

from shmq.broker import Broker, attach  # noqa: E402
from shmq.client import Batch, Consumer, Lease, LeasedBatch, Lessee, Loan, Message, Producer  # noqa: E402
from shmq.errors import (  # noqa: E402
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
from shmq.layout import Peeked  # noqa: E402
from shmq.stats import BrokerStats, ChannelStats, ClientStats, SessionStats, TopicStats  # noqa: E402

__all__ = [
    "BadName",
    "Batch",
    "Broker",
    "BrokerStats",
    "ChannelStats",
    "ClientStats",
    "Consumer",
    "Full",
    "Gone",
    "LayoutMismatch",
    "Lease",
    "LeaseFenced",
    "LeaseLost",
    "LeasedBatch",
    "Lessee",
    "Loan",
    "Message",
    "MessageTooBig",
    "NotInFlight",
    "NotRunning",
    "Peeked",
    "Producer",
    "SessionStats",
    "ShmqError",
    "TooManyClients",
    "TopicStats",
    "__version__",
    "attach",
]
