"""Archives and pickles against torch.load, zipfile and pickle: things nobody here wrote."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.core.checkpoint.outfiles import MIN_MEMORY_BYTES, Outfile, write_files
from holdfast.errors import UsageError
from holdfast.formats.write.archive import ArchivedTensor, ArchivePlan, add_archive, for_torch
from holdfast.formats.write.pickling import dumps
from holdfast.store import LocalStore

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)  # fmt: skip
VALUES = st.recursive(
    LEAVES | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_pickle_reads_what_was_written(value: Any) -> None:
    assert pickle.loads(dumps(value)) == value


@given(st.sets(st.integers() | st.text()))
def test_sets(value: set[Any]) -> None:
    assert pickle.loads(dumps(value)) == value


def test_a_frozenset_is_a_set_where_it_may_be() -> None:
    """torch.load knows sets alone."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", dumps({"a": frozenset({1, 2})}))
        archive.writestr("a/version", b"3\n")
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"a": {1, 2}}
    for value in ({frozenset({1}): 2}, {(1, frozenset({2}))}, frozenset({frozenset({1})})):
        with pytest.raises(UsageError, match="a frozenset cannot be written"):
            dumps(value)


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(UsageError, match="object"):
        dumps([object()])
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(UsageError, match="nested"):
        dumps(nested)


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {
        str(dtype).removeprefix("torch."): torch.randn(301, 999).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
    }
    found["float8_e4m3fn"] = torch.randn(77).to(torch.float8_e4m3fn)
    found["uint16"] = torch.arange(10).to(torch.uint16)
    found["complex64"] = torch.randn(5, dtype=torch.complex64)
    return found | {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "bool": torch.ones(3) > 0,
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> holdfast.Checkpoint:
    url = tmp_path_factory.mktemp("source")
    holdfast.save(url, {"s": state()}, step=1)
    return holdfast.open(url)


def tree_of(source: holdfast.Checkpoint) -> dict[str, ArchivedTensor]:
    infos = [(name, source.info(name)) for name in source.names()]
    return {
        name.removeprefix("s."): ArchivedTensor(i.dtype, i.shape, source.index(name))
        for name, i in infos
    }


def write(
    source: holdfast.Checkpoint, folder: Path, files: Sequence[Outfile], threads: int
) -> None:
    write_files(source, LocalStore(folder), files, memory_bytes=threads * MIN_MEMORY_BYTES)


def assert_equal(found: dict[str, torch.Tensor]) -> None:
    for name, expected in state().items():
        value = found[name]
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), name
        if value.numel():
            a, b = (t.reshape(-1).view(torch.uint8) for t in (value, expected))
            assert torch.equal(a, b), name


@pytest.mark.parametrize("threads", [1, 4])
def test_torch_load_reads_it(source: holdfast.Checkpoint, tmp_path: Path, threads: int) -> None:
    plan = ArchivePlan()
    add_archive(plan, tree_of(source) | {"epoch": 3, "array": for_torch(np.arange(3.0))})
    write(source, tmp_path, [plan.outfile("a.pt")], threads)
    for options in ({"weights_only": True}, {"mmap": True}, {"weights_only": False}):
        found = torch.load(tmp_path / "a.pt", **options)
        assert found["epoch"] == 3 and found["array"].tolist() == [0, 1, 2]
        assert_equal(found)
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None  # every CRC


def test_many_archives_in_one_file(source: holdfast.Checkpoint, tmp_path: Path) -> None:
    plan, places = ArchivePlan(), {}
    for name, tensor in tree_of(source).items():
        plan.align()
        start = plan.at
        add_archive(plan, tensor)
        places[name] = start, plan.at
    write(source, tmp_path, [plan.outfile("many")], 3)
    data = (tmp_path / "many").read_bytes()
    found = {name: torch.load(io.BytesIO(data[a:b])) for name, (a, b) in places.items()}
    assert_equal(found)
    for a, b in places.values():
        assert zipfile.ZipFile(io.BytesIO(data[a:b])).testzip() is None


def test_names_of_one_tensor_share_its_bytes(source: holdfast.Checkpoint, tmp_path: Path) -> None:
    tied = ArchivedTensor("float32", (301, 999), source.index("s.float32"), key="w")
    plan = ArchivePlan()
    add_archive(plan, {"a": tied, "b": tied})
    write(source, tmp_path, [plan.outfile("t.pt")], 1)
    found = torch.load(tmp_path / "t.pt")
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert (tmp_path / "t.pt").stat().st_size < 301 * 999 * 4 + 2000


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 700_000), min_size=1, max_size=6))
def test_blocks_may_end_anywhere(sizes: list[int]) -> None:
    """CRCs and descriptors on and across the borders of blocks of 1 MiB."""
    import tempfile

    values = {f"t{i}": torch.arange(n, dtype=torch.float32) for i, n in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as folder:
        holdfast.save(f"{folder}/s", {"s": values}, step=0)
        source = holdfast.open(f"{folder}/s")
        plan = ArchivePlan()
        add_archive(plan, tree_of(source))
        write(source, Path(folder), [plan.outfile("a.pt")], 2)
        assert zipfile.ZipFile(f"{folder}/a.pt").testzip() is None
        for name, value in torch.load(f"{folder}/a.pt").items():
            assert torch.equal(value, values[name])
