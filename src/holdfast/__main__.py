"""`python -m holdfast VERB ...`: the command line for launchers that start a module.

torchrun --nproc-per-node=8 -m holdfast convert SRC DST --to dcp
"""

from __future__ import annotations

from holdfast.cli.main import main

if __name__ == "__main__":
    main()
