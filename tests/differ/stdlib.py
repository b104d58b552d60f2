"""Programs of `multiprocessing` and `concurrent.futures`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from differ import executor_programs, queue_programs

GOES_ON = False
SHAPES: dict[str, Any] = {"queues": queue_programs, "executor": executor_programs}
WITNESSES = [program for shape in SHAPES.values() for program in shape.WITNESSES]


def draw(rng: random.Random) -> dict[str, Any]:
    shape = rng.choice((queue_programs, queue_programs, queue_programs, executor_programs))
    program: dict[str, Any] = shape.draw(rng)
    return program


def plan(program: dict[str, Any]) -> list[tuple[int, str, str]]:
    return SHAPES[program["shape"]].plan(program)


def smaller(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return SHAPES[program["shape"]].smaller(program)


def begin(side: str) -> None:
    """Start what all programs of a side share: the broker of the tree."""
    if side == "shmq":
        import shmq

        shmq.Queue()


def end(side: str) -> None:
    """Nothing else is to be closed."""


def run(side: str, program: dict[str, Any], say: Callable[..., None]) -> None:
    SHAPES[program["shape"]].run(side, program, say)
