"""The cast of a storm: roles, channels and limits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from chaos.storm import (
    actors,
    celery_actors,
    errand_actors,
    framework_actors,
    many_actors,
    operators,
    policy_actors,
    remote,
    result_actors,
    spark_actors,
)
from chaos.storm.actors import Actor
from chaos.storm.history import Promise

from shmq import _native


@dataclass(frozen=True)
class Role:
    """A role that some of the processes have. weight: how often one of them is killed; the first
    `survivors` never are: they must make progress whichever others die. after: seconds until they
    begin."""

    kind: type[Actor]
    topic: str
    channel: str = ""
    seats: int = 1
    survivors: int = 0
    weight: int = 0
    after: float = 0.0


#: Of each the worker and the program.
FRAMEWORK_KINDS: dict[str, tuple[type[Actor], type[Actor]]] = {
    "dramatiq": (framework_actors.DramatiqWorker, framework_actors.DramatiqCaller),
    "taskiq": (framework_actors.TaskiqWorker, framework_actors.TaskiqCaller),
    "django": (framework_actors.DjangoWorker, framework_actors.DjangoCaller),
}

ROLES = (
    Role(actors.Producer, "work", seats=3, survivors=1, weight=26),
    Role(actors.Consumer, "work", "a", seats=2, survivors=1, weight=8),
    Role(actors.Requeuer, "work", "b", seats=2, weight=14),
    Role(actors.AsyncConsumer, "work", "c", weight=8),
    Role(remote.RemoteProducer, "work", weight=8),
    Role(remote.RemoteConsumer, "work", "c", seats=2, weight=8),
    Role(remote.RemoteRequeuer, "work", "b", weight=4),
    Role(operators.Operator, "work", weight=8),
    Role(operators.Wanderer, "work", weight=4),
    Role(actors.Producer, actors.LATE, weight=6),
    Role(actors.Consumer, actors.LATE, "a", seats=2, weight=8, after=3.0),
    Role(actors.SlowProducer, "probe", weight=2),
    Role(actors.Holder, "probe", "a", seats=3, survivors=1, weight=12),
    Role(policy_actors.PolicyProducer, "pol", seats=2, survivors=1, weight=14),
    Role(policy_actors.Failer, "pol", "x", seats=2, weight=14),
    Role(remote.RemoteRequeuer, "pol", "x", weight=3),
    Role(policy_actors.Sloth, "pol", "y", seats=2, survivors=1, weight=6),
    Role(policy_actors.Sloth, "pol", "z", weight=4),
    Role(policy_actors.Failer, "pol", "z", weight=4),
    Role(operators.Tuner, "pol", weight=4),
    *(
        Role(actors.SlowProducer, topic, weight=2, after=3.0 * (topic == many_actors.LATER))
        for topic in many_actors.TOPICS
    ),
    Role(
        many_actors.ManyConsumer,
        many_actors.TOPICS[0],
        many_actors.CHANNEL,
        seats=3,
        survivors=1,
        weight=16,
    ),
    Role(result_actors.Keeper, "", seats=3, survivors=1, weight=24),
    Role(errand_actors.Visitor, "", seats=2, weight=24),
    *(Role(errand_actors.Putter, topic, weight=6) for topic in errand_actors.QUEUES),
    *(
        Role(errand_actors.Getter, topic, seats=2, survivors=1, weight=12)
        for topic in errand_actors.QUEUES
    ),
    Role(errand_actors.Submitter, errand_actors.POOL, seats=2, survivors=1, weight=8),
    Role(errand_actors.Caller, "work", "b", seats=2, weight=10),
    *(
        (
            Role(celery_actors.CeleryWorker, errand_actors.CALLS, seats=3, survivors=1, weight=16),
            Role(celery_actors.CeleryCaller, errand_actors.CALLS, seats=2, survivors=1, weight=8),
        )
        if celery_actors.INSTALLED
        else ()
    ),
    *(
        Role(kind, name, weight=weight)
        for name, kinds in FRAMEWORK_KINDS.items()
        if name in errand_actors.FRAMEWORKS
        for kind, weight in zip(kinds, (8, 4), strict=True)
    ),
)

#: Only if they are asked for: a driver takes some ten seconds to start.
SPARK_ROLES = (
    Role(spark_actors.Feeder, spark_actors.FEED, weight=3),
    Role(spark_actors.SparkJobs, spark_actors.FEED, weight=1),
)


SUPERVISOR_WEIGHT, GATEWAY_WEIGHT = 6, 8


AIMED = 0.6  # of the kills
AIM_SECONDS = 1.0  # for one that is told to die in a call
#: Killed from outside always: a death's time is to be known.
UNAIMED = tuple(role for role in ROLES if role.kind is actors.Holder)
SUPERVISOR_CALLS = tuple(
    name
    for name in vars(_native.Broker)
    if name
    in {
        "next_request",
        "answer",
        "create_topic",
        "reserve_queue",
        "create_queue",
        "enter_queue",
        "take_over",
        "renamed",
        "remove_queue",
        "remove_topic",
        "expire",
        "stage_oldest",
        "spill_begin",
        "chunk_begin",
        "chunk_load",
        "restore",
        "disk_set",
        "pump",
        "adopt",
        "reap",
        "pause_topic",
    }
)


CHANNELS = [
    Promise("work", "a", fifo=True),
    Promise("work", "b"),
    Promise("work", "c", fifo=True),
    Promise(actors.LATE, "a", fifo=True),
    Promise("probe", "a", fifo=True, hungry=True),
    *(Promise(topic, many_actors.CHANNEL, fifo=True) for topic in many_actors.TOPICS),
]


@dataclass(frozen=True)
class Policies:
    """The settings of a round's channels."""

    channels: list[Promise]
    palette: list[dict[str, Any]]
    tuned: dict[str, list[int]]

    @property
    def roles(self) -> list[Role]:
        """Those who look after dead letters."""
        return [
            Role(policy_actors.Undertaker, promise.dead, "dead", weight=5)
            for promise in self.channels
            if promise.dead
        ]


