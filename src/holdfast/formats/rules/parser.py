"""Parser of rules: text to statements.

A statement begins at the start of a line; lines that begin with a blank continue it; `#` at the start of a
line or after a blank begins a comment.  docs/reference/rules.md has the grammar.  An include is replaced by
the statements of the included text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

from holdfast.base.errors import RuleError
from holdfast.formats.rules import steps
from holdfast.formats.rules.expression import SIZE, Expression, Item, Named, Operator
from holdfast.formats.rules.pattern import Pattern
from holdfast.formats.rules.source import MAX_RULES_CHARS, Span, Text, presets, source_of, unknown
from holdfast.formats.rules.statements import (
    REPLICAS,
    Axes,
    Include,
    Let,
    Need,
    Optional,
    Rename,
    Rule,
    Statement,
)

_T = TypeVar("_T")

_MAX_INCLUDES = 100
_MAX_TOKENS = 10_000
_MAX_DEPTH = 30
_RESERVED = frozenset({SIZE, "over", "of", "from", "to", "multiple", "stored"})

_WORD = re.compile(r"/(?:\\.|[^/\\\n])*/|\S+")
_TOKEN = re.compile(r"[A-Za-z_]\w*|\d+|//|->|\S", re.ASCII)
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Token:
    """A word or sign; a statement ends with an empty token."""

    text: str
    span: Span

    @property
    def is_name(self) -> bool:
        return bool(_NAME.fullmatch(self.text))


def parsed(source: Text) -> list[Statement]:
    """Parse the statements of a text, in order.  RuleError at the first error."""
    if len(source.text) > MAX_RULES_CHARS:
        raise RuleError(f"{source.path}: rules of more than {MAX_RULES_CHARS} characters")
    found = [_Parser(source, lines).statement() for lines in _statements(source)]
    if any(isinstance(s, Optional) for s in found):
        return [_optional(s) for s in found]
    return found


def statements_of(source: Text, seen: tuple[str, ...] = ()) -> Iterator[Statement]:
    """A text's statements, with each include replaced by its content."""
    inside = (*seen, source.path)
    for statement in parsed(source):
        if isinstance(statement, Let):
            statement = replace(statement, depth=len(seen))
        if not isinstance(statement, Include):
            yield statement
            continue
        folder = None if source.path in presets() else Path(source.path).parent
        try:
            found = source_of(statement.what, folder)
        except RuleError as error:
            raise statement.span.error(error.message, error.hint) from None
        if found.path in inside or len(inside) > _MAX_INCLUDES:
            raise statement.span.error(f"{found.path} includes itself")
        yield from statements_of(found, inside)


def _optional(statement: Statement) -> Statement:
    if isinstance(statement, (Rule, Rename)):
        return replace(statement, optional=True)
    return statement


def _statements(source: Text) -> Iterator[list[tuple[int, str]]]:
    """Lines of each statement, with their numbers, without comments."""
    found: list[tuple[int, str]] = []
    for number, line in enumerate(source.text.split("\n"), 1):
        text = _COMMENT.sub("", line).rstrip()
        if not text:
            continue
        if text[0].isspace():
            if not found:
                at = len(text) - len(text.lstrip())
                span = Span(source, number, at, len(text) - at)
                raise span.error("a statement begins at the start of a line")
            found.append((number, text))
            continue
        if found:
            yield found
        found = [(number, text)]
    if found:
        yield found


