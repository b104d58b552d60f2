"""Runs the wheels for aarch64 on an emulated machine, with tools/packaging/pair.py, and the core's
C tests; `tools/dev emulated` calls it, as root.

QEMU emulates the two processors, and Debian's kernel runs on them. So locks of dead processes,
signals and shared memory are those of a kernel for that machine, unlike with QEMU's emulation of
one program. The files of a root come into the machine's memory: Debian's Python for glibc, and that
of tools/packaging/musl_python.py for musl. Its serial line brings what is printed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import musl
import musl_python
import roots
import wheels
from musl_python import PYTHON, RELEASE

MACHINE = "aarch64"
FAMILIES = {"gnu": "manylinux", "musl": "musllinux"}
PACKAGES = (
    "base-files",
    "busybox-static",
    f"{PYTHON}-minimal",
    f"lib{PYTHON}-stdlib",
    "libstdc++6",
    "linux-image-cloud-arm64",
)
#: The first program of the machine. It runs /mnt/job and ends the machine.
INIT = """#!/usr/bin/busybox sh
export PATH=/usr/sbin:/usr/bin LC_ALL=C.UTF-8 HOME=/root PYTHONPATH=/mnt/site PAIR_WAIT=900
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev
busybox mkdir /dev/shm
busybox mount -t tmpfs shm /dev/shm
busybox ifconfig lo 127.0.0.1 up
busybox timeout 3000 busybox sh -e /mnt/job
echo "exit status: $?"
busybox poweroff -f
"""
PASSED = "exit status: 0"
CORE = """
for test in /mnt/core/test_*; do
    echo "${test#/mnt/core/}"
    $test
done
"""
PAIR = f"{PYTHON} /mnt/pair.py\n"
QEMU = (
    *("qemu-system-aarch64", "-machine", "virt", "-cpu", "cortex-a72", "-smp", "2", "-m", "2G"),
    *("-accel", "tcg,thread=multi", "-nodefaults", "-nographic", "-serial", "stdio", "-no-reboot"),
    *("-append", "console=ttyAMA0 quiet panic=-1"),
)


def place(libc: str = "gnu") -> Path:
    """The root for a C library, if it was made. That for glibc has the kernel too."""
    if libc == "musl":
        return musl_python.place(MACHINE)
    return roots.place(RELEASE).with_name(f"{RELEASE.suite}-{RELEASE.python}-{MACHINE}")


def lacking() -> str:
    """The reason why this machine emulates no other one; empty if it does."""
    missing = [name for name in (QEMU[0], "cpio") if not shutil.which(name)]
    packages = "(Debian: qemu-system-arm, cpio)"
    return f"needs {', '.join(missing)} {packages}" if missing else musl_python.lacking()


def made(libc: str = "gnu") -> Path:
    """The root for a C library, made unless the cache has it."""
    path = place(libc)
    if libc == "musl":
        return musl_python.made(MACHINE)
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".emulated-") as name:
        root = Path(name, "root")
        musl_python.extract(MACHINE, PACKAGES, root)
        shutil.rmtree(root / "usr" / "lib" / "modules")  # what is needed is in the kernel
        musl_python.precompile(root / "usr" / "lib" / PYTHON)
        root.rename(path)
    return path


def pack(folder: Path, archive: Path) -> None:
    """Append the files of a folder to an archive that the kernel unpacks."""
    words = "find . -path ./boot -prune -o -print | cpio --quiet -o -H newc -R 0:0"
    with archive.open("ab") as file:
        wheels.run("sh", "-c", words, cwd=folder, stdout=file)


def boot(root: Path, folder: Path) -> None:
    """Run the job in `folder`, which is the /mnt of the machine, with the files of a root; ends
    this program if it fails."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name, "top")
        top.mkdir()
        (top / "init").write_text(INIT)
        (top / "init").chmod(0o755)
        shutil.copytree(folder, top / "mnt", symlinks=True)
        archive = Path(name, "files")
        pack(root, archive)
        pack(top, archive)
        shutil.rmtree(top)
        kernel = wheels.only(made().glob("boot/vmlinuz-*"))
        words = [*QEMU, "-kernel", str(kernel), "-initrd", str(archive)]
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as machine:
            assert machine.stdout is not None
            passed = False
            for line in machine.stdout:
                text = line.decode(errors="replace").rstrip()
                passed = passed or text == PASSED
                print(text, flush=True)
    if not passed:
        raise SystemExit(f"emulated: the job failed on {MACHINE}")


def tags() -> Iterator[str]:
    """pip's words for the systems that the root for glibc is one of, the newest first."""
    for minor in range(41, 28, -1):
        yield f"--platform=manylinux_2_{minor}_{MACHINE}"
    yield from roots.tags(MACHINE)


def add_core(libc: str, folder: Path) -> None:
    """Compile the core's C tests for a C library into a folder."""
    target = next(t for t in wheels.TARGETS if t.machine == MACHINE and t.libc.startswith(libc))
    folder.mkdir()
    for program in musl.compiled(target):
        shutil.copy(program, folder)


def attempt(libc: str, wheel: Path, core: bool = False) -> None:
    """Run the pair of processes with a wheel on the emulated machine, after the core's C tests if
    they are asked for; ends this program if anything fails."""
    systems = tags() if libc == "gnu" else musl_python.tags(MACHINE)
    root = made(libc)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        musl_python.unpack(wheel, systems, folder / "site")
        shutil.copy(wheels.PAIR, folder)
        (folder / "job").write_text(CORE * core + PAIR)
        if core:
            add_core(libc, folder / "core")
        boot(root, folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/dev emulated", description=__doc__)
    parser.add_argument("libc", nargs="*", help=f"only these of {', '.join(FAMILIES)}")
    parser.add_argument("--core", action="store_true", help="run the core's C tests too")
    parser.add_argument("--wheel", type=Path, help="[that in build/wheels]")
    chosen = parser.parse_args()
    if strange := set(chosen.libc) - set(FAMILIES):
        parser.error(f"{', '.join(sorted(strange))}: known are {', '.join(FAMILIES)}")
    if reason := lacking():
        raise SystemExit(f"emulated: this {reason}")
    for libc in chosen.libc or FAMILIES:
        wheel = chosen.wheel or musl_python.wheel_for(FAMILIES[libc], MACHINE)
        print(f"{MACHINE}, {libc}, {PYTHON}: {wheel.name}", flush=True)
        attempt(libc, wheel, chosen.core)


if __name__ == "__main__":
    main()
