"""Rule sets: the rule of a name, and the layout of a tensor over a mesh by it.

    >>> rules = RuleSet.parse('''
    ... axes tp
    ... copies dp
    ... **.proj.weight    unique, shard 1 over tp
    ... **.weight         unique, shard 0 over tp
    ... ''')
    >>> mesh = Mesh((("dp", 2), ("tp", 2)))
    >>> layout = rules.layout("h.0.proj.weight", (8, 6), mesh)
    >>> [str(f.box) for f in layout.fragments(rank=1)]
    ['0:8,3:6']
    >>> rules.check({"h.0.proj.weight": (8, 6), "h.0.fc.weight": (8, 6)}, mesh)

The first rule that matches a name wins.  Renames map one program's names to another's, one to one, and
back:

    >>> rules = RuleSet.parse("rename h.{n}.{x:**} -> layers.{n}.{x}")
    >>> rules.renamed(["h.0.ln.weight"])
    {'h.0.ln.weight': 'layers.0.ln.weight'}
    >>> rules.renamed_back(["layers.0.ln.weight"])
    {'layers.0.ln.weight': 'h.0.ln.weight'}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from holdfast.base.errors import RuleError
from holdfast.base.suggest import did_you_mean
from holdfast.core.layout import Mesh
from holdfast.formats.rules.checking import MAX_PROBLEMS, check_covered, matching, problems_of_names
from holdfast.formats.rules.expression import SIZE, Expression
from holdfast.formats.rules.layout import Layout, ShapeLayout
from holdfast.formats.rules.parser import statements_of
from holdfast.formats.rules.source import Text, source_of, unknown
from holdfast.formats.rules.statements import Axes, Let, Need, Rename, Rule, Statement

_Captures = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Match:
    """The rule of a name, and what its pattern captured."""

    rule: Rule
    captures: _Captures


class RuleSet:
    """Rules in order, renames, axes and variables; every name in them is checked to exist."""

    def __init__(
        self, statements: Iterable[Statement], path: str, let: Mapping[str, int | Fraction]
    ) -> None:
        found = list(statements)
        self.path = path
        self.rules = tuple(s for s in found if isinstance(s, Rule))
        self.renames = tuple(s for s in found if isinstance(s, Rename))
        self.axes = tuple(dict.fromkeys(_axes(found, copies=False)))
        self.copies = tuple(dict.fromkeys(_axes(found, copies=True)))
        self._given = {name: Fraction(value) for name, value in let.items()}
        self._lets = _lets(found, self._given)
        self._check_names(found)
        self._numbers = lru_cache(64)(self._numbers_of)
        self._alike = lru_cache(1 << 14)(self._alike_of)

    @staticmethod
    def parse(
        text: str, path: str = "<rules>", *, let: Mapping[str, int | Fraction] | None = None
    ) -> RuleSet:
        """Parse a rule set; values of variables in `let` take precedence over the text's.  RuleError."""
        return RuleSet(statements_of(Text(path, text)), path, let or {})

    @staticmethod
    def load(what: str, *, let: Mapping[str, int | Fraction] | None = None) -> RuleSet:
        """Load a preset by its name, or a file.  RuleError."""
        source = source_of(what, Path())
        return RuleSet(statements_of(source), source.path, let or {})

    # -- names ------------------------------------------------------------------------------------

    def match(self, name: str) -> Match:
        """The first rule that matches.  RuleError, with near misses, if none does."""
        for rule in self.rules:
            captures = rule.pattern.match(name)
            if captures is not None:
                return Match(rule, tuple(captures.items()))
        texts = [rule.pattern.text for rule in self.rules]
        raise RuleError(
            f"{self.path}: no rule matches {name!r}",
            hint=did_you_mean(name, texts) or "write a rule for it",
        )

    def rename(self, name: str) -> str:
        """The new name; a name without a rename stays.  `renamed` also checks a set of names."""
        found = _first(self.renames, name)
        return name if found is None else found[1]

    def renamed(self, names: Iterable[str]) -> dict[str, str]:
        """Map old names to new names; without renames names stay.

        RuleError if a name has no rename, a rename no name, or two names become one.
        """
        names = list(names)
        if not self.renames:
            return {name: name for name in names}
        found: dict[str, str] = {}
        owner: dict[str, str] = {}
        used: set[int] = set()
        for name in names:
            match = _first(self.renames, name)
            if match is None:
                raise _unmatched(name, [r.old.text for r in self.renames], self.path)
            rename, new = match
            if owner.setdefault(new, name) != name:
                raise rename.span.error(f"both {owner[new]!r} and {name!r} would be called {new!r}")
            found[name] = new
            used.add(id(rename))
        for rename in self.renames:
            if id(rename) not in used and not rename.optional:
                hint = did_you_mean(rename.old.text, names)
                raise rename.old.span.error("this rename is used by no name", hint)
        return found

    def renamed_back(self, names: Iterable[str]) -> dict[str, str]:
        """The old names of new ones.  RuleError if there is none, or more than one."""
        return {n: _back(self.renames, n, self.path) if self.renames else n for n in names}

    # -- layouts ----------------------------------------------------------------------------------

    def layout(
        self, name: str, shape: Iterable[int], mesh: Mesh, *, state: str = "param"
    ) -> Layout:
        """Return the layout of a tensor over a mesh by its rule.  `shape`: of the logical tensor.

        An axis that the mesh lacks has one rank.  `state` matters where values are scaled.
        """
        match = self.match(name)
        used = {named.name for e in match.rule.expressions for named in e.names()}
        captures = tuple((k, v) for k, v in match.captures if k in used)
        return Layout(name, self._alike(match.rule, captures, tuple(shape), mesh, state))

    def _alike_of(
        self, rule: Rule, captures: _Captures, shape: tuple[int, ...], mesh: Mesh, state: str
    ) -> ShapeLayout:
        numbers = dict(self._numbers(mesh))
        for key, text in captures:
            if not (text.isascii() and text.isdigit() and len(text) <= 18):
                raise rule.span.error(f"{{{key}}} is {text!r}, not a number")
            numbers[key] = Fraction(int(text))
        return ShapeLayout(shape, rule, mesh, numbers, state, self.copies)

    def _numbers_of(self, mesh: Mesh) -> dict[str, Fraction]:
        """Return the values of names: the sizes of axes, and variables."""
        for axis, size in mesh.axes:
            if size > 1 and axis not in self.axes + self.copies:
                known = self.axes + self.copies
                raise RuleError(
                    f"{self.path}: the mesh has an axis {axis!r} that no `axes` or `copies` names",
                    hint=did_you_mean(axis, known) or f"they name {', '.join(known) or 'none'}",
                )
        numbers = {a: Fraction(mesh.sizes.get(a, 1)) for a in self.axes + self.copies}
        numbers.update(self._given)
        for let in self._lets:
            numbers[let.name] = let.value.value(numbers)
        return numbers

    def check(self, shapes: Mapping[str, Iterable[int]], mesh: Mesh) -> None:
        """Check that names have a rule, rules a name, and ranks hold every element exactly once.

        Copies on the axes of `copies`, and of what is replicated or averaged, aside.  RuleError with
        all that is wrong.
        """
        problems = problems_of_names(self.rules, list(shapes), self.match)
        wrong: set[Rule] = set()  # one name of a rule says enough
        for name, rule in matching(self.rules, shapes):
            try:
                if rule not in wrong:
                    self.layout(name, shapes[name], mesh).check()
            except RuleError as error:
                wrong.add(rule)
                problems.append(str(error))
            if len(problems) >= MAX_PROBLEMS:
                break
        if problems:
            raise RuleError("\n\n".join(dict.fromkeys(problems)))

    def _check_given(self, statements: list[Statement]) -> None:
        """RuleError if the call gives a value to an unknown variable."""
        declared = _declared(statements)
        for rule in self.rules:
            declared |= {n.name for e in rule.expressions for n in e.names()}
        for name in self._given:
            if name not in declared or name in self.axes + self.copies:
                hint = (
                    did_you_mean(name, declared)
                    or f"they are {', '.join(sorted(declared)) or 'none'}"
                )
                raise RuleError(f"{self.path}: {name!r} is none of its variables", hint=hint)

    def _check_names(self, statements: list[Statement]) -> None:
        """RuleError for an unknown name in expressions or steps, or a needed variable without a value."""
        known = {*self.axes, *self.copies, *self._given}
        self._check_given(statements)
        lets = {let.name: let for let in self._lets}
        for statement in statements:
            if isinstance(statement, Need):
                for named in statement.names:
                    if named.name not in self._given and named.name not in lets:
                        raise named.span.error(
                            f"{named.name} has no value",
                            f"write `let {named.name} = ...` above the include, or pass it "
                            f"(--let {named.name}=...)",
                        )
            elif isinstance(statement, Let) and lets.get(statement.name) is statement:
                _check_expression(statement.value, known)
                if statement.name in self.axes + self.copies:
                    raise statement.span.error(f"{statement.name} is a mesh axis: it has its size")
                known.add(statement.name)
        for rule in self.rules:
            for named in rule.named_axes:
                if named.name not in self.axes:
                    raise unknown("axis", named.name, self.axes, named.span)
            for name in rule.pattern.captures:
                if name == SIZE or name in known:
                    raise rule.pattern.span.error(
                        f"{name} has a meaning already: capture another name"
                    )
            usable = {*known, *rule.pattern.captures, SIZE}
            for expression in rule.expressions:
                _check_expression(expression, usable)
        check_covered(self.rules)


