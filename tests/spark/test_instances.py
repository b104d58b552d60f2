"""Spark over three instances that are served by processes of their own, over TCP."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.certificates import of_this_host
from support.deliveries import take_all
from support.fake_auth_server import Authority, reply, rule
from support.fleet import Instance
from support.processes import ROOT, WATCHDOG, eventually
from support.real_nsqlookupd import nsqlookupd
from support.slow_spark import was_too_slow

import shmq
import shmq.spark

pytest.importorskip("pyspark")

from pyspark.errors import StreamingQueryException

from shmq.spark import hosts
from shmq.spark.many import ManyReader
from shmq.spark.options import Settings

pytestmark = pytest.mark.spark


@pytest.fixture
def start(new_instance: Callable[[], str], tmp_path: Path) -> Iterator[Callable[..., Instance]]:
    """`start(**options)`: an instance with these options of `shmq serve`."""
    made: list[Instance] = []

    def start(**given: object) -> Instance:
        directory = tmp_path / f"instance{len(made)}"
        made.append(Instance(new_instance(), directory, gateway_workers=1, **given))
        return made[-1]

    yield start
    hosts.disconnect()
    for one in made:
        one.close()


@pytest.fixture
def instances(start: Callable[..., Instance]) -> list[Instance]:
    """Three of them."""
    return [start() for _ in range(3)]


def options(instances: list[Instance], **given: object) -> dict[str, str]:
    addresses = ",".join(one.address for one in instances)
    found = {"instances": addresses, "topic": "t", "channel": "c", "transport": "tcp"}
    found |= {"minPartitionRows": "100", "numPartitions": "2", "consumer": "q"}
    return found | {name: str(value) for name, value in given.items()}


class Stream:
    """A query from the instances into topic `out` of a broker, which is started again if Spark did
    not wait for its Python process."""

    def __init__(self, spark: Any, broker: shmq.Broker, checkpoint: Path, given: Any) -> None:
        rows = spark.readStream.format("shmq").options(**given).load()
        to = {"instance": broker.instance, "topic": "out", "checkpointLocation": str(checkpoint)}
        self._query = rows.select("body").writeStream.format("shmq").options(**to)
        self._run = self._query.start()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until it is true."""

        def holds() -> bool:
            if not self._run.isActive:
                error = self._run.exception()
                assert was_too_slow(error), error
                self._run = self._query.start()
            return condition()

        eventually(holds, 4 * WATCHDOG, what)

    def stop(self) -> None:
        """The driver's process ends."""
        self._run.stop()


def test_a_batch_over_tcp_is_read_more_than_once_and_then_finished(
    spark: Any, instances: list[Instance]
) -> None:
    bodies = [body for one in instances for body in one.publish(0, 1000)]
    given = options(instances, consumer="once")
    rows = spark.read.format("shmq").options(**given).load()
    for _ in range(2):
        assert sorted(bytes(row.body) for row in rows.select("body").collect()) == sorted(bodies)
    assert rows.selectExpr("count(distinct id)", "max(attempts)").first() == (3000, 1)
    many = given["instances"]
    assert shmq.spark.finish_lease(None, "t", "c", "once", instances=many) == 3000
    assert [one.broker.channel_stats("t", "c").leased for one in instances] == [0, 0, 0]


def test_an_instance_on_this_host_is_read_in_shared_memory(
    instances: list[Instance],
) -> None:
    instances[0].publish(0, 10)
    for transport, kind in (("auto", shmq.Broker), ("tcp", shmq.RemoteBroker)):
        settings = Settings(options(instances[:1], transport=transport))
        place = hosts.Place.of(settings, instances[0].address)
        assert type(hosts.broker_at(place)) is kind
        reader = ManyReader(settings)
        (group,) = reader.partitions()
        assert type(group.parts[0].broker) is kind
        assert sum(batch.num_rows for batch in reader.read(group)) == 10
    with pytest.raises(shmq.MemoryLost):
        hosts.broker_at(replace(place, identity="other@1"))


