"""What holds for all tests."""

import os

from hypothesis import settings

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch: processes are forked, and compute alike
settings.register_profile("holdfast", deadline=None)  # a busy machine is no failure
settings.load_profile("holdfast")
