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
class MetaText:
    """The numbers of a position file as they stand there. nsqd's file numbers may be larger than
    those of a position word."""

    depth: int
    read_file: int
    read_offset: int
    write_file: int
    write_offset: int

    def __str__(self) -> str:
        read, write = (self.read_file, self.read_offset), (self.write_file, self.write_offset)
        return "{}\n{},{}\n{},{}\n".format(self.depth, *read, *write)


@dataclass(frozen=True, slots=True)
class Meta:
    """The contents of the position file: unread records, and both position words."""

    depth: int
    read_position: int
    write_position: int


def parse_text(text: bytes) -> MetaText | None:
    """The numbers in the text of a position file. None if it is malformed."""
    match = _META_TEXT.match(text)
    return None if match is None else MetaText(*map(int, match.groups()))


def parse_meta(text: bytes) -> Meta | None:
    """Parse the text of a position file. None if it is malformed or impossible."""
    found = parse_text(text)
    if found is None:
        return None
    try:
        read = pack(found.read_file, found.read_offset)
        return Meta(found.depth, read, pack(found.write_file, found.write_offset))
    except OverflowError:
        return None
