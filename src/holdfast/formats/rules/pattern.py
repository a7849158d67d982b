r"""Patterns over names: globs with captures, and regular expressions.

    model.layers.{layer}.mlp.{gate|up}_proj.weight
    **.bias
    /(?:transformer|model)\.h\.\d+\.ln_1\..*/

`*` matches one or more characters except dots, `**` one or more of any; `{layer}` captures a match of
`*`, `{a|b}` matches one of several, `{x:a|b}` captures one of several, `{x:**}` captures a match of
`**`.  A pattern matches whole names.

Names may come from untrusted checkpoints, and a regular expression with N wildcards may take time by the
length of a name to the power of N.  If that is long, a glob is first matched in linear time (`_may_match`),
and a regular expression is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.formats.rules.source import Span

_MAX_STARS = 12
_MAX_REPEATS = 4
_MAX_SAMPLES = 64
_MANY_TRIES = 1e6
"""Number of tries above which a glob is first matched by `_may_match`."""
_MAX_TRIES = 3e8
"""Most tries of a regular expression: one or two seconds."""
_OPAQUE = 0xE000
"""First private character that stands for a match of `*` in samples; no literal matches it."""
_DOTTED = 0xE100
"""First private character that stands for a match of `**` in samples; only `**` matches it."""
_PLAIN = f"[^.{chr(_DOTTED)}-{chr(_DOTTED + 0xFF)}]+"

_PIECE = re.compile(r"(\*\*)|(\*)|\{([^{}]*)\}|([^*{}]+)|(.)", re.DOTALL)
_CAPTURE = re.compile(r"([A-Za-z_]\w*)(?::(.*))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Pattern:
    """`regex` matches whole names; `captures` are its named groups.

    `samples`: names with private characters for wildcards, by which `covers` compares globs; a regular
    expression has none.
    """

    text: str
    span: Span
    regex: re.Pattern[str]
    captures: tuple[str, ...]
    samples: tuple[str, ...]
    num_wildcards: int
    """Wildcards, or repetitions of a regular expression."""

    @staticmethod
    def of(text: str, span: Span) -> Pattern:
        """Parse a pattern.  RuleError."""
        return _regex(text, span) if text.startswith("/") else _glob(text, span)

    @property
    def has_anonymous(self) -> bool:
        """True if some wildcard has no name."""
        bare = re.sub(r"\{[A-Za-z_]\w*(:[^{}]*)?\}", "", self.text)
        return "*" in bare or "{" in bare

    def like(self, text: str) -> str:
        """Return another pattern's text, in which a plain `{x}` gets its definition from this pattern."""
        kinds = {m[1]: m[0] for m in re.finditer(r"\{([A-Za-z_]\w*)(:[^{}]*)\}", self.text)}
        return re.sub(r"\{([A-Za-z_]\w*)\}", lambda m: kinds.pop(m[1], m[0]), text)

    def filled(self, captures: Mapping[str, str]) -> str:
        """Return the name with these captures."""
        return re.sub(r"\{([A-Za-z_]\w*)(:[^{}]*)?\}", lambda m: captures[m[1]], self.text)

    def match(self, name: str) -> dict[str, str] | None:
        """Return the captures; None if it does not match.  RuleError if matching may take too long."""
        tries = float(max(len(name), 1)) ** self.num_wildcards
        if tries > _MANY_TRIES and not self.text.startswith("/"):
            fits = _may_match(self.text, name)
            if not (fits and self.captures):
                return {} if fits else None
        elif tries > _MAX_TRIES:
            raise self.span.error(
                f"{self.num_wildcards} repetitions may take for ever over a name of {len(name):,} "
                f"characters, {name[:40]!r}...",
                "write it with fewer repetitions, or as a glob",
            )
        found = self.regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def covers(self, other: Pattern) -> bool:
        """True if this pattern certainly matches every name that `other` matches."""
        return bool(other.samples) and all(self.match(s) is not None for s in other.samples)


def _may_match(text: str, name: str) -> bool:
    """True if a glob matches a name, even with different captures for a repeated `{x}`.

    Takes time linear in the length of the name.
    """
    ends = {0}
    """Positions in the name at which a match of the pieces so far may end."""
    for deep, _, group, literal, _ in _PIECE.findall(text):
        _, colon, kind = group.partition(":")
        words = [literal] if literal else (kind if colon else group).split("|")
        if not ends:
            return False
        if literal or len(words) > 1:
            ends = {at + len(w) for at in ends for w in words if name.startswith(w, at)}
        elif deep or kind == "**" or f"{{{group}:" in text:
            ends = set(range(min(ends) + 1, len(name) + 1))
        else:
            ends = _star(ends, name)
    return len(name) in ends


