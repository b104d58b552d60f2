"""The row of joblib's backend."""

from __future__ import annotations

import joblib
from lifecycle.ends import ENDS
from lifecycle.handles import Held, Site, handle

from shmq.integrations.joblib import SharedMemoryBackend

#: A second call of Parallel is of the same workers.
_ENDS = [end for ends in ENDS.values() for end in ends if end not in ("second", "gateway_killed")]


@handle(SharedMemoryBackend, tree=True, ends=(*_ENDS,))
def joblib_executor(site: Site) -> Held:
    made = joblib.Parallel(n_jobs=2, backend="shmq")
    made.__enter__()
    assert made(joblib.delayed(abs)(-number) for number in range(3)) == [0, 1, 2]
    return Held(made, None, None, lambda: made.__exit__(None, None, None))
