"""What torch.save writes, read without torch: checkpoints of runs, shards; damage is named."""

from __future__ import annotations

import argparse
import datetime
import enum
import functools
import io
import os
import shutil
import subprocess
import sys
import time
import warnings
import zipfile
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.format.extras import memory_file
from holdfast.errors import (
    Corrupt,
    FormatError,
    HoldfastError,
    HoldfastWarning,
    NotFound,
    StateMismatch,
    UsageError,
)
from holdfast.formats.read.byindex import proved_names
from holdfast.formats.read.verifying import verify_foreign
from holdfast.store import open_store


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 40), nn.LayerNorm(40), nn.Linear(40, 30))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.full((5, 30), float(i + 1))).square().sum().backward()
        optimizer.step()


def as_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same(checkpoint: holdfast.Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, tensor in expected.items():
        info = checkpoint.info(name)
        assert (info.shape, f"torch.{info.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        assert checkpoint.read(name).tobytes() == as_bytes(tensor), name


# -- tensors --------------------------------------------------------------------------------------


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "large": torch.randn(70, 51)}
    for name in (n for n in DTYPES if hasattr(torch, n)):
        raw = torch.randint(0, 2 if name == "bool" else 100, (3, 5, DTYPES[name].bytes))
        found[name] = raw.to(torch.uint8).view(getattr(torch, name)).reshape(3, 5)
    found["slice"] = torch.randn(20, 30)[3:9, 4:6]
    found["column"] = torch.randn(20, 30)[:, 7]
    found["transposed"] = torch.randn(6, 4).t()
    found["permuted"] = torch.randn(4, 5, 6).permute(2, 0, 1)[1:, :, 2:4]
    found["expanded"] = torch.randn(1, 4, 1).expand(3, 4, 5)
    found["parameter"] = nn.Parameter(torch.randn(3))
    found["tied"] = found["large"]
    return found


@pytest.mark.parametrize("crc", [True, False])
def test_every_kind_of_tensor(tmp_path: Path, crc: bool) -> None:
    """Any dtype and strides; with and without the checksums that torch may be told to leave out."""
    torch.serialization.set_crc32_options(crc)
    torch.save(tensors(), tmp_path / "x.pt")
    torch.serialization.set_crc32_options(True)
    checkpoint = holdfast.open(tmp_path / "x.pt")
    same(checkpoint, {f"model.{n}": t for n, t in tensors().items()})
    for name in ("permuted", "expanded", "slice"):
        expected, box = tensors()[name].numpy(), tuple((0, n - 1) for n in tensors()[name].shape)
        found = checkpoint.read(f"model.{name}", box)
        assert np.array_equal(found, expected[tuple(slice(*r) for r in box)])
    report = verify_foreign(checkpoint)
    assert report.good and report.num_with_crc == crc and report.num_archives == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, dtype=torch.complex64).conj(), "conj"),
        (torch.ones(3).as_strided((4, 2), (0, 1)).as_strided((2, 2), (1, 1)), "of no array"),
        (torch.zeros(1).expand(10_000), "expanded"),
        (torch.ones(3).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.zeros(3, device="meta"), "not known to be data"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    torch.save({"w": torch.ones(2), "x": value}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=message) as caught:
        holdfast.open(tmp_path / "x.pt")
    assert caught.value.key == "x.pt"


def test_old_and_foreign_files(tmp_path: Path) -> None:
    old = tmp_path / "old.pt"
    torch.save(net().state_dict(), old, _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match=r"before 1\.6") as caught:
        holdfast.open(old)
    assert "torch.save(torch.load(old), new)" in str(caught.value)
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(FormatError, match="no zip archive"):
        holdfast.open(tmp_path / "text.pt")
    np.savez(tmp_path / "x.npz", a=np.ones(3))
    shutil.move(tmp_path / "x.npz", tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"no data\.pkl"):
        holdfast.open(tmp_path / "x.pt")
    torch.save(net(), tmp_path / "module.pt")
    with pytest.raises(FormatError, match=r"Sequential, which is not known") as caught:
        holdfast.open(tmp_path / "module.pt")
    assert "state_dict()" in str(caught.value)


def rezipped(path: Path, to: Path, **options: Any) -> Path:
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w", **options) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return to


def test_archives_that_others_have_packed(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "x.pt")
    again = rezipped(tmp_path / "x.pt", tmp_path / "stored.pt")
    assert holdfast.open(again).read("model.w").tolist() == list(range(1000))
    packed = rezipped(tmp_path / "x.pt", tmp_path / "packed.pt", compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match="is compressed"):
        holdfast.open(packed)


# -- training checkpoints -------------------------------------------------------------------------


def checkpoint_of(tmp_path: Path, saved: Any) -> holdfast.Checkpoint:
    torch.save(saved, tmp_path / "x.pt")
    return holdfast.open(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("model", "optim"),
    [
        ("model", "optim"),
        ("model_state_dict", "optimizer_state_dict"),
        ("state_dict", "optimizer"),
        ("model", "opt"),
    ],
)
def test_usual_names(tmp_path: Path, model: str, optim: str) -> None:
    """A run goes on: weights, optimizer and scheduler are those that were saved, as is the next step."""
    old = net()
    optimizer = torch.optim.AdamW(old.parameters(), lr=0.01, betas=(0.8, 0.95))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    train(old, optimizer)
    scheduler.step()
    saved = {model: old.state_dict(), optim: optimizer.state_dict(), "epoch": 3, "step": 120}
    saved["scheduler_state_dict"] = scheduler.state_dict()
    checkpoint = checkpoint_of(tmp_path, saved)
    assert checkpoint.step == 120 and holdfast.steps(tmp_path / "x.pt") == [120]
    assert checkpoint.extras["epoch"] == 3
    assert "optim.0.weight.exp_avg" in checkpoint.names()
    new = net(1)
    fresh = torch.optim.AdamW(new.parameters(), lr=9.0)
    other = torch.optim.lr_scheduler.StepLR(fresh, 7)
    state = {"model": new, "optim": fresh, "scheduler": other}
    assert holdfast.load(tmp_path / "x.pt", state) == 120
    assert fresh.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert (other.step_size, other.last_epoch) == (2, 1)
    train(old, optimizer)
    train(new, fresh)
    assert all(torch.equal(p, q) for p, q in zip(old.parameters(), new.parameters()))
    with pytest.raises(NotFound, match="of step 120; it has no step 7"):
        holdfast.open(tmp_path / "x.pt", step=7)


def test_optimizers_by_name(tmp_path: Path) -> None:
    """As torch.distributed names them, and as torch 2.6 and newer number them with names beside."""
    old = net()
    groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(old.parameters())]
    optimizer = torch.optim.AdamW(groups)
    train(old, optimizer)
    named = torch.optim.AdamW(list(reversed(list(old.named_parameters()))), lr=0.25)
    named.load_state_dict(_reversed(optimizer.state_dict()))
    for states in (get_optimizer_state_dict(old, optimizer), named.state_dict()):
        checkpoint = checkpoint_of(tmp_path, {"optim": states})
        for name, p in old.named_parameters():
            for state, value in optimizer.state[p].items():
                assert checkpoint.read(f"optim.{name}.{state}").tobytes() == as_bytes(value)


