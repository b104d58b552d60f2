"""Every function and method of the extension, called many times, leaves nothing behind: no object,
no memory, no descriptor, no mapping, no pin, no client, no slot."""

from __future__ import annotations

import ast
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conventions import (
    leak_scenes_of_handles,  # noqa: F401  # registers its scenes
    leak_scenes_of_lanes,  # noqa: F401
    leak_scenes_of_supervisor,  # noqa: F401
)
from conventions.leak_scenes import SCENES, SLOW, Scene
from support import recount

from shmq.layout import ClientState, State

STUB = Path(__file__).parents[2] / "shmq" / "_native.pyi"
ROUNDS, SLOW_ROUNDS = 1500, 150


# ---- the tests ----


@pytest.fixture
def place() -> Iterator[Scene]:
    found = Scene()
    yield found
    found.close()


def public(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            names = [ast.unparse(item.target) for item in fields]
            for name in (*public(node.body), *names):
                if not name.startswith("_"):
                    yield f"{node.name}.{name}"


def test_every_function_and_method_has_a_scene() -> None:
    declared = set(public(ast.parse(STUB.read_text()).body))
    covered = {name for names in SCENES for name in names.split()}
    without = declared - covered - {"killpoint"}
    assert not without, (
        "name each in the @scene(...) of a function in tests/conventions/leak_scenes*.py that "
        f"calls it: {sorted(without)}"
    )
    gone = covered - declared
    assert not gone, f"take these out of the scenes, the stub has them no more: {sorted(gone)}"


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def mappings() -> int:
    """Of shared memory."""
    with open("/proc/self/maps") as file:
        return sum("/memfd:" in line for line in file)


def counts(s: Scene) -> dict[str, int]:
    gc.collect()
    clients = s.world.directory.clients
    view = s.world.queue_view(s.queue)
    found = recount.count(s.world.directory, view)
    assert not found.problems, found.problems
    return {
        "objects": sys.getallocatedblocks(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": mappings(),
        "clients": int(np.count_nonzero(clients["state"] == ClientState.LIVE)),
        "pins": int(np.count_nonzero(clients["pins"])),
        "sessions": int(np.count_nonzero(view.sessions["client"])),
        "requests": int(np.count_nonzero(s.world.directory.requests["state"])),
        "slots in use": len(found.slots) - len(found.of[State.FREE]),
    }


@pytest.mark.parametrize("name", SCENES)
def test_nothing_is_left_behind(place: Scene, name: str) -> None:
    rounds = SLOW_ROUNDS if name in SLOW else ROUNDS
    for _ in range(rounds // 5):
        SCENES[name](place)
    for attempt in range(3):  # caches may fill once more
        before, memory = counts(place), rss()
        for _ in range(rounds):
            SCENES[name](place)
        after, grown = counts(place), rss() - memory
        objects = after.pop("objects") - before.pop("objects")
        assert after == before
        if objects < rounds // 10 and grown < rounds * 200:
            break
        assert attempt < 2, f"{objects} objects and {grown} bytes more after {rounds} rounds"
