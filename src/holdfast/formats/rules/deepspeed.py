"""DeepSpeed's `universal_checkpoint_info` as rules.

The info states by regular expressions how the slices of tensor-parallel ranks make up each parameter
(deepspeed/checkpoint/ds_to_universal.py, `merge_tp_slices`).  Together with the slices' shapes that is a
rule per name, in this order: replicated, averaged, two or more sub-parameters, cut along dim 1, else along
dim 0; and a padded vocabulary is padded along dim 0 besides.  Names that differ in numbers alone share one.

    >>> info = {"tp_replicated_parameter_patterns": [".*norm"],
    ...         "parameter_with_row_parallelism_patterns": [".*dense.weight"]}
    >>> shapes = {"0.norm": [(8,)] * 2, "1.norm": [(8,)] * 2, "1.dense.weight": [(8, 4)] * 2}
    >>> found = Slices(info, shapes)
    >>> print(found.text)
    optional
    axes tp
    1.dense.weight  unique, shard 1 over tp
    *.norm  replicated
    >>> found.shape("1.dense.weight")
    (8, 8)

From 0.19 on DeepSpeed also writes an `affine_map`, which states the geometry, and takes precedence over the
patterns.  `Slices.view` follows it; `Slices.text`, being rules, only has the patterns.

A map lists, by rank, the slice's shape and pieces: shape, offset and strides in the whole parameter and in
the slice, perhaps a scale (slice = whole * scale).  All that DeepSpeed makes are ranges of rows along one
dim, stored one after the other, so a rank's part is a view; a map of any other kind is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import prod
from typing import Any

from holdfast.base.errors import RuleError
from holdfast.core.layout import Mesh, row_major
from holdfast.core.layout.view import View
from holdfast.formats.rules.layout import POWERS, gap, gap_or_overlap
from holdfast.formats.rules.pattern import Pattern
from holdfast.formats.rules.ruleset import RuleSet
from holdfast.formats.rules.source import Span, Text
from holdfast.formats.rules.statements import Replica
from holdfast.formats.rules.ucp import fragment_params, params_to_average, replicated_params

_Shape = tuple[int, ...]

_AFFINE_VERSION = 1
_SPECIAL = re.compile(r"[*{}\s#/]")
"""Characters with a special meaning in patterns."""
_SUB_PARAMS = "parameter_with_sub_params"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_WIDTHS = "sub_param_shard_widths"


class Slices:
    """Parameters whose slices are on tensor-parallel ranks.

    `shapes`: by name, the shapes of the slices in the order of the ranks.  RuleError if info and shapes
    do not fit each other.
    """

    def __init__(self, info: Mapping[str, Any], shapes: Mapping[str, Sequence[_Shape]]) -> None:
        self._info = info
        self._shapes = {name: [tuple(s) for s in some] for name, some in shapes.items()}
        counts = {len(some) for some in self._shapes.values()}
        if len(counts) > 1:
            raise RuleError(f"slices of {sorted(counts)} ranks: all parameters have as many")
        self.tp = counts.pop() if counts else 1
        with _understood():
            self._categories = _Categories(info)
            found = {n: f for n, some in self._shapes.items() if (f := self._found(n, some))}
        self._logical = {name: shape for name, (_, shape) in found.items()}
        self.text = "\n".join(
            ["optional", "axes tp", *_folded({n: t for n, (t, _) in found.items()})]
        )

    @cached_property
    def rules(self) -> RuleSet:
        return RuleSet.parse(self.text, "universal_checkpoint_info")

    @property
    def mesh(self) -> Mesh:
        return Mesh((("tp", self.tp),))

    def shape(self, name: str) -> _Shape:
        """Return the shape of the whole parameter."""
        with _understood():
            entry = self._categories.affine(name)
            return tuple(entry["logical_shape"]) if entry is not None else self._logical[name]

    def replica(self, name: str) -> Replica:
        """Return how copies are merged; with a map, never by averaging."""
        if self._categories.affine(name) is None:
            return self.rules.match(name).rule.replica
        views = [self.view(name, rank) for rank in range(self.tp)]
        return "unique" if self.tp == 1 or len(set(views)) > 1 else "replicated"

    def view(self, name: str, rank: int, *, state: str = "param") -> View:
        """Return the view from a rank's slice to the whole parameter.  RuleError."""
        entry = self._categories.affine(name)
        if entry is not None:
            with _understood():
                view = view_of_map(name, entry, rank, state)
        else:
            view = self.rules.layout(name, self.shape(name), self.mesh, state=state).view(rank)
        if view.stored != self._shapes[name][rank]:
            raise RuleError(
                f"{name!r}: the slice of rank {rank} has shape {self._shapes[name][rank]}, "
                f"universal_checkpoint_info says {view.stored}"
            )
        return view

    def check(self) -> None:
        """Check that slices make up each parameter exactly once, copies aside.
        RuleError names what does not.

        By a map, ranks may share rows (keys and values of few heads): there nothing may be left out.
        """
        for name in self._shapes:
            distinct = {self.view(name, rank): rank for rank in reversed(range(self.tp))}
            held = [
                (f"rank {r}", [f.box for f in view.fragments()]) for view, r in distinct.items()
            ]
            by_map = self._categories.affine(name) is not None
            problem = (gap if by_map else gap_or_overlap)(self.shape(name), held)
            if problem:
                raise RuleError(f"{name!r}: {problem}")

    # -- a rule per name --------------------------------------------------------------------------

    def _found(self, name: str, shapes: list[_Shape]) -> tuple[str, _Shape] | None:
        """The rule of a name and its whole shape; None if only a map describes it."""
        for pattern, reason in (self._info.get(_UNSUPPORTED) or {}).items():
            if _starts(pattern, name):
                raise RuleError(f"{name!r} cannot be put together: {reason}")
        try:
            return self._ruled(name, shapes)
        except RuleError:
            if self._categories.affine(name) is None:
                raise
            return None

    def _ruled(self, name: str, shapes: list[_Shape]) -> tuple[str, _Shape]:
        """Return the text after the name in its rule, and the shape of the whole."""
        known = self._categories
        vocabulary = known.pattern("vocabulary_parameter_patterns", name) is not None
        if known.pattern("tp_replicated_parameter_patterns", name) is not None:
            return self._copied(replicated_params(""), shapes, vocabulary, name)
        if known.pattern("parameter_to_average_patterns", name) is not None:
            return self._copied(params_to_average(""), shapes, vocabulary, name)
        if not shapes[0]:
            if self.tp > 1:
                raise RuleError(f"{name!r}: scalars of {self.tp} ranks cannot be joined")
            return "unique", ()
        dim, parts, widths = self._cut(name, shapes)
        shape = _joined(name, shapes, dim)
        logical = self._stripped(shape) if vocabulary else shape
        chunked = all(_is_chunked(each) for each in widths)
        text = fragment_params(
            "",
            dim=dim,
            parts=parts,
            widths=() if chunked else widths,
            padded=(logical[0], shape[0]) if vocabulary else None,
        )
        return text.strip(), logical

    def _cut(self, name: str, shapes: list[_Shape]) -> tuple[int, list[int], list[list[int]]]:
        """The dim of a cut, the lengths of sub-parameters, and the widths of each one's parts."""
        known = self._categories
        if known.pattern("parameter_with_2_sub_params_cat_dim_0", name) is not None:
            if any(s[0] < 2 for s in shapes):
                raise RuleError(f"{name!r}: slices of {[s[0] for s in shapes]} do not halve")
            widths = [[-(-s[0] // 2) for s in shapes], [s[0] // 2 for s in shapes]]
            return 0, [sum(each) for each in widths], widths
        spec, pattern = known.sub_params(name)
        if spec is not None:
            return self._sub_params(name, shapes, spec, pattern)
        row = known.pattern("parameter_with_row_parallelism_patterns", name) is not None
        if row and len(shapes[0]) < 2:
            raise RuleError(f"{name!r} has one dim and is said to be cut along its second")
        dim = int(row)
        return dim, [], [[s[dim] for s in shapes]]

    def _sub_params(
        self, name: str, shapes: list[_Shape], spec: Mapping[str, Any], pattern: str
    ) -> tuple[int, list[int], list[list[int]]]:
        """Sub-parameters: along a dim of the parameter, or of a view of it that has more dims."""
        at, view = int(spec["partition_dim"]), list(spec["shape"])
        widths = self._widths(name, shapes, view[at], at, pattern)
        total = sum(map(prod, shapes))
        view = [sum(n) if isinstance(n, (tuple, list)) else int(n) for n in view]
        view[at] = sum(map(sum, widths))
        known = prod(n for n in view if n >= 0)
        if any(n < 0 for n in view) and known and total % known == 0:
            view = [n if n >= 0 else total // known for n in view]
        before, after = prod(view[:at]), prod(view[at + 1 :])
        for dim in [at] if len(view) == len(shapes[0]) else range(len(shapes[0])):
            lead, tail = prod(shapes[0][:dim]), prod(shapes[0][dim + 1 :])
            if not lead or not tail or before % lead or after % tail:
                continue
            times, unit = before // lead, after // tail
            rows = [times * unit * sum(each[r] for each in widths) for r in range(self.tp)]
            if rows == [s[dim] for s in shapes]:
                wide = [[w * unit for w in each] for each in widths] * times
                return dim, [sum(each) for each in wide], wide
        raise RuleError(
            f"{name!r}: sub-parameters {spec['shape']} are not those of slices {shapes}"
        )

    def _widths(
        self, name: str, shapes: list[_Shape], sizes: Any, at: int, pattern: str
    ) -> list[list[int]]:
        """Return the widths of each sub-parameter's parts, by rank."""
        if self._categories.version >= 0.4:
            widths = self._info.get(_WIDTHS, {}).get(pattern)
            if widths is None:
                raise RuleError(f"{name!r}: no {_WIDTHS} of pattern {pattern!r}")
            found = [[int(w) for w in each] for each in widths]
            if isinstance(sizes, (tuple, list)) and [sum(w) for w in found] != list(sizes):
                raise RuleError(
                    f"{name!r}: widths {found} are not of sub-parameters {tuple(sizes)}"
                )
            if any(len(each) != self.tp for each in found):
                raise RuleError(f"{name!r}: widths {found} are not those of {self.tp} ranks")
            return found
        if not isinstance(
            sizes, (tuple, list)
        ):  # before DeepSpeed 0.4: the number of equal sub-parameters
            count = int(sizes)
            full = sum(s[at] if at < len(s) else 0 for s in shapes)
            if count < 1 or full % count:
                raise RuleError(f"{name!r}: {full} does not divide into {count} sub-parameters")
            sizes = [full // count] * count
        if any(n % self.tp for n in sizes):
            raise RuleError(
                f"{name!r}: sub-parameters {tuple(sizes)} do not divide by {self.tp} ranks"
            )
        return [[n // self.tp] * self.tp for n in sizes]

    def _copied(
        self, text: str, shapes: list[_Shape], vocabulary: bool, name: str
    ) -> tuple[str, _Shape]:
        if len(set(shapes)) > 1:
            raise RuleError(f"{name!r} has copies of different shapes: {shapes}")
        logical = self._stripped(shapes[0]) if vocabulary else shapes[0]
        if logical != shapes[0]:
            text = f"{text}, padded 0 from {logical[0]} to {shapes[0][0]}"
        return text.strip(), logical

    def _stripped(self, shape: _Shape) -> _Shape:
        original = self._info.get("original_vocab_size")
        if not isinstance(original, int) or original < 0:
            raise RuleError("a vocabulary is padded, but there is no original_vocab_size")
        return (min(original, shape[0]), *shape[1:])


@contextmanager
def _understood() -> Iterator[None]:
    """Raise a type error of malformed info in this block as RuleError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        if isinstance(error, RuleError):
            raise
        what = f"{type(error).__name__}: {error}"
        raise RuleError(f"universal_checkpoint_info cannot be understood ({what})") from None


class _Categories:
    """The lists of patterns, and which one of each matches a name."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._info = info
        self.version = float(info.get("universal_checkpoint_version", 0.0))
        maps = info.get("affine_map") or {}
        if int(maps.get("version", _AFFINE_VERSION)) > _AFFINE_VERSION:
            raise RuleError(f"affine maps of version {maps['version']}: known is {_AFFINE_VERSION}")
        self._maps: Mapping[str, Any] = maps.get("params") or {}

    def pattern(self, key: str, name: str) -> str | None:
        """Return the pattern of list `key` that matches a name.  RuleError if several match."""
        return _only(key, self._info.get(key) or [], name)

    def sub_params(self, name: str) -> tuple[Mapping[str, Any] | None, str]:
        for spec in self._info.get(_SUB_PARAMS) or []:
            for pattern in spec["patterns"]:
                if _starts(pattern, name):
                    return spec, pattern
        return None, ""

    def affine(self, name: str) -> Mapping[str, Any] | None:
        pattern = _only("affine_map", list(self._maps), name)
        return None if pattern is None else self._maps[pattern]


def _only(key: str, patterns: Sequence[str], name: str) -> str | None:
    found = [p for p in patterns if _starts(p, name)]
    if len(found) > 1:
        raise RuleError(f"{name!r} is matched by several of {key}: {found}")
    return found[0] if found else None


def _starts(pattern: str, name: str) -> bool:
    """True if `re.match` finds the pattern.  RuleError if that could take exponential time."""
    literal = re.fullmatch(r"\^((?:[\w ]|\\.)*)\$", pattern)
    if literal:  # re.escape of a name, as AutoTP writes it
        return re.sub(r"\\(.)", r"\1", literal[1]) == name
    return _compiled(pattern).match(name) is not None


def _compiled(pattern: str) -> re.Pattern[str]:
    text = f"/{pattern}/"
    span = Span(Text("universal_checkpoint_info", text), 1, 0, len(text))
    return Pattern.of(text, span).regex


def _joined(name: str, shapes: list[_Shape], dim: int) -> _Shape:
    """The shape of slices concatenated along a dim."""
    others = {(*s[:dim], *s[dim + 1 :]) for s in shapes}
    if len(others) > 1 or len({len(s) for s in shapes}) > 1:
        raise RuleError(f"{name!r}: slices {shapes} differ in other dims than {dim}")
    return (*shapes[0][:dim], sum(s[dim] for s in shapes), *shapes[0][dim + 1 :])


def _is_chunked(widths: Sequence[int]) -> bool:
    """True if the widths are those of torch.chunk."""
    total, parts = sum(widths), len(widths)
    step = -(-total // parts)
    return list(widths) == [max(0, min(step, total - r * step)) for r in range(parts)]


def _folded(texts: Mapping[str, str]) -> list[str]:
    """Lines of rules; names that differ only in numbers share one if their rules are equal.

    A pattern can match a name of another group only if it has more stars: those come later.
    """
    groups: dict[str, list[str]] = {}
    for name in texts:
        groups.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    single, broad = [], []
    for glob, names in groups.items():
        alike = len({texts[n] for n in names}) == 1 and not any(_SPECIAL.search(n) for n in names)
        if len(names) > 1 and alike:
            broad.append(f"{glob}  {texts[names[0]]}")
        else:
            single += [f"{_literal(name)}  {texts[name]}" for name in names]
    return [*single, *sorted(broad, key=lambda line: line.count("*"))]


def _literal(name: str) -> str:
    """A pattern that matches one name."""
    if not name.isprintable() or len(name) > 1000:
        raise RuleError(f"{name!r} is no name of a parameter")
    if not _SPECIAL.search(name):
        return name
    escaped = re.escape(name).replace("/", "\\/")
    return f"/{escaped}/"


# -- affine maps ----------------------------------------------------------------------------------


def view_of_map(name: str, entry: Mapping[str, Any], rank: int, state: str) -> View:
    """A rank's slice by an affine map: ranges of rows of one dim, in any order."""
    shape = _ints(entry["logical_shape"])
    ranks = {int(r): value for r, value in entry["ranks"].items()}
    if rank not in ranks:
        raise RuleError(f"{name!r}: its affine map has no rank {rank}")
    stored = _ints(ranks[rank]["shard_shape"])
    cut = [d for d, (a, b) in enumerate(zip(shape, stored)) if a != b]
    pieces = sorted(ranks[rank]["pieces"], key=lambda p: int(p["dest"][0]))
    scales = {float(p.get("scale", 1.0)) for p in pieces} or {1.0}
    if len(shape) != len(stored) or len(cut) > 1 or len(scales) > 1:
        raise RuleError(f"{name!r}: an affine map that is no cut along one dim")
    view = View.whole(shape)
    if shape:
        view = _rows(name, view, pieces, stored, cut[0] if cut else 0)
    (scale,) = scales
    if scale == 1.0:
        return view
    if state not in POWERS:
        raise RuleError(f"{name!r} is scaled, and what that means for state {state!r} is not known")
    return view.scaled((1 / scale) ** POWERS[state])


def _rows(name: str, view: View, pieces: list[Mapping[str, Any]], stored: _Shape, dim: int) -> View:
    """Select the rows of `dim` that the pieces are; they must be contiguous in the slice."""
    shape, ranges, at = view.shape, [], 0
    from_strides, to_strides = row_major(shape), row_major(stored)
    for piece in pieces:
        size = _ints(piece["shape"])
        (source, from_given), (dest, to_given) = piece["source"], piece["dest"]
        rows, start = size[dim], int(source) // max(1, from_strides[dim])
        described = (
            (*shape[:dim], rows, *shape[dim + 1 :]),
            (start * from_strides[dim], at * to_strides[dim]),
            (from_strides, to_strides),
        )
        if (size, (source, dest), (_ints(from_given), _ints(to_given))) != described:
            if all(size):
                raise RuleError(f"{name!r}: an affine map with a piece that is no range of rows")
            continue
        ranges.append((start, start + rows))
        at += rows
    return view.picked(dim, ranges)


def _ints(numbers: Any) -> _Shape:
    return tuple(int(n) for n in numbers)
