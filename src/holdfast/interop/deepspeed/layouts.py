"""How the parts of tensor-parallel ranks make a parameter: DeepSpeed's `universal_checkpoint_info`.

A model that is to be converted puts regular expressions into its checkpoints, matched where names begin:

    tp_replicated_parameter_patterns           every rank holds all of it
    parameter_to_average_patterns              every rank holds all of it, updated apart: the mean
    parameter_with_row_parallelism_patterns    cut along dim 1
    parameter_with_2_sub_params_cat_dim_0      two tensors fused along dim 0, each cut (gate and up)
    parameter_with_sub_params                  several, of stated sizes (q, k, v), each cut
    vocabulary_parameter_patterns              rows above original_vocab_size are padding
    (none of them)                             cut along dim 0

Names that match nothing are cut along dim 0, as DeepSpeed has it; where ranks' copies of such a name were
meant to be replicas, the result has a dim that is twice as long, and does not load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from holdfast.errors import FormatError, LayoutError
from holdfast.format.manifest import Replica
from holdfast.layout import View

Shape = tuple[int, ...]
MAX_PATTERN = 512
_UNBOUNDED = re.compile(r"(?<!\\)(?:[*+]|\{\d*,\d*\})")
_NESTED = re.compile(r"\)(?:[*+]|\{\d*,)")
MAX_UNBOUNDED = 4


@dataclass(frozen=True)
class Layout:
    """A parameter's shape, and by tensor-parallel rank what it stores of it."""

    shape: Shape
    views: tuple[View, ...]
    replica: Replica = "unique"

    @staticmethod
    def whole(shape: Shape, ranks: int = 1) -> Layout:
        """Every rank holds all of it."""
        view = View.whole(shape)
        return Layout(shape, (view,) * ranks, "replicated" if ranks > 1 else "unique")


