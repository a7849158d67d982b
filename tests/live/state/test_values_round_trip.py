"""Whatever a save accepts, a load gives back: plain values of all kinds, with tensors among them."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import holdfast
from holdfast.core.codec.digest import hexdigest
from holdfast.errors import FormatError, UsageError

NUMBERS = st.integers() | st.floats() | st.complex_numbers() | st.booleans() | st.none()
TEXTS = st.text(max_size=3) | st.binary(max_size=3) | st.binary(max_size=3).map(np.bytes_)
NUMPYS = hnp.scalar_dtypes().flatmap(hnp.from_dtype)
ARRAYS = hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_side=2))
TENSORS = st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool]).flatmap(
    lambda dtype: st.sampled_from([(), (2,), (0, 3)]).map(lambda shape: torch.ones(shape).to(dtype))
)
KEYS = NUMBERS | TEXTS | NUMPYS | st.tuples(st.integers(), TEXTS)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items, dicts = st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)
    kinds = (items.map(tuple), items.map(deque), dicts.map(OrderedDict), dicts.map(UserDict))
    sets = st.sets(KEYS | TENSORS, max_size=2) | st.frozensets(KEYS, max_size=2)
    return st.one_of(items, dicts, *kinds, sets, st.lists(KEYS, max_size=3).map(Counter))


VALUES = st.recursive(NUMBERS | TEXTS | NUMPYS | ARRAYS | TENSORS, containers, max_leaves=6)
numbers = count()


def emptied(value: Any) -> Any:
    """The same value in memory of its own, with tensors that have other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, Counter):
        return Counter()
    if isinstance(value, Mapping):
        return type(value)((k, emptied(v)) for k, v in value.items())
    if isinstance(value, (list, tuple, deque)):
        return type(value)(map(emptied, value))
    return type(value)() if isinstance(value, set) else value


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Mapping):
        pairs = zip(a.items(), b.items())
        return len(a) == len(b) and all(alike(k, j) and alike(v, w) for (k, v), (j, w) in pairs)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b)
    return repr(a) == (repr(str(b)) if isinstance(b, np.str_) else repr(b))


@settings(max_examples=60)
@given(VALUES, st.booleans())
def test_what_is_saved_is_loaded(value: Any, is_whole: bool) -> None:
    """As a value of the state itself, and inside of one."""
    wrapped = (lambda v: v) if is_whole else (lambda v: {"v": [v]})
    url = f"memory://values-{next(numbers)}"
    live = {"w": torch.zeros(2), "s": wrapped(emptied(value))}
    try:
        holdfast.save(url, {"w": torch.ones(2), "s": wrapped(value)}, step=1)
    except UsageError:
        assert holdfast.steps(url) == []
        return
    holdfast.load(url, live)
    assert alike(live["s"], wrapped(value)) and live["w"].tolist() == [1, 1]


MALFORMED: dict[str, Any] = {
    "scalar": {"$scalar": ["f4", ""]},
    "dtype of a scalar": {"$scalar": ["of others", "AAAA"]},
    "array": {"$array": ["f4", [2, 2], "AAAA"]},
    "tag": {"$nothing": 1},
    "tensor": {"$tensor": ["float32", [3], "AAAAAA=="]},
    "dtype": {"$dtype": "float7"},
    "key": {"$dict": [[{"$dict": []}, 1]]},
    "object": {"$object": {"$int": "x"}},
    "optimizer": {"$optimizer": {"groups": 1}},
    "group": {"$optimizer": {"groups": [{"params": ["a"], "hyper": 1}]}},
}


@pytest.mark.parametrize("where", ["s", "sched"])
@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_extra_is_told_by_its_key(tmp_path: Path, what: str, where: str) -> None:
    """Before anything is changed, and by no error of Python's."""
    optim = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    sched = torch.optim.lr_scheduler.StepLR(optim, 3)
    state = {"w": torch.ones(2), "s": {"a": 1}, "sched": sched}
    holdfast.save(tmp_path, state, step=1)
    (path,) = tmp_path.glob("steps/*/manifest.json")
    manifest = json.loads(path.read_bytes())
    del manifest["digest"]
    inner = manifest["extras"][where]
    inner["a"] = [MALFORMED[what]]
    body = json.dumps(manifest, separators=(",", ":")).encode()[:-1]
    path.write_bytes(body + b',"digest":"' + hexdigest(body).encode() + b'"}')
    live = {**state, "w": torch.zeros(2), "s": {"a": 0}}
    with pytest.raises(FormatError, match=f"^{where}: "):
        holdfast.load(tmp_path, live)
    assert live["w"].tolist() == [0, 0] and live["s"] == {"a": 0}


@pytest.mark.parametrize("kind", ["PCG64", "SFC64", "Philox"])
@pytest.mark.parametrize("live", ["same", "usual"])
def test_numpys_generator_of_another_kind(kind: str, live: str) -> None:
    usual = np.random.MT19937(3)
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(5))
        np.random.standard_normal()
        holdfast.save(f"memory://{kind}-{live}", {"rng": holdfast.Rng()}, step=1)
        expected = np.random.standard_normal(3).tolist()
        if live == "usual":
            np.random.set_bit_generator(usual)
        holdfast.load(f"memory://{kind}-{live}", {"rng": holdfast.Rng()})
        assert np.random.standard_normal(3).tolist() == expected
        np.random.set_bit_generator(np.random.MT19937(3))
        holdfast.save(f"memory://usual-{kind}-{live}", {"rng": holdfast.Rng()}, step=1)
        expected = np.random.standard_normal(3).tolist()
        np.random.set_bit_generator(getattr(np.random, kind)(5))
        holdfast.load(f"memory://usual-{kind}-{live}", {"rng": holdfast.Rng()})
        assert np.random.standard_normal(3).tolist() == expected
    finally:
        np.random.set_bit_generator(np.random.MT19937())
