"""The order of the modules: which may import and which may include which.

C by the folders of `FOLDERS`, Python imports by the ranks of `RANKS`; docs/architecture.md
shows both. The binding sees <Python.h>, the headers of native/include and its own; core/ is closed
to it.
"""

from __future__ import annotations

import ast
import graphlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
CORE, BINDING = TOP / "native" / "core", TOP / "native" / "binding"
PACKAGE = TOP / "shmq"

# ---- C ----

#: The folders of the core, the lowest first. A file includes headers of its own folder and of those
#: before it in this list, and calls only what is there.
FOLDERS = (
    "base",
    "memory",
    "sync",
    "format",
    "queue",
    "instance",
    "publish",
    "consume",
    "disk",
    "store",
)

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
#: The head of a function that other files may call: not static in a source, and inline in a header.
DEFINITION = {
    ".c": re.compile(r"^(?!static|typedef)[A-Za-z_][\w \t*]*?\b(\w+)\([^;{]*\)\n\{", re.MULTILINE),
    ".h": re.compile(r"^static inline [\w \t*]*?\b(\w+)\([^;{]*\)\n\{", re.MULTILINE),
}


#: A function of a header, whole: the rest of it only declares.
INLINE = re.compile(r"^static inline .*?^\}", re.MULTILINE | re.DOTALL)


def includes(path: Path) -> Iterator[str]:
    """The headers that a file includes in quotation marks."""
    for quoted, _ in INCLUDE.findall(path.read_text()):
        if quoted:
            yield quoted


def core_files() -> list[Path]:
    return sorted(CORE.rglob("*.[ch]"))


def named(path: Path) -> str:
    """A file of the core as others include it."""
    return path.relative_to(CORE).as_posix()


def rank(path: Path) -> int:
    return FOLDERS.index(path.parent.name)


def test_every_file_of_the_core_is_in_one_of_its_folders() -> None:
    assert {path.parent for path in core_files()} == {CORE / name for name in FOLDERS}


def test_the_folders_are_those_of_the_map() -> None:
    text = (TOP / "docs" / "architecture.md").read_text()
    text = text.partition("## The core's folders")[2].partition("\n## ")[0]
    shown = [
        (folder, set(re.findall(r"`(\w+)`", row)))
        for folder, row in re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    ]
    there = [(name, {path.stem for path in (CORE / name).glob("*.[ch]")}) for name in FOLDERS]
    assert shown == there


@pytest.mark.parametrize("path", core_files(), ids=named)
def test_core_includes_only_its_own_folder_and_those_below(path: Path) -> None:
    for name in includes(path):
        if not (TOP / "native" / "include" / name).exists():
            assert rank(CORE / name) <= rank(path), f"{named(path)} includes {name}, which is above"


def calls(files: list[Path]) -> Iterator[tuple[Path, Path, str]]:
    """(file, file, function) of each call from one of these files to another."""
    texts = {path: COMMENT.sub("", path.read_text()) for path in files}
    home = {
        name: path for path, text in texts.items() for name in DEFINITION[path.suffix].findall(text)
    }
    assert len(home) > 50
    for path, text in texts.items():
        code = text if path.suffix == ".c" else "".join(INLINE.findall(text))
        for name in set(re.findall(r"\b(\w+)\s*\(", code)) & home.keys():
            if home[name].stem != path.stem:
                yield path, home[name], name


def test_core_calls_only_its_own_folder_and_those_below() -> None:
    """shmq.h declares all that the binding calls, so the includes alone do not show it."""
    up = {
        f"{named(path)} calls {name} of {named(home)}"
        for path, home, name in calls(core_files())
        if rank(home) > rank(path)
    }
    assert not up


@pytest.mark.parametrize("folder", [CORE, BINDING], ids=lambda path: path.name)
def test_files_in_c_do_not_call_each_other_in_circles(folder: Path) -> None:
    graph: dict[str, set[str]] = {}
    for path, home, _ in calls(sorted(folder.rglob("*.[ch]"))):
        graph.setdefault(path.stem, set()).add(home.stem)
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("path", core_files(), ids=named)
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
