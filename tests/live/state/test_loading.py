"""What a user may ask of a load: parts, other dtypes, empty models; and how it says no."""

from __future__ import annotations

import json
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.base.threads import in_threads
from holdfast.core.checkpoint import reading
from holdfast.errors import Corrupt, NotRecoverable, StateMismatch
from holdfast.live import restore_into_state


class Net(nn.Module):
    """Tied weights, a norm with running statistics, a buffer that is in no checkpoint."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embed.weight


def build(seed: int, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values()))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Step 1 of `build(0)` with an optimizer that has made a step."""
    net = build(0)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net.head(net.body(net.embed.weight)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path, {"model": net, "optim": optimizer, "epoch": 3}, step=1)
    torch.save(net.state_dict(), tmp_path / "expected.pt")
    return tmp_path


def expected(root: Path) -> Net:
    net = Net()
    net.load_state_dict(torch.load(root / "expected.pt"))
    return net


def test_weights_alone(root: Path) -> None:
    net = build(1)
    assert holdfast.load(root, {"model": net}) == 1
    assert equal(net, expected(root))
    assert net.head.weight is net.embed.weight


def test_only_some_names(root: Path) -> None:
    net, before = build(1), build(1)
    holdfast.load(root, {"model": net, "epoch": 0}, only="model.body.*")
    assert equal(net.body, expected(root).body)
    assert torch.equal(net.embed.weight, before.embed.weight)
    holdfast.load(root, {"model": net}, only=["model.embed.weight", "model.embed.*"])
    assert equal(net, expected(root))


def test_cast(root: Path) -> None:
    net = build(1).to(torch.bfloat16)
    with pytest.raises(
        StateMismatch, match=r"model\.embed\.weight: saved as float32, here bfloat16"
    ):
        holdfast.load(root, {"model": net})
    holdfast.load(root, {"model": net}, cast=True)
    assert equal(net, expected(root).to(torch.bfloat16))


def test_states_are_cast_with_their_parameters(tmp_path: Path) -> None:
    """Also those that are made by the restore: the optimizer can go on."""

    def new(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Linear(4, 3).to(dtype)
        return net, torch.optim.AdamW(net.parameters())

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        net(torch.ones(4, dtype=net.weight.dtype)).sum().backward()
        optimizer.step()

    net, optimizer = new(torch.float32)
    step(net, optimizer)
    holdfast.save(tmp_path, {"model": net, "optim": optimizer}, step=1)
    other, fresh = new(torch.bfloat16)
    holdfast.load(tmp_path, {"model": other, "optim": fresh}, cast=True)
    found = {name: value.dtype for name, value in fresh.state[other.weight].items()}
    assert found == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }
    step(other, fresh)


def test_cast_up_is_exact(tmp_path: Path) -> None:
    narrow = build(0).to(torch.float16)
    holdfast.save(tmp_path, {"model": narrow}, step=1)
    wide = build(1)
    holdfast.load(tmp_path, {"model": wide}, cast=True)
    assert equal(wide, narrow.to(torch.float32))


def test_a_mismatch_lists_every_name_and_touches_nothing(root: Path) -> None:
    net = build(1)
    net.body.append(nn.Linear(8, 4))
    net.boddy = nn.Linear(8, 8)
    net.embed = nn.Embedding(13, 9)
    del net.body[1]
    before = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(root, {"model": net, "epohc": 1})
    text = "\n".join(caught.value.problems)
    for name in ("model.boddy.weight", "model.boddy.bias", "epohc"):
        assert f"missing in the checkpoint: {name}" in text
    assert "did you mean 'model.body" in text
    assert "did you mean 'epoch'" in text
    assert "model.embed.weight: saved with shape (13, 8), here (13, 9)" in text
    assert "model.body.1.weight: saved with shape (8,), here (4, 8)" in text
    assert "unexpected in the checkpoint: model.body.1.running_mean" in text
    assert "unexpected in the checkpoint: model.body.1.num_batches_tracked" in text
    assert all(line in str(caught.value) for line in caught.value.problems)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


