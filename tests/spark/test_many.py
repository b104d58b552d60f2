"""The reader of many instances, driven by hand in the orders that Spark may call it in. The
instances are brokers of this process behind a network that the tests break: no JVM, no gateway."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

import shmq
from shmq.errors import LeaseFenced, MemoryLost, Unreachable

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadMaxRows

from shmq.spark import chain, fleet, hosts, keeper, many, reading
from shmq.spark.chain import DataLoss
from shmq.spark.hosts import HostAway, NoLookupd
from shmq.spark.many import ManyReader, shared
from shmq.spark.many_stream import ManyStreamReader
from shmq.spark.options import OPTIONS, Settings
from shmq.spark.reading import finish_lease, return_lease
from shmq.spark.reads import this_process

A, B, C = "a:4150", "b:4150", "c:4150"
ALL = f"{A},{B},{C}"

Offsets = dict[str, dict[str, Any]]


class Network:
    """The addresses, the broker at each, and those that do not answer."""

    def __init__(self, start: Callable[[], shmq.Broker]) -> None:
        self._start = start
        self.brokers: dict[str, shmq.Broker] = {}
        self.identities: dict[str, str] = {}
        self.away: set[str] = set()

    def start(self, address: str) -> shmq.Broker:
        """A broker with fresh memory."""
        return self.add(address, self._start())

    def add(self, address: str, broker: shmq.Broker) -> shmq.Broker:
        """A broker, which has no messages."""
        self.brokers[address] = broker
        self.identities[address] = f"{broker.instance}@1"
        broker.create_channel("t", "c")
        return broker

    def publish(self, address: str, *bodies: bytes) -> None:
        self.brokers[address].producer("t").publish_many(bodies)

    def waiting(self, address: str) -> int:
        return self.brokers[address].channel_depth("t", "c")

    def leased(self, address: str) -> int:
        return self.brokers[address].channel_stats("t", "c").leased

    def dial(self, place: hosts.Place) -> Remote:
        self.check(place.address)
        return Remote(self, place.address)

    def check(self, address: str) -> None:
        if address in self.away or address not in self.brokers:
            raise Unreachable(f"{address} did not answer")


class Remote:
    """A broker as `shmq.connect` gives it, and a holder of it."""

    def __init__(self, network: Network, address: str, thing: Any = None) -> None:
        self._network, self._address = network, address
        self._thing = network.brokers[address] if thing is None else thing
        self.identity = network.identities[address]

    @property
    def ended(self) -> bool:
        self._network.check(self._address)
        return self.identity != self._network.identities[self._address]

    def __getattr__(self, name: str) -> Any:
        if name == "close" and isinstance(self._thing, shmq.Broker):
            return lambda: None  # only the connection
        value = getattr(self._thing, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **named: Any) -> Any:
            if self.ended:
                raise MemoryLost(f"{self._address} has other memory")
            found = value(*arguments, **named)
            is_holder = isinstance(found, shmq.LeaseHolder)
            return Remote(self._network, self._address, found) if is_holder else found

        return call

    def check(self) -> None:
        self._network.check(self._address)

    def lease_holder(self, *names: Any, resume: Any = None, **named: Any) -> Remote:
        """As over a network, where a holder may be resumed."""
        if resume is None:
            return self.__getattr__("lease_holder")(*names, **named)
        found = self.__getattr__("lease_holder_known")(*names[:2], resume, 0)
        found.leases()
        return found

    def read_lease(self, *arguments: Any, **named: Any) -> Any:
        return self.__getattr__("read_lease")(*arguments, **named)

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thing.close()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[shmq.Broker]]:
    """Brokers for all tests, which delete the topic."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(3):
            name, path = (
                f"test-{os.getpid()}-{secrets.token_hex(4)}",
                tmp_path_factory.mktemp("data"),
            )
            made.append(stack.enter_context(shmq.Broker(path, name)))
        yield made


