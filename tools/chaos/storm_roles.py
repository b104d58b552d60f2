"""The cast of a storm: roles, channels and limits."""

from __future__ import annotations

import random
from dataclasses import dataclass

from chaos.storm import actors, remote
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


ROLES = (
    Role(actors.Producer, "work", seats=3, survivors=1, weight=26),
    Role(actors.Consumer, "work", "a", seats=2, survivors=1, weight=8),
    Role(actors.Requeuer, "work", "b", seats=2, weight=14),
    Role(actors.AsyncConsumer, "work", "c", weight=8),
    Role(remote.RemoteProducer, "work", weight=6),
    Role(remote.RemoteConsumer, "work", "c", seats=2, weight=8),
    Role(remote.RemoteRequeuer, "work", "b", weight=4),
    Role(actors.Operator, "work", weight=8),
    Role(actors.Wanderer, "work", weight=4),
    Role(actors.Producer, actors.LATE, weight=6),
    Role(actors.Consumer, actors.LATE, "a", seats=2, weight=8, after=3.0),
    Role(actors.SlowProducer, "probe", weight=2),
    Role(actors.Holder, "probe", "a", seats=3, survivors=1, weight=12),
)


SUPERVISOR_WEIGHT, GATEWAY_WEIGHT = 6, 4


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
        "advance",
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
]


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
