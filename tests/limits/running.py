"""The running limits: what fills a table or exceeds a size, and the ways in that can meet it.

Each row is a function that makes its cells on a site. `covers` names the bounds of the headers and
the options that it exceeds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.nsq_client import mpub, sized
from support.processes import WATCHDOG, eventually, stop_process

import shmq
from limits import ways
from limits.machine import Sheet, attempt
from limits.site import BODY, CHANNEL, IN_FLIGHT, MESSAGE, READY, TOPICS, Site
from shmq.gateway.protocol import MAX_LINE
from shmq.layout import constant

Fill = Callable[[Site, Sheet], None]


@dataclass(frozen=True)
class Row:
    fill: Fill
    covers: tuple[str, ...]
    deep: bool


ROWS: dict[str, Row] = {}


def exceeds(*covers: str, deep: bool = False) -> Callable[[Fill], Fill]:
    def add(fill: Fill) -> Fill:
        ROWS[fill.__name__] = Row(fill, covers, deep)
        return fill

    return add


def nothing() -> None:
    """There is no next call."""


# ---- sizes ----


@exceeds("max_msg_size", "max_body_size")
def a_body(site: Site, sheet: Sheet) -> None:
    site.broker.create_channel("sizes", CHANNEL)
    site.broker.configure("sizes", CHANNEL, max_messages=50, overflow="drop-oldest")
    for way, publish in ways.PUBLISH.items():
        for size in (MESSAGE + 1, MESSAGE * 2, BODY * 20):
            if way == "shmq pub" and size > 100_000:
                continue  # the kernel takes no longer word
            sheet.cell(
                f"a body of {size} by {way}",
                lambda publish=publish, size=size: publish(site, "sizes", b"x" * size),
                r"max_msg_size|max_body_size|[Bb]ody|BODY|MSG_TOO_BIG|message too big|BAD_MESSAGE",
                lambda publish=publish: publish(site, "sizes", b"x" * MESSAGE),
            )
    with site.broker.consumer("sizes", CHANNEL, max_in_flight=100) as consumer:
        batch = consumer.take_many(100, 0)
        if large := [len(body) for body in batch.bodies() if len(body) not in (1, MESSAGE)]:
            sheet.fault("a body", f"part of one that was refused was published: {large}")
        batch.finish()


@exceeds("max_body_size")
def a_command(site: Site, sheet: Sheet) -> None:
    many = [b"x" * 1000] * (BODY // 1000 + 1)
    long = json.dumps({"feature": "x" * BODY}).encode()
    says = r"(?i)body"
    for way, call in {
        "MPUB": lambda: ways.tcp(site, mpub(b"sizes", many)),
        "IDENTIFY": lambda: ways.tcp(site, b"IDENTIFY\n" + sized(long)),
        "AUTH": lambda: ways.tcp(site, b"AUTH\n" + sized(long)),
        "/mpub": lambda: ways.web(site, "POST", "/mpub?topic=sizes", b"\n".join(many)),
        "remote": lambda: site.remote.producer("sizes").publish_many(many),
    }.items():
        again = lambda: ways.tcp(site, mpub(b"sizes", [b"x"]))  # noqa: E731
        sheet.cell(f"a command of {len(long)} bytes by {way}", call, says, again)


@exceeds("PROPERTIES_MOST", "PROPERTY_NAME")
def properties(site: Site, sheet: Sheet) -> None:
    producer = site.gone_producer
    most, name = constant("PROPERTIES_MOST"), constant("PROPERTY_NAME")

    def loan(given: dict[str, Any]) -> None:
        with producer.loan(1, properties=given) as buffer:
            buffer[:] = b"x"

    for way, publish in {
        "publish": lambda given: producer.publish(b"x", properties=given),
        "publish_many": lambda given: producer.publish_many([b"x"], properties=given),
        "loan": loan,
        "shmq pub": lambda given: ways.command(
            site, "pub", "gone", "x", *(f"--property={k}={v.decode()}" for k, v in given.items())
        ),
    }.items():
        for what, given, says in (
            ("bytes", {"a": b"x" * most}, str(most)),
            ("many bytes", {"a": b"x" * 70_000}, str(most)),
            ("number", {f"n{i}": b"x" for i in range(most)}, str(most)),
            ("name", {"n" * (name + 1): b"x"}, rf"1 to {name}"),
            ("long name", {"n" * 300: b"x"}, rf"1 to {name}"),
            ("no name", {"": b"x"}, rf"1 to {name}|NAME=VALUE"),
        ):
            sheet.cell(
                f"{what} of properties by {way}",
                lambda publish=publish, given=given: publish(given),
                says,
                lambda publish=publish: publish({"n" * name: b"x"}),
            )


@exceeds("KEY_MOST")
def keys(site: Site, sheet: Sheet) -> None:
    store, most = site.results, constant("KEY_MOST")
    for size in (0, most + 1, 70_000):
        key = b"k" * size
        for way, call in {
            "set": lambda key=key: store.set(key, b"v"),
            "add": lambda key=key: store.add(key, b"v"),
            "get": lambda key=key: store.get(key),
            "pop": lambda key=key: store.pop(key),
            "delete": lambda key=key: store.delete(key),
            "incr": lambda key=key: store.incr(key),
            "wait": lambda key=key: store.wait(key, 0),
            "wait_any": lambda key=key: store.wait_any([key, b"there"], 0),
        }.items():
            again = lambda: store.set(b"k" * most, b"v")  # noqa: E731
            sheet.cell(f"a key of {size} by {way}", call, rf"1 to {most} bytes", again)
    sheet.cell(
        f"a value of {MESSAGE + 1}",
        lambda: store.set(b"k", b"x" * (MESSAGE + 1)),
        "max_msg_size",
        lambda: store.set(b"k", b"x" * MESSAGE),
    )


@exceeds("NAME")
def names(site: Site, sheet: Sheet) -> None:
    for size in (0, 65, 300, 20_000):
        name = "n" * size
        # as nsqd, the gateway ends a connection whose line never ends
        too_long = "|without a word|400 Bad Request" if size > MAX_LINE else ""
        for way, make in ways.TOPIC.items():
            sheet.cell(
                f"a topic's name of {size} by {way}",
                lambda make=make, name=name: make(site, name),
                r"1 to 64|E_BAD_TOPIC|INVALID_TOPIC|MISSING_ARG_TOPIC|E_INVALID" + too_long,
                lambda make=make, way=way: make(site, "queued" if way == "queue" else "sizes"),
                may_return=way == "queue" and not size,
            )
        for way, add in ways.CHANNEL.items():
            sheet.cell(
                f"a channel's name of {size} by {way}",
                lambda add=add, name=name: add(site, "sizes", name),
                r"1 to 64|E_BAD_CHANNEL|INVALID_(ARG_)?CHANNEL|MISSING_ARG_CHANNEL" + too_long,
                lambda add=add: add(site, "sizes", CHANNEL),
            )
        for way, call in {
            "results": lambda name=name: site.broker.results(name),
            "dead_letter": lambda name=name: site.broker.configure("sizes", "c", dead_letter=name),
            "attach": lambda name=name: shmq.attach(name),
            "executor": lambda name=name: shmq.Executor(topic=name),
        }.items():
            may = not size and way in ("attach", "executor", "dead_letter")
            sheet.cell(f"a name of {size} by {way}", call, "name", nothing, may_return=may)
    for size in (0, 80, 300):
        for way, holder in (("near", site.broker), ("remote", site.remote)):
            sheet.cell(
                f"a holder's name of {size}, {way}",
                lambda holder=holder, size=size: holder.lease_holder("sizes", CHANNEL, "n" * size),
                r"1 to 79",
                lambda holder=holder: holder.lease_holder("sizes", CHANNEL, "n" * 79).close(),
            )


@exceeds("DATA_PATH", "PATH_MOST")
def a_data_path(site: Site, sheet: Sheet) -> None:
    path = site.directory
    for _ in range(6):
        path = path / ("d" * 200)
    path.mkdir(parents=True)
    name = f"{site.instance}-path"

    def work() -> None:
        """Spill, and lease what is on disk: clients do not know where the files are."""
        with shmq.Broker(path, instance=name, mem_queue_size=READY) as broker:
            broker.create_channel("t", CHANNEL)
            producer = broker.producer("t")
            for number in range(READY * 3):
                producer.publish(b"%d" % number)
            read: list[bytes] = []
            with broker.lease_holder("t", CHANNEL, "h") as holder:
                while len(read) < READY * 3:
                    lease = holder.lease(READY * 3, timeout=WATCHDOG)
                    assert lease is not None
                    for rows in holder.read_lease(lease.id):
                        read += rows.bodies()
                    holder.finish_lease(lease.id)
            assert read == [b"%d" % number for number in range(READY * 3)]

    sheet.cell(f"a data path of {len(str(path))} bytes", work, "data.path", nothing, True)


# ---- tables ----


@exceeds("TOPICS", "max_topics")
def topics(site: Site, sheet: Sheet) -> None:
    site.broker.create_channel("sizes", CHANNEL)
    shmq.Queue(broker=site.broker, name="queued").close()
    made = [name for number in range(TOPICS) if _made(site, name := f"fill{number}")]
    try:
        for way, make in ways.TOPIC.items():
            sheet.cell(
                f"one more topic by {way}",
                lambda make=make, way=way: make(site, "more"),
                r"max.topics|table is full|TOO_MANY_TOPICS",
                lambda make=make, way=way: make(site, "queued" if way == "queue" else "sizes"),
            )
        for way, publish in ways.PUBLISH.items():
            sheet.cell(
                f"another topic by {way}",
                lambda publish=publish: publish(site, "sizes", b"x"),
                "",
                nothing,
                may_return=True,
            )
    finally:
        for name in made:
            site.broker.delete_topic(name)
    site.remote.create_topic("more")
    site.broker.delete_topic("more")


def _made(site: Site, name: str) -> bool:
    with contextlib.suppress(shmq.ShmqError):
        site.broker.create_topic(name)
        return True
    return False


@exceeds("STORES")
def stores(site: Site, sheet: Sheet) -> None:
    made = []
    try:
        with contextlib.suppress(shmq.ShmqError):
            for number in range(constant("STORES") + 1):
                site.broker.results(f"fill{number}", 16, 1 << 16)
                made.append(f"fill{number}")
        assert len(made) >= constant("STORES") - 8
        again = lambda: site.broker.results(made[0]).set(b"k", b"v")  # noqa: E731
        says = r"table is full.*delete"
        sheet.cell("a store by results", lambda: site.broker.results("more"), says, again)
        sheet.cell(
            "a store by request", lambda: site.broker.request("nobody", b"x", 0), says, again, True
        )
        with shmq.Executor(1, broker=site.broker, topic="pool") as pool:
            sheet.cell(
                "a store by Executor", lambda: pool.submit(abs, -1).result(WATCHDOG), says, again
            )
    finally:
        for name in made:
            site.broker.delete_results(name)
    sheet.cell(
        "a store after all", lambda: site.broker.results("more", 16, 1 << 16), "", nothing, True
    )


@exceeds("LEASE_HOLDERS", "LEASES")
def leases(site: Site, sheet: Sheet) -> None:
    site.broker.create_channel("leased", CHANNEL)
    site.broker.producer("leased").publish_many([b"x"] * 100)
    open_: list[Any] = []
    for number in range(constant("LEASE_HOLDERS")):
        open_.append(site.broker.lease_holder("leased", CHANNEL, f"near{number}"))
    for way, broker in (("near", site.broker), ("remote", site.remote)):
        sheet.cell(
            f"one more holder, {way}",
            lambda broker=broker: broker.lease_holder("leased", CHANNEL, "more"),
            r"names lease.*close a holder",
            open_[0].touch,
        )
    open_.pop().close()
    open_.append(site.remote.lease_holder("leased", CHANNEL, "far"))
    for way, holder in (("near", open_[0]), ("remote", open_[-1])):
        taken = []
        while (outcome := attempt(lambda holder=holder: holder.lease(1))).value is not None:
            taken.append(outcome.value)
        sheet.cell(
            f"one more lease, {way} ({len(taken)})",
            lambda holder=holder: holder.lease(1),
            r"leases.*finish|of this channel open",
            holder.leases,
        )
        for lease in taken:
            holder.return_lease(lease.id)
    for each in open_:
        each.close()
    depth = site.broker.channel_depth("leased", CHANNEL)
    if depth != 100:
        sheet.fault("leases", f"{depth} of 100 messages are there")


@exceeds("SESSIONS")
def consumers(site: Site, sheet: Sheet) -> None:
    site.broker.create_channel("sizes", "many")
    with contextlib.ExitStack() as stack:
        made = []
        while (outcome := attempt(lambda: site.broker.consumer("sizes", "many"))).error is None:
            made.append(stack.enter_context(outcome.value))
        assert len(made) == constant("SESSIONS"), outcome
        for way, call in {
            "consumer": lambda: site.broker.consumer("sizes", "many"),
            "consumer of many": lambda: site.broker.consumer(["sizes"], "many").take(0),
            "remote": lambda: site.remote.consumer("sizes", "many").take(0),
            "SUB": lambda: ways.tcp(site, b"SUB sizes many\n"),
        }.items():
            sheet.cell(
                f"one more consumer by {way}",
                call,
                r"(?i)consumers.*close|full",
                lambda: made[0].take(0),
            )
        made[0].close()
        site.broker.consumer("sizes", "many").close()


@exceeds("PINS")
def views(site: Site, sheet: Sheet) -> None:
    count = constant("PINS") + 20
    site.broker.create_channel("viewed", CHANNEL)
    producer = site.broker.producer("viewed")
    with site.broker.consumer("viewed", CHANNEL, max_in_flight=count) as consumer:
        held = []
        for number in range(count):
            producer.publish(b"%d" % number)
            message = consumer.take(WATCHDOG)
            assert message is not None
            held.append(message.view)
            message.finish()
        if [bytes(view) for view in held] != [b"%d" % number for number in range(count)]:
            sheet.fault("views", "a view beyond the limit has not its body")
        sheet.tried += 1


@exceeds("CAUGHT")
def queues_of_one_publish(site: Site, sheet: Sheet) -> None:
    count = 40
    with contextlib.ExitStack() as stack:
        clients = []
        for number in range(count):
            client = stack.enter_context(ways.session(site))
            client.sub("wide", f"c{number}", ready=1)
            clients.append(client)
        ways.tcp(site, b"PUB wide\n" + sized(b"x"))
        for number, client in enumerate(clients):
            outcome = attempt(client.delivery)
            sheet.tried += 1
            if outcome.error is not None or outcome.hung:
                sheet.fault(f"channel {number} of {count} of one publish", str(outcome))
            else:
                client.finish(outcome.value)
    site.broker.delete_topic("wide")


@exceeds("WRITERS")
def writers(site: Site, sheet: Sheet) -> None:
    site.broker.create_channel("marked", CHANNEL)
    count = constant("WRITERS") + 20

    def commit(number: int) -> int:
        name = f"w{number}"
        staged = site.remote.stage("marked", name, 1, [b"%d" % number])
        assert staged is not None
        return site.remote.commit("marked", name, 1, [staged])

    done = 0
    says = r"mark|writer"
    for number in range(count):
        call = lambda number=number: commit(number)  # noqa: E731
        done += sheet.cell(f"writer {number}", call, says, nothing, True).error is None
    for number in range(0, count, 25):
        call = lambda number=number: commit(number)  # noqa: E731
        sheet.cell(f"writer {number} again", call, says, nothing, True)
    bodies: list[bytes] = []
    with site.broker.consumer("marked", CHANNEL, max_in_flight=2 * count) as consumer:
        while batch := consumer.take_many(2 * count, 0 if len(bodies) >= done else WATCHDOG):
            bodies += batch.bodies()
            batch.finish()
    if len(bodies) != len(set(bodies)):
        sheet.fault("writers", "a message was published twice")
    if len(set(bodies)) < done:
        sheet.fault("writers", f"{len(set(bodies))} of {done} messages were published")


@exceeds("REQUESTS")
def requests(site: Site, sheet: Sheet) -> None:
    count = constant("REQUESTS") + 10
    pid = site.broker.supervisor_pid
    ended: list[BaseException | None] = []

    def ask(number: int) -> None:
        try:
            site.broker.create_channel("asked-for", f"c{number}")
        except BaseException as exc:
            ended.append(exc)
        else:
            ended.append(None)

    site.broker.create_topic("asked-for")
    stop_process(pid)
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    try:
        for thread in threads:
            thread.start()
        view = site.broker.directory()
        eventually(lambda: all(state != 0 for state in view.requests["state"]))
    finally:
        os.kill(pid, signal.SIGCONT)
    for thread in threads:
        thread.join()
    sheet.tried += count
    for exc in ended:
        if exc is not None:
            sheet.fault("a request", f"{type(exc).__name__}: {exc}")
    site.broker.delete_topic("asked-for")


# ---- room ----


@exceeds("mem_queue_size", "arena_size")
def a_batch(site: Site, sheet: Sheet) -> None:
    site.broker.create_channel("batched", CHANNEL)
    near, far = site.broker.producer("batched"), site.remote.producer("batched")
    for way, publish in (("near", near.publish_many), ("remote", far.publish_many)):
        for what, bodies in (
            ("one message too many", [b"x"] * (READY + 1)),
            ("far too many messages", [b"x"] * (READY * 20)),
            ("too many bytes", [b"x" * MESSAGE] * 250),
        ):
            sheet.cell(
                f"{what}, {way}",
                lambda publish=publish, bodies=bodies: publish(bodies),
                r"mem_queue_size|arena_size|max.body.size",
                lambda publish=publish: publish([b"x"]),
            )
    with site.broker.consumer("batched", CHANNEL, max_in_flight=1000) as consumer:
        got = consumer.take_many(1000, 0)
        if len(got) != 6:
            sheet.fault("a batch", f"{len(got)} messages are there, 6 were published")
        got.finish()


@exceeds("in_flight_slots")
def in_flight(site: Site, sheet: Sheet) -> None:
    count = IN_FLIGHT * 2
    site.broker.create_channel("held", CHANNEL)
    producer = site.broker.producer("held")
    for number in range(count):
        producer.publish(b"%d" % number, timeout=WATCHDOG)
    with site.broker.consumer("held", CHANNEL, max_in_flight=count) as consumer:
        taken = []
        while batch := consumer.take_many(count, 1 if not taken else 0.2):
            taken += batch.bodies()
            held = batch
        sheet.cell(
            f"a message beyond in_flight_slots ({len(taken)})",
            lambda: consumer.take(0),
            "in_flight_slots",
            nothing,
            may_return=True,
        )
        held.finish()
        more = attempt(lambda: consumer.take(WATCHDOG))
        if more.error is not None or more.value is None:
            sheet.fault("in flight", f"after a finish nothing comes: {more}")
    with site.broker.consumer("held", CHANNEL, max_in_flight=count) as consumer:
        came = len(taken) - len(held)
        del came
    site.broker.delete_topic("held")


@exceeds("max_req_timeout", "max_msg_timeout")
def times(site: Site, sheet: Sheet) -> None:
    for way, call in {
        "publish": lambda: site.gone_producer.publish(b"x", defer=3601),
        "remote": lambda: site.remote_producer.publish(b"x", defer=3601),
        "shmq pub": lambda: ways.command(site, "pub", "gone", "x", "--defer=2h"),
        "DPUB": lambda: ways.tcp(site, b"DPUB gone 3600001\n" + sized(b"x")),
        "/pub": lambda: ways.web(site, "POST", "/pub?topic=gone&defer=3600001", b"x"),
    }.items():
        sheet.cell(f"defer by {way}", call, r"max_req_timeout|DPUB timeout|INVALID_DEFER", nothing)
    for way, call in {
        "consumer": lambda: site.broker.consumer("gone", CHANNEL, msg_timeout=901),
        "consumer of many": lambda: site.broker.consumer(["gone"], CHANNEL, msg_timeout=901),
        "remote": lambda: site.remote.consumer("gone", CHANNEL, msg_timeout=901).take(0),
        "IDENTIFY": lambda: ways.identify(site, msg_timeout=901_000),
    }.items():
        sheet.cell(f"msg_timeout by {way}", call, r"max_msg_timeout|msg timeout", nothing)


@exceeds(
    "max_rdy_count",
    "max_heartbeat_interval",
    "max_output_buffer_size",
    "max_output_buffer_timeout",
    "min_output_buffer_timeout",
)
def wishes(site: Site, sheet: Sheet) -> None:
    def ready(count: int) -> bytes:
        with ways.session(site) as client:
            client.sub("gone", "ready")
            return ways.said(client, b"RDY %d\n" % count)

    for count in (-1, 2501, 1 << 31, 1 << 63, 10**30):
        sheet.cell(f"RDY {count}", lambda count=count: ready(count), "RDY", nothing)
    for key, values, says in (
        ("heartbeat_interval", (1, 60_001, 1 << 31, 1 << 63, -2), "heartbeat interval"),
        ("output_buffer_size", (1, 65_537, 1 << 31, 1 << 63, -2), "output buffer size"),
        ("output_buffer_timeout", (1, 30_001, 1 << 31, 1 << 63, -2), "output buffer timeout"),
        ("sample_rate", (-1, 100, 1 << 31), "sample rate"),
    ):
        for value in values:
            sheet.cell(
                f"{key}={value}",
                lambda key=key, value=value: ways.identify(site, **{key: value}),
                f"{says}|IDENTIFY",
                nothing,
            )


@exceeds("max_deflate_level", "max_lease_ttl")
def lowered(site: Site, sheet: Sheet) -> None:
    """The gateway lowers these wishes, and says so."""
    for level in (7, 9):
        got = json.loads(
            ways.identify(site, feature_negotiation=True, deflate=True, deflate_level=level)
        )
        sheet.tried += 1
        if got.get("deflate_level") != 6:
            sheet.fault(f"deflate_level={level}", f"the answer is {got}")
    holder = site.remote.lease_holder("gone", CHANNEL, "long", ttl=1e8)
    holder.close()


@exceeds(
    "max_channel_consumers",
    "max_connections",
    "max_connections_per_address",
    "max_buffered_bytes",
    deep=True,
)
def of_a_gateway(site: Site, sheet: Sheet) -> None:
    """Try them on a gateway that has such limits."""
    directory = site.directory / "limited"
    directory.mkdir()
    limited = Site(
        directory,
        f"{site.instance}-gw",
        max_channel_consumers=2,
        max_connections=8,
        max_buffered_bytes=1 << 20,
    )
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(ways.session(limited)).sub("few", "c", ready=1)
            sheet.cell(
                "a consumer too many",
                lambda: ways.tcp(limited, b"SUB few c\n"),
                "exceeds limit of 2",
                nothing,
            )
            more = [stack.enter_context(ways.session(limited)) for _ in range(20)]
            refused = [
                attempt(lambda client=client: ways.said(client, b"NOP\nPUB few\n" + sized(b"x")))
                for client in more
            ]
            sheet.tried += len(more)
            if all(outcome.error is None for outcome in refused):
                sheet.fault("a connection too many", "it is not refused")
        sheet.cell(
            "after them", lambda: ways.tcp(limited, b"PUB few\n" + sized(b"x")), "", nothing, True
        )
        limited.check()
    finally:
        limited.close()


@exceeds("CLIENTS", deep=True)
def clients(site: Site, sheet: Sheet) -> None:
    with contextlib.ExitStack() as stack:
        made = []
        while (outcome := attempt(lambda: shmq.attach(site.instance))).error is None:
            made.append(stack.enter_context(outcome.value))
        assert len(made) > constant("CLIENTS") - 20, outcome
        for way, call in {
            "attach": lambda: shmq.attach(site.instance),
            "shmq pub": lambda: ways.command(site, "pub", "gone", "x"),
            "Executor": lambda: (
                shmq.Executor(1, instance=site.instance).submit(abs, -1).result(WATCHDOG)
            ),
        }.items():
            sheet.cell(f"one more client by {way}", call, "client entries", made[0].stats)
        site.remote.producer("gone").publish(b"x")
        made[0].close()
        shmq.attach(site.instance).close()


@exceeds("WAITERS", deep=True)
def waiters(site: Site, sheet: Sheet) -> None:
    count = constant("WAITERS") + 30
    came: list[Any] = []

    def wait() -> None:
        outcome = attempt(lambda: site.results.wait(b"come", WATCHDOG))
        came.append(outcome)

    threads = [threading.Thread(target=wait) for _ in range(count)]
    for thread in threads:
        thread.start()
    site.results.set(b"come", b"v")
    for thread in threads:
        thread.join()
    sheet.tried += count
    for outcome in came:
        if outcome.value != b"v":
            sheet.fault("a thread that waits", str(outcome))
    site.results.delete(b"come")
