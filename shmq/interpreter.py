"""Commands that start Python processes which run this package's code, and no other by accident.

`python -m` and `python -c` put the working directory first on the module path. A user who may write
there could have a broker that is started there, perhaps as root, run a `numpy.py` of that user's.
So every Python that shmq starts gets `-P`. The directories in which this process found the packages
that shmq needs are passed explicitly and come last on the path. They serve for packages that are
found nowhere else (a checkout beside a script, a directory that a script added) and hide nothing.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

from shmq.errors import ShmqError

#: The packages that a process of shmq imports, as far as they are installed.
_NEEDED = ("shmq", "numpy", "posix_ipc", "psutil", "click", "aiohttp", "cramjam", "re2", "uvloop")

_PLACES = "import sys; sys.path += [path for path in {places!r} if path not in sys.path]; {code}"
_RUN = (
    "from importlib import import_module; del sys.argv[0]; "
    "sys.exit(import_module({module!r}).main())"
)


def run_main(module: str, words: Sequence[str] = ()) -> list[str]:
    """The command that calls `main` of a module with the arguments `words`, without the working
    directory on its module path. It starts sooner than `python -m` with the same effect."""
    shown = module.removesuffix(".__main__")
    return run_code(_RUN.format(module=module), [shown, *words])


def run_code(code: str, words: Sequence[str] = ()) -> list[str]:
    """The command that runs `python -c CODE WORDS...` in the same way; `sys` is imported."""
    return [_python(), "-P", "-c", _PLACES.format(places=_places(), code=code), *words]


def _python() -> str:
    """The Python to start: `multiprocessing.set_executable` may have named one. Raises ShmqError if
    there is none. A frozen application would start itself, again and again."""
    spawn = sys.modules.get("multiprocessing.spawn")
    named = spawn.get_executable() if spawn is not None else None
    python = os.fsdecode(named) if named else sys.executable
    frozen = getattr(sys, "frozen", False) and python == sys.executable
    if python and not frozen:
        return python
    what = f"{python} is a frozen application" if frozen else "this program embeds Python"
    raise ShmqError(
        f"start a process of shmq: {what}, so there is no Python to start; name one that has shmq "
        "by multiprocessing.set_executable(PATH), or run `shmq serve --instance NAME` beside this "
        'program and use it: shmq.Executor(instance="NAME"), shmq.Queue(name="jobs", '
        'broker=shmq.attach("NAME"))'
    )


def _places() -> list[str]:
    """The absolute directories in which this process finds the packages that shmq needs."""
    found: dict[str, None] = {}
    for name in _NEEDED:
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # a module without a spec, created by a program
            continue
        if spec is None or spec.origin is None:
            continue
        place = os.path.dirname(os.path.abspath(spec.origin))
        if spec.submodule_search_locations is not None:
            place = os.path.dirname(place)
        found[place] = None
    return list(found)
