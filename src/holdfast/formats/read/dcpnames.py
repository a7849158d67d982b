"""Names for values that DCP saves: its `optim.state.<parameter>.exp_avg` is `optim.<parameter>.exp_avg`.

DCP flattens a nested dict and remembers the path of each flat name.  By these paths a rank names its own
tensors (`StateDictNames.of`), and the coordinator makes extras of all other values
(`StateDictNames.extras`): groups and states of optimizers, nested dicts that refer to the tensors in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.base.errors import UsageError
from holdfast.core.format import extras
from holdfast.core.format.extras import DCP_NAMES
from holdfast.formats.read.dcptree import (
    Leaf,
    Path,
    group_by_hyper,
    hyper_path,
    is_extra_state,
    put_at,
    spelled,
    state_path,
    with_lists,
)

_OWN = (("common",), ("engine",))
"""Paths in an optimizer at which holdfast keeps values of its own."""


def paths_of(planner_data: Any) -> dict[str, Path]:
    """A planner's paths by flat name; empty if its data is something else."""
    found = planner_data if isinstance(planner_data, Mapping) else {}
    sound = all(
        isinstance(k, str) and isinstance(v, tuple) and v and k == ".".join(map(str, v))
        for k, v in found.items()
    )
    return dict(found) if sound else {}


class StateDictNames:
    """The names of the values of one state dict."""

    LISTED = DCP_NAMES
    """Name of the extra with DCP's names that do not follow from holdfast's."""

    def __init__(self, planner_data: Any) -> None:
        self.paths = paths_of(planner_data)
        self._inner = _unwrapped(self.paths)
        self.optimizers = _optimizers(self._inner.values())

    def path(self, flat: str) -> Path:
        """The path of a flat name."""
        return self.paths.get(flat, (flat,))

    def inner(self, flat: str) -> Path:
        """The path without a single outermost key (`{"app": AppState()}`)."""
        return self._inner.get(flat, (flat,))

    def of(self, flat: str) -> tuple[str, str]:
        """The name of a tensor, and its kind: `tensor`, or the name of an optimizer state."""
        path = self.inner(flat)
        found = state_path(path)
        if found is None or found[0] not in self.optimizers:
            return spelled(path), "tensor"
        key, param, what = found
        return f"{key}.{_param(param)}.{what}", what

    def extras(self, values: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
        """Extras for `values`, which are JSON trees by flat name; `tensors`: flat names."""
        leaves = dict(values)
        held: list[str] = []
        for flat in tensors:
            hyper = hyper_path(self.inner(flat))
            if hyper is not None and hyper[0] in self.optimizers:
                leaves[flat] = {"$at": self.of(flat)[0]}
            else:
                held.append(flat)
        own = {f: v for f, v in leaves.items() if self.inner(f)[0] in self.optimizers}
        found = _optimizer_extras(self.optimizers, {self.inner(f): v for f, v in own.items()})
        rest = {self.inner(f): v for f, v in leaves.items() if f not in own}
        apart = {
            ".".join(map(str, p)): v for p, v in rest.items() if len(p) == 1 or is_extra_state(p)
        }
        inside = {p: v for p, v in rest.items() if len(p) > 1 and not is_extra_state(p)}
        keys = {path[0] for path in inside}
        roots: dict[Any, Any] = {}
        for path, tree in inside.items():
            put_at(roots, path, Leaf(tree))
        for flat in held:
            if (path := self.inner(flat))[0] in keys and len(path) > 1:
                put_at(roots, path, Leaf({"$at": self.of(flat)[0]}))
        nested = {
            k: extras.encode(with_lists(v), lambda leaf, _: leaf.json) for k, v in roots.items()
        }
        return found | apart | nested


def _unwrapped(paths: dict[str, Path]) -> dict[str, Path]:
    if len({path[0] for path in paths.values()}) == 1 and all(len(p) > 1 for p in paths.values()):
        inner = {flat: path[1:] for flat, path in paths.items()}
        if _optimizers(inner.values()):
            return inner
    return paths


def _optimizers(paths: Iterable[Path]) -> set[str]:
    """Keys of optimizers, whose groups are whole values."""
    numbered: dict[str, dict[int, set[str]]] = {}
    flat = set()
    for path in paths:
        match hyper_path(path):
            case (key, int(i), what):
                numbered.setdefault(key, {}).setdefault(i, set()).add(what)
            case (key, _, _):
                flat.add(key)
    whole = {key for key, of in numbered.items() if all("params" in g for g in of.values())}
    return whole | (flat - numbered.keys())


def _param(name: str) -> str:
    """The name of a parameter; `optimizer.state_dict()` has numbers."""
    return f"state.{name}" if name.isdecimal() else name


def _optimizer_extras(keys: set[str], leaves: dict[Path, Any]) -> dict[str, Any]:
    """One extra per optimizer, and one for each value deeper in a state, or beside states and groups."""
    numbered: dict[str, dict[int, dict[str, Any]]] = {key: {} for key in keys}
    by_param: dict[str, dict[str, dict[str, Any]]] = {key: {} for key in keys}
    states: dict[str, dict[str, dict[str, Any]]] = {key: {} for key in keys}
    found: dict[str, Any] = {}
    for path, tree in leaves.items():
        match hyper_path(path) or state_path(path):
            case (key, int(i), what):
                numbered[key].setdefault(i, {})[what] = tree
            case (key, param, what) if hyper_path(path):
                by_param[key].setdefault(param, {})[what] = tree
            case (key, param, what):
                states[key].setdefault(_param(param), {})[what] = tree
            case _:
                if path[1:] in _OWN:
                    raise UsageError(
                        f"{spelled(path)}: holdfast has values of its own under this name",
                        hint="give it another one",
                    )
                found[spelled(path)] = tree
    for key in keys:
        groups = [
            {
                "params": [_param(str(p)) for p in group.get("params", [])],
                "hyper": {k: v for k, v in group.items() if k != "params"},
            }
            for _, group in sorted(numbered[key].items())
        ]
        body = {"groups": groups or group_by_hyper(by_param[key]), "state": states[key]}
        found[key] = {"$optimizer": body}
    return found
