"""Producers, consumers, messages and leases: thin subclasses of the extension's types, so that the
calls made for every message (`publish`, `take`, `finish`) go straight into C."""

from shmq._native import Loan
from shmq.client.consumer import Consumer
from shmq.client.dead_letters import DeadGroup, DeadLetter, DeadLetters
from shmq.client.lease import LeasedBatch, LeaseHolder
from shmq.client.many import MultiConsumer
from shmq.client.message import Batch, Message
from shmq.client.producer import Producer
from shmq.client.results import Results, ResultsStats
from shmq.leased import Lease

__all__ = [
    "Batch",
    "Consumer",
    "DeadGroup",
    "DeadLetter",
    "DeadLetters",
    "Lease",
    "LeaseHolder",
    "LeasedBatch",
    "Loan",
    "Message",
    "MultiConsumer",
    "Producer",
    "Results",
    "ResultsStats",
]
