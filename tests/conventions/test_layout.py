"""The bytes in shared memory are those that golden_layout.json says.

A process that was started before an upgrade shares segments with one started after it, so any
change of a size or an offset must be a new layout version. After a wanted change: raise
SHMQ_LAYOUT_VERSION in native/core/memory/layout.h, then `tools/dev layout --accept`.
"""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import Any

from shmq import _native

GOLDEN = Path(__file__).with_name("golden_layout.json")


def compiled() -> dict[str, Any]:
    """The layout of this build; each field is [dtype, offset, size of one, count]."""
    return {
        "layout_version": _native.LAYOUT_VERSION,
        "structures": {
            name: {
                "size": _native.SIZES[name],
                "fields": {field: list(place) for field, place in fields.items()},
            }
            for name, fields in _native.LAYOUT.items()
        },
    }


def as_text(layout: dict[str, Any]) -> str:
    """One field a line, so that a change is a line of a diff."""
    lines = ["{", f'  "layout_version": {layout["layout_version"]},', '  "structures": {']
    for name, structure in layout["structures"].items():
        lines.append(f'    "{name}": {{"size": {structure["size"]}, "fields": {{')
        lines += [f'      "{f}": {json.dumps(place)},' for f, place in structure["fields"].items()]
        lines[-1] = lines[-1].rstrip(",")
        lines.append("    }},")
    lines[-1] = lines[-1].rstrip(",")
    return "\n".join([*lines, "  }", "}", ""])


def changes() -> str:
    """A diff from the golden layout to the compiled one; "" if there is none."""
    golden = GOLDEN.read_text() if GOLDEN.exists() else ""
    return "\n".join(
        difflib.unified_diff(
            golden.splitlines(), as_text(compiled()).splitlines(), "golden", "compiled", "", "", 0
        )
    )


def test_the_layout_is_the_golden_one() -> None:
    difference = changes()
    assert not difference, (
        f"{difference}\n\nThe layout in shared memory changed. If that is wanted: raise "
        "SHMQ_LAYOUT_VERSION in native/core/memory/layout.h, then run tools/dev layout --accept"
    )


def test_the_golden_file_reads_back_as_what_it_was_made_of() -> None:
    assert json.loads(as_text(compiled())) == compiled()


def main(arguments: list[str]) -> int:
    """`tools/dev layout [--accept]`."""
    if arguments not in ([], ["--accept"]):
        print("usage: tools/dev layout [--accept]", file=sys.stderr)
        return 2
    difference = changes()
    if not difference:
        print("the layout is the golden one")
        return 0
    print(difference)
    if not arguments:
        return 1
    before = json.loads(GOLDEN.read_text())["layout_version"] if GOLDEN.exists() else 0
    GOLDEN.write_text(as_text(compiled()))
    print(f"accepted: {GOLDEN}")
    if before == _native.LAYOUT_VERSION:
        print(
            "warning: SHMQ_LAYOUT_VERSION was not raised; right only if no build of it is in use",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
