"""All checks of a host and its instances, and the repair of what they find."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from shmq import shm
from shmq.diagnostics import host
from shmq.diagnostics.container import check_container
from shmq.diagnostics.findings import Finding, problem
from shmq.diagnostics.instance_checks import check_instance
from shmq.diagnostics.instances import everything
from shmq.diagnostics.left_behind import left_behind
from shmq.errors import ShmqError
from shmq.shm import SharedObject


def examine(
    instance: str | None = None,
    data_path: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Finding]:
    """Findings about the host and about one instance, or about all if `instance` is None.

    data_path: checked in addition to those of running instances. say: takes progress texts.
    """
    if instance is None:
        objects, more = everything()
    else:
        objects, more = {instance: shm.list_objects(instance, everybodys=True)}, 0
    yield from host.check_shared_memory()
    yield from host.check_kernel()
    yield from host.check_limits()
    yield from host.check_memory()
    yield from check_container()
    owners = [found[0].uid for found in objects.values() if found]
    yield from host.check_remove_ipc([os.geteuid(), *owners])
    if data_path is not None:
        yield from host.check_data_path(Path(data_path), None)
    for name, found in objects.items():
        say(f"looking at instance {name}")
        for finding in _guarded(name, found):
            yield replace(finding, instance=name)
    if instance is None:
        yield from left_behind(objects)
    if more:
        text = f"{more} more names of instances belong to users who are not trusted; not checked"
        yield problem("segments", text, f"as root: ls -ln {shm.SHM_DIRECTORY}, then remove them")


def _guarded(name: str, objects: list[SharedObject]) -> Iterator[Finding]:
    try:
        yield from check_instance(name, objects)
    except (ShmqError, OSError) as exc:
        yield Finding("segments", "error", f"cannot be checked: {exc}")


def mend(finding: Finding) -> Finding:
    """Apply the fix of a finding, if it has one, and return the finding that results."""
    if finding.fix is None:
        return finding
    try:
        return replace(finding, level="fixed", text=finding.fix(), remedy="", fix=None)
    except (ShmqError, OSError) as exc:
        return replace(finding, level="error", text=f"{finding.text}; not removed: {exc}", fix=None)
