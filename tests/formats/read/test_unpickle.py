"""Pickles as data: what data needs is understood, everything else refused, and nothing is run."""

from __future__ import annotations

import os
import pickle
import struct
import time
import tracemalloc
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import FormatError
from holdfast.formats.read.unpickle import OpaqueInstance, UnknownInstance, record, unpickle

TABLE = {("collections", "OrderedDict"): lambda *items: dict(*items)}

leaves = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
    | st.text(max_size=300) | st.binary(max_size=300)
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=5)
        | st.sets(st.integers(), max_size=5)
        | st.frozensets(st.text(max_size=3), max_size=5)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(values, st.integers(2, 5))
def test_plain_data_comes_back(value: Any, protocol: int) -> None:
    table = TABLE | {("builtins", "set"): set, ("builtins", "frozenset"): frozenset,
                     ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
                     ("__builtin__", "set"): set, ("__builtin__", "frozenset"): frozenset,
                     ("__builtin__", "bytes"): bytes}  # fmt: skip
    assert unpickle(pickle.dumps(value, protocol), table) == value


def test_shared_and_ordered_values() -> None:
    part = [1, 2]
    value = OrderedDict(a=part, b=part, c=OrderedDict())
    found = unpickle(pickle.dumps(value, 4), TABLE)
    assert found == {"a": part, "b": part, "c": {}}
    assert found["a"] is found["b"]


class Card:
    def __init__(self) -> None:
        self.name = "x"
        self.size = (1, 2)


def test_instances_become_records() -> None:
    found = unpickle(pickle.dumps(Card(), 4), {(__name__, "Card"): record("Card")})
    assert isinstance(found, UnknownInstance) and found.name == "Card"
    assert found.fields == {"name": "x", "size": (1, 2)}
    with pytest.raises(FormatError, match="without 'colour'"):
        found["colour"]


class Hostile:
    def __init__(self, function: Any, *args: Any) -> None:
        self.how = (function, args)

    def __reduce__(self) -> Any:
        return self.how


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nothing_is_run(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "mark"
    for hostile in (
        Hostile(os.system, f"touch {mark}"),
        Hostile(eval, f"open({str(mark)!r}, 'w')"),
        Hostile(exec, f"open({str(mark)!r}, 'w')"),
        Hostile(open, str(mark), "w"),
    ):
        with pytest.raises(FormatError, match="not known to be data"):
            unpickle(pickle.dumps({"a": [1, hostile]}, protocol), TABLE)
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    {
        "empty": b"",
        "stop": b"\x80\x02.",
        "a huge string": b"\x80\x02X\xff\xff\xff\x7fabc.",
        "a huge bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 50) + b"abc.",
        "a negative size": b"\x80\x02\x8b\xff\xff\xff\xff.",
        "a mark as result": b"\x80\x02(.",
        "a memo that is not there": b"\x80\x02h\x07.",
        "an unhashable key": b"\x80\x02}]Ns.",
        "an extension": b"\x80\x02\x82\x01.",
        "an instance by text": b"\x80\x02(ios\nsystem\n.",
        "a name without end": b"\x80\x02c" + b"a" * 1000,
        "a call of text": b"\x80\x02X\x01\x00\x00\x00a)R.",
        "state for a tuple": b"\x80\x02)}b.",
        "an outside reference": b"\x80\x02K\x01Q.",
        "two results": b"\x80\x02NN.",
    }.values(),
)
def test_malformed(data: bytes) -> None:
    with pytest.raises(FormatError, match="pickle"):
        unpickle(data, TABLE)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_end_in_a_value_or_a_format_error(data: bytes, lenient: bool) -> None:
    try:
        unpickle(b"\x80\x04" + data, TABLE, lenient=lenient)
    except FormatError:
        pass


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans())
def test_flipped_bytes(data: Any, lenient: bool) -> None:
    card = Card()
    card.own = card
    value = {"a": [1, 2.5, "text", (None, True)], "b": OrderedDict(c=b"x"), "c": Counter({card: 1})}
    whole = bytearray(pickle.dumps(value, 4))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        unpickle(bytes(whole), TABLE, lenient=lenient)
    except FormatError:
        pass


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_is_unknown_is_kept_by_its_name(tmp_path: Path, protocol: int) -> None:
    """And not run; what a known function would make of it is unknown, too."""
    mark = tmp_path / "mark"
    card = Card()
    card.own = [card]
    value = {
        "a": Hostile(os.system, f"touch {mark}"),
        "b": card,
        "c": Counter([card]),
        "d": Card,
        "e": 1,
    }
    known = TABLE | {("collections", "Counter"): lambda counts=(): dict(counts)}
    found = unpickle(pickle.dumps(value, protocol), known, lenient=True)
    names = {key: one.name for key, one in found.items() if isinstance(one, OpaqueInstance)}
    card_name = f"{__name__}.Card"
    assert names == {
        "a": "posix.system",
        "b": card_name,
        "c": card_name,
        "d": card_name,
    }
    assert found["e"] == 1 and not mark.exists()
    with pytest.raises(FormatError, match="_rebuild_x, which is not known"):
        unpickle(b"\x80\x02cm\n_rebuild_x\n.", TABLE, lenient=True)


