"""`python -m shmq`: the command line."""

import os
import sys

# numpy's linear algebra is not used here; without this it keeps a spinning thread per core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from shmq.cli import main

if __name__ == "__main__":
    sys.exit(main())
