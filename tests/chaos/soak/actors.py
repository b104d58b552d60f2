"""The actors of a soak. Each is a process of its own, forked by `tools/chaos/soak.py`, that does
one kind of work over and over, writes down what it published and what came (`ledger`), and may be
killed at any instant. SIGTERM ends it in order. An unexpected exception ends it with status 1 and a
traceback in its `.err` file, which counts as a failure of the soak."""

from __future__ import annotations

import contextlib
import enum
import http.client
import itertools
import random
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from chaos.soak.ledger import LEAST, Log, What, body, parse
from support import nsq_client

import shmq
from shmq.errors import Full, Gone, LeaseLost, NotInFlight, NotRunning

T = TypeVar("T")

TOPICS: Final = ("work", "burst", "wire", "web", "leased")
PLACES: Final = (
    ("work", "a"),
    ("work", "b"),
    ("burst", "c"),
    ("wire", "c"),
    ("web", "c"),
    ("leased", "s"),
)
#: How the names of topics begin that come and go.
CHURN: Final = "churn-"
LEASE_HOLDER: Final = "soak"
_PUBLISHERS: Final = 1 << 10  # of one actor, which has another number after each broken connection
_PATIENCE: Final = 40.0  # seconds for an answer of the gateway


class Tally(enum.IntEnum):
    """The counters of the actors."""

    TURNS = 0
    DEFERRED = 1
    LOANED = 2
    REQUEUED = 3
    LEASES_FINISHED = 4
    LEASES_RETURNED = 5
    TOPICS_MADE = 6
    EPHEMERAL_OPENED = 7
    EPHEMERAL_REFUSED = 8
    ATTACHED = 9
    HTTP_REQUESTS = 10
    CONNECTIONS = 11


class Over(Exception):
    """The soak is over."""


@dataclass(frozen=True)
class Place:
    """Where an actor works. plant: leave behind what it makes: a leak, to see that it is found."""

    instance: str
    directory: Path
    tcp: int
    http: int
    rate: float
    plant: bool = False