def _declared(statements: list[Statement]) -> set[str]:
    """The variables that statements define or need."""
    needed = {n.name for s in statements if isinstance(s, Need) for n in s.names}
    return needed | {s.name for s in statements if isinstance(s, Let)}


def _check_expression(expression: Expression, known: Iterable[str]) -> None:
    known = set(known)
    for named in expression.names():
        if named.name not in known:
            raise unknown("variable", named.name, known, named.span)


def _axes(statements: list[Statement], *, copies: bool) -> list[str]:
    found = [s for s in statements if isinstance(s, Axes)]
    others = {n.name for s in found if s.copies != copies for n in s.names}
    for s in found:
        for named in s.names:
            if s.copies == copies and copies and named.name in others:
                raise named.span.error(f"{named.name} is an axis to divide over, and one of copies")
    return [n.name for s in found if s.copies == copies for n in s.names]


def _lets(statements: list[Statement], given: Mapping[str, Fraction]) -> tuple[Let, ...]:
    """Return the first `let` of each name that is not given.

    What is included may have defaults; other than that a name has one value.
    """
    found: dict[str, Let] = {}
    for let in (s for s in statements if isinstance(s, Let)):
        before = found.get(let.name)
        if before is not None and let.depth <= before.depth:
            raise let.span.error(
                f"{let.name} already has a value, from {before.span.source.path}:{before.span.line}",
                "the first one counts: what an include needs stands above it",
            )
        if before is None and let.name not in given:
            found[let.name] = let
    return tuple(found.values())


