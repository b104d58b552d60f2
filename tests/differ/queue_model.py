"""A model of the queues of `multiprocessing`: which step of a program waits, and what each one
returns. It knows too after which step the original's queue is of no more use, on purpose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from differ.machine import Unfit

Step = list[Any]
#: Of items: those whose pickling fails, and with what; those whose unpickling fails.
BAD = {
    "lambda": "PicklingError",
    "lock": "TypeError",
    "no:ValueError": "ValueError",
    "no:KeyError": "KeyError",
}
TRAPS = {"late:ValueError": "ValueError", "late:StopIteration": "StopIteration"}
JOINABLE = "JoinableQueue"
SIMPLE = "SimpleQueue"


@dataclass
class Of:
    """A queue."""

    kind: str
    maxsize: int
    items: list[str] = field(default_factory=list)
    unfinished: int = 0
    lost: str = ""
    getter: tuple[int, int, int] | None = None
    """Step, actor and thread that wait in `get`."""
    putter: tuple[int, int, int, str] | None = None
    joiners: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return 0 < self.maxsize <= len(self.items)


@dataclass
class Actor:
    """A process; thread 0 is its main thread."""

    busy: dict[int, int] = field(default_factory=dict)
    """The queue in which a thread waits."""
    held: dict[int, list[str]] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    handler: Step | None = None
    stopped: bool = False
    wrote: dict[int, bool] = field(default_factory=dict)
    """Queues into which it has put something; False: it has tried to."""
    told: dict[int, int] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)
    """Threads that wait for ever on the original."""


class Model:
    """The state of a program after its steps so far. `observed` has what each step returns, in the
    order in which they return: step, label, result, and whether the original has lost it."""

    def __init__(self, program: dict[str, Any]) -> None:
        self.queues = [Of(kind, size) for kind, size in program["queues"]]
        self.actors: dict[int, Actor] = {0: Actor()}
        self.observed: list[tuple[int, str, str]] = []
        self.lost: dict[int, str] = {}
        """Of the steps that the original is not asked for: why not."""
        self.started: set[int] = {0}
        self.returning: dict[int, int] = {}
        """Of steps that end processes: the queues whose items come back, by number."""
        self._labels: dict[int, str] = {}

    def apply(self, number: int, step: Step) -> list[tuple[int, str]]:
        """The steps that return by this step, in this order, and their results."""
        before = len(self.observed)
        waiting = [
            (of, actor, thread, index)
            for of, actor in self.actors.items()
            for thread, index in actor.busy.items()
            if not self.queues[index].lost
        ]
        first = step[0]
        if isinstance(first, str):
            getattr(self, f"_{first}")(number, *step[1:])
        else:
            self._call(number, *step)
        for who, actor, thread, index in waiting:
            if self.queues[index].lost and who in self.actors:
                actor.stuck.add(thread)
        return [(index, result) for index, _, result in self.observed[before:]]

    # ---- processes ----

    def _actor(self, who: int) -> Actor:
        if who not in self.actors or self.actors[who].stopped or self.actors[who].stuck:
            raise Unfit
        return self.actors[who]

    def _start(self, number: int, who: int) -> None:
        if who in self.started or any(queue in self.actors[0].closed for queue in range(9)):
            raise Unfit
        self.started.add(who)
        self.actors[who] = Actor()
        self._label(number, "start of a process")
        self._see(number, "started")

    def _stop(self, number: int, who: int) -> None:
        actor = self._actor(who)
        if who == 0 or actor.busy:
            raise Unfit
        actor.stopped = True
        self._label(number, "SIGSTOP")
        self._see(number, "sent")

    def _cont(self, number: int, who: int) -> None:
        if who not in self.actors or not self.actors[who].stopped:
            raise Unfit
        self.actors[who].stopped = False
        self._label(number, "SIGCONT")
        self._see(number, "sent")

    def _kill(self, number: int, who: int, name: str) -> None:
        if who == 0 or who not in self.actors:
            raise Unfit
        self._label(number, name)
        self._see(number, {"SIGKILL": "-9", "SIGTERM": "-15", "exit": "3"}[name])
        actor = self.actors[who]
        if name == "exit" and (actor.busy or actor.stopped):
            raise Unfit
        if name == "SIGTERM" and actor.stopped:
            raise Unfit
        self._dies(number, who)

    def _leave(self, number: int, who: int) -> None:
        """A process ends in order."""
        actor = self._actor(who)
        if who == 0 or actor.busy:
            raise Unfit
        self._label(number, "end of a process")
        self._see(number, "0")
        for index, items in actor.held.items():
            if items:
                self.queues[index].lost = "a process ended without task_done"
                self._finish(index, len(items))
        del self.actors[who]

    def _dies(self, number: int, who: int) -> None:
        actor = self.actors.pop(who)
        for index, queue in enumerate(self.queues):
            if queue.getter and queue.getter[1] == who:
                queue.getter = None
                queue.lost = "a kill in get"
            if queue.putter and queue.putter[1] == who:
                queue.putter = None
            if any(each[1] == who for each in queue.joiners):
                queue.joiners = [each for each in queue.joiners if each[1] != who]
                queue.lost = "a kill in join"
            back = actor.held.get(index)
            if back:
                queue.lost = "a kill before task_done"
                self.returning[number] = index
                if queue.getter:
                    self._give(index, back.pop(0))
                queue.items[:0] = back

    def _handle(self, number: int, who: int, what: str, index: int, item: str) -> None:
        actor = self._actor(who)
        if who == 0 or 0 in actor.busy or item in BAD or index >= len(self.queues):
            raise Unfit
        actor.handler = [what, index, item]
        self._label(number, "signal.signal")
        self._see(number, "set")

    def _signal(self, number: int, who: int) -> None:
        """SIGUSR1, to a main thread that waits."""
        actor = self._actor(who)
        if actor.handler is None or 0 not in actor.busy:
            raise Unfit
        what, index, item = actor.handler
        if what == "put":
            queue = self.queues[index]
            waits_there = actor.busy[0] == index
            if queue.full or index in actor.closed or queue.putter:
                raise Unfit
            if waits_there and not (queue.getter and queue.getter[1:] == (who, 0)):
                raise Unfit
            self._add(index, item)
            actor.wrote[index] = True
            if queue.lost:
                raise Unfit
        elif what == "raise":
            queue = self.queues[actor.busy[0]]
            waiting = [queue.getter, queue.putter, *queue.joiners]
            mine = next(each for each in waiting if each and each[1:3] == (who, 0))
            if queue.getter is mine:
                queue.getter = None
            elif queue.putter is mine:
                queue.putter = None
            else:
                queue.joiners.remove(mine)  # type: ignore[arg-type]
            self._wake(mine[0], who, 0, "FromHandler")
        self._label(number, f"signal whose handler does {what}")
        self._see(number, "sent")

    # ---- calls ----

    def _call(self, number: int, who: int, thread: int, name: str, index: int, *args: Any) -> None:
        actor = self._actor(who)
        if thread in actor.busy or index >= len(self.queues) or (who == 0 and thread):
            raise Unfit
        queue = self.queues[index]
        closed = index in actor.closed
        label = f"{queue.kind}.{name}"
        if queue.lost:
            self.lost[number] = queue.lost
        result = getattr(self, f"_{name}_of")(number, who, thread, index, queue, closed, *args)
        if result is None and who == 0:
            raise Unfit  # it reads no other step while it waits
        about = args[0] if name == "put" and args[0] in BAD else ""
        if name == "put" and args[0].startswith("array"):
            about = "array"
        label += f" of {about}" if about else ""
        if name == "task_done" and not actor.held.get(index) and result == "ValueError":
            label += " of another's item" if queue.unfinished else ""
        label += " after close" if closed else ""
        self._label(number, label)
        if result is not None:
            self._see(number, result)

    def _put_of(
        self,
        number: int,
        who: int,
        thread: int,
        index: int,
        queue: Of,
        closed: bool,
        item: str,
        block: bool = True,
        timeout: float | None = None,
    ) -> str | None:
        if closed:
            return "OSError" if queue.kind == SIMPLE else "ValueError"
        if queue.kind == SIMPLE and not (block and timeout is None):
            raise Unfit
        self.actors[who].wrote.setdefault(index, False)
        if item in BAD:
            self.actors[who].wrote[index] = False
            if queue.full or queue.putter:
                raise Unfit
            if queue.kind == JOINABLE:
                queue.lost = "an object that cannot be pickled"
            return BAD[item]
        if queue.putter:
            if not block:
                return "Full"
            raise Unfit
        if queue.full:
            if block and (timeout is None or timeout > 1):
                queue.putter = number, who, thread, item
                self.actors[who].busy[thread] = index
                return None
            return "Full"
        self.actors[who].wrote[index] = True
        self._add(index, item)
        return "None"

    def _get_of(
        self,
        number: int,
        who: int,
        thread: int,
        index: int,
        queue: Of,
        closed: bool,
        block: bool = True,
        timeout: float | None = None,
    ) -> str | None:
        if closed:
            if queue.kind == SIMPLE and queue.getter:
                raise Unfit  # the original waits for the one who has the lock
            return "OSError" if queue.kind == SIMPLE else "ValueError"
        if queue.kind == SIMPLE and not (block and timeout is None):
            raise Unfit
        waits = block and (timeout is None or timeout > 1)
        if queue.getter:
            if waits or (block and timeout):
                raise Unfit  # on the original it waits for the lock of the first
            return "Empty"
        if not queue.items:
            if not waits:
                return "Empty"
            queue.getter = number, who, thread
            self.actors[who].busy[thread] = index
            return None
        item = queue.items.pop(0)
        self._got(who, index, item)
        if queue.putter and not queue.full:
            step, putter, of, other = queue.putter
            queue.putter = None
            queue.items.append(other)
            queue.unfinished += 1
            self._wake(step, putter, of, "None")
        return TRAPS.get(item, item)

    def _empty_of(self, number: int, who: int, thread: int, index: int, *rest: Any) -> str:
        queue, closed = rest
        wrote = self.actors[who].wrote.get(index)
        if closed and wrote is False:
            raise Unfit  # each side has begun in its own way
        if closed and (wrote or queue.kind == SIMPLE):
            return "OSError"
        return str(not queue.items)

    def _qsize_of(self, number: int, who: int, thread: int, index: int, *rest: Any) -> str:
        if rest[0].kind == SIMPLE:
            raise Unfit
        return str(len(rest[0].items))

    def _full_of(self, number: int, who: int, thread: int, index: int, *rest: Any) -> str:
        if rest[0].kind == SIMPLE:
            raise Unfit
        return str(rest[0].full)

    def _close_of(self, number: int, who: int, thread: int, index: int, *rest: Any) -> str:
        actor = self.actors[who]
        queue = rest[0]
        if index in actor.busy.values():
            raise Unfit
        if who and self.actors[0].wrote.get(index) is not None:
            actor.wrote.setdefault(index, False)  # it was forked, perhaps after that
        actor.closed.add(index)
        if held := actor.held.pop(index, []):
            queue.lost = "close without task_done"
            actor.told[index] = actor.told.get(index, 0) + len(held)
            self._finish(index, len(held))
        return "None"

    def _join_thread_of(self, number: int, who: int, thread: int, index: int, *rest: Any) -> str:
        if rest[0].kind == SIMPLE:
            raise Unfit
        return "None"

    def _task_done_of(self, number: int, who: int, thread: int, index: int, *rest: Any) -> str:
        queue = rest[0]
        if queue.kind != JOINABLE:
            raise Unfit
        actor = self.actors[who]
        held = actor.held.get(index)
        if not held and actor.told.get(index):
            actor.told[index] -= 1  # of one that `close` has finished
            return "None"
        if not held:
            if queue.unfinished:
                queue.lost = queue.lost or "task_done of another's item"
            return "ValueError"
        held.pop(0)
        self._finish(index, 1)
        return "None"

    def _join_of(
        self, number: int, who: int, thread: int, index: int, queue: Of, closed: bool
    ) -> str | None:
        if queue.kind != JOINABLE:
            raise Unfit
        if not queue.unfinished:
            return "None"
        queue.joiners.append((number, who, thread))
        self.actors[who].busy[thread] = index
        return None

    def _make_of(self, number: int, who: int, thread: int, index: int, *rest: Any) -> str:
        """A queue of the process's own."""
        return "mine"

    # ---- what happens to others ----

    def _add(self, index: int, item: str) -> None:
        queue = self.queues[index]
        queue.unfinished += 1
        if queue.getter:
            self._give(index, item)
        else:
            queue.items.append(item)

    def _give(self, index: int, item: str) -> None:
        """An item for the one who waits."""
        queue = self.queues[index]
        assert queue.getter
        step, who, thread = queue.getter
        queue.getter = None
        self._got(who, index, item)
        self._wake(step, who, thread, TRAPS.get(item, item))

    def _got(self, who: int, index: int, item: str) -> None:
        if self.queues[index].kind == JOINABLE:
            self.actors[who].held.setdefault(index, []).append(item)
        else:
            self.queues[index].unfinished -= 1

    def _finish(self, index: int, count: int) -> None:
        queue = self.queues[index]
        queue.unfinished -= count
        if queue.unfinished == 0:
            for step, who, thread in queue.joiners:
                self._wake(step, who, thread, "None")
            queue.joiners = []

    def _wake(self, step: int, who: int, thread: int, result: str) -> None:
        actor = self.actors[who]
        index = actor.busy.pop(thread)
        if self.queues[index].lost:
            self.lost.setdefault(step, self.queues[index].lost)
        self._see(step, result)

    def _label(self, number: int, label: str) -> None:
        self._labels[number] = label

    def _see(self, number: int, result: str) -> None:
        self.observed.append((number, self._labels.get(number, ""), result))

    def plan(self) -> list[tuple[int, str, str]]:
        """Number, label and expected result, in the order in which the steps return."""
        return [
            (
                number,
                self._labels[number]
                + (f" after {self.lost[number]}" if number in self.lost else ""),
                result,
            )
            for number, _, result in self.observed
        ]


def walked(program: dict[str, Any]) -> Model:
    """The model after the whole program. Raises Unfit."""
    model = Model(program)
    for number, step in enumerate(program["steps"]):
        model.apply(number, step)
    return model
