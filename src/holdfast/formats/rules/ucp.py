"""The names of Universal Checkpointing's language as constructors of rules.

Each gives the text of a rule, to be parsed with others:

    >>> from holdfast.formats.rules import RuleSet
    >>> rules = RuleSet.parse("\\n".join([
    ...     "axes tp",
    ...     replicated_params("**.norm.{weight|bias}"),
    ...     fragment_params("**.qkv.weight", dim=0, parts=(32, 8, 8)),
    ...     fragment_params("**.proj.weight", dim=1),
    ...     params_to_average("**.alibi"),
    ...     unique_params("**"),
    ... ]))
    >>> print(rules.rules[1].text)
    unique, fused 0 (32, 8, 8), shard 0 over tp

Patterns are those of the language; a regular expression of DeepSpeed's, which matches from the start of a
name, becomes one by `regex`.
"""

from __future__ import annotations

from collections.abc import Sequence


def regex(pattern: str) -> str:
    """A pattern that matches what `re.match(pattern, name)` does."""
    return "/(?:" + pattern.replace("/", "\\/") + ").*/"


def unique_params(pattern: str) -> str:
    """Rule for parameters that are in exactly one rank's file."""
    return f"{pattern}  unique"


def replicated_params(pattern: str) -> str:
    """Rule for parameters that are the same on every rank."""
    return f"{pattern}  replicated"


def params_to_average(pattern: str) -> str:
    """Rule for parameters that are updated apart on every rank; the mean is taken."""
    return f"{pattern}  averaged"


def fragment_params(
    pattern: str,
    *,
    dim: int = 0,
    axis: str = "tp",
    parts: Sequence[int] = (),
    widths: Sequence[Sequence[int]] = (),
    padded: tuple[int, int] | None = None,
) -> str:
    """Rule for parameters that are cut along `dim` over `axis`.

    The sub-patterns: `parts` are lengths of sub-parameters, each of which is cut by itself; `widths` says
    for each of them (or for the whole) how wide each rank's part is, where parts are uneven; `padded` is
    (length, padded length) of dim 0, of a padded vocabulary.
    """
    steps = ["unique"]
    if padded is not None and padded[0] != padded[1]:
        steps.append(f"padded 0 from {padded[0]} to {padded[1]}")
    if parts:
        steps.append(f"fused {dim} {_list(parts)}")
    uneven = f" widths {' '.join(map(_list, widths))}" if widths else ""
    steps.append(f"shard {dim} over {axis}{uneven}")
    return f"{pattern}  {', '.join(steps)}"


def _list(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))})"