class Rules:
    """The patterns of a checkpoint; `path` is the file that holds them."""

    def __init__(self, info: Mapping[str, Any] | None, path: str) -> None:
        self.info = info
        self.path = path
        self._compiled: dict[str, re.Pattern[str]] = {}

    def layout(self, name: str, shapes: Sequence[Shape]) -> Layout:
        """How a parameter is made of parts of `shapes`, one for each tensor-parallel rank."""
        if self.info is None and len(shapes) == 1:
            return Layout.whole(shapes[0])
        if self.info is None:
            raise FormatError(
                f"{name!r} is cut over {len(shapes)} tensor-parallel ranks, and nothing says how",
                key=self.path,
                hint="the model must put its 'universal_checkpoint_info' into client_state",
            )
        try:
            return self._layout(name, shapes)
        except LayoutError as error:
            raise FormatError(f"{name!r}: {error.message}", key=self.path) from None

    def _layout(self, name: str, shapes: Sequence[Shape]) -> Layout:
        if len(shapes) == 1:
            view = self._stripped(name, shapes[0])
            return Layout(view.shape, (view,))
        unsupported = self._info.get("autotp_unsupported_parameter_patterns") or {}
        if any(self._match(pattern, name) for pattern in unsupported):
            raise LayoutError("DeepSpeed says that its parts cannot be put together")
        for key, replica in (
            ("tp_replicated_parameter_patterns", "replicated"),
            ("parameter_to_average_patterns", "averaged"),
        ):
            if self._matches(key, name):
                if len(set(shapes)) > 1:
                    raise LayoutError(f"copies of shapes {sorted(set(shapes))}")
                whole = Layout.whole(shapes[0], len(shapes))
                return Layout(whole.shape, whole.views, replica)  # type: ignore[arg-type]
        found = self._fused(name, shapes)
        if found is not None:
            return found
        dim = 1 if self._matches("parameter_with_row_parallelism_patterns", name) else 0
        return self._cut(name, dim, shapes)

    def _cut(self, name: str, dim: int, shapes: Sequence[Shape]) -> Layout:
        widths = [_width(shape, dim) for shape in shapes]
        full = _with(shapes[0], dim, sum(widths))
        if any(_with(shape, dim, sum(widths)) != full for shape in shapes):
            raise LayoutError(f"parts of shapes {sorted(set(shapes))} do not join along dim {dim}")
        view = self._stripped(name, full)
        return Layout(view.shape, tuple(view.split(dim, i, [widths]) for i in range(len(shapes))))

    def _stripped(self, name: str, shape: Shape) -> View:
        """Without the rows that only pad a vocabulary."""
        if not self._matches("vocabulary_parameter_patterns", name):
            return View.whole(shape)
        size = self._info.get("original_vocab_size")
        if type(size) is not int or not 0 < size <= _width(shape, 0):
            raise LayoutError(f"original_vocab_size is {size!r}, the tensor has {shape}")
        return View.whole(_with(shape, 0, size)).padded(0, to=shape[0])

    def _fused(self, name: str, shapes: Sequence[Shape]) -> Layout | None:
        """Of several tensors, each of which is cut; None for a name that is not fused."""
        if self._matches("parameter_with_2_sub_params_cat_dim_0", name):
            halves = [-(-_width(shape, 0) // 2) for shape in shapes]
            widths = [halves, [s[0] - h for s, h in zip(shapes, halves)]]
            return _views(_with(shapes[0], 0, sum(map(sum, widths))), 0, widths, shapes)
        for spec in self._list("parameter_with_sub_params"):
            patterns = spec.get("patterns") if isinstance(spec, dict) else None
            for pattern in patterns if isinstance(patterns, list) else ():
                if self._match(pattern, name):
                    return self._sub_params(spec, pattern, shapes)
        return None

    def _sub_params(self, spec: dict[Any, Any], pattern: str, shapes: Sequence[Shape]) -> Layout:
        form, dim, ranks = spec.get("shape"), spec.get("partition_dim"), len(shapes)
        if not isinstance(form, (tuple, list)) or type(dim) is not int or not 0 <= dim < len(form):
            raise LayoutError("its sub_params shape is malformed")
        total = sum(map(prod, shapes))
        sizes = form[dim]
        if not isinstance(sizes, (tuple, list)):  # before version 0.4: how many, all equal
            width = sum(_width(shape, dim) for shape in shapes)
            if type(sizes) is not int or sizes < 1 or width % sizes:
                raise LayoutError(f"{width} is not {sizes} equal parts")
            sizes = [width // sizes] * sizes
        widths = self._widths(pattern, sizes, ranks)
        logical = [sum(n) if isinstance(n, (tuple, list)) else n for n in form]
        logical[dim] = sum(sizes)
        return _views(_resolved(logical, total), dim, widths, shapes)

    def _widths(self, pattern: str, sizes: Sequence[int], ranks: int) -> list[list[int]]:
        """Of each sub-parameter what each rank holds."""
        if self._info.get("universal_checkpoint_version", 0) >= 0.4:
            said = self._info.get("sub_param_shard_widths")
            widths = said.get(pattern) if isinstance(said, dict) else None
            if not isinstance(widths, (list, tuple)):
                raise LayoutError(f"no sub_param_shard_widths for {pattern!r}")
            return [list(each) for each in widths]
        if any(size % ranks for size in sizes):
            raise LayoutError(f"sub-parameters of {list(sizes)} over {ranks} ranks")
        return [[size // ranks] * ranks for size in sizes]

    # -- patterns ---------------------------------------------------------------------------------

    @cached_property
    def _info(self) -> Mapping[str, Any]:
        return self.info or {}

    def _list(self, key: str) -> list[Any]:
        found = self._info.get(key) or []
        if not isinstance(found, (list, tuple)):
            raise LayoutError(f"{key} is a {type(found).__name__}")
        return list(found)

    def _matches(self, key: str, name: str) -> bool:
        return any(self._match(pattern, name) for pattern in self._list(key))

    def _match(self, pattern: Any, name: str) -> bool:
        if pattern not in self._compiled:
            self._compiled[pattern] = _compiled(pattern)
        return self._compiled[pattern].match(name) is not None


def _compiled(pattern: Any) -> re.Pattern[str]:
    """A regular expression that ends in bounded time: few repeats, none of them nested."""
    sound = isinstance(pattern, str) and len(pattern) <= MAX_PATTERN
    if not sound or len(_UNBOUNDED.findall(pattern)) > MAX_UNBOUNDED or _NESTED.search(pattern):
        raise LayoutError(f"the pattern {str(pattern)[:80]!r} is not one that names need")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise LayoutError(f"the pattern {pattern!r}: {error}") from None


def _views(shape: Shape, dim: int, widths: list[list[int]], shapes: Sequence[Shape]) -> Layout:
    """Fused tensors along `dim`; `widths`: of each, each rank's."""
    sizes = [sum(each) for each in widths]
    fused = View.whole(shape).fused(dim, sizes)
    views = tuple(fused.split(dim, i, widths) for i in range(len(shapes)))
    for view, held in zip(views, shapes):
        if view.size != prod(held):
            raise LayoutError(f"a rank holds {held}, its widths tell of {view.stored}")
    return Layout(shape, views)


def _width(shape: Shape, dim: int) -> int:
    if dim >= len(shape):
        raise LayoutError(f"parts of shape {shape} have no dim {dim}")
    return shape[dim]


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _resolved(shape: Sequence[Any], total: int) -> Shape:
    """With the size of the one dim that is stated as -1."""
    if not all(type(n) is int for n in shape) or sum(n < 0 for n in shape) > 1:
        raise LayoutError(f"{shape} is no shape")
    known = prod(n for n in shape if n >= 0)
    if any(n < 0 for n in shape) and (not known or total % known):
        raise LayoutError(f"{total} elements have no shape {shape}")
    return tuple(n if n >= 0 else total // known for n in shape)
