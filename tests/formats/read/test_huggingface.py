"""Safetensors of Hugging Face, read where they lie: what its own libraries wrote, and damage named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.format.safetensors import NAMED
from holdfast.errors import Corrupt, FormatError, HoldfastError, NotFound, StateMismatch, UsageError
from holdfast.store import open_store

transformers = pytest.importorskip("transformers")


def config() -> Any:
    return transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=50,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(config())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model of transformers, in shards and in one file."""
    path = tmp_path_factory.mktemp("huggingface")
    model(0).save_pretrained(path / "shards", max_shard_size="10KB")
    model(0).save_pretrained(path / "one")
    return path


def same(checkpoint: holdfast.Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert sorted(checkpoint.names()) == sorted(f"model.{n}" for n in expected)
    for name, tensor in expected.items():
        info = checkpoint.info(f"model.{name}")
        assert (info.shape, f"torch.{info.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        plain = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        assert checkpoint.read(f"model.{name}").tobytes() == bytes(plain), name


def test_what_transformers_writes(root: Path) -> None:
    assert len(list((root / "shards").glob("*.safetensors"))) > 2
    expected = load_file(root / "one/model.safetensors")
    index = root / "shards/model.safetensors.index.json"
    for place in (root / "one", root / "shards", root / "one/model.safetensors", index):
        for url in (place, f"huggingface:{place}"):
            same(holdfast.open(url), expected)
    assert holdfast.open(root / "one").extras["metadata"]["format"] == "pt"
    assert holdfast.steps(root / "shards") == [0]


def test_into_a_live_model(root: Path) -> None:
    """Tied weights are stored once, and stay tied."""
    live = model(1)
    assert holdfast.load(root / "shards", {"model": live}) == 0
    expected = transformers.GPT2LMHeadModel.from_pretrained(root / "shards").state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in live.state_dict().items())
    assert live.lm_head.weight is live.transformer.wte.weight
    with pytest.raises(StateMismatch, match="missing in the checkpoint"):
        holdfast.load(root / "one", {"model": torch.nn.Linear(2, 2)})


def test_every_dtype_that_safetensors_writes(tmp_path: Path) -> None:
    import safetensors.torch as theirs

    written = {}
    for stored, dtype in theirs._TYPES.items():
        size = dtype.itemsize
        raw = torch.randint(0, 2 if dtype is torch.bool else 100, (3, 5, size), dtype=torch.uint8)
        written[stored] = raw.view(dtype).reshape(3, 5)
    assert theirs._TYPES.keys() <= NAMED.keys() <= theirs._TYPES.keys() | {"F8_E8M0"}
    assert set(NAMED.values()) <= DTYPES.keys()
    written |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    save_file(written, tmp_path / "all.safetensors", {"a": "b"})
    checkpoint = holdfast.open(tmp_path / "all.safetensors")
    same(checkpoint, written)
    assert checkpoint.extras == {"metadata": {"a": "b"}}


def test_parts_and_any_store(root: Path) -> None:
    store = open_store("memory://hub/gpt2")
    for file in (root / "shards").iterdir():
        store.put(file.name, file.read_bytes())
    expected = load_file(root / "one/model.safetensors")["transformer.wte.weight"].numpy()
    for url in ("memory://hub/gpt2", "memory://hub/gpt2/model.safetensors.index.json"):
        found = holdfast.open(url).read("model.transformer.wte.weight", ((3, 40), (1, 9)))
        assert np.array_equal(found, expected[3:40, 1:9])


def test_links_of_the_hub_s_cache(root: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, file in enumerate((root / "shards").iterdir()):
        shutil.copy(file, tmp_path / f"blobs/{number}")
        (tmp_path / "snapshot" / file.name).symlink_to(tmp_path / f"blobs/{number}")
    same(holdfast.open(tmp_path / "snapshot"), load_file(root / "one/model.safetensors"))


def test_other_names(tmp_path: Path) -> None:
    """Those of diffusers are found by themselves; any name if a prefix says what it is."""
    for name in ("diffusion_pytorch_model.fp16.safetensors", "adapter_model.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"w": torch.ones(2)}, folder / name)
        assert holdfast.open(folder).names() == ["model.w"]
    folder = tmp_path / "mine"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "mine.safetensors")
    assert holdfast.open(f"huggingface:{folder}").names() == ["model.w"]
    with pytest.raises(HoldfastError, match="no checkpoint"):
        holdfast.open(folder)
    save_file({"v": torch.ones(2)}, folder / "yours.safetensors")
    with pytest.raises(UsageError, match=r"several models.*mine\.safetensors, yours\.safetensors"):
        holdfast.open(f"huggingface:{folder}")


def test_what_holdfast_consolidates_is_such_a_checkpoint(tmp_path: Path) -> None:
    live = torch.nn.Linear(3, 4)
    holdfast.save(tmp_path / "run", {"model": live, "n": 3}, step=7)
    holdfast.convert(tmp_path / "run", tmp_path / "whole")
    same(holdfast.open(tmp_path / "whole/steps/0000000007"), dict(live.state_dict()))


def test_without_torch(root: Path) -> None:
    code = (
        "import holdfast, sys; c = holdfast.open(sys.argv[1]); [c.read(n) for n in c.names()];"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, root / "shards"], check=False)
    assert done.returncode == 0


# -- damage ---------------------------------------------------------------------------------------


def test_shards_and_index_disagree(root: Path, tmp_path: Path) -> None:
    def changed(name: str, change: Any) -> Path:
        shutil.copytree(root / "shards", tmp_path / name)
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        change(index["weight_map"], tmp_path / name)
        (tmp_path / name / "model.safetensors.index.json").write_text(json.dumps(index))
        return tmp_path / name

    first = "transformer.h.0.attn.c_attn.bias"

    def elsewhere(files: dict[str, str], folder: Path) -> None:
        files[first] = next(f for f in files.values() if f != files[first])

    def twice(files: dict[str, str], folder: Path) -> None:
        other = next(f for f in files.values() if f != files[first])
        tensors = load_file(folder / other) | {first: torch.zeros(48)}
        save_file(tensors, folder / other)

    for name, change, message in (
        ("unknown", lambda f, _: f.update(more=f[first]), r"'more' is not in .*it is in none"),
        ("unlisted", lambda f, _: f.pop(first), rf"does not list '{first}'"),
        ("elsewhere", elsewhere, "is not in .*as model.safetensors.index.json says: it is in"),
        ("twice", twice, "is in two files"),
        ("missing", lambda f, d: (d / f[first]).unlink(), r"1 of \d files .* missing: model-0000"),
        ("outside", lambda f, _: f.update({first: "../x.safetensors"}), r"names the file '\.\./x"),
        ("absolute", lambda f, _: f.update({first: "/etc/x.safetensors"}), "names the file '/etc"),
        ("empty", lambda f, _: f.clear(), "malformed index"),
    ):
        with pytest.raises((FormatError, NotFound), match=message):
            holdfast.open(changed(name, change))
    (tmp_path / "unlisted/model.safetensors.index.json").write_text("[]")
    with pytest.raises(FormatError, match="malformed index"):
        holdfast.open(tmp_path / "unlisted")
    (tmp_path / "unlisted/model.safetensors.index.json").unlink()
    with pytest.raises(NotFound, match=r"shards in .* but no index"):
        holdfast.open(f"huggingface:{tmp_path / 'unlisted'}")


def header(rows: dict[str, Any], data: int = 16) -> bytes:
    text = rows if isinstance(rows, bytes) else json.dumps(rows).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def row(dtype: str = "F32", shape: tuple[Any, ...] = (4,), at: tuple[Any, ...] = (0, 16)) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": at}


ATTACKS = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "a header beyond the end": (1 << 62).to_bytes(8, "little"),
    "no JSON": header(b"{"),
    "a list": header(b"[]"),
    "nested deep": header(b"[" * 100_000),
    "not UTF-8": header(b'{"\xff": 1}'),
    "one name twice": header(b'{"a":%b,"a":%b}' % ((json.dumps(row()).encode(),) * 2)),
    "a hole": header({"a": row(at=(0, 16)), "b": row(at=(20, 36))}, 36),
    "a hole at the start": header({"a": row(at=(4, 20))}, 20),
    "an overlap": header({"a": row(at=(0, 16)), "b": row(at=(8, 24))}, 24),
    "a tail": header({"a": row()}, 17),
    "cut short": header({"a": row()}, 15),
    "bytes that are not the shape's": header({"a": row(shape=(5,))}),
    "negative offsets": header({"a": row(at=(-16, 0))}),
    "a negative dim": header({"a": row(shape=(-4,))}),
    "a dim that is no number": header({"a": row(shape=("4",))}),
    "a dim that is true": header({"a": row(shape=(4, True))}),
    "a shape whose product is small": header({"a": row(shape=(0, 1 << 62), at=(0, 0))}, 0),
    "very many dims": header({"a": row(shape=(1,) * 100_000, at=(0, 4))}, 4),
    "a huge number": header({"a": row(shape=(10**100,))}),
    "an unknown dtype": header({"a": row(dtype="F4")}),
    "a dtype that is a list": header({"a": row(dtype=[])}),  # type: ignore[arg-type]
    "no offsets": header({"a": {"dtype": "F32", "shape": [4]}}),
    "a number for a tensor": header({"a": 1}),
    "metadata that is a list": header({"__metadata__": [1], "a": row()}),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_malformed_headers(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(ATTACKS[name])
    with pytest.raises((Corrupt, FormatError)) as caught:
        holdfast.open(tmp_path)
    assert caught.value.key == "model.safetensors"


def test_cut_and_flipped_anywhere(tmp_path: Path) -> None:
    """Cut short at any byte: refused.  A flipped bit of the header: refused, or harmless; never a crash."""
    path = tmp_path / "model.safetensors"
    expected = {"a": np.arange(6, dtype="f4").reshape(2, 3), "b": np.arange(4, dtype="i8")}
    safetensors.numpy.save_file(expected, path)
    whole = path.read_bytes()
    for stop in range(len(whole)):
        path.write_bytes(whole[:stop])
        with pytest.raises((Corrupt, FormatError)):
            holdfast.open(tmp_path)
    size = 8 + int.from_bytes(whole[:8], "little")
    for at in range(size):
        for bit in (0, 3, 6):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            path.write_bytes(data)
            try:
                checkpoint = holdfast.open(tmp_path)
                for name in checkpoint.names():
                    checkpoint.read(name)
            except HoldfastError:
                pass


def test_a_file_that_shrinks_after_opening(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "one", tmp_path / "one")
    checkpoint = holdfast.open(tmp_path / "one")
    os.truncate(tmp_path / "one/model.safetensors", 5000)
    with pytest.raises(Corrupt, match="ends at byte 5000"):
        checkpoint.read(checkpoint.names()[-1])
