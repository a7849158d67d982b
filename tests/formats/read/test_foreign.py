"""Parts of foreign tensors: strided, transposed, scaled and averaged, against numpy's own indexing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.errors import FormatError, LayoutError
from holdfast.formats.read.foreign import Foreign, StoredPart, foreign
from holdfast.formats.read.sections import FilePlace
from holdfast.layout import Box, Fragment, row_major, whole
from holdfast.store import LocalStore, MemoryStore, Store

names = (f"foreign-{i}" for i in count())


def fresh() -> MemoryStore:
    return MemoryStore(next(names))


def at(path: str, start: int = 0) -> Callable[[], FilePlace]:
    return lambda: (path, start)


def opened(store: Store, *tensors: Foreign) -> Checkpoint:
    return foreign(store, tensors, step=0, software={}, extras={})


@st.composite
def stored_arrays(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """A storage, a view of it in any order of dims and cut anywhere, and the view's offset in elements."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    storage = np.arange(prod(shape), dtype=np.float32)
    view = storage.reshape(shape)
    for d, n in enumerate(shape):
        a = draw(st.integers(0, n - 1))
        view = view[(slice(None),) * d + (slice(a, draw(st.integers(a + 1, n))),)]
    if draw(st.booleans()) and view.ndim > 1:
        view = view[..., draw(st.integers(0, view.shape[-1] - 1))]
    view = view.transpose(draw(st.permutations(range(view.ndim))))
    return storage, view, int(view.min())


@given(stored_arrays(), st.data())
def test_any_part_of_any_view_is_read(
    case: tuple[np.ndarray, np.ndarray, int], data: st.DataObject
) -> None:
    storage, view, offset = case
    store = fresh()
    store.put("file", b"xy" + storage.tobytes())
    fragment = Fragment(whole(view.shape), offset, tuple(s // 4 for s in view.strides))
    part = StoredPart(fragment, (at("file", 2),), "file")
    found = opened(store, Foreign("t", "float32", view.shape, "param", (part,)))
    assert np.array_equal(found.read("t"), view)
    start = [data.draw(st.integers(0, n)) for n in view.shape]
    stop = [data.draw(st.integers(a, n)) for a, n in zip(start, view.shape)]
    wanted = tuple(slice(a, b) for a, b in zip(start, stop))
    assert np.array_equal(found.read("t", list(zip(start, stop))), view[wanted])


def test_a_large_transposed_tensor_is_read_block_by_block(tmp_path: Path) -> None:
    whole_ = np.random.default_rng(0).standard_normal((1500, 1201)).astype(np.float32)
    (tmp_path / "file").write_bytes(whole_.tobytes())
    fragment = Fragment(Box((0, 0), (900, 1500)), 77, (1, 1201))
    rest = Fragment(Box((900, 0), (1124, 1500)), 977, (1, 1201))
    parts = tuple(StoredPart(f, (at("file"),), "file") for f in (fragment, rest))
    found = opened(LocalStore(tmp_path), Foreign("t", "float32", (1124, 1500), "param", parts))
    assert np.array_equal(found.read("t"), whole_.T[77:1201])


def test_strides_of_no_array_are_refused() -> None:
    for strides in ((1, 1), (3, 2), (0, 1), (2, 1)):
        with pytest.raises(LayoutError):
            Fragment(Box((0, 0), (3, 3)), 0, strides).stored()
    part = StoredPart(Fragment(Box((0, 0), (3, 3)), 0, (2, 1)), (at("file"),), "the file")
    with pytest.raises(FormatError, match="strides") as caught:
        opened(fresh(), Foreign("t", "float32", (3, 3), "param", (part,)))
    assert caught.value.key == "the file"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_mean_of_several_sources(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = [np.random.default_rng(i).standard_normal((7, 5)).astype(kind) for i in range(3)]
    store = fresh()
    for i, v in enumerate(values):
        store.put(f"{i}", v.tobytes())
    part = StoredPart(Fragment.dense(whole((7, 5))), tuple(at(f"{i}") for i in range(3)), "0")
    found = opened(store, Foreign("t", dtype, (7, 5), "param", (part,), "averaged"))
    assert (
        found.read("t").tobytes() == ((values[0] + values[1] + values[2]) / kind.type(3)).tobytes()
    )
    assert found.read("t", ((2, 4), None)).shape == (2, 5)
    assert found.info("t").replica == "averaged"


def test_a_scale_multiplies() -> None:
    store = fresh()
    store.put("b", np.arange(6, dtype=np.float32).tobytes())
    part = StoredPart(Fragment(Box((0,), (6,)), 0, (1,), 0.5), (at("b"),), "b")
    found = opened(store, Foreign("bias", "float32", (6,), "param", (part,)))
    assert found.read("bias").tolist() == [0, 0.5, 1, 1.5, 2, 2.5]


def test_integers_have_no_mean() -> None:
    part = StoredPart(Fragment.dense(whole((3,))), (at("a"), at("b")), "a")
    with pytest.raises(FormatError, match="no mean"):
        opened(fresh(), Foreign("t", "int64", (3,), "param", (part,)))


def test_holes_and_overlaps_are_refused() -> None:
    def part(a: int, b: int) -> StoredPart:
        return StoredPart.of(Box((a,), (b,)), "f", at("f"))

    for parts in ((part(0, 2),), (part(0, 3), part(2, 4)), (part(0, 5),), ()):
        with pytest.raises(FormatError, match="exactly once"):
            opened(fresh(), Foreign("t", "float32", (4,), "param", parts))


def test_copies_are_checkpoints_of_their_own() -> None:
    store = fresh()
    for i in range(2):
        store.put(f"{i}", np.full(4, i, np.float32).tobytes())
    parts = [(StoredPart.of(whole((4,)), f"{i}", at(f"{i}")),) for i in range(2)]
    found = opened(
        store, Foreign("t", "float32", (4,), "param", parts[0], "replicated", (parts[1],))
    )
    (other,) = found.others
    assert found.read("t").tolist() == [0] * 4 and other.read("t").tolist() == [1] * 4


def test_a_column_of_a_matrix() -> None:
    store = fresh()
    matrix = np.arange(12, dtype=np.float32).reshape(4, 3)
    store.put("m", matrix.tobytes())
    column = StoredPart(Fragment(Box((0,), (4,)), 1, (3,)), (at("m"),), "m")
    found = opened(store, Foreign("t", "float32", (4,), "param", (column,)))
    assert np.array_equal(found.read("t"), matrix[:, 1])
    assert row_major((4, 3)) == (3, 1)
