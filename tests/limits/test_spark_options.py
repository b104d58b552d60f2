"""Every option of Spark's data source that is a number, beyond its bounds and at them, by each way
to read or write: one instance and many, in batches and as a stream. The readers and writers are
driven as Spark drives them, without a JVM."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from limits.machine import Sheet
from limits.site import CHANNEL, Site
from shmq.staging_place import staged_paths

for _name in ("pyspark", "pyarrow", "pandas", "isal"):
    if not importlib.util.find_spec(_name):
        pytest.skip(f"{_name} is not installed", allow_module_level=True)

import pyarrow as pa  # noqa: E402

import shmq.spark  # noqa: E402
from shmq.spark.options import OPTIONS, Seconds, Settings, Size, SparkOption, Whole  # noqa: E402
from shmq.spark.source import ShmqDataSource  # noqa: E402

NUMBERS = {
    option.name: option for option in OPTIONS if isinstance(option.parse, Whole | Size | Seconds)
}
TOPIC, ROWS = "sparks", 6
#: Texts that are no number, or none of 64 bits.
STRANGE = (
    *("", "x", "-1", "nan", "inf", "0x10", "1_0", "1.2.3", "1e3", "-0.5", "٣", "64q"),
    *(str(1 << 64), "9" * 400, "9" * 5000),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("site")
    made = Site(path, f"limits-{path.parent.name[-20:]}-spark")
    yield made
    made.close()
    for place in staged_paths(made.instance, os.geteuid()):
        shutil.rmtree(place, ignore_errors=True)


def beyond(option: SparkOption) -> list[str]:
    """Values that an option does not take: by little, by far, and of another kind."""
    parse = option.parse
    if isinstance(parse, Seconds):
        more = ["999999999999h", "1000000001", "9" * 400 + "s", "1000000000001ms"]
        if parse.low:
            more += ["0", "0.9ms", "0s"]
        return [*STRANGE, *more, "64k", *([] if _never(option) else ["never"])]
    if isinstance(parse, Size):
        return [*STRANGE, "0", "0k", "1.5", str(parse.high + 1), "9999999999g", "never"]
    return [*STRANGE, "1.5", "64k", "10s", str(parse.low - 1), str(parse.high + 1), "never"]


def _never(option: SparkOption) -> bool:
    try:
        option.parse("never")
    except ValueError:
        return False
    return True


def within(option: SparkOption) -> list[str]:
    """The least and the greatest value."""
    parse = option.parse
    if isinstance(parse, Seconds):
        return [f"{parse.low}s", f"{parse.high}s", *(["never"] if _never(option) else [])]
    return [str(1 if isinstance(parse, Size) else parse.low), str(parse.high)]


# ---- the ways ----

_numbers = itertools.count()


def _source(site: Site, given: dict[str, str], many: bool) -> tuple[ShmqDataSource, dict[str, str]]:
    where = {"instances": site.tcp} if many else {"instance": site.instance}
    number = next(_numbers)
    options = {"topic": TOPIC, "channel": f"c{number}", "consumer": f"r{number}", **where}
    options |= {"transport": "tcp", "minPartitionRows": "2", "numPartitions": "2"}
    options |= {"pollTimeout": "10ms", "maxTriggerDelay": "10ms"}
    return ShmqDataSource(options | given), options


def _fill(site: Site, channel: str) -> None:
    site.broker.create_channel(TOPIC, channel)
    site.broker.producer(TOPIC).publish_many([b"%d" % number for number in range(ROWS)])


def _bodies(reader: Any, parts: list[Any]) -> list[bytes]:
    return [
        body
        for part in parts
        for batch in reader.read(part)
        for body in batch.column("body").to_pylist()
    ]


def batch(site: Site, given: dict[str, str], many: bool = False) -> None:
    source, options = _source(site, given, many)
    _fill(site, options["channel"])
    try:
        reader = source.reader(None)
        rows = _bodies(reader, reader.partitions())
        assert rows == [b"%d" % number for number in range(len(rows))]
        assert rows
        words = [options[name] for name in ("topic", "channel", "consumer")]
        if many:
            shmq.spark.return_lease(None, *words, instances=site.tcp)
        else:
            shmq.spark.return_lease(site.instance, *words)
    finally:
        site.broker.delete_channel(TOPIC, options["channel"])


def peek(site: Site, given: dict[str, str]) -> None:
    source, options = _source(site, given | {"peek": "true"}, False)
    _fill(site, options["channel"])
    reader = source.reader(None)
    assert _bodies(reader, reader.partitions())
    site.broker.delete_channel(TOPIC, options["channel"])


def stream(site: Site, given: dict[str, str], many: bool = False) -> None:
    source, options = _source(site, given, many)
    _fill(site, options["channel"])
    reader = source.streamReader(None)
    try:
        begin = end = reader.initialOffset()
        most = reader.getDefaultReadLimit()
        while end == begin:
            end = reader.latestOffset(begin, most)
        assert _bodies(reader, reader.partitions(begin, end))
        reader.commit(end)
    finally:
        reader.stop()
        site.broker.delete_channel(TOPIC, options["channel"])


def write(site: Site, given: dict[str, str], many: bool = False, publish: str = "commit") -> None:
    number = next(_numbers)
    if "txnVersion" in given:
        given = given | {"txnAppId": f"a{number}"}
    source, _ = _source(site, given | {"topic": f"t{number}", "publish": publish}, many)
    site.broker.create_channel(f"t{number}", CHANNEL)
    try:
        writer = source.writer(None, False)
        rows = pa.record_batch({"body": pa.array([b"a", b"b"], pa.binary())})
        writer.commit([writer.write(iter([rows]))])
        assert site.broker.channel_depth(f"t{number}", CHANNEL) == 2
    finally:
        site.broker.delete_topic(f"t{number}")


WAYS: dict[str, tuple[str, Callable[[Site, dict[str, str]], None]]] = {
    "batch": ("batch", batch),
    "batch of many": ("batch", lambda site, given: batch(site, given, True)),
    "peek": ("batch", peek),
    "stream": ("stream", stream),
    "stream of many": ("stream", lambda site, given: stream(site, given, True)),
    "write": ("write", write),
    "write at once": ("write", lambda site, given: write(site, given, publish="immediate")),
    "write to many": ("write", lambda site, given: write(site, given, True)),
    "write at once to many": ("write", lambda site, given: write(site, given, True, "immediate")),
}


def applies(option: SparkOption, kind: str) -> bool:
    where = option.where.replace("read", "batch, stream")
    return kind in where.split(", ")


def test_each_option_that_is_a_number_has_its_bounds() -> None:
    others = {option.name for option in OPTIONS} - set(NUMBERS)
    for name in others:
        option = next(one for one in OPTIONS if one.name == name)
        assert not isinstance(option.default, int | float) or isinstance(option.default, bool), name
    assert len(NUMBERS) >= 13


@pytest.mark.parametrize("name", NUMBERS)
def test_an_option_is_refused_beyond_its_bounds(site: Site, name: str) -> None:
    option, sheet = NUMBERS[name], Sheet()
    for value in beyond(option):
        sheet.cell(
            f"{name}={value!r:.40}",
            lambda value=value: ShmqDataSource({"topic": TOPIC, name: value}),
            rf"option {name} of shmq.* from \d",
            lambda: Settings({"topic": TOPIC}),
        )
    sheet.verdict()


#: Each run tries these, which had faults; `--all` tries all of them.
OFTEN = ("hostTimeout", "leaseTtl", "maxBytesPerTrigger")


@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.deep) for name in NUMBERS],
)
def test_an_option_works_at_its_bounds(site: Site, name: str) -> None:
    option, sheet = NUMBERS[name], Sheet()
    ways = [way for way, (kind, _) in WAYS.items() if applies(option, kind)]
    for way, value in itertools.product(ways, within(option)):
        call = WAYS[way][1]
        sheet.cell(
            f"{name}={value} by {way}",
            lambda call=call, value=value: call(site, {name: value}),
            rf"{name}",
            lambda: None,
            may_return=True,
        )
    assert sheet.tried
    site.check()
    sheet.verdict()
