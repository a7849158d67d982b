"""Names: what DCP calls `optim.state.<parameter>.exp_avg`, holdfast calls `optim.<parameter>.exp_avg`.

DCP flattens a nested dict and remembers the path of each flat name.  By these paths a rank names its own
tensors (`StateDictNames.of`), and the coordinator makes extras of all other values
(`StateDictNames.extras`): groups and states of optimizers, nested dicts that refer to the tensors in them.
`listing` goes the other way, for any checkpoint: it puts the nested dict together and lets DCP flatten it.

What was saved in another form than `listing` would give it (a dict in a dict, flattened optimizers, names
of a planner of one's own) is listed besides, in the extra `dcp.names`, so that `dcp.load` finds every name
that `dcp.save` had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from holdfast.base.errors import UsageError
from holdfast.core.format import extras
from holdfast.core.format.extras import DCP_NAMES
from holdfast.core.format.manifest import TensorEntry
from holdfast.formats.read.dcptree import (
    Leaf,
    Path,
    alike,
    hyper_of,
    is_extra_state,
    put_at,
    spelled,
    state_of,
    with_lists,
)
from holdfast.integrations.dcp.values import StandIn, encode, listed, named

OWN = (("common",), ("engine",))
"""Paths in an optimizer at which holdfast keeps values of its own."""

Listing = dict[str, tuple[Path, Any]]
"""The path and the value of each flat name, or a stand-in for a tensor."""


def paths_of(planner_data: Any) -> dict[str, Path]:
    """The paths that a planner remembers by flat name; none if it remembers something else."""
    found = planner_data if isinstance(planner_data, Mapping) else {}
    sound = all(
        isinstance(k, str) and isinstance(v, tuple) and v and k == ".".join(map(str, v))
        for k, v in found.items()
    )
    return dict(found) if sound else {}


class StateDictNames:
    """The names of what is in one state dict."""

    def __init__(self, planner_data: Any) -> None:
        self.paths = paths_of(planner_data)
        self._inner = _unwrapped(self.paths)
        self.optimizers = _optimizers(self._inner.values())

    def path(self, flat: str) -> Path:
        """The path of a flat name."""
        return self.paths.get(flat, (flat,))

    def inner(self, flat: str) -> Path:
        """The path without the one key that all is under (`{"app": AppState()}`), if there is one."""
        return self._inner.get(flat, (flat,))

    def of(self, flat: str) -> tuple[str, str]:
        """The name of a tensor, and what it is: `tensor`, or the state of an optimizer that it is."""
        path = self.inner(flat)
        found = state_of(path)
        if found is None or found[0] not in self.optimizers:
            return spelled(path), "tensor"
        key, param, what = found
        return f"{key}.{_param(param)}.{what}", what

    def extras(self, values: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
        """Extras of all values that are no tensors.  Both by flat name; values as JSON trees."""
        leaves = dict(values)
        held: list[str] = []
        for flat in tensors:
            hyper = hyper_of(self.inner(flat))
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
    """Keys under which lie the groups of an optimizer, whole."""
    numbered: dict[str, dict[int, set[str]]] = {}
    flat = set()
    for path in paths:
        match hyper_of(path):
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
    """One extra for each optimizer; what lies deeper in a state, or beside states and groups, is one by
    itself."""
    numbered: dict[str, dict[int, dict[str, Any]]] = {key: {} for key in keys}
    by_param: dict[str, dict[str, dict[str, Any]]] = {key: {} for key in keys}
    states: dict[str, dict[str, dict[str, Any]]] = {key: {} for key in keys}
    found: dict[str, Any] = {}
    for path, tree in leaves.items():
        match hyper_of(path) or state_of(path):
            case (key, int(i), what):
                numbered[key].setdefault(i, {})[what] = tree
            case (key, param, what) if hyper_of(path):
                by_param[key].setdefault(param, {})[what] = tree
            case (key, param, what):
                states[key].setdefault(_param(param), {})[what] = tree
            case _:
                if path[1:] in OWN:
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
        body = {"groups": groups or alike(by_param[key]), "state": states[key]}
        found[key] = {"$optimizer": body}
    return found


# -- the other way --------------------------------------------------------------------------------


def listing(
    tensors: Iterable[TensorEntry], aliases: Mapping[str, str], trees: Mapping[str, Any]
) -> Listing:
    """All that a checkpoint holds, as DCP would list it.  `trees`: extras."""
    stand_ins = {t.name: named(t.name, t.dtype, t.shape) for t in tensors}
    stand_ins |= {alias: stand_ins[name] for alias, name in aliases.items()}
    trees = dict(trees)
    table = trees.pop(DCP_NAMES, {})
    if "tensors" in table:
        found: Listing = {
            flat: (tuple(path), stand_ins[name]) for flat, (path, name) in table["tensors"].items()
        }
        return found | {
            flat: (tuple(path), listed(tree, stand_ins))
            for flat, (path, tree) in table["values"].items()
        }
    states = {t.name: t.state for t in tensors}
    try:
        flat, paths = flatten_state_dict(_nested(stand_ins, states, aliases, trees))
    except ValueError:  # DCP would name two things alike
        flat = {**stand_ins, **{k: listed(v, stand_ins) for k, v in trees.items()}}
        paths = {name: (name,) for name in flat}
    paths |= {name: tuple(path) for name, path in table.get("paths", {}).items()}
    return {name: (paths[name], value) for name, value in flat.items()}


def _nested(
    stand_ins: dict[str, StandIn],
    states: dict[str, str],
    aliases: Mapping[str, str],
    trees: Mapping[str, Any],
) -> dict[str, Any]:
    """The dict that was saved, as `get_state_dict` would have given it."""
    out: dict[str, Any] = {}
    optimizers = {k for k, v in trees.items() if isinstance(v, dict) and "$optimizer" in v}
    for key, tree in trees.items():
        if key in optimizers:
            out[key] = _optimizer(tree["$optimizer"], stand_ins)
        else:
            _place(out, key, listed(tree, stand_ins))
    inside = {name for tree in trees.values() for name in extras.referred(tree)}
    for name, stand_in in stand_ins.items():
        key, _, rest = name.partition(".")
        state = states[aliases.get(name, name)]
        if name in inside:
            continue
        if key in optimizers and rest.endswith(f".{state}"):
            if name not in aliases:  # torch has states under the first name of a tied parameter
                of = out[key]["state"].setdefault(_number(rest[: -len(state) - 1]), {})
                of[state] = stand_in
        else:
            _place(out, name, stand_in)
    return out


def _place(out: dict[str, Any], name: str, value: Any) -> None:
    key, _, rest = name.partition(".")
    below = out.setdefault(key, {}) if rest else None
    if isinstance(below, dict):
        below[rest] = value
    else:
        out[name] = value


def _number(param: str) -> Any:
    """The number of a parameter that has no name, else its name."""
    number = param.removeprefix("state.")
    return int(number) if number != param and number.isdecimal() else param


def _optimizer(body: Any, stand_ins: dict[str, StandIn]) -> dict[str, Any]:
    groups = [
        {**listed(g["hyper"], stand_ins), "params": [_number(p) for p in g["params"]]}
        for g in body["groups"]
    ]
    state = {_number(p): listed(of, stand_ins) for p, of in body["state"].items()}
    return {"state": state, "param_groups": groups}


def table_for(
    expected: Listing, tensors: Iterable[TensorEntry], trees: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the extra with which `listing` gives what was saved; None if it does so without.

    `expected`: the path of each flat name, and the stand-in of a tensor, or the tree of a value.
    """
    got = listing(tensors, {}, trees)
    same = got.keys() == expected.keys() and all(
        _alike(value, got[flat][1], flat) for flat, (_, value) in expected.items()
    )
    if same:
        paths = {f: list(path) for f, (path, _) in expected.items() if path != got[f][0]}
        return {"paths": paths} if paths else None
    tables: dict[str, Any] = {"tensors": {}, "values": {}}
    for flat, (path, value) in expected.items():
        if isinstance(value, StandIn):
            tables["tensors"][flat] = [list(path), value.saved_name]
        else:
            tables["values"][flat] = [list(path), value]
    return tables


def _alike(expected: Any, got: Any, flat: str) -> bool:
    if isinstance(expected, StandIn):
        return isinstance(got, StandIn) and expected.saved_name == got.saved_name
    if isinstance(got, StandIn):
        return False
    try:
        return bool(encode(got, flat) == expected)
    except UsageError:  # there are tensors in it, which were saved by themselves
        return False
