"""`python -m shmq`: the command line."""

import os
import sys

# numpy's linear algebra is not used here; without this it keeps a spinning thread per core. The
# tasks of a pool, which `shmq worker` runs, may use it.
if sys.argv[1:2] != ["worker"]:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from shmq.cli import main

if __name__ == "__main__":
    sys.exit(main())
