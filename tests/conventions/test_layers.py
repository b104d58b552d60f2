"""The order of the modules: which may import and which may include which.

C includes by the floors of `FLOORS`, Python imports by the ranks of `RANKS`; docs/architecture.md
shows both. The binding sees <Python.h>, the headers of native/include and its own; core/ is closed
to it.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
CORE, BINDING = TOP / "native" / "core", TOP / "native" / "binding"
PACKAGE = TOP / "shmq"

# ---- C ----

#: The floors of the core, the lowest first. A file includes only headers of the floors below its
#: own. The compiler refuses a call without a declaration, so it also calls only these.
FLOORS = (
    (
        "arena clock heap killpoint latency layout_table libc names process properties record "
        "seal status wire"
    ),
    ("doorbell lock segment settings writer"),
    ("mapping slots sort store_table"),
    ("failure lease"),
    ("rebuild lease_read"),
    ("create locking session"),
    (
        "batch consumer directory disk expire held lease_holder reaper room store_segment "
        "supervisor sweep trim"
    ),
    ("chunk client lane prepend producer requests store store_directory store_expire waiter"),
    ("fanout lanes restore spill store_wait"),
    ("backlog dead loan"),
    ("publish"),
)
FLOOR_OF = {name: rank for rank, names in enumerate(FLOORS, 1) for name in names.split()}

#: Headers without a source file: the contract, bytes, memory orders, switches of the build.
BASE = {
    "shmq.h",
    "shmq_store.h",
    "shmq_lease.h",
    "layout_store.h",
    "shmq_supervisor.h",
    "shmq_wire.h",
    "layout.h",
    "atomics.h",
    "bounds.h",
}
HANDLES = {"handles.h", "store_handle.h"}

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def includes(path: Path) -> Iterator[str]:
    """The headers that a file includes in quotation marks, without folders."""
    for quoted, _ in INCLUDE.findall(path.read_text()):
        if quoted:
            yield Path(quoted).name


def core_files() -> list[Path]:
    return sorted(CORE.glob("*.[ch]"))


def test_every_source_of_the_core_has_a_floor() -> None:
    assert {path.stem for path in CORE.glob("*.c")} == set(FLOOR_OF)
    headers = {path.name for path in CORE.glob("*.h")}
    assert headers <= BASE | HANDLES | {f"{name}.h" for name in FLOOR_OF}


def test_the_floors_are_those_of_the_map() -> None:
    text = (TOP / "docs" / "architecture.md").read_text()
    text = text.partition("## The core's floors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (`.*) \|$", text, re.MULTILINE)
    shown = {int(number): set(re.findall(r"`(\w+)`", row)) for number, row in rows}
    for number, names in enumerate(FLOORS, 1):
        assert shown[number] == set(names.split())


@pytest.mark.parametrize("path", core_files(), ids=lambda path: path.name)
def test_core_includes_only_what_is_below(path: Path) -> None:
    if path.name in BASE:
        assert set(includes(path)) <= BASE
        return
    if path.name in HANDLES:
        assert set(includes(path)) <= BASE | {"heap.h", "handles.h"}
        return
    for name in set(includes(path)) - BASE - HANDLES - {f"{path.stem}.h"}:
        lower = FLOOR_OF[Path(name).stem]
        assert lower < FLOOR_OF[path.stem] or lower == FLOOR_OF[path.stem] == 1, (
            f"{path.name} is on floor {FLOOR_OF[path.stem]} and includes {name} of floor {lower}"
        )


def test_core_calls_no_function_that_its_includes_do_not_declare() -> None:
    """A declaration by hand would go around the floors."""
    definition = re.compile(r"^(?!static)[A-Za-z_][\w \t*]*?\b(\w+)\([^;{]*\)\n\{", re.MULTILINE)
    declaration = re.compile(
        r"^(?!static|typedef)[A-Za-z_][\w \t*]*?\b(\w+)\([^;{]*\);", re.MULTILINE
    )
    defined = {
        name: path.stem
        for path in CORE.glob("*.c")
        for name in definition.findall(path.read_text())
    }
    for path in CORE.glob("*.c"):
        by_hand = set(declaration.findall(path.read_text())) & set(defined)
        assert not by_hand, f"{path.name} declares {by_hand} of other files itself"


@pytest.mark.parametrize("path", core_files(), ids=lambda path: path.name)
def test_core_knows_no_python(path: Path) -> None:
    assert "Python.h" not in path.read_text()


@pytest.mark.parametrize("path", sorted(BINDING.glob("*.[ch]")), ids=lambda path: path.name)
def test_binding_sees_only_the_contract(path: Path) -> None:
    own = {header.name for header in BINDING.glob("*.h")}
    contract = {"shmq.h", "shmq_lease.h", "shmq_store.h", "shmq_supervisor.h", "shmq_wire.h"}
    assert set(includes(path)) <= own | contract | {"docstrings.h"}


# ---- Python ----

RANKS = {
    "errors": 0,
    "_native": 1,
    "arguments": 1,
    "keywords": 1,
    "patience": 1,
    "printing": 1,
    "greenlets": 2,
    "objects": 2,
    "seal": 2,
    "taken": 6,
    "leased": 2,
    "peers": 2,
    "names": 2,
    "shared": 2,
    "nsqd": 2,
    "private": 2,
    "claims": 2,
    "staging_place": 3,
    "ownership": 2,
    "interpreter": 2,
    "procfs": 2,
    "semaphore": 2,
    "remote": 3,
    "shm": 3,
    "option_types": 2,
    "host_defaults": 2,
    "settings": 3,
    "users": 3,
    "option_fields": 4,
    "door": 5,
    "options": 5,
    "audit": 4,
    "audit_file": 3,
    "logs": 6,
    "layout": 4,
    "views": 5,
    "chronicle": 5,
    "history": 6,
    "deaths": 6,
    "sources": 6,
    "peek": 6,
    "stats": 7,
    "prometheus": 8,
    "storage": 8,
    "client": 9,
    "homes": 9,
    "attachment": 10,
    "finder": 9,
    "configurable": 10,
    "embedded": 11,
    "held": 11,
    "answers": 11,
    "lessor": 11,
    "broker": 12,
    "queues": 13,
    "pool": 14,
    "integrations": 15,
    "supervisor": 14,
    "gateway": 14,
    "forward": 14,
    "page": 13,
    "spark": 14,
    "otel": 14,
    "diagnostics": 15,
    "cli": 16,
    "__init__": 15,  # the public names: nothing from the siblings and the command line
    "__main__": 17,
}

#: Module -> parts of the package that may import it. `__init__` is where the handshake is.
RESERVED = {
    "shmq._native": {
        "__init__",
        "integrations/celery/attachment.py",
        "answers",
        "errors",
        "option_fields",
        "options",
        "layout",
        "views",
        "sources",
        "peek",
        "client",
        "attachment",
        "broker",
        "lessor",
        "pool",
        "finder",
        "supervisor",
        "gateway",
        "diagnostics",
    },
    "click": {"cli"},
    "asyncio": {"cli/page.py", "client/aio.py", "client/results_aio.py", "door", "gateway", "page"},
    "aiohttp": {"door", "gateway", "page"},
    "re2": {"gateway"},
    "opentelemetry": {"otel"},
    "pyspark": {"spark"},
    "pyarrow": {"spark", "client/message.py", "page/arrow_reader.py"},
    "posix_ipc": {"semaphore"},
    "rich": {"pool/mapping.py"},
    "joblib": {"integrations"},
    "anyio": {"integrations"},
    "celery": {"integrations"},
    "django": {"integrations"},
    "dramatiq": {"integrations"},
    "kombu": {"integrations"},
    "taskiq": {"integrations"},
    "cloudpickle": {"integrations", "pool"},
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
    without = {part_of(path) for path in modules()} - set(RANKS)
    assert not without, f"{without}: add each to RANKS, above all that it imports"


def test_the_order_of_the_map_is_that_of_the_ranks() -> None:
    text = (TOP / "docs" / "architecture.md").read_text()
    chain = text.partition("Left never imports right")[2].partition("\n\n")[2].partition("\n\n")[0]
    steps = [re.findall(r"\w+", step) for step in chain.split("<-")]
    assert len(steps) > 10
    for left, right in itertools.pairwise(steps):
        assert max(RANKS[name] for name in left) < min(RANKS[name] for name in right), (left, right)


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


def test_gateway_imports_follow_the_map() -> None:
    """For typing too: a file can be understood after those that come before it."""
    text = (TOP / "docs" / "architecture.md").read_text()
    text = text.partition("## The gateway's files")[2].partition("\n## ")[0]
    shown = [
        name
        for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]
    files = {path.stem: path for path in (PACKAGE / "gateway").glob("*.py")}
    assert sorted(shown) == sorted(files.keys() - {"__init__"})
    for rank, module in enumerate(shown):
        for name in imports(files[module]):
            words = name.split(".")
            if words[:2] == ["shmq", "gateway"] and words[2] in files:
                assert words[2] in shown[:rank], f"{module} imports {name}, which comes after it"
