"""Lets Spark find `format("shmq")` by itself: it imports every top-level module `pyspark_*` and
takes its DefaultSource. If one of them raised, Spark would find no other source either. So this one
never raises: if shmq or one of its dependencies is missing or broken, it has no DefaultSource."""

import contextlib

with contextlib.suppress(Exception):
    from shmq.spark.source import ShmqDataSource as DefaultSource  # noqa: F401
