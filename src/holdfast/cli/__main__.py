"""`python -m holdfast.cli VERB ...`: as `python -m holdfast`."""

from __future__ import annotations

from holdfast.cli.main import main

if __name__ == "__main__":
    main()
