"""Runs a script in a forked process, observed as `holdfast prove` has it: `-m prove.armed SCRIPT ...`."""

import os
import runpy
import sys
import tempfile

from holdfast.prove.inside import hooks

if __name__ == "__main__":
    tempfile.tempdir = None  # it is in TMPDIR, which another process has not had
    hooks.arm()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
