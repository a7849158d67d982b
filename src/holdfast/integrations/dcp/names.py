"""The contents of a checkpoint as DCP would list them: `listing` translates our names back to DCP's.

It rebuilds the nested dict that was saved, and lets DCP flatten it.  Names that `listing` would not
reproduce (a dict in a dict, flattened optimizers, names of a custom planner) are stored in the extra
`StateDictNames.LISTED`, so that `dcp.load` finds every name that `dcp.save` had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast import errors
from holdfast.extend import StateDictNames, referred
from holdfast.integrations.dcp.values import StandIn, encode_extra, listed, make_stand_in

(flatten_state_dict,) = errors.need(
    "torch", "torch.distributed.checkpoint._nested_dict", "flatten_state_dict"
)

DcpListing = dict[str, tuple[tuple[Any, ...], Any]]
"""The path and the value of each flat name, or a stand-in for a tensor."""


def listing(
    tensors: Iterable[Any], aliases: Mapping[str, str], trees: Mapping[str, Any]
) -> DcpListing:
    """Return the contents of a checkpoint as DCP would list them.  `trees`: extras."""
    stand_ins = {t.name: make_stand_in(t.name, t.dtype, t.shape) for t in tensors}
    stand_ins |= {alias: stand_ins[name] for alias, name in aliases.items()}
    trees = dict(trees)
    table = trees.pop(StateDictNames.LISTED, {})
    if "tensors" in table:
        found: DcpListing = {
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
    """Return the saved dict, as `get_state_dict` would have given it."""
    out: dict[str, Any] = {}
    optimizers = {k for k, v in trees.items() if isinstance(v, dict) and "$optimizer" in v}
    for key, tree in trees.items():
        if key in optimizers:
            out[key] = _optimizer(tree["$optimizer"], stand_ins)
        else:
            _place(out, key, listed(tree, stand_ins))
    inside = {name for tree in trees.values() for name in referred(tree)}
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
    """Return the name of a parameter, or its number if it has no name."""
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
    expected: DcpListing, tensors: Iterable[Any], trees: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the extra that `listing` needs to reproduce the saved names; None if it needs none.

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
        return bool(encode_extra(got, flat) == expected)
    except errors.UsageError:  # it contains tensors, which were saved separately
        return False
