"""For every test: one thread per matrix product, since the tests and their services share two cores already."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
