"""shmq for PySpark 4.3: `format("shmq")` reads and writes, batch and streaming. `Exchange` lets
tasks of one job pass messages to each other. `session` starts Spark with the right Python and Java.

    import shmq.spark
    spark = shmq.spark.session("local[2,4]")
    rows = spark.readStream.format("shmq").option("instance", "x").option("topic", "t") \\
        .option("channel", "c").option("consumer", "report").load()

pyspark is not imported before it is used. NoPySpark, an ImportError, says what is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from shmq.spark.versions import SOURCE, NoPySpark, need

if TYPE_CHECKING:
    from shmq.spark import source as source
    from shmq.spark.exchange import Exchange as Exchange
    from shmq.spark.reading import finish_lease as finish_lease
    from shmq.spark.reading import return_lease as return_lease
    from shmq.spark.sessions import NoJava as NoJava
    from shmq.spark.sessions import session as session
    from shmq.spark.sink import publish as publish

_WHERE: Final = {
    "Exchange": "exchange",
    "NoJava": "sessions",
    "finish_lease": "reading",
    "return_lease": "reading",
    "publish": "sink",
    "session": "sessions",
}
_MODULES: Final = ("exchange", "options", "reading", "sink", "source", "stream")

__all__ = [
    "Exchange",
    "NoJava",
    "NoPySpark",
    "finish_lease",
    "publish",
    "register",
    "return_lease",
    "session",
]


def register(spark: Any) -> None:
    """Register `format("shmq")` with this SparkSession. If `pyspark_shmq` is installed for Spark's
    own Python, Spark has found the format by itself, and nothing is done. Raises NoPySpark."""
    need(SOURCE, "shmq.spark.register")
    from shmq.spark.source import ShmqDataSource

    if not _is_known(spark, ShmqDataSource.name()):
        spark.dataSource.register(ShmqDataSource)


def _is_known(spark: Any, name: str) -> bool:
    """Returns True if Spark knows the format. Registering it again is an error in 4.0 and a warning
    in 4.3."""
    try:
        manager = spark._jsparkSession.sessionState().dataSourceManager()
        return bool(manager.dataSourceExists(name))
    except Exception:  # these names are internal to Spark; if they fail, register
        return False


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        need(SOURCE, f"shmq.spark.{name}")
        return importlib.import_module(f"shmq.spark.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'shmq.spark' has no attribute {name!r}")
    if name != "NoJava":
        need(SOURCE, f"shmq.spark.{name}")
    return getattr(importlib.import_module(f"shmq.spark.{_WHERE[name]}"), name)
