"""The built extension has what the compiler and linker offer against errors in C."""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import SANITIZED

from shmq import _native

PT_DYNAMIC, PT_NOTE, PT_GNU_STACK, PT_GNU_RELRO = 2, 4, 0x6474E551, 0x6474E552
DT_NULL, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_FLAGS = 0, 5, 6, 10, 30
DF_BIND_NOW = 8
PF_X = 1
NT_GNU_PROPERTY_TYPE_0, X86_FEATURE_1_AND, SHSTK = 5, 0xC0000002, 2
ENDBR64 = b"\xf3\x0f\x1e\xfa"

pytestmark = pytest.mark.skipif(
    bool(SANITIZED), reason="a build with sanitizers has checks of its own instead"
)


class Elf:
    """As much of a 64-bit little-endian ELF file as is asked for."""

    def __init__(self, path: str) -> None:
        self.data = Path(path).read_bytes()
        assert self.data[:6] == b"\x7fELF\x02\x01"
        (begin,) = struct.unpack_from("<Q", self.data, 32)
        size, count = struct.unpack_from("<HH", self.data, 54)
        self.segments = [
            struct.unpack_from("<IIQQQQQQ", self.data, begin + i * size) for i in range(count)
        ]

    def of_type(self, kind: int) -> list[tuple[int, ...]]:
        return [segment for segment in self.segments if segment[0] == kind]

    def at(self, address: int) -> int:
        """Offset in the file of what is loaded there."""
        for kind, _, offset, begin, _, in_file, _, _ in self.segments:
            if kind == 1 and begin <= address < begin + in_file:
                return offset + address - begin
        raise AssertionError(f"nothing is loaded at {address:#x}")

    def dynamic(self) -> dict[int, int]:
        ((_, _, offset, _, _, size, _, _),) = self.of_type(PT_DYNAMIC)
        entries = struct.iter_unpack("<qQ", self.data[offset : offset + size])
        return {tag: value for tag, value in entries if tag != DT_NULL}

    def names(self) -> set[str]:
        """Everything in its dynamic string table, with all that it takes from other libraries."""
        dynamic = self.dynamic()
        begin = self.at(dynamic[DT_STRTAB])
        return set(self.data[begin : begin + dynamic[DT_STRSZ]].decode().split("\0"))

    def properties(self) -> Iterator[tuple[int, bytes]]:
        """Of its GNU property notes."""
        for _, _, offset, _, _, size, _, _ in self.of_type(PT_NOTE):
            at, end = offset, offset + size
            while at + 12 <= end:
                name, length, kind = struct.unpack_from("<III", self.data, at)
                body = at + 12 + (name + 3) // 4 * 4
                if kind == NT_GNU_PROPERTY_TYPE_0 and self.data[at + 12 : at + 16] == b"GNU\0":
                    place = body
                    while place < body + length:
                        what, nbytes = struct.unpack_from("<II", self.data, place)
                        yield what, self.data[place + 8 : place + 8 + nbytes]
                        place += 8 + (nbytes + 7) // 8 * 8
                at = body + (length + 3) // 4 * 4


@pytest.fixture(scope="module")
def elf() -> Elf:
    return Elf(str(_native.__file__))


def test_stacks_are_guarded(elf: Elf) -> None:
    assert "__stack_chk_fail" in elf.names()


def test_copies_of_known_size_are_checked(elf: Elf) -> None:
    checked = {name for name in elf.names() if name.endswith("_chk")}
    assert checked & {"__memcpy_chk", "__memset_chk", "__strcpy_chk"}


def test_all_addresses_are_found_at_load_and_read_only_then(elf: Elf) -> None:
    assert elf.of_type(PT_GNU_RELRO)
    assert elf.dynamic()[DT_FLAGS] & DF_BIND_NOW


def test_no_stack_is_executable(elf: Elf) -> None:
    ((_, flags, *_),) = elf.of_type(PT_GNU_STACK)
    assert not flags & PF_X


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64 alone")
def test_returns_and_indirect_branches_are_made_for_cet(elf: Elf) -> None:
    """Each function whose address is taken begins with endbr64: there are hundreds, and what the C
    runtime adds to any library has two."""
    assert elf.data.count(ENDBR64) > 100
    features = [
        struct.unpack("<I", value)[0]
        for what, value in elf.properties()
        if what == X86_FEATURE_1_AND
    ]
    assert features
    assert all(feature & SHSTK for feature in features)