def test_strict_false_loads_what_there_is(root: Path) -> None:
    net = build(1)
    net.extra = nn.Linear(2, 2)
    del net.body[1]
    kept = net.extra.weight.detach().clone()
    holdfast.load(root, {"model": net, "unknown": 4}, strict=False)
    assert torch.equal(net.extra.weight, kept)
    assert torch.equal(net.embed.weight, expected(root).embed.weight)


def test_strict_false_still_refuses_other_shapes(root: Path) -> None:
    with pytest.raises(StateMismatch, match=r"saved with shape \(8, 8\), here \(9, 9\)"):
        holdfast.load(root, {"model": build(1, width=9)}, strict=False)


def test_a_model_on_the_meta_device_is_made_real(root: Path) -> None:
    with torch.device("meta"):
        net = Net()
    holdfast.load(root, {"model": net})
    assert not any(t.is_meta for t in (*net.parameters(), *net.buffers()))
    assert net.head.weight is net.embed.weight
    assert equal(net, expected(root))


def test_a_meta_buffer_in_no_checkpoint_is_refused(root: Path) -> None:
    with torch.device("meta"):
        net = Net()
        net.register_buffer("angles", torch.zeros(4), persistent=False)
    with pytest.raises(holdfast.errors.UsageError, match="angles are on the meta device"):
        holdfast.load(root, {"model": net})


def test_a_model_whose_weights_accelerate_has_offloaded_is_refused(root: Path) -> None:
    """Its hooks, which it keeps under this name, put their own values back in each forward pass."""
    with torch.device("meta"):
        net = Net()
    net.head._hf_hook = object()
    pattern = r"'head.weight': .* offloaded by accelerate"
    with pytest.raises(holdfast.errors.UsageError, match=pattern):
        holdfast.load(root, {"model": net})
    assert all(p.is_meta for p in net.parameters()), "nothing was touched"


def test_ties_that_are_new_or_gone(tmp_path: Path) -> None:
    """Tied weights load into two of their own, and the other way round, with their Adam state."""
    tied, apart = build(0), build(1)
    apart.head.weight = nn.Parameter(torch.zeros(13, 8))
    optimizers = [torch.optim.Adam(net.parameters()) for net in (tied, apart)]
    tied.head(tied.body(tied.embed.weight)).square().sum().backward()
    optimizers[0].step()
    holdfast.save(tmp_path, {"model": tied, "optim": optimizers[0]}, step=1)
    holdfast.load(tmp_path, {"model": apart, "optim": optimizers[1]})
    assert torch.equal(apart.head.weight, tied.embed.weight)
    moments = [optimizers[1].state[p]["exp_avg"] for p in (apart.head.weight, apart.embed.weight)]
    assert moments[0] is not moments[1]
    for moment in moments:
        assert torch.equal(moment, optimizers[0].state[tied.embed.weight]["exp_avg"])
    holdfast.save(tmp_path, {"model": apart, "optim": optimizers[1]}, step=2)
    again = build(2)
    optimizer = torch.optim.Adam(again.parameters())
    holdfast.load(tmp_path, {"model": again, "optim": optimizer}, step=2)
    assert equal(again, tied)
    assert torch.equal(optimizer.state[again.head.weight]["exp_avg"], moments[0])


