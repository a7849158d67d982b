"""Rebuilding the nested state from a DCP directory, which has flat names.

DCP's planner stores the path of each flat name in the nested dict.  By these paths optimizers get their
groups and objects their `state_dict`, and the wrapping by `get_state_dict` or an application (`{"app":
AppState()}`) is removed.  Optimizers are recognised in both of torch's forms:

    optim.state.<parameter>.<state>, optim.param_groups.<i>.<name>           # get_state_dict
    optim, state.<parameter>.<state>; optim, param_groups.<parameter>.<name>  # flatten_optimizer_state_dict

and in the first form also with numbers for parameters, as in `optimizer.state_dict()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from holdfast.core.format import extras
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.store import Store, read_range
from holdfast.formats.read.byindex import parameter_shapes, proved_names, stated_names
from holdfast.formats.read.foreign import Foreign
from holdfast.formats.read.sections import row_major_place
from holdfast.formats.read.unpickle import UnknownInstance

Path = tuple[Any, ...]
_Groups = dict[str, list[dict[str, Any]]]


def arrange_tree(
    store: Store, tensors: list[Foreign], values: dict[str, Any], meta: UnknownInstance
) -> tuple[list[Foreign], dict[str, Any]]:
    """Return tensors and extras under holdfast's names.  `values`: encoded, by flat name."""
    tree = _Tree(tensors, values, _paths(meta))
    tree.unwrap()
    tree.take_hyper_tensors(store)
    groups = tree.take_groups()
    tree.name_numbers(groups)
    tree.name_states(groups)
    tree.name_weights(groups)
    tree.nest()
    return tree.tensors, tree.values


def _paths(meta: UnknownInstance) -> dict[str, Path]:
    """Path of each flat name in the saved dict: (key, key or index, ...)."""
    found = meta.get("planner_data")
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if isinstance(k, str) and _is_path(v)}


