"""shmq and PySpark 4.3: `format("shmq")` to read and write, batch and streaming; tasks of one job
that
hand each other messages; a session that finds its Python and Java.

    import shmq.spark
    spark = shmq.spark.session("local[2,4]")
    rows = spark.readStream.format("shmq").option("instance", "x").option("topic", "t") \\
        .option("channel", "c").option("consumer", "report").load()

Nothing here imports pyspark before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shmq.spark.exchange import Exchange as Exchange
    from shmq.spark.reading import finish as finish
    from shmq.spark.reading import give_back as give_back
    from shmq.spark.session import session as session
    from shmq.spark.sink import publish as publish

_WHERE: Final = {
    "Exchange": "exchange",
    "finish": "reading",
    "give_back": "reading",
    "publish": "sink",
    "session": "session",
}

__all__ = ["Exchange", "finish", "give_back", "publish", "register", "session"]


def register(spark: Any) -> None:
    """Make `format("shmq")` known to this session. Where `pyspark_shmq` is installed for Spark's
    own
    Python, Spark finds it by itself."""
    from shmq.spark.source import ShmqDataSource

    spark.dataSource.register(ShmqDataSource)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shmq.spark' has no attribute {name!r}")
    return getattr(importlib.import_module(f"shmq.spark.{_WHERE[name]}"), name)