def _star(begins: set[int], name: str) -> set[int]:
    """The positions at which a match of `*` that begins at one of `begins` may end."""
    ends, inside = set(), False
    for at, char in enumerate(name):
        inside = (inside or at in begins) and char != "." and not 0 <= ord(char) - _DOTTED <= 0xFF
        if inside:
            ends.add(at + 1)
    return ends


def _glob(text: str, span: Span) -> Pattern:
    regex, samples, stars = "", [""], 0
    captures: dict[str, list[str]] = {}
    for deep, star, group, literal, stray in _PIECE.findall(text):
        if stray:
            raise span.error(f"{stray!r} in a pattern without its other half")
        if deep:
            piece, shown = ".+", [chr(_DOTTED + stars)]
        elif star:
            piece, shown = _PLAIN, [chr(_OPAQUE + stars)]
        elif literal:
            piece, shown = re.escape(literal), [literal]
        else:
            piece, shown = _group(group, captures, stars, span)
        stars += not literal
        if stars > _MAX_STARS:
            raise span.error(f"a pattern has at most {_MAX_STARS} wildcards")
        regex += piece
        samples = [a + b for a in samples for b in shown] if len(samples) <= _MAX_SAMPLES else []
    made = re.compile(regex, re.DOTALL)
    return Pattern(text, span, made, tuple(captures), tuple(samples), stars)


def _group(
    text: str, captures: dict[str, list[str]], number: int, span: Span
) -> tuple[str, list[str]]:
    """Regex and samples of `{text}`, which may add to `captures` (samples by name)."""
    if "|" in text and ":" not in text:
        return _alternatives(text, span), text.split("|")
    found = _CAPTURE.fullmatch(text)
    if not found:
        raise span.error(f"{{{text}}} is neither a name nor alternatives such as {{q|k|v}}")
    name, kind = found.groups()
    if name in captures:
        if kind is not None:
            raise span.error(f"{{{name}}} is captured twice")
        return f"(?P={name})", captures[name]
    if kind is None:
        piece, shown = _PLAIN, [chr(_OPAQUE + number)]
    elif kind == "**":
        piece, shown = ".+", [chr(_DOTTED + number)]
    else:
        piece, shown = _alternatives(kind, span), kind.split("|")
    captures[name] = shown
    return f"(?P<{name}>{piece})", shown


def _alternatives(text: str, span: Span) -> str:
    words = text.split("|")
    if len(words) > 64 or not all(re.fullmatch(r"[\w.\-]+", w, re.ASCII) for w in words):
        raise span.error(f"{{{text}}}: alternatives are words between bars")
    return f"(?:{'|'.join(map(re.escape, words))})"


def _regex(text: str, span: Span) -> Pattern:
    if len(text) < 3 or not text.endswith("/"):
        raise span.error("a regular expression stands between two slashes")
    inner = text[1:-1].replace("\\/", "/")
    try:
        compiled = re.compile(inner, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise span.error(f"not a regular expression: {error}") from None
    if _may_explode(inner):
        raise span.error(
            "a repeated group with repetitions or alternatives in it may take for ever",
            "write it without the outer repetition",
        )
    repeats = _num_repeats(_without_classes(inner))
    return Pattern(text, span, compiled, tuple(compiled.groupindex), (), repeats)


def _without_classes(regex: str) -> str:
    """A regular expression with each character class replaced by a letter."""
    plain = re.sub(r"\\.", "a", regex, flags=re.DOTALL)
    return re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]", "a", plain)


def _num_repeats(plain: str) -> int:
    return len(re.findall(r"[*+]|\{\d*,\d*\}", plain))


def _may_explode(regex: str) -> bool:
    """True if matching may take exponential or high polynomial time; may be true without need."""
    plain = _without_classes(regex)
    if _num_repeats(plain) > _MAX_REPEATS:
        return True
    open_groups: list[bool] = []
    for i, char in enumerate(plain):
        if char == "(":
            open_groups.append(False)
        elif char in "*+{|":
            open_groups = [True] * len(open_groups)
        elif char == ")" and open_groups:
            busy = open_groups.pop()
            if busy and re.match(r"[*+{]", plain[i + 1 :]):
                return True
    return False
