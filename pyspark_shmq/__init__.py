"""So that Spark finds `format("shmq")` by itself: it imports every top-level module `pyspark_*`
and takes its DefaultSource. A module that raised would take every other source with it, so this
one does not: where shmq or what it needs is missing or broken there is no DefaultSource."""

import contextlib

with contextlib.suppress(Exception):
    from shmq.spark.source import ShmqDataSource as DefaultSource  # noqa: F401
