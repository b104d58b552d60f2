"""CPython's tests of `multiprocessing`'s queues, with shmq's in their place.

The environment variable START_METHOD says how these tests start processes, which import this module
too."""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
import os
import queue
import unittest

import shmq
from shmq import layout, sources
from shmq.layout import State
from shmq.queues.place import CHANNEL

# Before the import of the tests, whose classes take the names from here.
for _name in ("Queue", "JoinableQueue", "SimpleQueue"):
    setattr(multiprocessing, _name, getattr(shmq, _name))
    setattr(multiprocessing.queues, _name, getattr(shmq, _name))

from test import _test_multiprocessing as originals  # noqa: E402
from test import test_queue  # noqa: E402

GROUPS = {
    "queues": "WithProcessesTestQueue|TestSimpleQueue|TestStdinBadfiledescriptor",
    "queues-of-threads": "WithThreadsTestQueue|TestQueueOfThreads",
    "processes": "WithProcessesTestProcess",
}

originals.ThreadsMixin.Queue = staticmethod(shmq.Queue)
originals.ThreadsMixin.JoinableQueue = staticmethod(shmq.JoinableQueue)
originals.install_tests_in_module_dict(globals(), os.environ["START_METHOD"])


class Queue(shmq.JoinableQueue):
    """The tests know the order of the items by the name of the class, and read `maxsize` and
    `unfinished_tasks`, which `queue.Queue` has and `multiprocessing.Queue` has not."""

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__(maxsize)
        self.maxsize = maxsize

    @property
    def unfinished_tasks(self) -> int:
        """How many items were put and are not done."""
        with sources.open_readonly(self._place.instance) as source:
            topic = source.directory.find_topic(self.name)
            found = topic and source.directory.find_queue(topic.index, CHANNEL)
            states = layout.state(source.queue(found).slots["word"])
            return int(((states != State.FREE) & (states != State.PINNED)).sum())


class TestQueueOfThreads(test_queue.BaseQueueTestMixin, unittest.TestCase):
    """CPython has these tests for `queue.Queue`, which has the same methods."""

    queue = queue
    type2test = Queue
