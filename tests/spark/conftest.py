"""One broker a test, one Spark session for all of them."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.spark_home import spark_home

import shmq
from shmq.staging_place import staged_paths

TOP = Path(__file__).resolve().parents[2]


def need(*names: str) -> None:
    """Skip where Spark is not installed; fail where it has to be."""
    missing = [name for name in names if not importlib.util.find_spec(name)]
    if missing and not os.environ.get("SHMQ_REQUIRE_PEERS"):
        pytest.skip(f"{', '.join(missing)} not installed: tools/dev test installs it")
    assert not missing


@pytest.fixture
def broker(new_instance: Callable[[], str], data_path: Path) -> Iterator[shmq.Broker]:
    """A broker of the test's own; at the end nothing of it is left, staged rows neither."""
    instance = new_instance()
    with shmq.Broker(data_path, instance, in_flight_slots=50_000, mem_queue_size=50_000) as made:
        yield made
    places = [Path(place) for place in staged_paths(instance, os.geteuid())]
    left = [path for place in places for path in place.glob("*")]
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    assert not left


@pytest.fixture(scope="session")
def installed() -> None:
    """For tests whose Spark runs in a process of its own."""
    need("pyspark", "pyarrow", "pandas")


@pytest.fixture(scope="session")
def spark(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Local mode in which a failed task is tried again."""
    import shmq.spark

    with pytest.MonkeyPatch.context() as patch:
        # where Spark's own Python looks for pyspark_shmq, as if it were installed there
        patch.setenv("PYTHONPATH", str(TOP))
        patch.setenv("SPARK_HOME", str(spark_home(tmp_path_factory.mktemp("home") / "spark")))
        made = shmq.spark.session(
            "local[2,4]",
            spark_sql_shuffle_partitions=2,
            spark_local_dir=str(tmp_path_factory.mktemp("spark")),
            spark_sql_warehouse_dir=str(tmp_path_factory.mktemp("warehouse")),
            spark_log_level="OFF",
        )
    yield made
    made.stop()
