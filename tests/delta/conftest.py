"""Tests here may ask for `lives` of trainings."""

from memory.fixtures import lives, zygote

__all__ = ["lives", "zygote"]
