"""Drawing how a tensor is cut: a grid of boxes, with the ranks that hold each.

                dim 1
                0            4            8
       dim 0  0 ┌────────────┬────────────┐
                │ 0, 4       │ 1, 5       │
              4 ├────────────┼────────────┤
                │ 2, 6       │ 3, 7       │
              8 └────────────┴────────────┘

Works from boxes alone, so regular and listed shardings are drawn alike: the edges of all boxes make a
grid, and each of its cells shows who holds the box that it is part of.  Of more than two cut dims the
two most cut are drawn.  Long grids are abbreviated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.format.manifest import Manifest, TensorEntry
from holdfast.layout import Box, Placement, Sharding, chunk, parts_of, whole

Held = tuple[Box, tuple[int, ...]]
"""A box, and the ranks that hold it."""

ROWS, COLUMNS = 8, 6
WIDTH = 88


def held_boxes(manifest: Manifest, tensor: TensorEntry, placement: Placement) -> list[Held]:
    """Every box into which a tensor is cut, with the ranks that hold it."""
    sharding = placement.table.shardings[tensor.sharding]
    if sharding.held is not None:
        return [(box, (rank,)) for rank, box in sharding.held]
    mesh = manifest.layout
    counts = [parts_of(mesh, cut.axes) for cut in sharding.cuts]
    found: list[Held] = []
    boxes = [whole(tensor.shape)]
    for cut, parts in zip(sharding.cuts, counts):
        boxes = [chunk(box, cut.dim, part, parts) for box in boxes for part in range(parts)]
    for part, box in enumerate(boxes):
        found.append((box, tuple(placement.holders(sharding, part).tolist())))
    return found


def words(sharding: Sharding, manifest: Manifest, num_replicas: int) -> str:
    """A sharding in words."""
    if sharding.held is not None:
        return f"irregular: {len(sharding.held)} fragments, listed one by one"
    sizes = manifest.layout.sizes
    texts = [
        f"dim {c.dim} in {parts_of(manifest.layout, c.axes)} over {' × '.join(c.axes)}"
        for c in sharding.cuts
    ]
    text = ", then each part ".join(texts[:1] + [f"along {t}" for t in texts[1:]])
    text = f"cut along {text}" if texts else "whole"
    text += "".join(
        f"; only on {axis} {', '.join(map(str, at))} of {sizes[axis]}" for axis, at in sharding.on
    )
    if num_replicas > 1:
        text += f"; {num_replicas} replicas of each part" if texts else f"; {num_replicas} replicas"
    return text


def draw(
    held: Sequence[Held], shape: tuple[int, ...], label: Callable[[Sequence[int]], str]
) -> list[str]:
    """Lines of text; `label` writes a list of ranks."""
    filled = [(box, ranks) for box, ranks in held if box.size]
    idle = sorted(r for box, ranks in held if not box.size for r in ranks)
    edges = [
        sorted({0, n, *(e for b, _ in filled for e in (b.start[d], b.stop[d]))})
        for d, n in enumerate(shape)
    ]
    across, down, rest = _dims(edges, len(shape))
    for d in rest:
        filled = [(b, r) for b, r in filled if b.start[d] == 0]
    grid = _Grid(
        filled,
        edges[down] if down is not None else [0, 1],
        down,
        edges[across] if across is not None else [0, 1],
        across,
        label,
    )
    lines = grid.lines()
    lines += [
        f"(cut along dim {d} as well, in {len(edges[d]) - 1}: drawn where it is 0)" for d in rest
    ]
    if idle:
        lines.append(f"(nothing is left for {label(idle)})")
    return lines


def _dims(edges: list[list[int]], num_dims: int) -> tuple[int | None, int | None, list[int]]:
    """Return the dim that is drawn across, the one down, and the cut dims that are not drawn."""
    cut = sorted((d for d in range(num_dims) if len(edges[d]) > 2), key=lambda d: -len(edges[d]))
    rest, drawn = sorted(cut[2:]), sorted(cut[:2])
    if num_dims == 0:
        return None, None, []
    if num_dims == 1:
        return 0, None, []
    for d in range(num_dims):  # an uncut dim makes the picture two-dimensional
        if len(drawn) < 2 and d not in drawn:
            drawn = sorted([*drawn, d])
    return drawn[1], drawn[0], rest


def _kept(count: int, most: int) -> list[int | None]:
    """Indices to draw; None stands for those left out."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