def _is_path(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else ()
    return bool(parts) and all(isinstance(p, (str, int)) for p in parts)


@dataclass(frozen=True)
class Leaf:
    """An encoded value."""

    json: Any


class _Tree:
    """Tensors and values by name, with their paths in the saved dict."""

    def __init__(
        self, tensors: list[Foreign], values: dict[str, Any], paths: dict[str, Path]
    ) -> None:
        self.tensors = tensors
        self.values = dict(values)
        names = {n: (n,) for n in (*values, *(t.name for t in tensors))}
        self._path: dict[str, Path] = {n: p for n, p in paths.items() if n in names}
        """Path in the saved dict of each flat name, in saved order; names without one are last."""
        self._path |= {n: p for n, p in names.items() if n not in paths}

    def unwrap(self) -> None:
        """Remove a single outermost key if there are optimizers below it."""
        tops = {path[0] for path in self._path.values()}
        if len(tops) != 1 or not all(len(path) > 1 for path in self._path.values()):
            return
        inner = {name: path[1:] for name, path in self._path.items()}
        if not any(hyper_path(path) for path in inner.values()):
            return
        new = {name: ".".join(map(str, path)) for name, path in inner.items()}
        self.tensors = [replace(t, name=new[t.name]) for t in self.tensors]
        self.values = {new[name]: value for name, value in self.values.items()}
        self._path = {new[name]: path for name, path in inner.items()}

    def take_hyper_tensors(self, store: Store) -> None:
        """Replace hyper-parameters that are tensors by values that refer to them.

        The flattened form has a group's tensor once per parameter: equal tensors are merged.
        """
        kept: list[Foreign] = []
        known: dict[Any, str] = {}
        for t in self.tensors:
            path = self._path[t.name]
            found = hyper_path(path)
            if found is None:
                kept.append(t)
                continue
            key, number, what = found
            same = (key, what, number if isinstance(number, int) else _content(store, t))
            if same not in known:
                if not isinstance(number, int):
                    number = sum(k[:2] == same[:2] for k in known)
                known[same] = f"{key}.param_groups[{number}].{what}"
                kept.append(replace(t, name=known[same]))
                self._path[known[same]] = path
            self.values[t.name] = {"$at": known[same]}
        self.tensors = kept

    def take_groups(self) -> _Groups:
        """Return optimizers' groups by key; the values of each optimizer become one extra."""
        numbered: dict[str, dict[int, dict[str, Any]]] = {}
        named: dict[str, dict[str, dict[str, Any]]] = {}
        for name, value in self.values.items():
            match hyper_path(self._path[name]):
                case (key, int(i), what):
                    numbered.setdefault(key, {}).setdefault(i, {})[what] = value
                case (key, str(param), what):
                    named.setdefault(key, {}).setdefault(param, {})[what] = value
        groups = {
            key: [
                {"params": g["params"], "hyper": {k: v for k, v in g.items() if k != "params"}}
                for _, g in sorted(of.items())
            ]
            for key, of in numbered.items()
            if all(isinstance(g.get("params"), list) for g in of.values())
        }
        groups |= {key: group_by_hyper(of) for key, of in named.items() if key not in numbered}
        for key, found in groups.items():
            self._drop(lambda p, key=key: (hyper_path(p) or ("",))[0] == key)
            states: dict[str, dict[str, Any]] = {}
            for name in [n for n in self.values if (state_path(self._path[n]) or ("",))[0] == key]:
                _, param, what = state_path(self._path[name]) or ("", "", "")
                states.setdefault(param, {})[what] = self.values.pop(name)
            self._put(key, {"$optimizer": {"groups": found, "state": states}})
        return groups

    def name_numbers(self, groups: _Groups) -> None:
        """Replace numbers of parameters by names if stated or proved, else by `state.<number>`."""
        for key, found in groups.items():
            numbers = [p for g in found for p in g["params"]]
            if not all(type(p) is int for p in numbers):
                continue
            known = stated_names([{"params": g["params"], **g["hyper"]} for g in found])
            known = known or self._proved(key, [g["params"] for g in found]) or {}
            names = {str(n): known.get(n, f"state.{n}") for n in numbers}
            for group in found:
                group["params"] = [names[str(p)] for p in group["params"]]
                group["hyper"].pop("param_names", None)
            body = self.values[key]["$optimizer"]
            body["state"] = {names.get(p, f"state.{p}"): s for p, s in body["state"].items()}
            for t in self.tensors:
                match self._path[t.name]:
                    case (k, "state", str(p), str(what)) if k == key:
                        self._path[t.name] = (key, "state", names.get(p, f"state.{p}"), what)

    def _proved(self, key: str, groups: list[list[int]]) -> dict[int, str] | None:
        shapes: dict[int, set[tuple[int, ...]]] = {}
        for t in self.tensors:
            state = state_path(self._path[t.name])
            if state and state[0] == key and state[1].isdecimal() and t.shape:
                shapes.setdefault(int(state[1]), set()).add(t.shape)
        by_name = {t.name: t for t in self.tensors}
        model = [
            (str(path[1]), by_name[n].dtype, by_name[n].shape)
            for n, path in self._path.items()
            if n in by_name and path[0] == "model" and len(path) == 2
        ]
        one = {n: next(iter(s)) for n, s in shapes.items() if len(s) == 1}
        return proved_names(groups, one, parameter_shapes(model))

    def name_states(self, groups: _Groups) -> None:
        """Rename `<key>.state.<parameter>.<state>` to `<key>.<parameter>.<state>`."""
        for i, t in enumerate(self.tensors):
            found = state_path(self._path[t.name])
            if found and found[0] in groups:
                self._rename(i, ".".join(found), (".".join(found),), found[2])

    def name_weights(self, groups: _Groups) -> None:
        """Rename weights at the top, beside their optimizer, to `model.<name>`."""
        tops = {
            t.name for t in self.tensors if len(self._path[t.name]) == 1 and t.state == "tensor"
        }
        trained = {p for g in groups.values() for one in g for p in one["params"]}
        if not trained or not trained <= tops:
            return
        for i, t in enumerate(self.tensors):
            if t.name in tops:
                self._rename(i, f"model.{t.name}", (f"model.{t.name}",), t.state)

    def nest(self) -> None:
        """Join the values of an object or dict to one extra, which refers to its tensors by name.

        Extra states of modules (`_extra_state`) keep their names, by which modules load them.
        """
        keys = {
            path[0]
            for name, path in self._path.items()
            if name in self.values and len(path) > 1 and not is_extra_state(path)
        } - set(self.values)
        roots: dict[str, Any] = {}
        for name in [n for n in self.values if self._path[n][0] in keys]:
            if not is_extra_state(self._path[name]):
                put_at(roots, self._path[name], Leaf(self.values.pop(name)))
        for i, t in enumerate(self.tensors):
            path = self._path[t.name]
            if path[0] in keys and len(path) > 1:
                self._rename(i, spelled(path), path, t.state)
                put_at(roots, path, Leaf({"$at": spelled(path)}))
        for key, root in roots.items():
            self._put(key, extras.encode(with_lists(root), lambda leaf, _: leaf.json))

    def _put(self, key: str, value: Any) -> None:
        self.values[key] = value
        self._path[key] = (key,)

    def _drop(self, unwanted: Any) -> None:
        self.values = {n: v for n, v in self.values.items() if not unwanted(self._path[n])}

    def _rename(self, number: int, name: str, path: Path, state: str) -> None:
        self.tensors[number] = replace(self.tensors[number], name=name, state=state)
        self._path[name] = path


def _content(store: Store, t: Foreign) -> Any:
    """A key that equal tensors share: dtype and bytes of a single number, else the tensor's name."""
    if t.shape:
        return t.name
    place = row_major_place(t.parts[0].sources[0])
    return t.dtype, bytes(read_range(store, *place, DTYPES[t.dtype].bytes))


def hyper_path(path: Path) -> tuple[str, int | str, str] | None:
    """(optimizer, number of the group or a parameter, hyper-parameter)."""
    match path:
        case (str(key), "param_groups", int(i), str(what)):
            return key, i, what
    return _flat(path, "param_groups.")


def state_path(path: Path) -> tuple[str, str, str] | None:
    """(optimizer, parameter, state)."""
    match path:
        case (str(key), "state", str(param), str(what)):
            return key, param, what
    return _flat(path, "state.")


def _flat(path: Path, prefix: str) -> tuple[str, str, str] | None:
    match path:
        case (str(key), str(flat)) if flat.startswith(prefix) and flat.count(".") > 1:
            param, _, what = flat.removeprefix(prefix).rpartition(".")
            return key, param, what
    return None


def group_by_hyper(hypers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of the parameters that have the same hyper-parameters."""
    groups: dict[bytes, dict[str, Any]] = {}
    for param, hyper in hypers.items():
        same = msgspec.json.encode(hyper, order="deterministic")
        groups.setdefault(same, {"params": [], "hyper": hyper})["params"].append(param)
    return list(groups.values())


def is_extra_state(path: Path) -> bool:
    return str(path[-1]).endswith("_extra_state")


def spelled(path: Path) -> str:
    """Format a path as in extras: `key.a.b[0]`."""
    return "".join(_steps(path))


def _steps(path: Path) -> Iterator[str]:
    for i, part in enumerate(path):
        yield f"[{part}]" if isinstance(part, int) else f".{part}" if i else part


def put_at(root: dict[Any, Any], path: Path, leaf: Leaf) -> None:
    for part in path[:-1]:
        below = root.setdefault(part, {})
        root = below if isinstance(below, dict) else root
    root[path[-1]] = leaf


def with_lists(node: Any) -> Any:
    """Convert dicts with the keys 0, 1, 2, ... back to lists."""
    if isinstance(node, Leaf):
        return node
    made = {key: with_lists(child) for key, child in node.items()}
    if made and set(made) == set(range(len(made))):
        return [made[i] for i in range(len(made))]
    return made