@pytest.mark.parametrize("shape", [(13, 8), (14, 8)])
def test_two_weights_that_differ_do_not_become_one(tmp_path: Path, shape: tuple[int, int]) -> None:
    """A model that was not tied when it was saved: the second of its weights would be lost."""
    apart, tied = build(0), build(1)
    apart.head.weight = nn.Parameter(torch.ones(shape))
    holdfast.save(tmp_path, {"model": apart}, step=1)
    before = tied.embed.weight.detach().clone()
    said = "different values" if shape == (13, 8) else "this one was saved as"
    expected = rf"model.head.weight \(here it is model.embed.weight, but .*{said}"
    with pytest.raises(holdfast.errors.StateMismatch, match=expected):
        holdfast.load(tmp_path, {"model": tied})
    assert torch.equal(tied.embed.weight, before)
    with pytest.warns(holdfast.errors.HoldfastWarning, match=expected):
        holdfast.load(tmp_path, {"model": tied}, strict=False)
    assert torch.equal(tied.embed.weight, apart.embed.weight)


def test_a_step_whose_second_weight_is_damaged_is_passed_over(tmp_path: Path) -> None:
    """Nobody can tell whether it is the same as the first."""
    apart, tied = (
        nn.ModuleDict({"embed": nn.Embedding(600, 300), "head": nn.Linear(300, 600, bias=False)})
        for _ in range(2)
    )
    apart["head"].weight = nn.Parameter(apart["embed"].weight.detach().clone())
    tied["head"].weight = tied["embed"].weight
    for step in (1, 2):
        holdfast.save(tmp_path, {"model": apart}, step=step)
    flip(tmp_path, 2, "model.head.weight")
    with (
        holdfast.Checkpointer(tmp_path, {"model": tied}) as ckpt,
        pytest.warns(holdfast.HoldfastWarning, match="step 2"),
    ):
        assert ckpt.restore() == 1
    assert torch.equal(tied["embed"].weight, apart["embed"].weight)


def test_a_tied_weight_can_be_chosen_by_each_of_its_names(tmp_path: Path) -> None:
    saved = build(0)
    holdfast.save(tmp_path, {"model": saved}, step=1)
    for name in ("model.embed.weight", "model.head.weight"):
        net = build(1)
        holdfast.load(tmp_path, {"model": net}, only=name)
        assert torch.equal(net.embed.weight, saved.embed.weight)


def test_a_compiled_or_wrapped_model_has_the_same_names(root: Path) -> None:
    wrapped = nn.DataParallel(build(1))
    holdfast.load(root, {"model": wrapped})
    assert equal(wrapped.module, expected(root))


def test_nothing_to_load_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotRecoverable, match="no checkpoint in"):
        holdfast.load(tmp_path / "nowhere", {"model": build(0)})
    with holdfast.Checkpointer(tmp_path, {"model": build(0)}) as ckpt:
        assert ckpt.restore() == 0
        with pytest.raises(holdfast.errors.NotFound):
            ckpt.restore(5)


# -- damage ---------------------------------------------------------------------------------------


def flip(root: Path, step: int, tensor: str) -> tuple[str, int]:
    """Flip one bit in the middle of a tensor's bytes; the file's key and the byte's offset."""
    (path,) = root.glob(f"steps/{step:010d}/*/*.safetensors")
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + length]))
    at = 8 + length + sum(header[tensor]["data_offsets"]) // 2
    data[at] ^= 4
    path.write_bytes(data)
    return str(path.relative_to(root)), at


def saved_steps(root: Path, steps: list[int]) -> nn.Module:
    """Checkpoints of a model whose weights are the step's number."""
    net = nn.Linear(300, 300)
    for step in steps:
        with torch.no_grad():
            net.weight.fill_(step)
        holdfast.save(root, {"model": net}, step=step)
    return net


def test_a_flipped_bit_is_named(tmp_path: Path) -> None:
    net = saved_steps(tmp_path, [1])
    key, at = flip(tmp_path, 1, "model.weight")
    with pytest.raises(Corrupt) as caught:
        holdfast.load(tmp_path, {"model": net})
    error = caught.value
    assert (error.key, error.step) == (key, 1)
    assert error.start <= at < error.stop <= error.start + (256 << 10)
    assert error.expected != error.found
    assert key in str(error)
    assert net.weight.isnan().all(), "a half-loaded model must not look like a good one"