@dataclass
class _Parser:
    """Parser of one statement: by words, or by tokens after a word."""

    source: Text
    lines: list[tuple[int, str]]
    tokens: list[Token] = field(default_factory=list)
    at: int = 0
    axes: list[Named] = field(default_factory=list)
    """The axes that steps have named."""

    # -- words and tokens -------------------------------------------------------------------------

    def words(self) -> list[Token]:
        """Return the words, separated by blanks; a regular expression is one word."""
        return [
            Token(m[0], Span(self.source, number, m.start(), m.end() - m.start()))
            for number, text in self.lines
            for m in _WORD.finditer(text)
        ]

    def tokenize(self, behind: Token) -> None:
        """Split the text after a word of the first non-empty line into tokens."""
        span = behind.span
        for number, text in self.lines:
            start = 0 if number != span.line else span.column + span.width
            if number < span.line:
                continue
            for m in _TOKEN.finditer(text, start):
                self.tokens.append(
                    Token(m[0], Span(self.source, number, m.start(), m.end() - m.start()))
                )
        if len(self.tokens) > _MAX_TOKENS:
            raise span.error(f"a statement of more than {_MAX_TOKENS} words")
        number, text = self.lines[-1]
        self.tokens.append(Token("", Span(self.source, number, len(text), 1)))

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    def take(self) -> Token:
        token = self.next
        self.at += bool(token.text)
        return token

    def accept(self, text: str) -> bool:
        """Take the next token if it is `text`; return whether it was."""
        if self.next.text != text:
            return False
        self.at += 1
        return True

    def several(self, item: Callable[[], _T], sign: str = ",") -> tuple[_T, ...]:
        """Parse one or more items, separated by `sign`."""
        found = [item()]
        while self.accept(sign):
            found.append(item())
        return tuple(found)

    def expect(self, *texts: str) -> Token:
        token = self.take()
        if token.text not in texts:
            raise self.unexpected(token, " or ".join(map(repr, texts)))
        return token

    def unexpected(self, token: Token, wanted: str) -> RuleError:
        found = repr(token.text) if token.text else "the end"
        return token.span.error(f"{wanted} expected, found {found}")

    def name(self, what: str) -> Named:
        token = self.take()
        if not token.is_name:
            raise self.unexpected(token, what)
        if token.text in _RESERVED:
            raise token.span.error(f"{token.text!r} is a word of the language, not {what}")
        return Named(token.text, token.span)

    def integer(self, what: str) -> int:
        token = self.take()
        if not token.text.isascii() or not token.text.isdigit() or len(token.text) > 18:
            raise self.unexpected(token, what)
        return int(token.text)

    def end(self) -> None:
        if self.next.text:
            raise self.unexpected(self.next, "the end of the line")

    # -- statements -------------------------------------------------------------------------------

    def statement(self) -> Statement:
        """Parse the statement of the first word; a rule if that is no keyword."""
        words = self.words()
        first = words[0]
        if first.text in ("include", "rename"):
            return self.include(words) if first.text == "include" else self.rename(words)
        self.tokenize(first)
        kinds: dict[str, Callable[[Token], Statement]] = {
            "axes": lambda t: Axes(self.names("a mesh axis"), copies=False),
            "copies": lambda t: Axes(self.names("a mesh axis"), copies=True),
            "need": lambda t: Need(self.names("a variable")),
            "let": self.let,
            "optional": lambda t: Optional(t.span),
        }
        found = kinds.get(first.text, self.rule)(first)
        self.end()
        return found

    def include(self, words: list[Token]) -> Include:
        if len(words) != 2:
            raise words[-1].span.error("include takes the name of a preset, or a file")
        return Include(words[1].text.strip('"'), words[1].span)

    def rename(self, words: list[Token]) -> Rename:
        if len(words) != 4 or words[2].text != "->":
            raise words[-1].span.error(
                "a rename is not complete", "write it as rename h.{n}.w -> layers.{n}.w"
            )
        old = Pattern.of(words[1].text, words[1].span)
        new = Pattern.of(old.like(words[3].text), words[3].span)
        for pattern in (old, new):
            if pattern.text.startswith("/") or pattern.has_anonymous:
                raise pattern.span.error(
                    "a rename goes both ways: each wildcard needs a name",
                    "write {x} for *, {x:**} for **, {x:a|b} for {a|b}",
                )
        for a, b in ((old, new), (new, old)):
            for name in a.captures:
                if name not in b.captures:
                    raise a.span.error(f"{{{name}}} is on one side only")
        return Rename(old, new, words[0].span)

    def names(self, what: str) -> tuple[Named, ...]:
        return self.several(lambda: self.name(what))

    def let(self, first: Token) -> Let:
        name = self.name("a variable")
        self.expect("=")
        return Let(name.name, self.expression(), name.span)

    def rule(self, first: Token) -> Rule:
        pattern = Pattern.of(first.text, first.span)
        word = self.take()
        replica = next((r for r in REPLICAS if r == word.text), None)
        if replica is None:
            if word.is_name:
                raise unknown("replica rule", word.text, REPLICAS, word.span)
            raise self.unexpected(word, "unique, replicated or averaged")
        found = self.several(self.step) if self.accept(",") else ()
        behind = self.lines[0][1][first.span.column + first.span.width :]
        text = " ".join(" ".join([behind, *(line for _, line in self.lines[1:])]).split())
        return Rule(pattern, replica, found, first.span, text, tuple(self.axes))

    # -- steps ------------------------------------------------------------------------------------

    def step(self) -> steps.RuleStep:
        word = self.take()
        kinds: dict[str, Callable[[Token], steps.RuleStep]] = {
            "shard": self.shard,
            "fused": lambda w: steps.Fused(w.span, self.dim(), self.numbers()),
            "interleaved": self.interleaved,
            "padded": self.padded,
            "experts": self.experts,
            "transposed": self.transposed,
            "scaled": lambda w: steps.Scaled(w.span, self.expression()),
            "flat": self.flat,
            "on": self.on,
        }
        if not word.is_name:
            raise self.unexpected(word, "a step")
        if word.text not in kinds:
            raise unknown("step", word.text, kinds, word.span)
        step = kinds[word.text](word)
        return replace(step, span=word.span.to(self.tokens[self.at - 1].span))

    def shard(self, word: Token) -> steps.Shard:
        dim, axes = self.dim(), self.over()
        for how in ("even", "balanced"):
            if self.accept(how):
                return steps.Shard(word.span, dim, axes, how)
        if not self.accept("widths"):
            return steps.Shard(word.span, dim, axes)
        widths = [self.numbers()]
        while self.next.text == "(":
            widths.append(self.numbers())
        return steps.Shard(word.span, dim, axes, "widths", tuple(widths))

    def interleaved(self, word: Token) -> steps.Interleaved:
        dim, groups = self.dim(), self.expression()
        self.expect("of")
        sizes = self.numbers()
        logical = "stored" if self.accept("stored") else "parts"
        return steps.Interleaved(word.span, dim, groups, sizes, logical)

    def padded(self, word: Token) -> steps.Padded:
        dim = self.dim()
        original = self.expression() if self.accept("from") else None
        is_length = self.expect("to", "multiple").text == "to"
        number = self.expression()
        to, multiple = (number, None) if is_length else (None, number)
        return steps.Padded(word.span, dim, to, multiple, original)

    def experts(self, word: Token) -> steps.RuleStep:
        if self.next.text.isdigit():
            return steps.Experts(word.span, self.dim(), self.over())
        self.expect("{")
        expert = self.name("a capture of the pattern")
        self.expect("}")
        self.expect("of")
        named = Expression((expert,), expert.span)
        return steps.ExpertTensors(word.span, named, self.expression(), self.over())

    def transposed(self, word: Token) -> steps.Transposed:
        order = self.bracketed(self.dim) if self.next.text == "(" else None
        return steps.Transposed(word.span, order)

    def flat(self, word: Token) -> steps.Flat:
        axes = self.over()
        multiple = self.expression() if self.accept("multiple") else None
        return steps.Flat(word.span, axes, multiple)

    def on(self, word: Token) -> steps.On:
        axis = self.axis()
        coordinates = self.numbers() if self.next.text == "(" else (self.expression(),)
        return steps.On(word.span, (axis,), coordinates)

    def dim(self) -> int:
        return self.integer("a dim (0, 1, ...)")

    def over(self) -> tuple[str, ...]:
        """`over pp*tp`: axes from the outermost."""
        self.expect("over")
        return self.several(self.axis, "*")

    def axis(self) -> str:
        self.axes.append(self.name("a mesh axis"))
        return self.axes[-1].name

    def numbers(self) -> tuple[Expression, ...]:
        """`(a, b)`."""
        return self.bracketed(self.expression)

    def bracketed(self, item: Callable[[], _T]) -> tuple[_T, ...]:
        self.expect("(")
        found = self.several(item)
        self.expect(")")
        return found

    # -- expressions ------------------------------------------------------------------------------

    def expression(self) -> Expression:
        first = self.next
        items = self.sum(0)
        return Expression(tuple(items), first.span.to(self.tokens[self.at - 1].span))

    def sum(self, depth: int) -> list[Item]:
        return self.chain(("+", "-"), lambda: self.product(depth))

    def product(self, depth: int) -> list[Item]:
        return self.chain(("*", "/", "//", "%"), lambda: self.operand(depth))

    def chain(self, signs: tuple[str, ...], operand: Callable[[], list[Item]]) -> list[Item]:
        items = operand()
        while self.next.text in signs:
            sign = self.take()
            items += [*operand(), Operator(sign.text, sign.span)]
        return items

    def operand(self, depth: int) -> list[Item]:
        token = self.next
        if token.text == "(":
            if depth == _MAX_DEPTH:
                raise token.span.error("brackets within brackets, too deep")
            self.take()
            items = self.sum(depth + 1)
            self.expect(")")
            return items
        if token.is_name:
            if token.text == SIZE:
                return [Named(self.take().text, token.span)]
            return [self.name("a number or a name")]
        return [Fraction(self.integer("a number or a name"))]