@pytest.mark.deep
def test_a_write_goes_to_every_instance_once(
    spark: Any, instances: list[Instance], tmp_path: Path
) -> None:
    for one in instances:
        one.broker.create_channel("out", "o")
    rows = spark.range(3000).repartition(6).selectExpr("printf('%05d', id) as body")
    to = {"instances": ",".join(one.address for one in instances), "topic": "out"}
    for _ in range(2):
        shmq.spark.publish(rows, "out", instances=to["instances"], txnAppId="w", txnVersion=1)
    broken = rows.selectExpr("if(body = '00999', cast(null as string), body) as body")
    with pytest.raises(Exception, match="null"):
        broken.write.format("shmq").mode("append").options(**to).save()
    came = [take_all(one.broker, "out", "o").bodies for one in instances]
    assert min(map(len, came)) > 0
    assert sorted(itertools.chain.from_iterable(came)) == [
        b"%05d" % number for number in range(3000)
    ]
    rows.write.format("shmq").mode("append").options(**to, publish="immediate").save()
    assert sum(len(take_all(one.broker, "out", "o").bodies) for one in instances) == 3000
    with pytest.raises(Exception, match="lookupd of shmq is for reads"):
        rows.write.format("shmq").mode("append").options(topic="out", lookupd="a:4161").save()


@pytest.mark.deep
def test_a_stream_gives_each_message_of_three_instances_once(
    spark: Any, broker: shmq.Broker, instances: list[Instance], tmp_path: Path
) -> None:
    broker.create_channel("out", "o")
    sent = [body for one in instances for body in one.publish(0, 1000)]

    def all_came() -> bool:
        return broker.channel_depth("out", "o") >= len(sent)

    given = options(instances, maxMessagesPerTrigger=900, hostTimeout="30s")
    stream = Stream(spark, broker, tmp_path / "checkpoint", given)
    stream.until(lambda: broker.channel_depth("out", "o") > 0, "the stream has begun")
    instances[0].kill_gateway()
    sent += [body for one in instances for body in one.publish(1000, 1000)]
    stream.until(all_came, "everything came though a gateway was killed")
    stream.stop()

    sent += [body for one in instances for body in one.publish(2000, 500)]
    instances[1].kill()
    given = options(instances, onMissingHost="wait", hostTimeout="1s")
    stream = Stream(spark, broker, tmp_path / "checkpoint", given)
    before = broker.channel_depth("out", "o")
    stream.until(lambda: bool(stream._run.status["isTriggerActive"]), "the stream waits")
    assert broker.channel_depth("out", "o") == before
    instances[1].start()
    stream.until(all_came, "everything came when the instance was back")
    stream.until(
        lambda: not any(one.broker.channel_stats("t", "c").leased for one in instances),
        "every lease is finished",
    )
    stream.stop()

    came = take_all(broker, "out", "o")
    assert sorted(came.bodies) == sorted(sent)
    assert set(came.attempts) == {1}


@pytest.mark.deep
def test_a_stream_into_three_instances_publishes_each_message_once(
    spark: Any, broker: shmq.Broker, instances: list[Instance], tmp_path: Path
) -> None:
    broker.create_channel("t", "c")
    for one in instances:
        one.broker.create_channel("out", "o")
    given = {"instance": broker.instance, "topic": "t", "channel": "c", "consumer": "q"}
    given |= {"minPartitionRows": "100", "numPartitions": "3", "maxMessagesPerTrigger": "600"}
    rows = spark.readStream.format("shmq").options(**given).load().select("body")
    to = {"instances": ",".join(one.address for one in instances), "topic": "out"}
    writing = rows.writeStream.format("shmq").options(
        checkpointLocation=str(tmp_path / "checkpoint"), **to
    )
    sent = [b"%05d" % number for number in range(2000)]
    for half in (sent[:1000], sent[1000:]):
        broker.producer("t").publish_many(half)
        stop_at = 3
        while broker.channel_stats("t", "c").depth or broker.channel_stats("t", "c").leased:
            query = writing.trigger(availableNow=True).start()
            try:
                assert query.awaitTermination(10 * WATCHDOG)
            except StreamingQueryException as exc:
                stop_at -= 1
                if not stop_at or not was_too_slow(exc):
                    raise
    came = [take_all(one.broker, "out", "o").bodies for one in instances]
    assert min(map(len, came)) > 0
    assert sorted(itertools.chain.from_iterable(came)) == sent