def _reversed(saved: dict[str, Any]) -> dict[str, Any]:
    count = len(saved["state"])
    group = saved["param_groups"][0] | {"params": list(range(count))}
    return {"state": {count - 1 - i: s for i, s in saved["state"].items()}, "param_groups": [group]}


def test_weight_decay_s_usual_groups_are_proved(tmp_path: Path) -> None:
    old = net()
    decay = [p for p in old.parameters() if p.ndim > 1]
    rest = [p for p in old.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    train(old, optimizer)
    saved = {"model": old.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint = checkpoint_of(tmp_path, saved)
    for name, p in old.named_parameters():
        found = checkpoint.read(f"optim.{name}.exp_avg")
        assert found.tobytes() == as_bytes(optimizer.state[p]["exp_avg"])
    first = checkpoint.extras["optim"]["param_groups"][0]
    assert first["params"] == ["0.weight", "2.weight"] and first["weight_decay"] == 0.1


@pytest.mark.parametrize("case", ["halves of equal shapes", "reversed", "no model", "a buffer"])
def test_numbers_that_prove_nothing_stay_numbers(tmp_path: Path, case: str) -> None:
    """Better no name than a wrong one; loading says so and touches nothing."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)], nn.Linear(4, 30))
    if case == "a buffer":
        model.register_buffer("more", torch.zeros(4))
    params = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": params}]
    if case == "halves of equal shapes":
        groups = [{"params": params[4:], "lr": 0.5}, {"params": params[:4]}]
    if case == "reversed":
        groups = [{"params": params[::-1]}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    saved = {"optimizer": optimizer.state_dict()}
    if case != "no model":
        saved["model"] = model.state_dict()
    checkpoint = checkpoint_of(tmp_path, saved)
    assert "optim.state.3.exp_avg" in checkpoint.names()
    assert not [n for n in checkpoint.names() if n.startswith("optim.0")]
    before = [p.clone() for p in params]
    fresh = torch.optim.AdamW(model.parameters(), lr=9.0)
    state = {"optim": fresh} | ({"model": model} if "model" in saved else {})
    with pytest.raises(StateMismatch, match="which is which cannot be known"):
        holdfast.load(tmp_path / "x.pt", state)
    assert all(torch.equal(p, q) for p, q in zip(before, params)) and not fresh.state


def test_an_optimizer_without_state_is_not_skipped(tmp_path: Path) -> None:
    """Plain SGD has nothing but hyper-parameters; where they belong cannot be known either."""
    old = net()
    saved = {
        "model": old.state_dict(),
        "optim": torch.optim.SGD(old.parameters(), lr=0.3).state_dict(),
    }
    torch.save(saved, tmp_path / "x.pt")
    live = net(1)
    state = {"model": live, "optim": torch.optim.SGD(live.parameters(), lr=9.0)}
    with pytest.raises(StateMismatch, match="no parameter in common"):
        holdfast.load(tmp_path / "x.pt", state)


def test_proving_against_all_orders() -> None:
    """Whatever the groups: a name is given only if groups in the model's order allow no other."""
    from itertools import product

    model = [("a", (2,)), ("b", (3,)), ("c", (2,)), ("d", (3, 2))]
    for split in product(range(2), repeat=4):
        order = [i for g in range(2) for i, s in enumerate(split) if s == g]
        numbers = [[k for k, i in enumerate(order) if split[i] == g] for g in range(2)]
        shapes = {k: model[i][1] for k, i in enumerate(order)}
        found = proved_names(numbers, shapes, model)
        unique = split[0] == split[2]
        assert found == ({k: model[i][0] for k, i in enumerate(order)} if unique else None)


def test_wrappers_leave_the_names(tmp_path: Path) -> None:
    old = net()
    expected = {f"model.{n}": t for n, t in old.state_dict().items()}
    for prefix in ("module.", "_orig_mod.", "module._orig_mod."):
        saved = {f"{prefix}{n}": t for n, t in old.state_dict().items()}
        same(checkpoint_of(tmp_path, saved), expected)


def test_a_plain_dict_of_tensors_is_filled(tmp_path: Path) -> None:
    torch.save(net(1).state_dict(), tmp_path / "x.pt")
    into = {k: torch.zeros_like(v) for k, v in net().state_dict().items()}
    holdfast.load(tmp_path / "x.pt", {"model": into})
    for name, tensor in net(1).state_dict().items():
        assert torch.equal(into[name], tensor), name
    with pytest.raises(StateMismatch, match=r"missing in the checkpoint: model\.3\.weight"):
        holdfast.load(tmp_path / "x.pt", {"model": {**into, "3.weight": torch.zeros(2)}})
    with pytest.raises(StateMismatch, match="missing in the checkpoint: model"):
        holdfast.load(tmp_path / "x.pt", {"model": {**into, "epoch": 3}})


def test_tied_weights_load_into_tied_weights(tmp_path: Path) -> None:
    def tied(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9, bias=False))
        model[1].weight = model[0].weight
        return model

    old, new = tied(0), tied(1)
    optimizer = torch.optim.AdamW(old.parameters())
    old(torch.arange(9)).square().sum().backward()
    optimizer.step()
    saved = {"model": old.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "x.pt")
    fresh = torch.optim.AdamW(new.parameters(), lr=9.0)
    holdfast.load(tmp_path / "x.pt", {"model": new, "optim": fresh})
    assert torch.equal(old[0].weight, new[1].weight) and new[0].weight is new[1].weight
    assert torch.equal(
        fresh.state[new[0].weight]["exp_avg"], optimizer.state[old[0].weight]["exp_avg"]
    )


def test_states_of_shared_weights_are_theirs(tmp_path: Path) -> None:
    """torch counts a weight at the first place where a module has it."""
    torch.manual_seed(0)
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    old = nn.Sequential(one, other, one)
    optimizer = torch.optim.AdamW(old.parameters())
    old(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    saved = {"model": old.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "x.pt")
    shared = nn.Linear(4, 4)
    new = nn.Sequential(shared, nn.Linear(4, 4), shared)
    fresh = torch.optim.AdamW(new.parameters())
    holdfast.load(tmp_path / "x.pt", {"model": new, "optim": fresh})
    for p, q in zip(old.parameters(), new.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], fresh.state[q]["exp_avg"])


def test_arrays_in_newer_pickles(tmp_path: Path) -> None:
    saved = {"w": torch.ones(2), "a": np.arange(6, dtype="f4").reshape(2, 3).T, "s": np.int64(3)}
    torch.save(saved, tmp_path / "x.pt", pickle_protocol=5)
    found = holdfast.open(tmp_path / "x.pt").extras
    assert np.array_equal(found["a"], saved["a"]) and found["a"].dtype == "f4" and found["s"] == 3


def test_extras_of_every_kind(tmp_path: Path) -> None:
    values = {
        "args": argparse.Namespace(lr=0.1, path=Path("/data/x"), betas=(0.9, 0.95)),
        "numbers": np.arange(6, dtype="f4").reshape(2, 3).T,
        "big": np.arange(3, dtype=">i4"),
        "scalar": np.float64(2.5),
        "state": np.random.RandomState(0).get_state(),
        "bytes": b"\x00\xff",
        "names": {"b", "a"},
        "counts": defaultdict(list, {"x": [1, 2]}),
        "recent": deque([1, 2], maxlen=5),
        "ordered": OrderedDict(a=1),
        "version": torch.__version__,
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "nan": float("nan"),
        "by number": {0: "x"},
        "complex": 1 + 2j,
        "file": memory_file(b"losses", 3),
        "chars": bytearray(b"ab"),
        "text": np.str_("abc"),
    }
    found = checkpoint_of(tmp_path, {"model": net().state_dict(), "rest": values}).extras["rest"]
    assert found["args"] == {"lr": 0.1, "path": "/data/x", "betas": (0.9, 0.95)}
    assert np.array_equal(found["numbers"], values["numbers"])
    assert found["big"].tolist() == [0, 1, 2] and found["scalar"] == 2.5
    assert np.array_equal(found["state"][1], values["state"][1])
    assert found["bytes"] == b"\x00\xff" and found["names"] == {"a", "b"}
    assert found["counts"] == {"x": [1, 2]} and list(found["recent"]) == [1, 2]
    assert found["chars"] == b"ab" and found["text"] == "abc"
    assert found["file"].getvalue() == b"losses" and found["file"].tell() == 3
    assert found["version"] == torch.__version__ and found["size"] == (2, 3)
    assert (
        found["by number"] == {0: "x"}
        and found["complex"] == 1 + 2j
        and found["dtype"] == "bfloat16"
    )


def test_tensors_among_extras_come_back(tmp_path: Path) -> None:
    """In the state of objects, and as a second module under a key of its own."""
    old = net()
    saved = {"model": old.state_dict(), "ema": net(3).state_dict(), "rng": torch.get_rng_state()}
    torch.save(saved | {"meter": {"sum": torch.arange(5), "n": 2}}, tmp_path / "x.pt")

    class Meter:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, saved: dict[str, Any]) -> None:
            self.saved = saved

    meter, ema, rng = Meter(), net(9), torch.zeros_like(torch.get_rng_state())
    state = {"meter": meter, "ema": ema, "rng": rng, "model": net(1)}
    holdfast.load(tmp_path / "x.pt", state)
    assert meter.saved["n"] == 2 and meter.saved["sum"].tolist() == [0, 1, 2, 3, 4]
    assert all(torch.equal(p, q) for p, q in zip(ema.parameters(), net(3).parameters()))
    assert torch.equal(rng, saved["rng"])