def test_a_huge_memo_index_costs_nothing() -> None:
    """Python's own unpickler makes an array that long."""
    assert unpickle(b"\x80\x02]r\xff\xff\xff\x7f.", TABLE) == []


def test_deep_nesting_is_no_problem() -> None:
    found = unpickle(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".", TABLE)
    depth = 0
    while found:
        found, depth = found[0], depth + 1
    assert depth == 49_999


def test_what_would_take_for_ever_is_refused() -> None:
    """Few bytes that stand for 2^60 parts: hashed, walked, or copied."""
    tuples = b"\x80\x02)q\0" + b"0h\0h\0\x86q\0" * 60 + b"0"
    with pytest.raises(FormatError, match="nested tuples"):
        unpickle(tuples + b"}h\0Ns.", TABLE)
    with pytest.raises(FormatError, match="more than"):
        unpickle(b"\x80\x02]q\0" + b"0](h\0h\0eq\0" * 60 + b".", TABLE)
    many = b"\x80\x02(" + b"N" * 10_000 + b"tq\0" + b"ccollections\nOrderedDict\nh\0\x85R0" * 100
    with pytest.raises(FormatError):
        unpickle(many + b"N.", {("collections", "OrderedDict"): lambda x: list(x)})


def test_a_value_that_holds_itself() -> None:
    with pytest.raises(FormatError, match="more than"):
        unpickle(b"\x80\x02]q\0(h\0h\0e.", TABLE)


def test_members_of_enumerations_are_named_and_not_looked_up() -> None:
    """Python 3.11.0 to 3.11.3 pickle them as `getattr(Class, "NAME")`."""
    from holdfast.formats.read.torchfile import torch_globals

    known = torch_globals() | {("m", "Kind"): record("Kind")}
    data = b"\x80\x02cbuiltins\ngetattr\ncm\nKind\nX\x03\x00\x00\x00ONE\x86R."
    assert unpickle(data, known).name == "m.Kind.ONE"
    hostile = data[:-1] + b")R."  # and calls it
    with pytest.raises(FormatError, match="it calls"):
        unpickle(hostile, known)
    with pytest.raises(FormatError, match="no class"):
        unpickle(b"\x80\x02cbuiltins\ngetattr\nX\x01\x00\x00\x00aX\x01\x00\x00\x00b\x86R.", known)


