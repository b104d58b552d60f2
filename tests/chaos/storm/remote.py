"""Those of a storm who come over TCP, through the gateway, which is killed under them too.

A consumer gets what the gateway pushes, so each of its connections is one take without an end. The
protocol confirms no FIN, REQ or TOUCH; one more command whose answer is known says that those
before it are done. Where a connection breaks, what was not answered may or may not have happened.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable
from typing import ClassVar

from chaos.storm import history
from chaos.storm.actors import Actor, Consumer, Delivery, Producer
from chaos.storm.history import Settling, What, record
from support import nsq_client

from shmq.errors import Full, NotInFlight
from shmq.options import Options

_BARRIER = b"TOUCH " + b"0" * 16 + b"\n"
_PASSED = b"E_TOUCH_FAILED TOUCH " + b"0" * 16
_PATIENCE = 40.0  # seconds for an answer: a gateway may be stopped, or wait for room


class Remote(Actor):
    """Attaches to nothing but the gateway's port."""

    client: nsq_client.Client | None = None

    def attach(self) -> None:
        pass

    def connect(self) -> None:
        """Until somebody listens, or the storm is over."""
        while self.client is None and not self.over:
            try:
                sock = socket.create_connection(("127.0.0.1", self.place.port), _PATIENCE)
                self.client = nsq_client.Client(sock)
                self.client.send(b"  V2")
            except ConnectionError:
                self.hang_up()
                time.sleep(0.02)

    def hang_up(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None

    def frame(self) -> tuple[int, bytes]:
        """The next one. ConnectionError if there is none."""
        assert self.client is not None
        frame = self.client.frame()
        if frame is None:
            raise ConnectionError("the gateway has closed the connection")
        return frame


class RemoteProducer(Remote, Producer):
    """PUB, MPUB, DPUB."""

    role = "remote-producer"
    kinds: ClassVar[dict[str, int]] = {
        "single": 60,
        "batch": 20,
        "deferred": 4,
        "large": 3,
        "large_batch": 1,
    }

    def work(self) -> None:
        self.publish_until_over()
        self.hang_up()

    def publish(
        self, number: int, parts: int, defer: float | None, call: Callable[[], int | str | None]
    ) -> None:
        self.connect()
        if self.client is not None:
            with contextlib.suppress(ConnectionError):
                super().publish(number, parts, defer, call)

    def command(self, line: bytes, data: bytes) -> int:
        """OK, or Full with an error that says that nothing was published."""
        assert self.client is not None
        try:
            self.client.send(line + b"\n" + data)
            answer = self.frame()
        except ConnectionError:
            self.hang_up()
            raise
        if answer == nsq_client.OK:
            return 0  # the protocol tells no id
        assert answer[1].startswith(b"E_%b_FAILED" % line.split()[0]), answer
        self.hang_up()
        raise Full(answer[1].decode())

    def _publish_one(self, number: int, size: int, defer: float | None = None) -> None:
        (body,) = self.bodies(number, [size])
        ms = int((defer or 0) * 1000)
        topic = self.place.topic.encode()
        line = b"DPUB %b %d" % (topic, ms) if ms else b"PUB " + topic
        self.publish(number, 1, ms / 1000, lambda: self.command(line, nsq_client.sized(body)))

    def _publish_many(self, number: int, sizes: list[int], defer: float | None = None) -> None:
        line, _, data = nsq_client.mpub(
            self.place.topic.encode(), self.bodies(number, sizes)
        ).partition(b"\n")
        self.publish(number, len(sizes), None, lambda: self.command(line, data))


class RemoteConsumer(Remote, Consumer):
    """One connection after the other; finishes and touches."""

    role = "remote-consumer"
    seconds = 1.0  # of a connection, in the mean

    @property
    def timeout_ns(self) -> int:
        return int(Options().msg_timeout * 1e9)

    def work(self) -> None:
        while not self.over:
            self.connect()
            if self.client is not None:
                try:
                    self.subscribe()
                    self.consume()
                except ConnectionError:
                    self.hang_up()
                else:
                    self.leave()

    def subscribe(self) -> None:
        assert self.client is not None
        self._stream = self.log.next_op()
        self._waiting: list[Delivery] = []
        self.log.write(record(What.TAKE, op=self._stream))
        place = self.place
        self.client.send(f"SUB {place.topic} {place.channel}\n".encode())
        answer = self.frame()
        if answer != nsq_client.OK:
            assert answer[1].startswith(b"E_SUB_FAILED"), answer
            raise ConnectionError(answer[1].decode())
        self.client.send(b"RDY %d\n" % self.choice.choice(self.max_in_flights))

    def consume(self) -> None:
        until = time.monotonic() + self.choice.expovariate(1 / self.seconds)
        while not self.over and time.monotonic() < until:
            self.receive()
            taken, self._waiting = self._waiting, []
            if taken:
                self.handle(taken, None)

    def leave(self) -> None:
        """The messages it still holds go back."""
        op = self.log.next_op()
        self.log.write(record(What.SETTLE, op=op, flag=Settling.CLOSE))
        self.hang_up()
        self.log.write(record(What.SETTLED, op=op))

    def receive(self) -> None:
        """The frames that are there, or the first one to come."""
        assert self.client is not None
        seconds = 0.1
        while select.select([self.client.sock], [], [], seconds)[0] and len(self._waiting) < 500:
            self.delivered(self.frame())
            seconds = 0

    def delivered(self, frame: tuple[int, bytes]) -> None:
        kind, data = frame
        assert kind == nsq_client.MESSAGE, frame
        delivery = nsq_client.Delivery.parse(data)
        key, good = history.read_body(delivery.body)
        number = int(delivery.id, 16)
        self.log.write(
            record(
                What.DELIVERY,
                op=self._stream,
                flag=good,
                count=delivery.attempts,
                id=number,
                key=key,
            )
        )
        self._waiting.append(Delivery(delivery, number, key, delivery.attempts))

    def handle(self, taken: list[Delivery], batch: None) -> None:
        way = self.choice.random()
        if way < 0.1:
            self.say(Settling.TOUCH, taken, b"TOUCH %b\n")
        if way < 0.15:
            for delivery in taken[:20]:
                self.say(Settling.FINISH, [delivery], b"FIN %b\n")
            taken = taken[20:]
        if taken:
            self.say(Settling.FINISH, taken, b"FIN %b\n")

    def say(self, kind: Settling, taken: list[Delivery], line: bytes, delay: float = 0) -> None:
        self.settle(kind, taken, lambda: self._say(taken, line), delay)

    def _say(self, taken: list[Delivery], line: bytes) -> None:
        """NotInFlight if one of them was not."""
        assert self.client is not None
        self.client.send(b"".join(line % each.message.id for each in taken) + _BARRIER)
        refused = []
        while not (frame := self.frame())[1].startswith(_PASSED):
            if frame[0] == nsq_client.ERROR:
                assert frame[1].startswith(b"E_%b_FAILED" % line.split()[0]), frame
                refused.append(frame[1].decode())
            else:
                self.delivered(frame)
        if refused:
            raise NotInFlight(", ".join(refused))


class RemoteRequeuer(RemoteConsumer):
    """Also requeues, and leaves what it got."""

    role = "remote-requeuer"

    def handle(self, taken: list[Delivery], batch: None) -> None:
        way = self.choice.random()
        if way < 0.15:
            self.say(Settling.REQUEUE, taken, b"REQ %b 0\n")
        elif way < 0.25:
            ms = int(self.choice.expovariate(1 / 100))
            self.say(Settling.REQUEUE, taken, b"REQ %%b %d\n" % ms, ms / 1000)
        elif way > 0.28:
            super().handle(taken, batch)
