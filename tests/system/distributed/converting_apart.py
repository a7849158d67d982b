"""A worker: each rank converts another step of a root, as if it had looked for the newest by itself."""

from __future__ import annotations

import os
import sys

import holdfast

if __name__ == "__main__":
    source, target = sys.argv[1:3]
    step = holdfast.open(source, step=1 + int(os.environ["RANK"]))
    holdfast.convert(step, target, to="huggingface")
