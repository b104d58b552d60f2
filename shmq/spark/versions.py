"""The PySpark that is installed, and the parts of shmq that work with it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Final

#: The first PySpark versions with the needed features: Python data sources that read and write
#: Arrow batches; streaming sources that get a read limit.
SOURCE: Final = (4, 0)
STREAM: Final = (4, 3)


class NoPySpark(ImportError):
    """PySpark is not installed, or too old for the call. An ImportError."""


def need(least: tuple[int, int], what: str) -> None:
    """Raises NoPySpark unless PySpark is installed and new enough for `what`."""
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