class _Grid:
    """The picture of two dims; either may be None where a tensor lacks it."""

    def __init__(
        self,
        held: list[Held],
        rows: list[int],
        down: int | None,
        columns: list[int],
        across: int | None,
        label: Callable[[Sequence[int]], str],
    ) -> None:
        self.held = held
        self.row_edges, self.down = rows, down
        self.column_edges, self.across = columns, across
        self.rows = _kept(len(rows) - 1, ROWS)
        for most in range(COLUMNS, 2, -1):
            self.columns = _kept(len(columns) - 1, most)
            self.cells = [[self._cell(r, c, label) for c in self.columns] for r in self.rows]
            self.widths = [self._width(i) for i in range(len(self.columns))]
            if sum(self.widths) <= WIDTH:
                break
        self.margin = 0
        if down is not None:
            self.margin = len(f"dim {down}  ") + max(len(f"{e:,}") for e in rows) + 1

    def _cell(
        self, row: int | None, column: int | None, label: Callable[[Sequence[int]], str]
    ) -> str:
        if row is None or column is None:
            return "⋯" if column is None and row is not None else "⋮" if column is not None else "⋱"
        at_row, at_column = self.row_edges[row], self.column_edges[column]
        ranks = sorted(
            r
            for box, holders in self.held
            if _spans(box, self.down, at_row) and _spans(box, self.across, at_column)
            for r in holders
        )
        return label(ranks)

    def _width(self, i: int) -> int:
        longest = max(len(row[i]) for row in self.cells)
        column = self.columns[i]
        if column is None:
            return 3
        number = len(f"{self.column_edges[column]:,}") if self.across is not None else 0
        room = 12 if len(self.columns) < 4 else 8
        return max(longest + 2, number + 1, room)

    def lines(self) -> list[str]:
        out = self._top_labels() if self.across is not None else []
        for i, row in enumerate(self.cells):
            out.append(self._label(i) + self._rule(*("┌┬┐" if i == 0 else "├┼┤")))
            texts = "│".join(f" {t}".ljust(w) for t, w in zip(row, self.widths))
            out.append(" " * self.margin + f"│{texts}│")
        out.append(self._last_label() + self._rule(*"└┴┘"))
        return out

    def _rule(self, left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * w for w in self.widths) + right

    def _label(self, i: int) -> str:
        row = self.rows[i]
        edge = "" if row is None or self.down is None else f"{self.row_edges[row]:,}"
        name = f"dim {self.down}" if i == 0 and self.down is not None else ""
        return self._join(name, edge)

    def _last_label(self) -> str:
        return self._join("", f"{self.row_edges[-1]:,}" if self.down is not None else "")

    def _join(self, name: str, edge: str) -> str:
        return name + edge.rjust(self.margin - 1 - len(name)) + " " if self.margin else ""

    def _top_labels(self) -> list[str]:
        line = ""
        at = self.margin
        for column, width in zip(self.columns, self.widths):
            edge = "" if column is None else f"{self.column_edges[column]:,}"
            line = line.ljust(at) + edge
            at += width + 1
        line = line.ljust(at) + f"{self.column_edges[-1]:,}"
        return [" " * self.margin + f"dim {self.across}", line]


def _spans(box: Box, dim: int | None, at: int) -> bool:
    return dim is None or box.start[dim] <= at < box.stop[dim]
