"""Extras: whatever can be saved comes back as it was, types included."""

from __future__ import annotations

import io
import math
from collections import Counter, OrderedDict, deque

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.core.format.extras import MAX_EXTRAS_DEPTH, decode, encode, memory_file
from holdfast.errors import FormatError, UsageError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
NUMPYS = hnp.scalar_dtypes().flatmap(hnp.from_dtype) | st.binary(max_size=5).map(np.bytes_)
"""Scalars of all kinds that numpy has, empty ones and those that end with zeros among them."""
NUMPYS |= st.sampled_from([np.datetime64("NaT"), np.timedelta64("NaT", "ns"), np.longdouble("0.1")])
FILES = st.builds(memory_file, st.binary(max_size=5), st.integers(0, 9))
DTYPES = hnp.scalar_dtypes().filter(lambda d: d.kind in "biufc" and d.itemsize <= 16)
ARRAYS = DTYPES.flatmap(
    lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
)
KEYS = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3)
KEYS |= st.tuples(st.integers(), st.text(max_size=2)) | st.binary(max_size=3).map(np.bytes_)
SETS = st.frozensets(st.integers() | st.text(max_size=2), max_size=3)
KEYS |= SETS | st.tuples(st.integers(), SETS) | st.frozensets(SETS, max_size=2)


def containers(inner):
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda v: deque(v, maxlen=5))
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(st.text(max_size=2), st.integers(), max_size=3).map(Counter)
        | st.sets(st.integers() | st.text(max_size=2), max_size=3)
        | st.sets(KEYS, max_size=3)
        | SETS
    )


VALUES = st.recursive(SCALARS | ARRAYS | FILES | NUMPYS, containers, max_leaves=10)


def same(a, b) -> bool:
    """Equal in value and type, NaN and the sign of zero included; a text of numpy's is a text."""
    if isinstance(b, np.str_):
        return type(a) is str and a == str(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, np.bytes_):
        return bytes.__eq__(a, b) and len(a) == len(b)
    if isinstance(a, np.generic) and not isinstance(a, np.longdouble | np.clongdouble):
        return a.dtype == b.dtype and bytes(a.data) == bytes(b.data)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, io.BytesIO):
        return (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items())
        )
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@settings(max_examples=120, deadline=None)
@given(VALUES)
def test_comes_back_as_it_was(value) -> None:
    text = msgspec.json.encode(encode(value))
    assert same(decode(msgspec.json.decode(text)), value)


@settings(max_examples=40, deadline=None)
@given(VALUES)
def test_same_value_same_bytes(value) -> None:
    """Ranks compare extras by digest."""
    assert msgspec.json.encode(encode(value)) == msgspec.json.encode(encode(value))


def test_sets_of_sets_have_one_order() -> None:
    """Sets of the same members may go through them in another order."""
    a, b, c = frozenset([0, 8]), frozenset([8, 0]), frozenset([4])
    assert repr(a) < repr(c) < repr(b)
    for one, other in (({a, c}, {b, c}), ({(a, 1), (c, 2)}, {(b, 1), (c, 2)})):
        assert msgspec.json.encode(encode(one)) == msgspec.json.encode(encode(other))


@pytest.mark.parametrize(
    ("tree", "value"),
    [
        ({"$dict": [[{"$set": [1, 2]}, 0.5]]}, {frozenset({1, 2}): 0.5}),
        ({"$set": [{"$set": [1]}, 3]}, {frozenset({1}), 3}),
        ({"$counter": [[{"$tuple": [1, {"$set": [2]}]}, 4]]}, Counter({(1, frozenset({2})): 4})),
        ({"$set": [1, 2]}, {1, 2}),
    ],
)
def test_a_set_where_only_a_frozenset_can_be(tree, value) -> None:
    """So they were written when there was one tag for both."""
    assert same(decode(tree), value)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                [
                    "$tuple",
                    "$int",
                    "$float",
                    "$complex",
                    "$bytes",
                    "$bytesio",
                    "$scalar",
                    "$array",
                    "$deque",
                    "$set",
                    "$frozenset",
                    "$dict",
                    "$ordered",
                    "$counter",
                    "$x",
                ]
            ),
            inner,
            min_size=1,
            max_size=1,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(JUNK)
