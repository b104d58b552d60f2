"""Brokers that one thread attaches and another one closes."""

from __future__ import annotations

from collections.abc import Callable

from support.processes import Child, say

import shmq


def attach_and_close_elsewhere(instance):
    import gc
    import threading

    for _ in range(3):
        broker = shmq.attach(instance)
        thread = threading.Thread(target=broker.close)
        thread.start()
        thread.join()
        del broker, thread
        gc.collect()  # nothing maps its memory any more
        again = shmq.attach(instance)
        again.create_topic("t")
        again.close()
        del again
        gc.collect()
    say("fine")


def test_a_thread_goes_on_after_another_has_closed_its_broker(
    broker: shmq.Broker, child: Callable[..., Child]
) -> None:
    """The C library links the robust locks that a thread holds through the locks themselves: one
    that is left held must not vanish with its memory, or the thread's next lock is a crash."""
    went = child(attach_and_close_elsewhere, broker.instance)
    assert went.succeed() == ["fine"]
