"""Which PySpark there is, and what of shmq works with it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Final

#: The first PySpark with what is needed: Python data sources that read and write Arrow batches;
#: streams whose source is told how much to take.
SOURCE: Final = (4, 0)
STREAM: Final = (4, 3)


class NoPySpark(ImportError):
    """The PySpark that is asked for is not installed."""


def need(least: tuple[int, int], what: str) -> None:
    """NoPySpark unless PySpark is there and new enough for `what`."""
    wanted = f"{what} needs PySpark {least[0]}.{least[1]} or newer"
    try:
        import pyspark
    except ImportError:
        raise NoPySpark(f"{wanted}, and {sys.executable} has none: {_remedy()}") from None
    if not importlib.util.find_spec("pyarrow"):
        raise NoPySpark(f"{what} needs pyarrow, and {sys.executable} has none: {_remedy()}")
    found: str = pyspark.__version__
    numbers = tuple(int(word) for word in found.split(".")[:2])
    if numbers < least:
        rest = "" if numbers < SOURCE else " Batches and shmq.spark.Exchange work with 4.0."
        raise NoPySpark(f"{wanted}, and this is {found}: {_remedy()}.{rest}")


def _remedy() -> str:
    return "pip install 'shmq[spark]', which brings 4.3"
