"""Queues between processes, with the methods of those of the standard library."""

from shmq.queues.item import Item
from shmq.queues.queue import JoinableQueue, Queue, SimpleQueue

__all__ = ["Item", "JoinableQueue", "Queue", "SimpleQueue"]
