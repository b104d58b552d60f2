"""`python -m differ`: see `machine`."""

import sys

from differ.machine import main

sys.exit(main())
