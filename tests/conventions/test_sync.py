"""Every acquire and every release in native/core says with which other place it pairs.

A label is a comment, `/* SYNC(name) */`, on the line or alone on the line above it. Each name has a
releasing and an acquiring place. The table in docs/protocol.md says what the name publishes and
where both sides are. After a change:

    tools/dev tables      writes the places of that table again
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "native" / "core"
PROTOCOL = ROOT / "docs" / "protocol.md"
BEGIN, END = "<!-- SYNC labels -->\n", "<!-- end of SYNC labels -->\n"
HEAD = "| label | what is published | release | acquire |\n|---|---|---|---|\n"

ORDERED = re.compile(
    r"\b(?:ld_acquire|st_release|fence_\w+)\(|__ATOMIC_(?:ACQUIRE|RELEASE|ACQ_REL)"
)
#: A locked instruction is on both sides; so is a full fence.
BOTH = re.compile(
    r"\batomic_(?:fetch_\w+|exchange|compare_exchange_\w+)\(|fence_(?:full|unlocked)\(|ACQ_REL"
)
RELEASES = re.compile(r"\bst_release\(|__ATOMIC_RELEASE\b")
LABEL = re.compile(r"SYNC\(([\w-]+)\)")
FUNCTION = re.compile(r"^[a-zA-Z].*?\b(\w+)\(")

#: Its acquiring side is not in the core.
READ_IN_PYTHON = {"names-written": "shmq/supervisor/startup.py"}


class Place(NamedTuple):
    file: str
    line: int
    function: str
    code: str
    labels: tuple[str, ...]

    def sides(self) -> set[str]:
        """A line without an ordered store reads: under a lock, or after a fence."""
        if BOTH.search(self.code):
            return {"release", "acquire"}
        return {"release"} if RELEASES.search(self.code) else {"acquire"}


def places() -> list[Place]:
    """The lines of the core that are ordered, and those that have a label."""
    found = []
    for path in sorted(CORE.rglob("*.[ch]"), key=lambda each: each.name):
        if path.name == "atomics.h":
            continue
        function, above = "", ""
        for number, text in enumerate(path.read_text().split("\n"), 1):
            code = re.sub(r"/\*.*?\*/", "", text)
            if text.lstrip().startswith(("/*", "*")):
                above += text
                continue
            if opened := FUNCTION.match(code):
                function = opened[1]
            labels = tuple(LABEL.findall(above + text))
            above = ""
            if labels or ORDERED.search(code):
                found.append(Place(path.name, number, function, code.strip(), labels))
    return found


def by_label() -> dict[str, dict[str, list[Place]]]:
    labels: dict[str, dict[str, list[Place]]] = defaultdict(lambda: {"release": [], "acquire": []})
    for place in places():
        for label in place.labels:
            for side in place.sides():
                labels[label][side].append(place)
    return labels


def named(some: list[Place]) -> str:
    """`file.c` function, function; ..."""
    files: dict[str, list[str]] = {}
    for place in some:
        functions = files.setdefault(place.file, [])
        if place.function not in functions:
            functions.append(place.function)
    return "; ".join(f"`{file}` {', '.join(names)}" for file, names in files.items())


def published() -> dict[str, str]:
    """The data that each label publishes, by the page."""
    table = PROTOCOL.read_text().partition(BEGIN)[2].partition(END)[0]
    return {row[1]: row[2] for row in re.finditer(r"^\| `([\w-]+)` \| (.*?) \|", table, re.M)}


def table() -> str:
    says = published()
    rows = [
        f"| `{label}` | {says.get(label, '?')} | {named(sides['release'])} | "
        f"{named(sides['acquire']) or f'`{READ_IN_PYTHON[label]}`'} |\n"
        for label, sides in sorted(by_label().items())
    ]
    return HEAD + "".join(rows)


def test_every_acquire_and_release_has_a_label() -> None:
    without = [f"{p.file}:{p.line}: {p.code}" for p in places() if not p.labels]
    assert not without, "add /* SYNC(name) */, the name of the pair:\n" + "\n".join(without)


def test_every_label_has_both_sides() -> None:
    labels = by_label()
    assert len(labels) > 30
    for label, sides in labels.items():
        assert sides["release"], f"nobody releases {label}"
        assert sides["acquire"] or label in READ_IN_PYTHON, f"nobody acquires {label}"
        assert len({*sides["release"], *sides["acquire"]}) > 1, f"{label} stands in one place"


def test_the_table_of_labels_is_that_of_the_code() -> None:
    unsaid = [label for label, says in published().items() if says == "?"]
    assert not unsaid, f"say in the table of docs/protocol.md what {unsaid} publish"
    is_current = BEGIN + table() + END in PROTOCOL.read_text()
    assert is_current, "docs/protocol.md is out of date: run tools/dev tables"


if __name__ == "__main__":
    page = PROTOCOL.read_text()
    before, _, rest = page.partition(BEGIN)
    PROTOCOL.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