@pytest.mark.deep
def test_the_walk_through_runs_as_pasted(
    spark: Any, instances: list[Instance], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the addresses and directories are the test's, and the session is the one that is
    there."""
    page = (ROOT / "docs" / "fleet.md").read_text().partition("## Spark over many instances")[2]
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for number, one in enumerate(instances, 1):
        assert program.count(f"127.0.0.1:515{number}") == 1
        program = program.replace(f"127.0.0.1:515{number}", one.address)
    program = program.replace("/var/tmp/fleet", str(tmp_path / "fleet"))
    monkeypatch.setattr(shmq.spark, "session", lambda *_: spark, raising=False)
    names: dict[str, Any] = {}
    for times in (1, 2):  # the second run reads what it published itself
        for last in (False, False, True):
            try:
                exec(compile(program, "docs/fleet.md", "exec"), names)
                break
            except StreamingQueryException as exc:
                if last or not was_too_slow(exc):
                    raise
                program = re.sub(r"(?m)^        broker.producer.*$", "        pass", program)
        assert spark.read.parquet(str(tmp_path / "fleet" / "out")).count() == 3000 * times


# ---- logins, discovery ----


@pytest.mark.deep
def test_a_stream_over_tls_with_a_secret(
    spark: Any, broker: shmq.Broker, start: Callable[..., Instance], tmp_path: Path
) -> None:
    cert, key = of_this_host(tmp_path)
    with Authority() as authority:
        authority.reply = (200, reply(3600, rule()))
        secure = {
            "tls_cert": cert,
            "tls_key": key,
            "https_address": "",
            "tls_required": "tcp-https",
        }
        fleet = [start(auth_http_address=authority.address, **secure) for _ in range(2)]
        sent = [body for one in fleet for body in one.publish(0, 1000)]
        login = {"tls": cert, "authSecret": "open sesame"}
        for one in fleet:
            one.broker.create_channel("out", "o")
        to = {"instances": options(fleet)["instances"], "topic": "out", **login}
        rows = spark.readStream.format("shmq").options(**options(fleet, **login)).load()
        writing = (
            rows.select("body")
            .writeStream.format("shmq")
            .options(checkpointLocation=str(tmp_path / "checkpoint"), **to)
        )
        drain(writing, fleet)
        came = [body for one in fleet for body in take_all(one.broker, "out", "o").bodies]
        assert sorted(came) == sorted(sent)
        assert {(one["secret"], one["tls"]) for one in authority.asked} == {("open sesame", "true")}
        for wrong, match in (
            ({"authSecret": "s"}, "TLS"),
            ({"tls": cert}, "AUTH"),
            ({**login, "tls": "true"}, "CERTIFICATE_VERIFY_FAILED"),
        ):
            with pytest.raises(Exception, match=match):
                spark.read.format("shmq").options(**options(fleet, **wrong)).load().count()


@pytest.mark.deep
def test_a_stream_over_the_instances_that_a_real_nsqlookupd_knows(
    spark: Any, start: Callable[..., Instance], tmp_path: Path
) -> None:
    with nsqlookupd() as (tcp, web):
        announced = {"lookupd_tcp_address": tcp, "broadcast_address": "127.0.0.1"}
        announced["http_address"] = "127.0.0.1:0"
        fleet = [start(**announced) for _ in range(2)]
        sent: list[bytes] = []
        given = options(fleet, lookupd=web)
        del given["instances"]
        for last in (False, True):
            if last:  # another joins
                fleet.append(start(**announced))
            eventually(lambda: len(hosts.known_to_lookupd([f"http://{web}"], "t")) == len(fleet))
            sent += [body for one in fleet for body in one.publish(len(sent), 500)]
            rows = spark.readStream.format("shmq").options(**given).load()
            writing = (
                rows.select("body")
                .writeStream.format("parquet")
                .options(
                    path=str(tmp_path / "out"), checkpointLocation=str(tmp_path / "checkpoint")
                )
            )
            drain(writing, fleet)
        came = spark.read.parquet(str(tmp_path / "out")).collect()
        assert sorted(bytes(row.body) for row in came) == sorted(sent)


def drain(writing: Any, fleet: list[Instance]) -> None:
    """Run a query until the instances hold nothing more; again, up to three times, if Spark did not
    wait for its Python process."""
    patience = 3
    while any(found.depth or found.leased for found in counts(fleet)):
        query = writing.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(10 * WATCHDOG)
        except StreamingQueryException as exc:
            patience -= 1
            if not patience or not was_too_slow(exc):
                raise


def counts(fleet: list[Instance]) -> list[Any]:
    """The counts of the channel on each instance."""
    return [one.broker.channel_stats("t", "c") for one in fleet]
