"""Compiles C tests of the core for musl and runs them here; `tools/dev musl` calls it.

They are linked statically, so they bring their C library along and run where Python has glibc. The
tests are those of locks, doorbells and processes that die or write garbage: what a C library has a
part in. Arguments go to ctest.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import wheels

TESTS = (
    "lock",
    "doorbell",
    "lanes_wake",
    "queue",
    "fanout",
    "store",
    "corrupt",
    "garbage",
    "threads",
    "race",
)


def build_of(target: wheels.Target) -> Path:
    """The folder in which the tests for a target are compiled."""
    return wheels.TOP / "build" / f"tests-{target.name}"


def compiled(target: wheels.Target) -> list[Path]:
    """Compile the tests for a target; returns the programs."""
    defines = {
        "CMAKE_BUILD_TYPE": "Release",
        # the warning of gcc that the C tests name; that of glibc for what is not optimized; no
        # checks of undefined behaviour, for which Zig has no library here
        "CMAKE_C_FLAGS": "-Wno-unknown-warning-option -Wno-cpp -fno-sanitize=undefined",
        "CMAKE_EXE_LINKER_FLAGS": "-static" if target.libc == "musl" else "",
        **wheels.cmake_tools(target),
    }
    words = [f"-D{name}={value}" for name, value in defines.items()]
    environment = wheels.compiling(target)
    source = wheels.TOP / "native"
    build = build_of(target)
    wheels.run("cmake", "-S", source, "-B", build, "-G", "Ninja", *words, env=environment)
    programs = [f"test_{name}" for name in TESTS]
    wheels.run("cmake", "--build", build, "--target", *programs, env=environment)
    return [build / program for program in programs]


def main() -> None:
    (target,) = (t for t in wheels.TARGETS if t.name == f"{platform.machine()}-linux-musl")
    compiled(target)
    only = f"^({'|'.join(TESTS)})$"
    wheels.run(
        *(
            "ctest",
            "--test-dir",
            build_of(target),
            "--output-on-failure",
            "--no-tests=error",
            "-R",
            only,
        ),
        *sys.argv[1:],
    )


if __name__ == "__main__":
    main()
