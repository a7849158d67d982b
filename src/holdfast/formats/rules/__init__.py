"""The rule language: rules by name for the part of each tensor that each rank stores.  No I/O.

A rule is a pattern over parameter names, a replica rule, and steps that name constructors of
`holdfast.core.layout.view.View`, from left to right, over named mesh axes.  See docs/reference/rules.md.
"""

from holdfast.formats.rules.layout import Layout
from holdfast.formats.rules.ruleset import Match, RuleSet
from holdfast.formats.rules.source import presets

__all__ = ["Layout", "Match", "RuleSet", "presets"]