def test_a_load_that_is_interrupted_leaves_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notebooks go on after a KeyboardInterrupt."""
    net = saved_steps(tmp_path, [1])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(restore_into_state, "plan_together", lambda *_: interrupted)
    with pytest.raises(KeyboardInterrupt):
        holdfast.load(tmp_path, {"model": net})
    assert net.weight.isnan().all()


def test_nothing_is_written_over_the_nan_of_an_interrupted_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that read have ended by then."""
    state = {"x": {f"w{n}": torch.zeros(1_000_000) for n in range(16)}}
    holdfast.save(tmp_path, {"x": {name: torch.ones(1_000_000) for name in state["x"]}}, step=1)
    heard, placed = threading.Event(), list[int]()

    def handler(*_: Any) -> None:
        heard.set()
        raise KeyboardInterrupt

    def interrupted(work: Any, items: Any, threads: int, **options: Any) -> None:
        def one(item: Any) -> None:
            if len(placed) == 2:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                assert heard.wait(60)
            placed.append(1)
            work(item)

        in_threads(one, items, 2, **options)

    monkeypatch.setattr(reading, "in_threads", interrupted)
    old = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            holdfast.load(tmp_path, state)
    finally:
        signal.signal(signal.SIGUSR1, old)
    num_placed = len(placed)
    assert all(tensor.isnan().all() for tensor in state["x"].values())
    assert not [t for t in threading.enumerate() if t.name == "holdfast-io"]
    assert len(placed) == num_placed >= 3


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_whatever_has_a_nan_is_poisoned(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {"x": {"w": torch.zeros(300_000, dtype=dtype)}}
    holdfast.save(tmp_path, state, step=1)
    flip(tmp_path, 1, "x.w")
    with pytest.raises(Corrupt):
        holdfast.load(tmp_path, state)
    assert state["x"]["w"].to(torch.complex64).isnan().all()


def test_verification_can_be_left_out(tmp_path: Path) -> None:
    net = saved_steps(tmp_path, [1])
    flip(tmp_path, 1, "model.weight")
    holdfast.load(tmp_path, {"model": net}, verify=False)
    assert (net.weight != 1).sum() == 1


def test_restore_goes_back_to_the_newest_good_step(tmp_path: Path) -> None:
    net = saved_steps(tmp_path, [1, 2, 3, 4])
    flip(tmp_path, 4, "model.weight")
    next(tmp_path.glob("steps/0000000003/*/*.safetensors")).unlink()
    with holdfast.Checkpointer(tmp_path, {"model": net}) as ckpt:
        with pytest.warns(holdfast.HoldfastWarning) as caught:
            assert ckpt.restore() == 2
        assert (net.weight == 2).all()
        told = [str(w.message) for w in caught]
        assert [re.match(r"step (\d)", t)[1] for t in told] == ["4", "3"]


def test_restore_says_why_nothing_can_be_used(tmp_path: Path) -> None:
    net = saved_steps(tmp_path, [1, 2])
    flip(tmp_path, 1, "model.weight")
    (tmp_path / "steps/0000000002/manifest.json").write_bytes(b"{}")
    with (
        holdfast.Checkpointer(tmp_path, {"model": net}) as ckpt,
        pytest.warns(holdfast.HoldfastWarning),
        pytest.raises(NotRecoverable) as caught,
    ):
        ckpt.restore()
    assert caught.value.reasons.keys() == {1, 2}
    assert "differ from what was written" in caught.value.reasons[1]
    assert "manifest" in caught.value.reasons[2]


def test_a_state_that_does_not_fit_is_not_passed_over(tmp_path: Path) -> None:
    saved_steps(tmp_path, [1, 2])
    with (
        holdfast.Checkpointer(tmp_path, {"model": nn.Linear(4, 4)}) as ckpt,
        pytest.raises(StateMismatch, match="step 2"),
    ):
        ckpt.restore()
