"""Runs a script, observed by `holdfast prove` as it would be by a new interpreter: `-m prove.armed SCRIPT ...`"""

import os
import runpy
import sys

from holdfast.prove.inside import hooks

if __name__ == "__main__":
    hooks.arm()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
