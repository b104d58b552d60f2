"""shmq and PySpark 4.3: `format("shmq")` to read and write, batch and streaming; tasks of one job
that hand each other messages; a session that finds its Python and Java.

    import shmq.spark
    spark = shmq.spark.session("local[2,4]")
    rows = spark.readStream.format("shmq").option("instance", "x").option("topic", "t") \\
        .option("channel", "c").option("consumer", "report").load()

Nothing here imports pyspark before it is used. NoPySpark, an ImportError, says what is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from shmq.spark.versions import SOURCE, NoPySpark, need

if TYPE_CHECKING:
    from shmq.spark import source as source
    from shmq.spark.exchange import Exchange as Exchange
    from shmq.spark.reading import finish as finish
    from shmq.spark.reading import give_back as give_back
    from shmq.spark.sessions import NoJava as NoJava
    from shmq.spark.sessions import session as session
    from shmq.spark.sink import publish as publish

_WHERE: Final = {
    "Exchange": "exchange",
    "NoJava": "sessions",
    "finish": "reading",
    "give_back": "reading",
    "publish": "sink",
    "session": "sessions",
}
_MODULES: Final = ("exchange", "options", "reading", "sink", "source", "stream")

__all__ = [
    "Exchange", "NoJava", "NoPySpark", "finish", "give_back", "publish", "register", "session",
]  # fmt: skip


def register(spark: Any) -> None:
    """Make `format("shmq")` known to this session, unless it is: where `pyspark_shmq` is installed
    for Spark's own Python, Spark finds it by itself. NoPySpark."""
    need(SOURCE, "shmq.spark.register")
    from shmq.spark.source import ShmqDataSource

    if not _is_known(spark, ShmqDataSource.name()):
        spark.dataSource.register(ShmqDataSource)


def _is_known(spark: Any, name: str) -> bool:
    """Whether Spark has found it already. 4.0 refuses to be told again, 4.3 warns."""
    try:
        manager = spark._jsparkSession.sessionState().dataSourceManager()
        return bool(manager.dataSourceExists(name))
    except Exception:  # none of Spark's promises: then it is registered, as anywhere else
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