class Actor:
    """One of them."""

    role: ClassVar[str]
    weight: ClassVar[float] = 1.0
    """How often it is killed, beside others."""

    def __init__(self, place: Place, number: int, seed: int) -> None:
        self.place, self.choice = place, random.Random(seed)
        self.log = Log(log_of(place.directory, number, self.role))
        self._publishers = itertools.count(number * _PUBLISHERS)
        self.over = False
        self.renew()

    def run(self) -> int:
        """Until it is told to end."""
        signal.signal(signal.SIGTERM, self._end)
        with contextlib.suppress(Over):
            self.begin()
            while not self.over:
                self.turn()
                self.count(Tally.TURNS)
        self.finish()
        return 0

    def _end(self, number: int, frame: object) -> None:
        self.over = True

    def begin(self) -> None:
        """Before the first turn."""
        self.broker = self.patiently(lambda: shmq.attach(self.place.instance, timeout=1))

    def turn(self) -> None:
        """A piece of its work, of about a second at most."""
        raise NotImplementedError

    def finish(self) -> None:
        """After the last one."""
        if hasattr(self, "broker"):
            self.broker.close()

    def patiently(self, call: Callable[[], T]) -> T:
        """Again as long as there is no supervisor or no room. Over."""
        while True:
            try:
                return call()
            except (NotRunning, Full):
                if self.over:
                    raise Over from None
                time.sleep(0.05)

    def pause(self, seconds: float) -> None:
        """Sleep. Over."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.over:
                raise Over
            time.sleep(min(left, 0.2))

    # -- the ledger

    def count(self, tally: Tally, number: int = 1) -> None:
        self.log.write(What.COUNT, tally, [(0, number)])

    def renew(self) -> None:
        """Be another publisher: of the last publish nobody knows whether it happened."""
        self.publisher, self.numbered = next(self._publishers), 0

    def bodies(self, sizes: Iterable[int]) -> list[bytes]:
        """The next ones. They count when `owe` is called."""
        return [body(self.publisher, self.numbered + at, size) for at, size in enumerate(sizes)]

    def owe(self, topic: str, count: int) -> None:
        """Count this many published messages."""
        self.numbered += count
        self.log.write(What.OWED, TOPICS.index(topic), [(self.publisher, self.numbered)])

    def came(self, place: int, bodies: Iterable[bytes]) -> None:
        """Before they are finished."""
        self.log.write(What.CAME, place, map(parse, bodies))

    def size(self) -> int:
        """Of a body: small mostly."""
        return LEAST + int(self.choice.paretovariate(1.2) * 60) % 60_000


def log_of(directory: Path, number: int, role: str) -> Path:
    """Of an actor."""
    return directory / f"{number:06d}.{role}.log"


class Producer(Actor):
    """Singles, batches, deferred ones, loans."""

    role = "producer"

    def begin(self) -> None:
        super().begin()
        self.producer = self.patiently(lambda: self.broker.producer("work"))

    def turn(self) -> None:
        began, count = time.monotonic(), 0
        while count < self.place.rate / 4 and not self.over:
            count += self.patiently(self.publish)
        self.pause(0.25 - (time.monotonic() - began))

    def publish(self) -> int:
        """One call."""
        kind = self.choice.random()
        if kind < 0.6:
            bodies = self.bodies([self.size()])
            self.producer.publish(bodies[0], timeout=1)
        elif kind < 0.9:
            bodies = self.bodies(self.size() for _ in range(20))
            self.producer.publish_many(bodies, timeout=1)
        elif kind < 0.97:
            bodies = self.bodies(self.size() for _ in range(3))
            self.producer.publish_many(bodies, defer=self.choice.uniform(0.05, 3.0), timeout=1)
            self.count(Tally.DEFERRED, 3)
        else:
            bodies = self.bodies([self.choice.randrange(70_000, 150_000)])
            with self.producer.loan(len(bodies[0]), timeout=1) as buffer:
                buffer[:] = bodies[0]
            self.count(Tally.LOANED)
        self.owe("work", len(bodies))
        return len(bodies)


class Consumer(Actor):
    """Takes, writes down, finishes."""

    role = "consumer"
    at: ClassVar[int] = 0

    def begin(self) -> None:
        super().begin()
        self.open()

    def open(self) -> None:
        """A consumer of the channel."""
        where = PLACES[self.at]
        self.consumer = self.patiently(lambda: self.broker.consumer(*where, max_in_flight=500))

    def turn(self) -> None:
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline and not self.over:
            batch = self.consumer.take_many(200, timeout=0.3)
            if batch:
                self.came(self.at, batch.bodies())
                with contextlib.suppress(NotInFlight):  # some timed out: they come again
                    batch.finish()


class WebConsumer(Consumer):
    """Of what came over HTTP."""

    role = "web-consumer"
    at = PLACES.index(("web", "c"))


class Requeuer(Consumer):
    """Requeues with and without a delay, touches, and lets some time out."""

    role = "requeuer"
    at = PLACES.index(("work", "b"))

    def open(self) -> None:
        self.consumer = self.patiently(
            lambda: self.broker.consumer("work", "b", max_in_flight=50, msg_timeout=1.0)
        )

    def turn(self) -> None:
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline and not self.over:
            batch = self.consumer.take_many(50, timeout=0.3)
            late = self.choice.random() < 0.01
            for message in batch or ():
                self.answer(message, late)

    def answer(self, message: shmq.Message, late: bool) -> None:
        with contextlib.suppress(NotInFlight):  # it timed out
            if self.choice.random() < 0.1 and message.attempts < 4:
                message.requeue(delay=self.choice.choice([0, 0, 0.2, 1.0]))
                self.count(Tally.REQUEUED)
                return
            if late:
                time.sleep(0.05)
                message.touch()
            self.came(self.at, [message.body])
            message.finish()


class Burster(Actor):
    """More than memory holds, then nothing for a while."""

    role = "burster"
    messages: ClassVar[int] = 6000

    def begin(self) -> None:
        super().begin()
        self.producer = self.patiently(lambda: self.broker.producer("burst"))

    def turn(self) -> None:
        for _ in range(self.messages // 200):
            if self.over:
                return
            bodies = self.bodies([1024] * 200)
            self.patiently(lambda bodies=bodies: self.producer.publish_many(bodies, timeout=1))
            self.owe("burst", len(bodies))
        self.pause(self.choice.uniform(5, 15))


class Drainer(Consumer):
    """Takes what a burst left on disk, when it is awake."""

    role = "drainer"
    at = PLACES.index(("burst", "c"))

    def turn(self) -> None:
        super().turn()
        self.pause(self.choice.choice([0.0, 0.0, 3.0]))


class LeaseHolder(Actor):
    """Leases what it has published itself, reads it in parts, finishes or returns it."""

    role = "holder"

    def begin(self) -> None:
        super().begin()
        self.producer = self.patiently(lambda: self.broker.producer("leased"))
        self.holder = self.patiently(
            lambda: self.broker.lease_holder(*PLACES[5], LEASE_HOLDER, ttl=600.0, grace=600.0)
        )
        for lease in self.holder.leases():  # of one that was killed
            self.end(lease)

    def turn(self) -> None:
        for _ in range(4):
            bodies = self.bodies(self.size() for _ in range(max(int(self.place.rate / 8), 1)))
            self.patiently(lambda bodies=bodies: self.producer.publish_many(bodies, timeout=1))
            self.owe("leased", len(bodies))
        lease = self.holder.lease(1000, parts=2, timeout=0.5)
        if lease is not None:
            self.end(lease)
        self.pause(0.5)

    def end(self, lease: shmq.Lease) -> None:
        """Read it twice, then finish it or give it back."""
        with contextlib.suppress(LeaseLost):
            parts = range(lease.parts)
            for _ in range(2):
                read = [
                    b
                    for at in parts
                    for batch in self.holder.read_lease(lease.id, at)
                    for b in batch.bodies()
                ]
            if self.choice.random() < 0.2:
                self.holder.return_lease(lease.id)
                self.count(Tally.LEASES_RETURNED)
            else:
                self.came(5, read)
                self.holder.finish_lease(lease.id)
                self.count(Tally.LEASES_FINISHED)

    def finish(self) -> None:
        if hasattr(self, "holder"):
            for lease in self.holder.leases():
                with contextlib.suppress(LeaseLost):
                    self.holder.return_lease(lease.id)
            self.holder.close()
        super().finish()


class Churner(Actor):
    """Makes topics and channels, overflows some of them, deletes them with what is in them. Those
    of one that was killed are deleted by the next."""

    role = "churner"

    def begin(self) -> None:
        super().begin()
        if not self.place.plant:
            for topic in self.broker.stats().topics:
                if topic.name.startswith(CHURN):
                    self.delete(topic.name)

    def turn(self) -> None:
        topic = f"{CHURN}{self.choice.getrandbits(40):x}"
        channels = [f"c{at}" for at in range(self.choice.randrange(1, 4))]
        for channel in channels:
            self.patiently(lambda channel=channel: self.broker.create_channel(topic, channel))
        self.count(Tally.TOPICS_MADE)
        with self.patiently(lambda: self.broker.producer(topic)) as producer:
            count = self.choice.choice([20, 200, 3000])  # the last: more than memory holds
            for _ in range(count // 20):
                self.patiently(lambda: producer.publish_many([bytes(500)] * 20, timeout=1))
        with self.patiently(lambda: self.broker.consumer(topic, channels[0])) as consumer:
            batch = consumer.take_many(100, timeout=1)
            if batch and self.choice.random() < 0.5:
                batch.finish()  # else they go back, and away with the topic
        if self.place.plant:
            self.pause(0.2)
            return
        if self.choice.random() < 0.5:
            self.patiently(lambda: self.broker.delete_channel(topic, channels[-1]))
        self.delete(topic)
        self.pause(0.5)

    def delete(self, topic: str) -> None:
        with contextlib.suppress(Gone):  # the call before said NotRunning and did it
            self.patiently(lambda: self.broker.delete_topic(topic))


class Visitor(Actor):
    """Attaches, opens ephemeral channels, looks around, goes."""

    role = "visitor"

    def begin(self) -> None:
        pass

    def turn(self) -> None:
        broker = self.patiently(lambda: shmq.attach(self.place.instance, timeout=1))
        self.count(Tally.ATTACHED)
        try:
            for at in range(5):
                channel = f"v{at % 2}#ephemeral"
                try:
                    consumer = self.patiently(
                        lambda channel=channel: broker.consumer("visited#ephemeral", channel)
                    )
                except Gone:
                    self.count(Tally.EPHEMERAL_REFUSED)
                    continue
                with consumer:
                    self.count(Tally.EPHEMERAL_OPENED)
                    with broker.producer("visited#ephemeral") as producer:
                        self.patiently(lambda producer=producer: producer.publish(b"x", timeout=1))
                    if message := consumer.take(timeout=0.2):
                        message.finish()
            broker.stats()
            broker.peek("work", "a", n=5)
        except Gone:
            self.count(Tally.EPHEMERAL_REFUSED)
        finally:
            broker.close()
        self.pause(0.2)


class Remote(Actor):
    """Comes over TCP only."""

    client: nsq_client.Client | None = None

    def begin(self) -> None:
        pass

    def connect(self) -> nsq_client.Client:
        """Until somebody listens. Over."""
        while self.client is None:
            try:
                sock = socket.create_connection(("127.0.0.1", self.place.tcp), _PATIENCE)
                self.client = nsq_client.Client(sock)
                self.client.send(b"  V2")
                self.count(Tally.CONNECTIONS)
            except OSError:
                self.hang_up()
                self.pause(0.1)
        return self.client

    def hang_up(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None

    def finish(self) -> None:
        self.hang_up()

    def ask(self, data: bytes) -> bytes:
        """An answer. ConnectionError."""
        answer = self.connect().ask(data)
        if answer is None:
            raise ConnectionError("the gateway has closed the connection")
        return answer[1]


class RemoteProducer(Remote):
    """PUB, MPUB, DPUB; now and then over a new connection."""

    role = "remote-producer"

    def turn(self) -> None:
        began, count = time.monotonic(), 0
        while count < self.place.rate / 4 and not self.over:
            kind, many = self.choice.random(), 20
            if kind < 0.2:
                bodies = self.bodies([self.size()])
                command = b"PUB wire\n" + nsq_client.sized(bodies[0])
            elif kind < 0.3:
                bodies = self.bodies([self.size()])
                ms = self.choice.randrange(50, 3000)
                command = b"DPUB wire %d\n" % ms + nsq_client.sized(bodies[0])
                self.count(Tally.DEFERRED)
            else:
                bodies = self.bodies(self.size() for _ in range(many))
                command = nsq_client.mpub(b"wire", bodies)
            try:
                answer = self.ask(command)
            except OSError:  # nobody knows whether it was published
                answer = b""
            if answer == b"OK":
                self.owe("wire", len(bodies))
                count += len(bodies)
            else:
                assert answer == b"" or answer.startswith((b"E_PUB_F", b"E_MPUB_F", b"E_DPUB_F"))
                self.hang_up()
                self.renew()
        if self.choice.random() < 0.05:
            self.hang_up()
        self.pause(0.25 - (time.monotonic() - began))


class RemoteConsumer(Remote):
    """SUB, RDY, FIN, REQ; now and then over a new connection."""

    role = "remote-consumer"
    at: ClassVar[int] = PLACES.index(("wire", "c"))

    def turn(self) -> None:
        try:
            self.subscribe()
            self.take(time.monotonic() + 2)
        except OSError:
            self.hang_up()
        if self.choice.random() < 0.05:
            self.hang_up()

    def subscribe(self) -> None:
        if self.client is None:
            said = self.ask(b"SUB wire c\n")
            assert said in (b"OK", b"_heartbeat_"), said
            self.connect().send(b"RDY 50\n")

    def take(self, until: float) -> None:
        client = self.client
        assert client is not None
        while time.monotonic() < until and not self.over:
            if not select.select([client.sock], [], [], 0.3)[0]:
                continue
            frame = client.frame()
            if frame is None:
                raise ConnectionError("the gateway has closed the connection")
            if frame[0] != nsq_client.MESSAGE:
                continue
            delivery = nsq_client.Delivery.parse(frame[1])
            if self.choice.random() < 0.05 and delivery.attempts < 4:
                client.send(b"REQ %b 100\n" % delivery.id)
                self.count(Tally.REQUEUED)
            else:
                self.came(self.at, [delivery.body])
                client.finish(delivery)


class Browser(Actor):
    """HTTP: publishes, makes and deletes, reads /stats and /metrics."""

    role = "browser"
    looks: ClassVar[tuple[str, ...]] = ("/ping", "/info", "/stats?format=json", "/metrics")

    def begin(self) -> None:
        pass

    def turn(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.place.http, timeout=_PATIENCE)
        try:
            for _ in range(5):
                self.publish(connection)
                self.pause(0.1)
            name = f"{CHURN}web-{self.choice.getrandbits(40):x}"
            self.post(connection, f"/topic/create?topic={name}")
            self.post(connection, f"/channel/create?topic={name}&channel=c")
            self.post(connection, f"/channel/pause?topic={name}&channel=c")
            if not self.place.plant:
                self.post(connection, f"/topic/delete?topic={name}")
            for path in self.looks:
                got = self.request(connection, "GET", path)
                assert got[0] in (200, 500), (path, got)
        except (OSError, http.client.HTTPException):  # killed
            self.renew()
            self.pause(0.2)
        finally:
            connection.close()

    def publish(self, connection: http.client.HTTPConnection) -> None:
        bodies = self.bodies(self.size() for _ in range(max(int(self.place.rate / 10), 1)))
        data = b"".join(nsq_client.sized(each) for each in bodies)
        path = "/mpub?topic=web&binary=true"
        if self.post(connection, path, len(bodies).to_bytes(4, "big") + data) == 200:
            self.owe("web", len(bodies))
        else:
            self.renew()

    def post(self, connection: http.client.HTTPConnection, path: str, data: bytes = b"") -> int:
        status, answer = self.request(connection, "POST", path, data)
        assert status in (200, 404, 500, 503), (path, status, answer)  # no supervisor: 5xx
        return status

    def request(
        self, connection: http.client.HTTPConnection, method: str, path: str, data: bytes = b""
    ) -> tuple[int, bytes]:
        connection.request(method, path, data)
        response = connection.getresponse()
        self.count(Tally.HTTP_REQUESTS)
        return response.status, response.read()


class Emptier(Actor):
    """At the end: takes all that a channel still has."""

    role = "emptier"

    def __init__(self, place: Place, number: int, seed: int, at: int) -> None:
        super().__init__(place, number, seed)
        self.at = at

    def turn(self) -> None:
        where = PLACES[self.at]
        if where == PLACES[5]:
            with self.broker.lease_holder(*where, LEASE_HOLDER) as holder:
                for lease in holder.leases():
                    holder.return_lease(lease.id)
        with self.patiently(lambda: self.broker.consumer(*where, max_in_flight=500)) as consumer:
            while batch := consumer.take_many(200, timeout=0.3):
                self.came(self.at, batch.bodies())
                batch.finish()
        found = self.broker.channel_stats(*where)
        self.over = not (found.depth or found.in_flight or found.deferred or found.leased)


ROLES: Final[tuple[type[Actor], ...]] = (
    Producer,
    Consumer,
    Requeuer,
    Burster,
    Drainer,
    LeaseHolder,
    Churner,
    Visitor,
    RemoteProducer,
    RemoteConsumer,
    Browser,
    WebConsumer,
)