def policies(choice: random.Random) -> Policies:
    """x: messages fail; y: a limit; z: messages expire. Half of the channels keep what they begin
    with."""
    found = Policies([], [{}], {})
    for channel, draw in (("x", failures), ("y", limit), ("z", life)):
        dead = {} if choice.random() < 0.5 else {"dead_letter": f"grave-{channel}"}
        fifo = channel == "y"
        name = dead.get("dead_letter", f"pol.{channel}.dead")
        promise = Promise("pol", channel, fifo, False, len(found.palette), name)
        found.channels.append(promise)
        first = draw(choice, {})
        others = [draw(choice, first) for _ in range(3)] if choice.random() < 0.5 else []
        if others:
            found.tuned[channel] = list(range(len(found.palette), len(found.palette) + 4))
        found.palette.extend({**each, **dead} for each in [first, *others])
    return found


def failures(choice: random.Random, first: dict[str, Any]) -> dict[str, Any]:
    """A channel that convicts."""
    return {
        "max_attempts": choice.choice([1, 2, 3, 5] if not first else [None, 1, 2, 4, 8]),
        "retry_delay": choice.choice([None, None, (0.02, 0.3), (0.1, 1.0)]),
    }


def limit(choice: random.Random, first: dict[str, Any]) -> dict[str, Any]:
    """A channel that is full soon."""
    words = ["block", "reject", "drop-oldest", "drop-newest"]
    if first and choice.random() < 0.7:
        words = [first["overflow"]]
    elif first:
        words.append("disk")
    word = choice.choice(words)
    found: dict[str, Any] = {"overflow": word}
    if word != "disk":
        found["max_messages"] = choice.choice([1, 10, 60, 200])
    if word != "disk" and choice.random() < 0.2:
        found["max_bytes"] = 100_000
    if word == "drop-oldest":
        found["overflow_to_dead"] = choice.random() < 0.3
    return found


def life(choice: random.Random, first: dict[str, Any]) -> dict[str, Any]:
    """A channel whose messages expire."""
    return {
        "message_ttl": choice.choice([0.05, 0.3, 2.0, 600.0] + [None] * bool(first)),
        "expired_to_dead": choice.random() < 0.4,
        "max_attempts": choice.choice([None, 2]),
    }


def limits(choice: random.Random) -> dict[str, object]:
    """Options of a round's supervisor: small, so that the disk has its share."""
    return {
        "mem_queue_size": choice.choice([0, 256, 400, 1000, 5000]),
        "in_flight_slots": choice.choice([256, 1000, 16384]),
        "arena_size": choice.choice([2, 4, 16]) << 20,
        "max_msg_size": 300_000,
        "max_bytes_per_file": choice.choice([64 << 10, 1 << 20, 100 << 20]),
        "sync_every": choice.choice([1, 100, 2500]),
    }


@dataclass
class Seat:
    """A process's place; a dead one is followed by another."""

    place: int

    role: Role | None  # None: the supervisor
    may_die: bool
    start_at: float = 0.0
    number: int = 0
    pid: int = 0
    blow: bool = False  # it was killed by us, or told to die, and is not waited for yet
    dies_by: float = 0.0  # if it was told to die: when our patience ends
    stopped: bool = False
    size: int = 0  # of its log
    moved_at: float = 0.0  # when its log last grew

    @property
    def name(self) -> str:
        return "supervisor" if self.role is None else self.role.kind.role

    @property
    def weight(self) -> float:
        """How often it is killed, beside others."""
        return SUPERVISOR_WEIGHT if self.role is None else self.role.weight / self.role.seats
