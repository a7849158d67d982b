"""Python imports this module when it starts, because `holdfast prove` put its folder on PYTHONPATH.

It arms the observer, and then imports the `sitecustomize` that the environment has of its own, if any.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _own_of_the_environment() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    path = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _arm() -> None:
    from holdfast.prove.inside import hooks

    hooks.arm()


_own_of_the_environment()
if "HOLDFAST_PROVE" in os.environ:
    _arm()
