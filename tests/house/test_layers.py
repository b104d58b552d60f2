"""Who may import whom, and who may include whom. This file is also the documentation.

Left never knows right:

    C       layout atomics killpoint plant <- clock owner <- lock arena heap <- internal.h <- rest
    binding <Python.h>, "shmq.h" and its own headers only; core/ is closed to it
    Python  _native <- errors <- names, ownership, interpreter <- segments <- options, layout
            <- stats <- storage <- client <- broker <- { supervisor | gateway | spark } <- cli
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
CORE, BINDING = TOP / "native" / "core", TOP / "native" / "binding"
PACKAGE = TOP / "shmq"

# ---- C ----

HEADER_RANKS = {
    "shmq.h": 0,
    "layout.h": 0,
    "atomics.h": 0,
    "killpoint.h": 0,
    "plant.h": 0,
    "sane.h": 0,
    "clock.h": 1,
    "owner.h": 1,
    "lock.h": 2,
    "arena.h": 2,
    "heap.h": 2,
    "internal.h": 3,
}
SOURCE_RANK = 4

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def includes(path: Path) -> Iterator[str]:
    """What a file includes in quotation marks, without folders."""
    for quoted, _ in INCLUDE.findall(path.read_text()):
        if quoted:
            yield Path(quoted).name


def core_files() -> list[Path]:
    return sorted(CORE.glob("*.[ch]"))


@pytest.mark.parametrize("path", core_files(), ids=lambda path: path.name)
def test_core_includes_go_to_the_left(path: Path) -> None:
    own = path.with_suffix(".h").name
    rank = HEADER_RANKS.get(own if path.suffix == ".c" else path.name, SOURCE_RANK)
    if path.suffix == ".h":
        assert path.name in HEADER_RANKS, f"give {path.name} a rank in {Path(__file__).name}"
    for name in includes(path):
        assert name in HEADER_RANKS, f"{path.name} includes {name}, which has no rank"
        if name not in (own, "shmq.h"):
            assert HEADER_RANKS[name] < rank or rank == HEADER_RANKS[name] == 0, (
                f"{path.name} (rank {rank}) includes {name} (rank {HEADER_RANKS[name]})"
            )


@pytest.mark.parametrize("path", core_files(), ids=lambda path: path.name)
def test_core_knows_no_python(path: Path) -> None:
    assert "Python.h" not in path.read_text()


@pytest.mark.parametrize("path", sorted(BINDING.glob("*.[ch]")), ids=lambda path: path.name)
def test_binding_sees_only_the_contract(path: Path) -> None:
    own = {header.name for header in BINDING.glob("*.h")}
    assert set(includes(path)) <= own | {"shmq.h"}


# ---- Python ----

RANKS = {
    "_native": 0,
    "errors": 1,
    "keywords": 1,
    "names": 2,
    "ownership": 2,
    "interpreter": 2,
    "segments": 3,
    "options": 4,
    "audit": 4,
    "logs": 5,
    "layout": 4,
    "stats": 5,
    "prometheus": 6,
    "storage": 6,
    "client": 7,
    "homes": 7,
    "broker": 8,
    "supervisor": 9,
    "gateway": 9,
    "spark": 9,
    "cli": 10,
    "__init__": 9,  # the public names: nothing from the siblings and the command line
    "__main__": 11,
}

#: Module -> parts of the package that may import it. `__init__` is where the handshake is.
RESERVED = {
    "shmq._native": {"__init__", "errors", "layout", "client", "broker", "supervisor", "gateway"},
    "click": {"cli"},
    "asyncio": {"client/aio.py", "gateway"},
    "aiohttp": {"gateway"},
    "re2": {"gateway"},
    "pyspark": {"spark"},
    "pyarrow": {"spark", "client/message.py"},
    "posix_ipc": {"segments"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """First name under shmq/: `layout` for layout.py, `client` for client/aio.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, in functions and for typing too."""
    package = ["shmq", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            yield from (".".join([*base, alias.name]) for alias in node.names)


def test_every_part_has_a_rank() -> None:
    assert {part_of(path) for path in modules()} <= set(RANKS)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_to_the_left(path: Path) -> None:
    part = part_of(path)
    for name in imports(path):
        words = name.split(".")
        if words[0] == "shmq" and len(words) > 1 and words[1] in RANKS and words[1] != part:
            assert RANKS[words[1]] < RANKS[part], f"{part} imports {name}, which is not left of it"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_reserved_modules_are_imported_where_they_belong(path: Path) -> None:
    here = {part_of(path), path.relative_to(PACKAGE).as_posix()}
    for name in imports(path):
        for module, allowed in RESERVED.items():
            if name == module or name.startswith(module + "."):
                assert here & allowed, f"{name} may be imported only in {sorted(allowed)}"