def test_lightning(tmp_path: Path) -> None:
    """The layout of a Lightning checkpoint."""
    old = net()
    optimizer = torch.optim.AdamW(old.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    train(old, optimizer)
    saved = {
        "epoch": 1,
        "global_step": 30,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": old.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
    }
    torch.save(saved, tmp_path / "last.ckpt")
    live = net(1)
    fresh = torch.optim.AdamW(live.parameters(), lr=9.0)
    other = torch.optim.lr_scheduler.StepLR(fresh, 9)
    state = {"model": live, "optim": fresh, "scheduler": other}
    assert holdfast.load(tmp_path / "last.ckpt", state) == 30
    assert other.step_size == 4 and fresh.param_groups[0]["lr"] == 0.01
    assert all(torch.equal(p, q) for p, q in zip(old.parameters(), live.parameters()))


# -- shards of Hugging Face -----------------------------------------------------------------------


def test_bin_shards(tmp_path: Path) -> None:
    """As huggingface_hub writes them."""
    hub = pytest.importorskip("huggingface_hub")
    expected = net().state_dict()
    hub.save_torch_state_dict(expected, tmp_path, max_shard_size="4KB", safe_serialization=False)
    assert len(list(tmp_path.glob("pytorch_model-*.bin"))) > 1
    same(holdfast.open(tmp_path), {f"model.{n}": t for n, t in expected.items()})
    index = tmp_path / "pytorch_model.bin.index.json"
    same(holdfast.open(index), {f"model.{n}": t for n, t in expected.items()})
    text = index.read_text()
    index.write_text(text.replace("0.bias", "0.other"))
    with pytest.raises(FormatError, match=r"'0\.bias' is in .*says nowhere"):
        holdfast.open(tmp_path)
    index.write_text(text)
    next(iter(tmp_path.glob("pytorch_model-*.bin"))).unlink()
    with pytest.raises(NotFound, match=r"1 of \d files"):
        holdfast.open(tmp_path)


def test_folders_and_stores(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "best.pt")
    with pytest.raises(HoldfastError, match="no checkpoint"):
        holdfast.open(tmp_path)  # nothing says that this is a checkpoint
    assert "model.0.weight" in holdfast.open(f"torch:{tmp_path}").names()
    shutil.copy(tmp_path / "best.pt", tmp_path / "last.pt")
    with pytest.raises(UsageError, match=r"several checkpoints.*best\.pt, last\.pt"):
        holdfast.open(f"torch:{tmp_path}")
    shutil.copy(tmp_path / "best.pt", tmp_path / "pytorch_model.bin")
    assert holdfast.open(tmp_path).format == "torch"
    open_store("memory://files").put("best.pt", (tmp_path / "best.pt").read_bytes())
    expected = {f"model.{n}": t for n, t in net().state_dict().items()}
    same(holdfast.open("memory://files/best.pt"), expected)
    with pytest.raises(NotFound, match=r"did you mean 'best\.pt'"):
        holdfast.open(f"torch:{tmp_path}/bets.pt")


def test_without_torch(tmp_path: Path) -> None:
    torch.save({"model": net().state_dict(), "epoch": 3}, tmp_path / "x.pt")
    code = (
        "import holdfast, sys; c = holdfast.open(sys.argv[1]); [c.read(n) for n in c.names()];"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x.pt"], check=False)
    assert done.returncode == 0


# -- damage ---------------------------------------------------------------------------------------


def small() -> bytes:
    data = io.BytesIO()
    torch.save({"model": {"w": torch.arange(6.0).reshape(2, 3)}, "epoch": 3}, data)
    return data.getvalue()


def test_cut_anywhere() -> None:
    whole, store = small(), open_store("memory://cut")
    for stop in range(len(whole)):
        store.put("x.pt", whole[:stop])
        with pytest.raises((Corrupt, FormatError)):
            holdfast.open("memory://cut/x.pt")


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_flipped_anywhere(every: int) -> None:
    """Where the tree or a tensor lies: found, by opening or by verifying.  Anywhere: no crash, no wait."""
    whole, store = small(), open_store("memory://flipped")
    expected = np.arange(6.0, dtype="f4").reshape(2, 3)
    began = time.monotonic()
    for at in range(0, len(whole), every):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        store.put("x.pt", data)
        try:
            checkpoint = holdfast.open("memory://flipped/x.pt")
            good = verify_foreign(checkpoint).good
            if good and "model.w" in checkpoint.names():
                assert np.array_equal(checkpoint.read("model.w"), expected), at
        except HoldfastError:
            pass
    assert time.monotonic() - began < 600


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pickles_that_are_changed(data: st.DataObject) -> None:
    """The tree's bytes changed under a right checksum: errors of ours alone, in bounded time."""
    with zipfile.ZipFile(io.BytesIO(small())) as old:
        members = {n: old.read(n) for n in old.namelist()}
    name = next(n for n in members if n.endswith("data.pkl"))
    tree = bytearray(members[name])
    for _ in range(data.draw(st.integers(1, 4))):
        tree[data.draw(st.integers(0, len(tree) - 1))] = data.draw(st.integers(0, 255))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as new:
        for n, value in (members | {name: bytes(tree)}).items():
            new.writestr(n, value)
    store = open_store("memory://changed")
    store.put("x.pt", out.getvalue())
    try:
        checkpoint = holdfast.open("memory://changed/x.pt")
        for n in checkpoint.names():
            if checkpoint.info(n).bytes < 1 << 20:
                checkpoint.read(n)
    except HoldfastError:
        pass


def test_a_pickle_that_would_run_something(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for attack in (
        b"\x80\x02cos\nsystem\nX%b\x85R.",
        b"\x80\x02c__builtin__\ngetattr\nctorch\nTensor\nX%b\x86R.",
        b"\x80\x02c__builtin__\neval\nX%b\x85R.",
    ):
        text = f"touch {mark}".encode()
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as new:
            new.writestr("x/data.pkl", attack % (len(text).to_bytes(4, "little") + text))
        with pytest.raises(FormatError, match="not known to be data"):
            holdfast.open(tmp_path / "x.pt")
    assert not mark.exists()


def test_a_value_that_would_run_something_is_left_out(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {mark}",)

    torch.save({"w": torch.ones(2), "epoch": 3, "it": Hostile()}, tmp_path / "x.pt")
    with pytest.warns(HoldfastWarning, match=r"it \(posix\.system\)"):
        found = holdfast.open(tmp_path / "x.pt")
    assert found.extras == {"epoch": 3} and not mark.exists()


class Config(dict[str, Any]):
    """As Hydra's configurations: a class of its own, with items and attributes."""

    def __init__(self, **given: Any) -> None:
        super().__init__(given)
        self.parent = self


class Schedule(enum.Enum):
    COSINE = "cosine"


@dataclass
class Options:
    lr: float
    kind: Any


UNKNOWN: dict[str, Any] = {
    "a dict's": Config(lr=0.1, inner=Config(depth=3)),
    "a dataclass": Options(0.1, Schedule.COSINE),
    "a member": {"schedule": [Schedule.COSINE]},
    "a class": {"optimizer": torch.optim.AdamW},
    "a function": functools.partial(torch.optim.AdamW, lr=0.1),
    "a factory": defaultdict(Config, a=Config()),
    "a list's": type("Steps", (list,), {})([1, 2]),
    "a time": datetime.timedelta(seconds=3),
    "a key": {Schedule.COSINE: 1},
    "a method": Options(0.1, None).__eq__,
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_values_of_which_nothing_is_known_are_left_out_and_told(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Lightning keeps what a module was made with."""
    value = UNKNOWN[what]
    if what == "a list's":
        monkeypatch.setattr(sys.modules[__name__], "Steps", type(value), raising=False)
    model = net()
    saved = {"state_dict": model.state_dict(), "epoch": 3, "hyper_parameters": value}
    torch.save(saved, tmp_path / "x.ckpt")
    with pytest.warns(HoldfastWarning, match=r"left out, .* data: hyper_parameters \("):
        found = holdfast.open(tmp_path / "x.ckpt")
    assert found.extras == {"epoch": 3}
    other = net()
    with pytest.warns(HoldfastWarning, match="left out"):
        holdfast.load(tmp_path / "x.ckpt", {"model": other})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


class Projector:
    def __init__(self) -> None:
        self.matrix = torch.ones(3)


def test_what_a_run_would_miss_is_refused(tmp_path: Path) -> None:
    """An optimizer's settings, also where it is all that a file has, and a module's own state."""
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1).state_dict()
    optimizer["param_groups"][0]["kind"] = Schedule.COSINE
    weights = net().state_dict() | {"0._extra_state": Schedule.COSINE}
    for value in (optimizer, {"optimizer": {**optimizer, "state": {0: torch.ones(1)}}}, weights):
        torch.save(value, tmp_path / "x.pt")
        with pytest.raises(FormatError, match="Schedule, which is not known to be data"):
            holdfast.open(tmp_path / "x.pt")


def test_a_value_that_one_rank_cannot_have_is_left_out_for_all(tmp_path: Path) -> None:
    for rank, value in enumerate((Schedule.COSINE, None)):
        saved = {"model": net().state_dict(), "epoch": 3, "it": value}
        torch.save(saved, tmp_path / f"rank{rank}.pt")
    with pytest.warns(HoldfastWarning, match=r"rank0.pt and 1 more: left out.* it \("):
        found = holdfast.open(tmp_path)
    assert found.extras == {"epoch": 3} and "model.0.weight" in found.names()


def test_unknown_objects_that_hold_tensors_are_refused(tmp_path: Path) -> None:
    """A module, an optimizer's state with objects, a tensor of a class of its own."""
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    state = optimizer.state_dict()
    state["state"] = {0: {"projector": Projector(), "step": torch.ones(1)}}
    own = torch.ones(3).as_subclass(type("Own", (torch.Tensor,), {"__module__": __name__}))
    globals()["Own"] = type(own)
    for value in (net(), {"module": net()}, {"optimizer": state}, {"w": own}, Projector()):
        torch.save(value, tmp_path / "x.pt")
        with pytest.raises(FormatError, match="not known to be data"):
            holdfast.open(tmp_path / "x.pt")


def test_values_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that hold each other, namespaces that hold themselves, and nesting without end."""
    monkeypatch.setattr("holdfast.formats.read.unpickle._MAX_NODES", 1 << 16)
    loop: list[Any] = []
    loop.append({"again": loop})
    space = argparse.Namespace()
    space.me = space
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    for value in (loop, space, deep):
        torch.save({"model": {"w": torch.ones(2)}, "value": value}, tmp_path / "x.pt")
        with pytest.raises(HoldfastError, match=r"parts|deep"):
            holdfast.open(tmp_path / "x.pt")


def test_bytes_of_arrays_are_bounded(tmp_path: Path) -> None:
    """A few bytes of a pickle cannot ask for gigabytes, or for objects."""
    for tree in (
        b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
        b"c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R.",
        b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x85R.",
    ):
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as new:
            new.writestr("x/data.pkl", b"\x80\x02" + tree)
        with pytest.raises(FormatError):
            holdfast.open(tmp_path / "x.pt")


# -- files of ranks -------------------------------------------------------------------------------


def save_ranks(folder: Path, *trees: Any) -> Path:
    folder.mkdir()
    for rank, tree in enumerate(trees):
        torch.save(tree, folder / f"rank{rank}.pt")
    return folder


def shards(step: float) -> list[torch.Tensor]:
    """A DTensor of two ranks, as each of them has it."""
    found = []
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        local = torch.full((2, 3), step)
        mesh = init_device_mesh("cpu", (2,))
        found.append(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        dist.destroy_process_group()
    return found


def run_of(weight: torch.Tensor, step: Any, count: Any) -> dict[str, Any]:
    state = {"w": {"step": count, "exp_avg": weight}}
    groups = [{"params": ["w"], "lr": 0.1}]
    return {
        "model": {"w": weight},
        "optim": {"state": state, "param_groups": groups},
        "step": step,
    }


@pytest.mark.parametrize("crc", [True, False])
def test_ranks_of_two_saves_are_refused(tmp_path: Path, crc: bool) -> None:
    """By the step that files state, and by the steps that optimizers count."""
    torch.serialization.set_crc32_options(crc)
    old, new = shards(100.0)[0], shards(101.0)[1]
    a, b = torch.tensor(100.0), torch.tensor(101.0)
    cases = {
        "numbers": (run_of(old, 100, a), run_of(new, 101, a)),
        "tensors": (run_of(old, torch.tensor(100), a), run_of(new, torch.tensor(101), a)),
        "counted": (run_of(old, 7, a), run_of(new, 7, b)),
        "counted plainly": (run_of(old, 7, 100), run_of(new, 7, 101)),
    }
    folders = [save_ranks(tmp_path / name, *trees) for name, trees in cases.items()]
    same = save_ranks(tmp_path / "same", run_of(old, 7, a), run_of(new, 7, a.clone()))
    torch.serialization.set_crc32_options(True)
    for folder in folders:
        with pytest.raises(FormatError, match=r"100.* in rank0\.pt and 101.* in rank1\.pt"):
            holdfast.open(folder)
    assert holdfast.open(same).step == 7


def test_shards_without_a_layout_are_refused(tmp_path: Path) -> None:
    """Tensor parallelism by hand: each rank's tensor looks like a whole one."""
    full = torch.arange(12.0).reshape(4, 3)
    states = [{"state": {0: {"m": full + r}}, "param_groups": [{"params": [0]}]} for r in range(2)]
    cases = {
        "cloned": [{"model": {"w": full[:2].clone()}}, {"model": {"w": full[2:].clone()}}],
        "views": [{"model": {"w": full[:2]}}, {"model": {"w": full[2:]}}],
        "flat": [{"w": full + r} for r in range(2)],
        "states": [{"model": {"w": full}, "optim": s} for s in states],
    }
    for name, trees in cases.items():
        with pytest.raises(FormatError, match=r"rank0\.pt.*rank1\.pt") as caught:
            holdfast.open(save_ranks(tmp_path / name, *trees))
        assert "DTensor" in str(caught.value)


def test_buffers_of_replicas_may_differ(tmp_path: Path) -> None:
    """Data parallelism: equal parameters, and the batch norm of each rank's own data."""
    trees = []
    for rank in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
        model[1].running_mean += rank
        trees.append({"model": model.state_dict(), "optim": optimizer.state_dict(), "rank": rank})
    checkpoint = holdfast.open(save_ranks(tmp_path / "x", *trees))
    assert checkpoint.read("model.1.running_mean").tolist() == [0] * 4
    assert checkpoint.extras["rank"] == {"ranks": [0, 1]}
    assert checkpoint.read("optim.param_groups[0].lr") == 0.25


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_step_may_be_a_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.save(
        {"model": net().state_dict(), "step": torch.tensor(50, dtype=dtype)}, tmp_path / "x.pt"
    )
    assert holdfast.open(tmp_path / "x.pt").step == 50


def test_a_rank_far_beyond_the_others(tmp_path: Path) -> None:
    """A date is no rank; ranks are counted, and not listed up to it."""
    folder = save_ranks(tmp_path / "x", net().state_dict())
    shutil.copy(folder / "rank0.pt", folder / "rank20250101.pt")
    began = time.process_time()
    with pytest.raises(NotFound, match=r"no file of rank 1 beside rank20250101\.pt"):
        holdfast.open(folder)
    assert time.process_time() - began < 2


def test_a_path_of_lightnings_is_told_from_a_file_with_tensors(tmp_path: Path) -> None:
    """Its integration writes a small file there that names a step."""
    (tmp_path / "top").mkdir()
    path = tmp_path / "top/best.ckpt"
    path.write_text('{"holdfast": 1, "root": "../runs/net", "step": 48, "run": 1}')
    for call in (
        lambda: holdfast.open(path),
        lambda: holdfast.load(path, {"x": torch.zeros(1)}),
        lambda: holdfast.convert(path, tmp_path / "out", to="torch"),
    ):
        with pytest.raises(UsageError, match=f"names step 48 of {tmp_path}/runs/net") as caught:
            call()
        assert caught.value.hint == f"give {tmp_path}/runs/net@48, here and to every command"


@pytest.mark.parametrize("text", ['{"holdfast": 1, "root": "../runs/ne', '{"holdfast": 1]'])
def test_a_damaged_path_of_lightnings_is_a_format_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.ckpt").write_text(text)
    with pytest.raises(FormatError, match=r"best\.ckpt begins like a path of Lightning's"):
        holdfast.open(tmp_path / "best.ckpt")


def test_what_lies_beside_states_and_groups_is_told(tmp_path: Path) -> None:
    """As fairseq has it for mixed precision."""
    old = net()
    optimizer = torch.optim.AdamW(old.parameters())
    train(old, optimizer)
    more = {f"x{i}": i for i in range(8)}
    own = optimizer.state_dict() | {"loss_scale": 64.0, "window": torch.ones(3), **more}
    saved = {"model": old.state_dict(), "optim": own}
    checkpoint = checkpoint_of(tmp_path, saved)
    assert checkpoint.extras["optim.loss_scale"] == 64.0
    assert checkpoint.read("optim.window").tolist() == [1.0] * 3
    told = [name for name in checkpoint.extras if name.startswith("optim.x")]
    assert told == [f"optim.{name}" for name in more]  # on every rank, whatever its hashes
    live = net(1)
    state = {"model": live, "optim": torch.optim.AdamW(live.parameters())}
    with pytest.raises(StateMismatch, match=r"optim\.loss_scale"):
        holdfast.load(tmp_path / "x.pt", state)
    with pytest.warns(HoldfastWarning, match=r"optim\.loss_scale"):
        holdfast.load(tmp_path / "x.pt", state, strict=False)
    assert all(torch.equal(p, q) for p, q in zip(live.parameters(), old.parameters()))


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (torch.optim.AdamW, ["step"]),
        (torch.optim.NAdam, ["step", "mu_product"]),
        (torch.optim.ASGD, ["step", "eta", "mu"]),
        (torch.optim.Adadelta, ["step"]),
        (torch.optim.SparseAdam, []),
    ],
)
def test_counts_that_are_plain_numbers_become_tensors(
    tmp_path: Path, kind: Any, numbers: list[str]
) -> None:
    """Up to torch 1.11 they were numbers; SparseAdam's still is one.  The next step is torch's own."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Embedding(6, 3, sparse=kind is torch.optim.SparseAdam)
        return model, kind(model.parameters(), lr=0.01)

    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        model(torch.tensor([1, 4])).square().sum().backward()
        optimizer.step()
        return next(model.parameters()).detach()

    old, optimizer = made(0)
    for _ in range(3):
        stepped(old, optimizer)
    states = optimizer.state_dict()
    for one in states["state"].values():
        one.update({name: one[name].item() for name in numbers})
    torch.save({"model": old.state_dict(), "optim": states}, tmp_path / "x.pt")
    model, live = made(1)
    holdfast.load(tmp_path / "x.pt", {"model": model, "optim": live})
    other, torchs = made(2)
    loaded = torch.load(tmp_path / "x.pt")
    other.load_state_dict(loaded["model"])
    torchs.load_state_dict(loaded["optim"])
    for _ in range(2):
        assert torch.equal(stepped(model, live), stepped(other, torchs))


@pytest.mark.parametrize("form", ["a dict", "a tensor"])
def test_generators_that_others_have_saved_are_not_put_back(tmp_path: Path, form: str) -> None:
    old = net()
    optimizer = torch.optim.AdamW(old.parameters())
    train(old, optimizer)
    now = torch.get_rng_state()
    rng = now if form == "a tensor" else {"torch": now, "cuda": []}
    saved = {"model": old.state_dict(), "optim": optimizer.state_dict(), "rng": rng, "epoch": 3}
    torch.save(saved, tmp_path / "x.pt")
    live = net(1)
    state = {"model": live, "optim": torch.optim.AdamW(live.parameters()), "epoch": 0}
    told = pytest.warns(HoldfastWarning, match="'rng' was not written by holdfast")
    with holdfast.Checkpointer(tmp_path / "root", state) as ckpt, told:
        assert ckpt.restore(source=str(tmp_path / "x.pt")).found
    assert state["epoch"] == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastWarning)
        holdfast.load(tmp_path / "x.pt", {"model": live, "rng": holdfast.Rng()}, only="model.*")
    assert all(torch.equal(p, q) for p, q in zip(live.parameters(), old.parameters()))
