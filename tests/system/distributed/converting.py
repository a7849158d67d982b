"""A worker: `holdfast convert` on every rank of a torchrun, with the arguments given."""

from __future__ import annotations

import sys

from holdfast.cli.main import main

if __name__ == "__main__":
    sys.argv = ["holdfast", "convert", *sys.argv[1:]]
    main()
