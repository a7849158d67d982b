"""The rule language: which part of each tensor each rank of a mesh stores, said by name.  Pure.

A rule is a pattern over parameter names, a replica rule, and steps that name constructors of
`holdfast.layout.View`, from left to right, over named mesh axes.  docs/reference/rules.md is its page.
"""

from holdfast.formats.rules.layout import Layout
from holdfast.formats.rules.ruleset import Match, RuleSet
from holdfast.formats.rules.source import presets

__all__ = ["Layout", "Match", "RuleSet", "presets"]
