"""Position words, and the position file that keeps two of them over a restart.

A position is one 64-bit word, `file << 40 | offset`, so that one store can commit it. The position
file `<base>.diskqueue.meta.dat` has go-diskqueue's text:
"depth\\nreadFile,readPos\\nwriteFile,writePos\\n".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FILE_SHIFT = 40
MAX_OFFSET = (1 << FILE_SHIFT) - 1
MAX_FILE = (1 << (64 - FILE_SHIFT)) - 1
LAST_FILE = MAX_FILE - 1  # the highest file number, so that the position after it still fits

MOST_META = 4096  # bytes of a position file that are read; five numbers need 130

_META_TEXT = re.compile(
    rb"[ \t]*([+-]?\d{1,19})[ \t]*\r?\n"
    rb"[ \t]*\+?(\d{1,19}),[ \t]*\+?(\d{1,19})[ \t]*\r?\n"
    rb"[ \t]*\+?(\d{1,19}),[ \t]*\+?(\d{1,19})[ \t]*(?:\r?\n|\Z)"
)


def pack(file: int, offset: int) -> int:
    """The position word for a byte offset in a numbered file.

    Raises OverflowError if either does not fit (2^24 files, 2^40 bytes).
    """
    if not (0 <= file <= MAX_FILE and 0 <= offset <= MAX_OFFSET):
        raise OverflowError(f"position {file},{offset} does not fit in a word")
    return file << FILE_SHIFT | offset


def unpack(position: int) -> tuple[int, int]:
    """Split a position word into (file number, byte offset)."""
    word = int(position)
    return word >> FILE_SHIFT, word & MAX_OFFSET


@dataclass(frozen=True, slots=True)
class Meta:
    """The contents of the position file: unread records, and both position words."""

    depth: int
    read_position: int
    write_position: int


def parse_meta(text: bytes) -> Meta | None:
    """Parse the text of a position file. None if it is malformed or impossible."""
    match = _META_TEXT.match(text)
    if match is None:
        return None
    depth, read_file, read_offset, write_file, write_offset = map(int, match.groups())
    try:
        return Meta(depth, pack(read_file, read_offset), pack(write_file, write_offset))
    except OverflowError:
        return None