def test_a_list_that_holds_itself_a_thousand_times() -> None:
    """Children are counted before they are held: 2 KB would else take all memory."""
    tracemalloc.start()
    with pytest.raises(FormatError, match="more than"):
        unpickle(b"\x80\x02]q\0(" + b"h\0" * 1000 + b"e.", TABLE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 28


def tower(depth: int) -> bytes:
    """A tuple of two tuples of two tuples, ..., each of them stored once."""
    return b")q\0" + b"0h\0h\0\x86q\0" * depth


TEXT = b"X" + struct.pack("<I", 1 << 16) + b"a" * (1 << 16) + b"q\1"


@pytest.mark.parametrize(
    "data",
    {
        "a dtype": b"ctorch._utils\n_rebuild_tensor_v3\n(K\0QK\0))NN" + tower(22) + b"tR.",
        "a device": b"ctorch\ndevice\n(" + tower(18) + b"tR.",
        "a path": b"cpathlib\nPosixPath\n(" + TEXT + b"h\1" * 20_000 + b"tR.",
        "paths": TEXT + b"0(" + b"cpathlib\nPosixPath\nh\1\x85R" * 20_000 + b"l.",
        "a reference": tower(22) + b"Q.",
        "a long key": b"(" + b"N" * 5000 + b"tq\0}(" + b"h\0N" * 10_000 + b"u.",
        "a field": b"cm\nKind\n)R}(" + b"(" + TEXT + b"h\1" * 1000 + b"tNub.",
    }.values(),
    ids=lambda data: str(len(data)),
)
def test_what_functions_would_hash_or_format_for_ever(data: bytes) -> None:
    """Shared parts are counted as often as they are met, before a function gets them."""
    from holdfast.formats.read import torchfile

    known = torchfile.torch_globals() | {("m", "Kind"): record("Kind")}
    began = time.process_time()
    with pytest.raises(FormatError):
        unpickle(
            b"\x80\x02" + data, known, lambda pid: torchfile._Storage(str(pid)[:0], 0, 10, "x")
        )
    assert time.process_time() - began < 1.5


class Set:
    """Pickled with a function that sets its state."""

    def __init__(self, value: Any, setter: Any) -> None:
        self.value, self.setter = value, setter

    def __reduce__(self) -> Any:
        return record_like, (self.value,), {"scale": 3}, None, None, self.setter


def record_like(value: Any) -> Any:
    return value


def set_state(value: Any, state: Any) -> None:
    pass


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_unknown_function_that_sets_a_state(protocol: int) -> None:
    """Its result is thrown away, so what it was called with must not be lost."""
    data = pickle.dumps({"a": Set(5, set_state)}, protocol)
    known = TABLE | {(__name__, "record_like"): record("Known")}
    with pytest.raises(FormatError, match="set_state, which is not known to be data"):
        unpickle(data, known, lenient=True)
    found = unpickle(data, TABLE, lenient=True)["a"]
    assert found.name == f"{__name__}.record_like" and found.fields["held"][0].args[1] == {
        "scale": 3
    }


def test_names_without_end() -> None:
    """A long module that many globals share."""
    long = b"\x8c\xff" + b"m" * 255
    many = b"\x80\x04" + long + b"\x94" + b"h\0" * 5 + b"."
    with pytest.raises(FormatError):
        unpickle(many, TABLE, lenient=True)
    module = b"X" + struct.pack("<I", 5000) + b"m" * 5000 + b"q\0"
    with pytest.raises(FormatError, match="a name without end"):
        unpickle(b"\x80\x04" + module + b"h\0\x93.", TABLE, lenient=True)


def test_what_becomes_unknown_after_it_was_looked_at() -> None:
    """A list that a record holds gets something unknown between two calls that are given the record."""
    known = {("m", "Kind"): record("Kind"), ("m", "made"): record("made")}
    a_list = b"cm\nKind\n(]q\1tRq\2"  # Kind([])
    call = b"cm\nmade\nh\2\x85R"
    data = b"\x80\x02(" + b"cm\nOdd\n)R0"[:-1] + a_list + call + b"h\1cm\nOdd\n)Ra" + call + b"t."
    _, _, first, _, second = unpickle(data, known, lenient=True)
    assert (first.name, second.name) == ("made", "m.Odd")


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(data)) + data


