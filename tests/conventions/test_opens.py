"""Files are opened by functions that look at their owner.

Files that another user may have made are opened in `shmq/ownership.py` (segments, secrets) and
`shmq/storage/own_files.py` (a data path), which check the descriptor. Everything else that opens a
file is named here, with the reason why nobody else can have made it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from conventions.sources import ROOT

CHECKING = {"shmq/ownership.py", "shmq/storage/own_files.py"}

_KERNEL = "a file of the kernel"
_HOST = "a file of the host's administrator"
_CHECKED = "of a descriptor that was checked"
_DIRECTORY = "a directory, whose owner is looked at or does not matter"
_PRIVATE = "in a directory that only this user may enter, made and checked as such"

#: module:function -> why it may open files by itself
ALLOWED = {
    "shmq/claims.py:_claimed": _PRIVATE,
    "shmq/claims.py:_opened": _DIRECTORY,
    "shmq/claims.py:released": _PRIVATE,
    "shmq/cli/__init__.py:_fill_closed_streams": _KERNEL,
    "shmq/cli/output.py:forget_output": _KERNEL,
    "shmq/cli/serve.py:_read_config": "the configuration file, which its user names",
    "shmq/diagnostics/container.py:_limit_files": _KERNEL,
    "shmq/diagnostics/container.py:_limit_in": _KERNEL,
    "shmq/diagnostics/host.py:_mount_of": _KERNEL,
    "shmq/diagnostics/host.py:number": _KERNEL,
    "shmq/diagnostics/host.py:_meminfo": _KERNEL,
    "shmq/diagnostics/host.py:_apply": _HOST,
    "shmq/diagnostics/host.py:_is_system": _HOST,
    "shmq/diagnostics/inspect.py:opened": "a file that its user names, to be looked at only",
    "shmq/diagnostics/instance_checks.py:_strain": _KERNEL,
    "shmq/diagnostics/removal.py:remove_own_directory": _DIRECTORY,
    "shmq/diagnostics/segment.py:boot_id": _KERNEL,
    "shmq/door/acceptor.py:_spare": _KERNEL,
    "shmq/forward/login.py:NatsLogin.context": "the path of a checked key, and a certificate",
    "shmq/gateway/asker.py:_near": _KERNEL,
    "shmq/gateway/control.py:Control.changes": _PRIVATE,
    "shmq/gateway/control.py:Control._store": _PRIVATE,
    "shmq/gateway/listeners.py:_give": "a socket that was bound just now; its owner is checked",
    "shmq/gateway/listeners.py:control_directory": _DIRECTORY,
    "shmq/gateway/listeners.py:_sweep_control": _DIRECTORY,
    "shmq/gateway/staged.py:_decide": _CHECKED,
    "shmq/gateway/tls.py:server_context": "the path of a checked key, and a certificate",
    "shmq/gateway/worker.py:give_up_protection": _KERNEL,
    "shmq/homes.py:_locked": _DIRECTORY,
    "shmq/integrations/blas.py:_loaded": _KERNEL,
    "shmq/integrations/django/home.py:Home._start": _CHECKED,
    "shmq/page/arrow_reader.py:_limit": _KERNEL,
    "shmq/page/server.py:Page.__init__": "files of the package",
    "shmq/private.py:Private.again": _DIRECTORY,
    "shmq/private.py:Private.create": _PRIVATE,
    "shmq/private.py:Private.append": _PRIVATE,
    "shmq/private.py:Private.read": _PRIVATE,
    "shmq/private.py:_open_named": _DIRECTORY,
    "shmq/private.py:_make": _DIRECTORY,
    "shmq/procfs.py:Stat.read": _KERNEL,
    "shmq/procfs.py:exit_code": _KERNEL,
    "shmq/procfs.py:program_name": _KERNEL,
    "shmq/procfs.py:short_name": _KERNEL,
    "shmq/queues/hold.py:Hold.__del__": _CHECKED,
    "shmq/queues/tree.py:within_reach": _KERNEL,
    "shmq/shm.py:create_segment": "a new file (O_EXCL)",
    "shmq/spark/sessions.py:_wrapped": _PRIVATE,
    "shmq/spark/reads.py:Reads.store": _CHECKED,
    "shmq/spark/staging.py:_decide": _CHECKED,
    "shmq/staging_place.py:_forget": _DIRECTORY,
    "shmq/staging_place.py:_memories": _DIRECTORY,
    "shmq/staging_place.py:_forget_read": _PRIVATE,
    "shmq/storage/data_files.py:DataFiles.cut": "`own_files.truncate`",
    "shmq/storage/deferred.py:DeferredStore._entries": _CHECKED,
    "shmq/storage/dirlock.py:DirLock.acquire": _DIRECTORY,
    "shmq/storage/returned_leases.py:load": "the descriptor of `own_files.open_file`",
    "shmq/storage/key_file.py:load": _CHECKED,
    "shmq/storage/metadata.py:sync_directory": _DIRECTORY,
    "shmq/storage/results_file.py:ResultsFile.read": _CHECKED,
    "shmq/storage/results_file.py:ResultsFile.write": _CHECKED,
    "shmq/supervisor/supervisor.py:_has_terminal": _KERNEL,
    "shmq/supervisor/trouble.py:probe": "a file without a name (O_TMPFILE)",
}

_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "load_cert_chain", "truncate"}


def opens(call: ast.Call) -> bool:
    """Whether a call opens a file by its path, or may."""
    what = call.func
    if isinstance(what, ast.Name):
        return what.id == "open"
    if not isinstance(what, ast.Attribute):
        return False
    if what.attr in _METHODS:
        return True
    modes = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    if what.attr == "open" and isinstance(what.value, ast.Name) and what.value.id in ("os", "io"):
        return True
    return what.attr == "open" and any(
        isinstance(mode, str) and mode and set(mode) <= set("rwabx+t") for mode in modes
    )


def places(node: ast.AST, where: str = "") -> Iterator[str]:
    """The functions in which files are opened."""
    for child in ast.iter_child_nodes(node):
        inside = where
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{where}.{child.name}" if where else child.name
        if isinstance(child, ast.Call) and opens(child):
            yield inside
        yield from places(child, inside)


def found() -> set[str]:
    return {
        f"{path.relative_to(ROOT)}:{place}"
        for path in sorted((ROOT / "shmq").rglob("*.py"))
        if str(path.relative_to(ROOT)) not in CHECKING
        for place in places(ast.parse(path.read_text()))
    }


def test_whoever_opens_a_file_looks_at_its_owner_or_says_why_not() -> None:
    new = found() - ALLOWED.keys()
    assert not new, (
        "open files of a data path by shmq/storage/own_files.py, secrets by ownership.read_secret "
        f"or secret_path, other files by ownership.open_regular; or give the reason here: {new}"
    )


def test_no_place_is_named_that_opens_nothing() -> None:
    assert not ALLOWED.keys() - found()


def test_the_calls_that_open_are_seen() -> None:
    code = (
        "def f():\n"
        "    open('x')\n"
        "    Path('x').open('rb')\n"
        "    os.open('x', 0)\n"
        "    Path('x').read_text()\n"
        "    origin.open(reached)\n"
        "    self._link.open(lambda: 1)\n"
    )
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert sum(map(opens, calls)) == 4
    assert set(places(ast.parse(code))) == {"f"}
