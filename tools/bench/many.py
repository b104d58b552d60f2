"""The wake-up of one consumer of many idle queues, beside that of a consumer of one queue.

    tools/dev bench many [--topics 1000] [--messages 300] [--rounds 10] [--json FILE]

A process sleeps in `take`; another publishes one message, waits until it was taken and pauses. The
time is from before the publish to after the take. In "at random" each message goes to another
topic, whose memory is in no cache; "one at random" is a consumer of that topic alone. The lines
take turns, round by round, so that what else the machine does meets all. The table has medians over
the rounds. The switches are how often the sleeping process gave up its core for each message: one
wake-up costs one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import shmq

CHANNEL = "bench"
#: Line -> whether one consumer takes from all topics, and whether each message goes to another one.
LINES = {
    "one": (False, False),
    "many": (True, False),
    "one at random": (False, True),
    "many at random": (True, True),
}
PAUSE = 0.001  # seconds after which the consumer sleeps
PATIENCE = 60.0


def consume(instance: str, single: list[str], topics: list[str], orders: Connection) -> None:
    """Take a message for each number of an order: from the consumer of that topic alone, or (-1)
    from the one of all. Tell the times (ns) and the switches."""
    with shmq.attach(instance) as broker:
        consumers = [*(broker.consumer(topic, CHANNEL) for topic in single)]
        consumers.append(broker.consumer(topics, CHANNEL))
        for consumer in consumers:
            assert consumer.take(0) is None
        orders.send("ready")
        while (numbers := orders.recv()) is not None:
            times = []
            before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
            for number in numbers:
                message = consumers[number].take(PATIENCE)
                assert message is not None
                times.append(time.monotonic_ns() - int(message.body))
                message.finish()
                orders.send(None)
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
            orders.send((times, switches / len(numbers)))


def measure(count: int, messages: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds: microseconds, and switches for each message."""
    found: dict[str, list[tuple[float, float, float]]] = {line: [] for line in LINES}
    with shmq.Broker(mem_queue_size=64, arena_size=4 << 20, max_topics=2 * count) as broker:
        topics = [[f"{kind}-{number}" for number in range(count)] for kind in ("one", "many")]
        orders, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("spawn").Process(
            target=consume, args=(broker.instance, *topics, theirs)
        )
        child.start()
        theirs.close()
        orders.recv()
        producers = [[*map(broker.producer, names)] for names in topics]
        chance = random.Random(1)
        for number in range(rounds + 1):  # the first one is not counted
            for line, there in found.items():
                many, anywhere = LINES[line]
                chosen = [chance.randrange(count) if anywhere else 0 for _ in range(messages)]
                orders.send([-1] * messages if many else chosen)
                for topic in chosen:
                    time.sleep(PAUSE)
                    producers[many][topic].publish(b"%d" % time.monotonic_ns())
                    orders.recv()
                times, switches = orders.recv()
                if number:
                    low = statistics.quantiles(times, n=100)
                    there.append((low[49] / 1000, low[98] / 1000, switches))
        orders.send(None)
        child.join()
    table = {}
    for line, there in found.items():
        for name, column in zip(("p50", "p99", "switches"), zip(*there, strict=True), strict=True):
            table[f"{line}: {name}"] = statistics.median(column)
    for one, many in (("one", "many"), ("one at random", "many at random")):
        ratios = [y[0] / x[0] for x, y in zip(found[one], found[many], strict=True)]
        table[f"{many} / {one}: p50"] = statistics.median(ratios)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--topics", type=int, default=1000)
    parser.add_argument("--messages", type=int, default=300, help="in each round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="add the result to this file, an object a line")
    given = parser.parse_args()
    table = measure(given.topics, given.messages, given.rounds)
    for what, figure in table.items():
        print(f"{what:40}{figure:10,.2f}")
    if given.json is not None:
        with given.json.open("a") as file:
            file.write(json.dumps({"topics": given.topics, **table}) + "\n")


if __name__ == "__main__":
    main()