@pytest.fixture
def network(
    open_broker: Callable[..., shmq.Broker],
    three: list[shmq.Broker],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Network]:
    """Three instances, none of which is found in shared memory."""
    made = Network(open_broker)
    for address, one in zip((A, B, C), three, strict=True):
        made.add(address, one)
    monkeypatch.setattr(hosts, "dial", made.dial)
    for module in (hosts, fleet):
        monkeypatch.setattr(module, "probe", made.check)
    monkeypatch.setattr(hosts, "local_instance", lambda identity, owner: None)
    monkeypatch.setattr(fleet.Failure, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(hosts, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(chain, "_ENDING", 0.05)
    monkeypatch.setattr(keeper, "start", lambda *_: this_process())  # of real instances
    yield made
    hosts.disconnect()
    for one in three:
        one.delete_topic("t")


class Query:
    """A query's runner: a reader, and what Spark would ask it."""

    def __init__(self, instances: str = ALL, **options: object) -> None:
        given = {"instances": instances, "topic": "t", "channel": "c", "consumer": "q"}
        given |= {"pollTimeout": "10ms", "minPartitionRows": "1", "numPartitions": "2"}
        given |= {name: str(value) for name, value in options.items()}
        if "lookupd" in given:
            del given["instances"]
        self.settings = Settings(given)
        self.reader: ManyStreamReader = pickle.loads(pickle.dumps(ManyStreamReader(self.settings)))

    def die(self) -> Query:
        """The connections of its process end."""
        for host in self.reader._fleet._hosts.values():
            if host.chain._holder is not None:
                host.chain._holder.leave()
        return self

    def latest(self, start: Offsets, rows: int = 100) -> Offsets:
        """As Spark has it, which keeps the text."""
        found = self.reader.latestOffset(json.loads(json.dumps(start)), ReadMaxRows(rows))
        return json.loads(json.dumps(found))

    def groups(self, start: Offsets, end: Offsets) -> list[Any]:
        return [pickle.loads(pickle.dumps(one)) for one in self.reader.partitions(start, end)]

    def read(self, start: Offsets, end: Offsets) -> list[bytes]:
        batches = [batch for one in self.groups(start, end) for batch in self.reader.read(one)]
        return sorted(body for batch in batches for body in batch.column("body").to_pylist())


def of(offsets: Offsets, address: str) -> dict[str, Any]:
    """The offset of the instance at an address."""
    (found,) = (one for one in offsets.values() if one["a"] == address)
    return found


# ---- which is read ----


def test_every_instance_is_read_and_its_leases_are_finished(network: Network) -> None:
    network.publish(A, b"a1", b"a2", b"a3")
    network.publish(B, b"b1")
    query = Query()
    start = query.reader.initialOffset()
    assert start == {}
    first = query.latest(start)
    assert first.keys() == {network.identities[A], network.identities[B]}
    assert query.read(start, first) == [b"a1", b"a2", b"a3", b"b1"]
    assert len(query.groups(start, first)) == 2
    network.publish(C, b"c1")  # it joins with lease 0
    second = query.latest(first)
    assert (of(second, A), of(second, C)["p"]) == (of(first, A), 0)
    assert query.read(first, second) == [b"c1"]
    assert [network.leased(address) for address in (A, B, C)] == [0, 0, 1]
    network.publish(A, b"a4")
    third = query.latest(second)
    assert (of(third, A)["p"], of(third, C)) == (of(first, A)["l"], of(second, C))
    assert Query().latest(second) == third
    assert (network.leased(A), network.leased(C)) == (1, 0)
    query = Query()
    assert query.latest(third) == third
    told = query.reader.reportLatestOffset()
    assert (told["depth"], told["instances"], told["away"]) == (0, 3, [])


def test_the_limits_are_for_all_instances_together(network: Network) -> None:
    network.publish(A, *(b"a%d" % number for number in range(9)))
    network.publish(B, b"b0", b"b1", b"b2")
    network.publish(C, b"c0")
    query = Query()
    offsets, sizes = [query.reader.initialOffset()], []
    while (end := query.latest(offsets[-1], 5)) != offsets[-1]:
        sizes.append(len(query.read(offsets[-1], end)))
        offsets.append(end)
    assert sum(sizes) == 13
    assert max(sizes) <= 5


@pytest.mark.parametrize(
    ("total", "waiting", "shares"),
    [
        (10, {"a": 90, "b": 10}, {"a": 8, "b": 1}),
        (10, {"a": 5, "b": 0}, {"a": 10}),
        (2, {"a": 1, "b": 7, "c": 5}, {"b": 1, "c": 1}),
        (10, {}, {}),
        (100, {"a": 1, "b": 1}, {"a": 50, "b": 50}),
    ],
)
def test_a_limit_is_shared_by_what_waits(
    total: int, waiting: dict[str, int], shares: dict[str, int]
) -> None:
    assert shared(total, waiting) == shares


def test_parts_of_several_instances_are_read_by_one_task(network: Network) -> None:
    network.publish(A, *[b"a" * 100] * 8)
    network.publish(B, b"b")
    network.publish(C, b"c")
    query = Query(minPartitionRows=5)
    start = query.reader.initialOffset()
    groups = query.groups(start, query.latest(start))
    sizes = [[len(one.column(0)) for one in query.reader.read(group)] for group in groups]
    assert sizes == [[4, 1], [4, 1]]  # two parts of the large lease, each with a small one


def test_two_addresses_of_one_instance_are_one(network: Network) -> None:
    network.brokers["alias:4150"] = network.brokers[A]
    network.identities["alias:4150"] = network.identities[A]
    network.publish(A, b"a1", b"a2")
    query = Query(f"{A},alias:4150")
    end = query.latest({})
    assert query.read({}, end) == [b"a1", b"a2"]
    assert query.latest(end) == end


def test_available_now_ends_where_it_began(network: Network) -> None:
    network.publish(A, b"a1", b"a2", b"a3")
    query = Query()
    query.reader.prepareForTriggerAvailableNow()
    network.publish(B, b"later")
    start, came = query.reader.initialOffset(), list[bytes]()
    while (end := query.latest(start, 2)) != start:
        came += query.read(start, end)
        network.publish(A, b"later")
        start = end
    assert came == [b"a1", b"a2", b"a3"]


# ---- one is away ----


def test_a_missing_instance_is_named(network: Network) -> None:
    network.publish(A, b"a1")
    network.away.add(B)
    with pytest.raises(HostAway, match=f"1 of 3 instances.*{B} did not answer.*onMissingHost"):
        Query().latest({})
    assert network.waiting(A) == 1


def test_a_missing_instance_is_waited_for(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    network.publish(A, b"a1")
    network.publish(B, b"b1")
    waits = []

    def comes_back(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            network.away.clear()

    monkeypatch.setattr(fleet.time, "sleep", comes_back)
    query = Query(onMissingHost="wait")
    network.away.add(B)
    end = query.latest({})
    assert len(waits) == 3
    network.away.add(A)
    waits.clear()
    assert query.read({}, end) == [b"a1", b"b1"]  # planning waits too
    assert len(waits) == 3


def test_a_skipped_instance_comes_back_with_what_it_held(network: Network) -> None:
    network.publish(A, b"a1")
    network.publish(B, b"b1")
    query = Query(onMissingHost="skip")
    first = query.latest({})
    assert query.read({}, first) == [b"a1", b"b1"]
    network.away.add(B)
    network.publish(A, b"a2")
    second = query.latest(first)
    assert of(second, B) == of(first, B)
    assert query.read(first, second) == [b"a2"]
    query.reader.commit(second)
    assert network.leased(B) == 1
    assert query.reader.reportLatestOffset()["away"] == [B]
    network.away.clear()
    network.publish(B, b"b2")
    third = query.latest(second)
    assert query.read(second, third) == [b"b2"]
    assert query.latest(third) == third
    assert network.leased(B) == 0


def test_a_lease_that_no_offset_names_is_found_when_its_instance_is_back(network: Network) -> None:
    network.publish(A, b"a1")
    network.publish(B, b"b1")
    dead = Query()
    dead.latest({})  # Spark dies before it writes this down
    dead.die()
    query = Query(onMissingHost="skip")
    network.away.add(B)
    first = query.latest({})
    assert query.read({}, first) == [b"a1"]
    network.away.clear()
    second = query.latest(first)
    assert query.read(first, second) == [b"b1"]


def test_a_planned_batch_is_read_whole_or_not_at_all(network: Network) -> None:
    network.publish(A, b"a1")
    network.publish(B, b"b1")
    end = Query().latest({})
    network.away.add(B)
    query = Query(onMissingHost="skip")
    with pytest.raises(HostAway, match="cannot be read in part"):
        query.read({}, end)
    without = Query(f"{A},{C}", failOnDataLoss="false")
    assert without.read({}, end) == [b"a1"]
    network.away.clear()
    assert Query(onMissingHost="skip").read({}, end) == [b"a1", b"b1"]


def test_an_instance_that_is_taken_out_is_finished_and_forgotten(network: Network) -> None:
    network.publish(A, b"a1")
    network.publish(B, b"b1")
    first = Query().latest({})
    network.publish(A, b"a2")
    network.publish(B, b"b2")
    query = Query(f"{A},{C}")
    second = query.latest(first)
    assert [one["a"] for one in second.values()] == [A]
    assert query.read(first, second) == [b"a2"]
    assert (network.leased(B), network.waiting(B)) == (0, 1)


def test_a_task_waits_and_reads_on_where_it_was(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_ROWS", 2)
    bodies = [b"a%d" % number for number in range(6)]
    network.publish(A, *bodies)
    query = Query(onMissingHost="wait", numPartitions=1)
    (group,) = query.groups({}, query.latest({}))
    rows, came = query.reader.read(group), list[bytes]()
    pauses = []

    def comes_back(seconds: float) -> None:
        pauses.append(seconds)
        network.away.clear()
        monkeypatch.setattr(reading, "_ROWS", 3)  # other batches than before

    monkeypatch.setattr(many.time, "sleep", comes_back)
    whole = Remote.read_lease

    def breaks(self: Remote, *arguments: Any, **named: Any) -> Any:
        for number, found in enumerate(whole(self, *arguments, **named)):
            if number == 2 and not pauses:
                network.away.add(A)
            self.check()
            yield found

    monkeypatch.setattr(Remote, "read_lease", breaks)
    for batch in rows:
        came += batch.column("body").to_pylist()
    assert came == bodies
    assert len(pauses) == 1
    impatient = Query()
    network.away.add(A)
    (group,) = [
        replace(group, parts=(replace(part, place=place),))
        for part in group.parts
        for place in [replace(part.place, patient=False)]
    ]
    with pytest.raises(Unreachable):
        list(impatient.reader.read(group))


# ---- memory that is lost ----


def test_lost_memory_is_told(network: Network) -> None:
    network.publish(A, b"a1")
    network.publish(B, b"b1")
    query = Query()
    end = query.latest({})
    groups = query.groups({}, end)
    network.start(B)  # with fresh memory
    with pytest.raises(MemoryLost):
        [list(query.reader.read(group)) for group in groups]
    network.publish(B, b"b2")
    for one in (query, Query()):
        with pytest.raises(DataLoss, match=f"instance '{B}' .lease {of(end, B)['l']}"):
            one.read({}, end)
    loose = Query(failOnDataLoss="false")
    assert loose.read({}, end) == [b"a1"]
    for one in (query, Query()):
        with pytest.raises(DataLoss, match=f"instance '{B}' .lease {of(end, B)['l']}"):
            one.latest(end)
    following = loose.latest(end)
    assert network.identities[B] in following
    assert loose.read(end, following) == [b"b2"]
    assert len(following) == 2
    assert loose.reader.reportLatestOffset()["lost_leases"] == 2


def test_an_address_with_another_instance_is_no_end_of_the_first(network: Network) -> None:
    network.publish(A, b"a1")
    end = Query(A).latest({})
    for table in (network.brokers, network.identities):  # the names of two hosts changed places
        table[A], table[B] = table[B], table[A]  # type: ignore[index]
    query = Query(f"{A},{B}")
    assert query.read({}, end) == [b"a1"]
    assert query.latest(end) == end
    assert network.leased(B) == 0


# ---- crashes ----


@pytest.mark.parametrize("taken", [(A, B, C), (B,)])
def test_what_spark_did_not_write_down_is_given_again(
    taken: tuple[str, ...], network: Network
) -> None:
    for address in taken:
        network.publish(address, address.encode())
    dead = Query()
    lost = dead.latest({})
    dead.die()
    for address in (A, B, C):
        network.publish(address, b"later")
    again = Query()
    assert again.latest({}) == lost
    assert again.read({}, lost) == sorted(address.encode() for address in taken)
    following = again.latest(lost)
    assert again.read(lost, following) == [b"later"] * 3


def test_a_restarted_query_reads_what_spark_wrote_down(network: Network) -> None:
    network.publish(A, b"a1")
    network.publish(B, b"b1")
    end = Query().latest({})
    again = Query()
    for _ in range(2):
        assert again.read({}, end) == [b"a1", b"b1"]
    assert again.latest(end) == end
    assert (network.leased(A), network.leased(B)) == (0, 0)


def test_the_newest_run_of_a_query_wins_on_every_instance(network: Network) -> None:
    network.publish(A, b"a1")
    network.publish(B, b"b1")
    before, after = Query(), Query()
    end = before.latest({})
    assert after.latest(end) == end
    joined = network.start("d:4150")
    joined.producer("t").publish(b"d1")
    before.settings._values["instances"] = after.settings._values["instances"] = (A, B, C, "d:4150")
    before.reader._fleet._settings._values["instances"] = (A, B, C, "d:4150")
    after.reader._fleet._settings._values["instances"] = (A, B, C, "d:4150")
    following = after.latest(end)
    with pytest.raises(LeaseFenced):
        before.latest(end)
    assert after.read(end, following) == [b"d1"]
    assert after.latest(following) == following  # it was not fenced where it joined


# ---- lookupd ----


@pytest.fixture
def lookupd() -> Iterator[tuple[str, list[str]]]:
    """A nsqlookupd's HTTP interface: its URL, and the addresses that it knows."""
    known: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/lookup?topic=t"
            pairs = [address.rsplit(":", 1) for address in known]
            found = [{"broadcast_address": name, "tcp_port": int(port)} for name, port in pairs]
            body = json.dumps({"channels": ["c"], "producers": found}).encode()
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(body if known else b'{"message":"TOPIC_NOT_FOUND"}')

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", known
    server.shutdown()
    server.server_close()
    thread.join()


def test_lookupd_tells_which_instances_there_are(
    network: Network,
    lookupd: tuple[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hosts, "LOOK_EVERY", 0.0)
    url, known = lookupd
    dead = "http://127.0.0.1:9"
    query = Query(lookupd=f"{dead},{url}")
    assert query.latest({}) == query.latest({}) == {}
    assert caplog.text.count("no nsqlookupd knows an instance that has topic t") == 1
    known += [A, B]
    for address in (A, B, C):
        network.publish(address, address.encode())
    first = query.latest({})
    assert query.read({}, first) == [A.encode(), B.encode()]
    known[:] = [C]  # A and B are read on: a nsqlookupd forgets what it does not hear of
    network.publish(A, b"a2")
    second = query.latest(first)
    assert query.read(first, second) == [b"a2", C.encode()]
    with pytest.raises(NoLookupd, match=dead):
        Query(lookupd=dead).latest({})


# ---- batches, options ----


def batch(**options: str) -> list[bytes]:
    given = {"instances": ALL, "topic": "t", "channel": "c", "consumer": "once", **options}
    reader = ManyReader(Settings(given))
    groups = [pickle.loads(pickle.dumps(group)) for group in reader.partitions()]
    return sorted(
        body
        for group in groups
        for batch in reader.read(group)
        for body in batch.column("body").to_pylist()
    )


def test_a_batch_of_many_instances_is_read_more_than_once_and_then_finished(
    network: Network,
) -> None:
    assert batch() == []
    network.publish(A, b"a1")
    network.publish(B, b"b1")
    assert batch() == [b"a1", b"b1"]
    network.publish(C, b"later")
    assert batch() == [b"a1", b"b1"]
    network.away.add(C)
    with pytest.raises(HostAway, match=C):
        batch()
    assert batch(onMissingHost="skip") == [b"a1", b"b1"]
    network.away.clear()
    assert return_lease(None, "t", "c", "once", instances=ALL) == 2
    assert batch() == [b"a1", b"b1", b"later"]
    network.away.add(C)
    with pytest.raises(HostAway, match=C):
        finish_lease(None, "t", "c", "once", instances=ALL)
    assert (network.leased(A), network.leased(B), network.leased(C)) == (0, 0, 1)
    network.away.clear()
    assert finish_lease(None, "t", "c", "once", instances=ALL) == 1


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"instances": "a:4150,a:4150"}, "each once"),
        ({"instances": "a:port"}, "host:port"),
        ({"instances": ","}, "HOST:PORT"),
        ({"lookupd": "ftp://a"}, "nsqlookupd"),
        ({"instances": "a", "instance": "b"}, "give one of them"),
        ({"instances": "a", "lookupd": "b:4161"}, "give one of them"),
        ({"instances": "a", "onMissingHost": "no"}, "fail or wait or skip"),
        ({"instances": "a", "hostTimeout": "never"}, "from 1ms"),
        ({"instances": "a", "hostTimeout": "0s"}, "from 1ms"),
    ],
)
def test_options_that_name_no_instances_are_refused(given: dict[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Settings({"topic": "t", **given})


def test_options_that_name_instances() -> None:
    settings = Settings({"topic": "t", "instances": " a, b:1 ,[::1]:7"})
    assert settings.instances == ("a:4150", "b:1", "[::1]:7")
    assert Settings({"topic": "t", "lookupd": "a:4161,https://b/"}).lookupd == (
        "http://a:4161",
        "https://b",
    )


def test_the_checkpoint_of_one_instance_is_told_from_that_of_many(
    network: Network, broker: shmq.Broker
) -> None:
    from shmq.spark.stream import ShmqStreamReader

    one = ShmqStreamReader(Settings({"topic": "t", "channel": "c", "instance": broker.instance}))
    start = one.initialOffset()
    with pytest.raises(ValueError, match="reads one instance"):
        Query().latest(start)
    with pytest.raises(ValueError, match="reads many instances"):
        one.latestOffset({}, ReadMaxRows(1))
    one.stop()


def test_the_connections_are_as_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(shmq, "connect", lambda *words, **named: calls.append((words, named)))
    given = {"topic": "t", "instances": A, "hostTimeout": "3s"}
    own = {"tls": "false", "secret": "only the runs of this query"}
    for more in ({}, {"tls": "true", "authSecret": "s3"}, own, {}):
        place = hosts.Place.of(Settings(given | more), A)
        assert "s3" not in repr(place)
        hosts.dial(place)
    plain = {"tls": None, "auth_secret": None, "timeout": 3.0}
    secure = {"tls": True, "auth_secret": "s3", "timeout": 3.0}
    proofs = [named.pop("secret") for _, named in calls]
    assert calls == [((A,), plain), ((A,), secure), ((A,), plain), ((A,), plain)]
    # the next run has the proof of this one, and strangers have not what follows from authSecret
    assert proofs[0] == proofs[3] != proofs[1]
    assert proofs[2] == own["secret"]
    with pytest.raises(FileNotFoundError):
        hosts.dial(hosts.Place.of(Settings(given | {"tls": "/no/file"}), A))


def test_a_token_is_the_secret_by_its_other_name() -> None:
    given = {"topic": "t", "instances": A}
    settings = Settings(given | {"token": "s3"})
    place = hosts.Place.of(settings, A)
    assert place.secret == "s3"
    assert "s3" not in repr(place) + repr(settings) + settings.where
    with pytest.raises(ValueError, match="one thing"):
        Settings(given | {"token": "s3", "authSecret": "s4"})


@pytest.mark.parametrize("wrong", ["a short one", "sixteen characters\nand a line end", "x" * 201])
def test_an_error_does_not_repeat_a_secret(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"^option secret of shmq: secret must have 16") as failed:
        Settings({"topic": "t", "instances": A, "secret": wrong})
    assert wrong not in str(failed.value)
    assert repr(wrong)[1:-1] not in repr(failed.value)
    assert {option.name for option in OPTIONS if option.is_secret} == {
        "token", "authSecret", "secret"
    }  # fmt: skip