LARGE = number(10**4299) + b"q\0"
ALIKE = [number(k * ((1 << 61) - 1)) for k in range(1, 500)]


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("a number of more than 4300 digits", number(10**4300) + b"."),
        ("a number of more than 4300 digits", number(-(10**5000)) + b"."),
        ("more than it holds", LARGE + b"0cpathlib\nPosixPath\n(" + b"h\0" * 20_000 + b"tR."),
        ("more than it holds", LARGE + b"0(" + b"cm\nKind\nh\0\x85R" * 20_000 + b"t."),
        ("more than .* bytes", LARGE + b"0(" + b"h\0" * 20_000 + b"t."),
        ("keys of one hash", b"}(" + b"".join(n + b"N" for n in ALIKE) + b"u."),
        ("keys of one hash", b"}" + b"".join(n + b"Ns" for n in ALIKE) + b"."),
        ("keys of one hash", b"\x8f(" + b"".join(ALIKE) + b"\x90."),
        ("keys of one hash", b"(" + b"".join(ALIKE) + b"\x91."),
        ("keys of one hash", b"cbuiltins\nset\n((" + b"".join(ALIKE) + b"ltR."),
        (
            "keys of one hash",
            b"ccollections\nOrderedDict\n((" + b"".join(n + b"N\x86" for n in ALIKE) + b"ltR.",
        ),
        ("makes more than", b"](" + b"\x8f" * 2_000_000 + b"e."),
        pytest.param("makes more than", b"](" + b"}" * 2_000_000 + b"e.", marks=pytest.mark.soak),
        ("of more than", b"cm\nKind\nq\0" + b"0](" + b"h\0)R" * 300_000 + b"e."),
        ("of more than", b"](" + b"N" * 2000 + b"eq\0" + b"0](" + b"h\0" * 2000 + b"e."),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_little_that_costs_much(what: str, data: bytes) -> None:
    """And is refused before it costs it."""
    from holdfast.formats.read import torchfile

    known = torchfile.torch_globals() | {("m", "Kind"): record("Kind")}
    with pytest.raises(FormatError, match=what):
        unpickle(b"\x80\x04" + data, known)


def test_names_that_grow() -> None:
    """Each call makes a longer one, and all are kept."""
    from holdfast.formats.read import torchfile

    text = b"X" + struct.pack("<I", 400) + b"x" * 400 + b"q\0"
    first = text + b"0cbuiltins\ngetattr\nq\1h\1ccollections\nOrderedDict\nh\0\x86Rq\2"
    with pytest.raises(FormatError, match="more than it holds"):
        unpickle(
            b"\x80\x04" + first + b"h\1h\2h\0\x86Rq\2" * 2000 + b"l.", torchfile.torch_globals()
        )


def test_shared_parts_of_usual_files_are_no_bombs() -> None:
    """Constants that Python keeps once, and metadata of many chunks."""
    value = {"shapes": [(3, 3)] * 10_000, "seen": list(range(300_000)), "of": [{}] * 5000}
    assert unpickle(pickle.dumps(value, 2), TABLE) == value


@pytest.mark.parametrize(
    ("default", "most", "length"),
    [
        (1 << 17, 1 << 19, 200_000),
        pytest.param(1 << 21, 1 << 23, 3_000_000, marks=pytest.mark.soak),
    ],
)
def test_more_parts_where_the_caller_says_so(
    default: int, most: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.formats.read.unpickle._MAX_NODES", default)
    data = pickle.dumps([None] * length, 2)
    assert unpickle(data, TABLE, most=most) == [None] * length
    with pytest.raises(FormatError, match=f"of more than {default} parts"):
        unpickle(data, TABLE)
