"""Checks of names and rules: names without a rule, rules without a name, ambiguous rules.

The first match wins, so the more specific rule must come first.  If two globs match a name, the later one
must cover the earlier one (match all names that it matches); else they are ambiguous.  Rules of different
files are not compared, as rules above an include override it; nor are regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from holdfast.base.errors import RuleError
from holdfast.base.suggest import did_you_mean
from holdfast.formats.rules.statements import Rule

MAX_PROBLEMS = 20


def matching(rules: Sequence[Rule], names: Iterable[str]) -> Iterator[tuple[str, Rule]]:
    """Yield each name that has a rule, with the rule."""
    for name in names:
        rule = next((r for r in rules if r.pattern.match(name) is not None), None)
        if rule is not None:
            yield name, rule


def check_covered(rules: Sequence[Rule]) -> None:
    """RuleError if a rule can never win because an earlier one of its file covers it."""
    for i, rule in enumerate(rules):
        for earlier in rules[:i]:
            if not _same_file(earlier, rule):
                continue
            same = earlier.pattern.text == rule.pattern.text
            if same or earlier.pattern.covers(rule.pattern):
                raise rule.span.error(
                    f"this rule can never win: line {earlier.span.line} matches all that it does",
                    f"write it above {earlier.pattern.text}",
                )


def problems_of_names(
    rules: Sequence[Rule], names: Sequence[str], match: Callable[[str], object]
) -> list[str]:
    """Describe the problems of names and rules, at most `MAX_PROBLEMS` of each kind."""
    used: dict[Rule, None] = {}
    taken: dict[Rule, tuple[str, Rule]] = {}
    unmatched: list[str] = []
    ambiguous: dict[tuple[Rule, Rule], str] = {}
    for name in names:
        found = [r for r in rules if r.pattern.match(name) is not None]
        if not found:
            unmatched.append(name)
            continue
        winner = found[0]
        used[winner] = None
        for other in found[1:]:
            taken.setdefault(other, (name, winner))
            if _is_chance(winner, other):
                ambiguous.setdefault((winner, other), name)
    unused = [r for r in rules if not r.optional and r not in used]
    return [
        *_unmatched(unmatched, match),
        *[_ambiguity(*pair, name) for pair, name in list(ambiguous.items())[:MAX_PROBLEMS]],
        *[_unused(r, taken.get(r), names) for r in unused[:MAX_PROBLEMS]],
    ]


def _unmatched(names: Sequence[str], match: Callable[[str], object]) -> list[str]:
    """Describe names without a rule; one text for names that differ only in numbers."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    problems = []
    for some in list(alike.values())[:MAX_PROBLEMS]:
        try:
            match(some[0])
        except RuleError as error:
            more = f" (and {len(some) - 1} more like it)" if len(some) > 1 else ""
            problems.append(str(RuleError(error.message + more, hint=error.hint)))
    if len(alike) > MAX_PROBLEMS:
        left = sum(len(some) for some in list(alike.values())[MAX_PROBLEMS:])
        problems.append(f"... and {left} more names without a rule")
    return problems


def _same_file(a: Rule, b: Rule) -> bool:
    return a.span.source == b.span.source


def _is_chance(winner: Rule, other: Rule) -> bool:
    globs = bool(winner.pattern.samples and other.pattern.samples)
    return _same_file(winner, other) and globs and not other.pattern.covers(winner.pattern)


def _ambiguity(winner: Rule, other: Rule, name: str) -> str:
    first = winner.span.says(f"ambiguous: {name!r} is matched by this rule")
    second = f"  and by line {other.span.line}, and neither is the more specific one:"
    hint = "  hint: write a rule above both for the names that both match"
    return "\n".join([first, second, other.span.quote(), hint])


def _unused(rule: Rule, taken: tuple[str, Rule] | None, names: Sequence[str]) -> str:
    text = rule.span.says("this rule is used by no name")
    if taken is not None:
        name, winner = taken
        where = winner.span
        return f"{text}\n  hint: {name!r} goes to {where.source.path}:{where.line} above it"
    hint = did_you_mean(rule.pattern.text, names)
    return f"{text}\n  hint: {hint}" if hint else text