# -- renames --------------------------------------------------------------------------------------


_KEEP = "rename {x:**} -> {x}  as the last one keeps all other names"


def _first(renames: Sequence[Rename], name: str) -> tuple[Rename, str] | None:
    """The first rename that matches, and the new name."""
    for rename in renames:
        captures = rename.old.match(name)
        if captures is not None:
            return rename, rename.new.filled(captures)
    return None


def _back(renames: Sequence[Rename], name: str, path: str) -> str:
    """Undo the first rename that can have made the name; RuleError if a later one is not more general."""
    olds: dict[str, Rename] = {}
    for rename in renames:
        captures = rename.new.match(name)
        if captures is not None:
            old = rename.old.filled(captures)
            if _first(renames, old) == (rename, name):
                olds.setdefault(old, rename)
    if not olds:
        raise _unmatched(name, [r.new.text for r in renames], path)
    (found, by), *others = olds.items()
    for old, rename in others:
        if not rename.new.covers(by.new) or by.new.covers(rename.new):
            raise rename.span.error(f"{name!r} may have been {found!r} or {old!r}")
    return found


def _unmatched(name: str, texts: Sequence[str], path: str) -> RuleError:
    return RuleError(f"{path}: no rename matches {name!r}", hint=did_you_mean(name, texts) or _KEEP)