def test_junk_is_decoded_or_refused(tree) -> None:
    try:
        decode(tree)
    except FormatError:
        pass


@pytest.mark.parametrize(
    "value", [np.int16(3), np.float64(0.1), np.bool_(True), np.complex64(1j), np.datetime64(5, "s")]
)
def test_numpy_scalars(value) -> None:
    back = decode(msgspec.json.decode(msgspec.json.encode(encode(value))))
    assert (type(back), back) == (type(value), value)


class Apart(str):
    """A text that equals itself alone."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class Row(list):  # type: ignore[type-arg]
    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"of": {Apart("a"): 1, "a": 2, 3: 4}}, "two keys that differ, and would be read as one"),
        ({"of": {Apart("a"), "a"}}, "two keys that differ"),
        ({"of": {("x", Apart("a")): 1, ("x", "a"): 2}}, "two keys that differ"),
        ({"of": {Row([1]): 1}}, "a key that cannot be saved: unhashable"),
        ({"of": {Row([1])}}, "a key that c.* unhashable"),
    ],
)
def test_keys_that_would_not_come_back_are_refused(value, why) -> None:
    with pytest.raises(UsageError, match=f"^of key: {why}"):
        encode(value)


def test_numbers_of_dtypes_that_another_package_makes_are_refused() -> None:
    """No numpy knows their names before it is imported."""
    others = pytest.importorskip("ml_dtypes")
    for kind in (others.float8_e5m2, others.bfloat16, others.int4):
        for value in (kind(1), np.ones(2, kind)):
            with pytest.raises(UsageError, match=r"^a\[0\]: a .* cannot be saved"):
                encode({"a": [value]})


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(UsageError, match=r"a\.b\[1\]: a builtins\.object"):
        encode({"a": {"b": [1, object()]}})


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("caf\udce9", "value"),
        ({"a": [{"b": ("x", "\ud800x")}]}, r"a\[0\]\.b\[1\]"),
        ({"a": {"caf\udce9": 1}}, "a key"),
        ({"a": {("caf\udce9", 1): 1}}, r"a key\[0\]"),
        ({"caf\udce9"}, r"\[0\]"),
    ],
)
def test_texts_that_no_manifest_can_have_are_named(value, path) -> None:
    with pytest.raises(UsageError, match=rf"^{path}: a text with half of a surrogate pair") as e:
        encode(value, utf8=True)
    str(e.value).encode()
    assert encode(value)  # of a checkpoint that is only looked at


@pytest.mark.parametrize("kind", ["closed", "attributes", "subclass"])
def test_a_file_in_memory_that_is_more_than_bytes_is_refused(kind: str) -> None:
    file = type("Log", (io.BytesIO,), {})(b"x") if kind == "subclass" else io.BytesIO(b"x")
    if kind == "closed":
        file.close()
    if kind == "attributes":
        file.name = "losses"
    with pytest.raises(UsageError, match=f"^log: a .*{'Log' if kind == 'subclass' else kind}"):
        encode({"log": file})


def test_a_file_in_memory_has_no_place_in_a_set_or_a_key() -> None:
    """What comes back is another object, which nobody would find."""
    for value in ({io.BytesIO(b"x")}, frozenset([io.BytesIO()]), {io.BytesIO(b"x"): 1}):
        with pytest.raises(UsageError, match="equals itself alone"):
            encode({"in": value})


def test_a_structure_that_holds_itself_is_refused() -> None:
    loop: list = []
    loop.append(loop)
    with pytest.raises(UsageError, match="nested deeper"):
        encode(loop)


def test_as_deep_as_allowed_can_be_read_again() -> None:
    value: tuple = ()
    for _ in range(MAX_EXTRAS_DEPTH - 1):
        value = (value,)
    assert decode(msgspec.json.decode(msgspec.json.encode(encode(value)))) == value
