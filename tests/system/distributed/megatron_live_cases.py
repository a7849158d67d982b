"""Worker, 4 ranks: Megatron-Core's models and optimizers as live state, on one arrangement and another."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

import holdfast
from holdfast.errors import StateMismatch, UsageError

from .cases import Case, run_all
from .megatron_cpu import on_cpu
from .megatron_gpt import Run, Setup

STEPS, MORE = 3, 4
HEAD = "output_layer.weight"
DENSE = Setup(layers=2, heads=8, groups=4, divisible=64)
TIED = replace(DENSE, tied=True)
BF16 = replace(DENSE, bf16=True)
FP16 = replace(DENSE, fp16=True, layers=4)
MOE = replace(DENSE, experts=4)
TP2 = {"tp": 2, "divisible": 32}
ARRANGED = {
    "fp32": {
        "tp2_pp2": replace(TIED, **TP2, pp=2),
        "dp4_zero": replace(TIED, distributed=True, bucket=2000, parallel_save=True),
        "tp4": replace(TIED, tp=4, divisible=16),
    },
    "bf16": {
        "tp2_zero": replace(BF16, **TP2, distributed=True, sequence_parallel=True),
        "pp2_zero": replace(BF16, pp=2, distributed=True),
        "tp2_pp2": replace(BF16, **TP2, pp=2),
    },
    "tied": {
        "pp2_zero": replace(TIED, bf16=True, pp=2, distributed=True),
        "dp4": replace(TIED, bf16=True),
    },
    "moe": {
        "ep2_zero": replace(MOE, ep=2, distributed=True),
        "tp2_ep2": replace(MOE, **TP2, ep=2, sequence_parallel=True),
    },
    "fp16": {
        "vp2_zero": replace(FP16, pp=2, virtual=2, distributed=True, parallel_save=True),
        "tp2_vp2": replace(FP16, **TP2, pp=2, virtual=2),
    },
}
NOISE = {"fp32": 2e-5, "bf16": 2e-2, "tied": 2e-2, "moe": 2e-5, "fp16": 4e-3}
"""By how much losses may differ, relatively, where the arithmetic is in another order."""
WRONG = {("tied", "pp2_zero"), ("fp32", "dp4_zero")}
"""By parameter (`fully_reshardable`) Megatron-Core 0.16 itself saves states shifted, if there are several
buckets and one of them ends in padding (where it warns of "data corruption", and where it does not)."""
GATHERED = ("bf16", "tp2_zero")
"""Whose buckets are saved by `dp_zero_gather_scatter`; those of the others as Megatron-LM does it."""


def state_of(run: Run) -> dict[str, object]:
    return {"model": run.models, "optim": run.optimizer}


def saved_as(model: str, name: str) -> dict[str, str]:
    """By folder, the sharding by which Megatron-Core saves the optimizer."""
    found = {} if (model, name) in WRONG else {"theirs": "fully_reshardable"}
    if ARRANGED[model][name].distributed:
        gathered = (model, name) == GATHERED
        found["buckets"] = "dp_zero_gather_scatter" if gathered else "dp_reshardable"
    return found


def _saving(model: str, name: str) -> Case:
    def save(root: Path) -> None:
        """What holdfast has saved is what it reads of Megatron's own checkpoint of the same moment."""
        run = Run(ARRANGED[model][name])
        run.train(STEPS)
        holdfast.save(root / "ours", state_of(run), step=STEPS)
        _own(root, run)
        for folder, sharding in saved_as(model, name).items():
            run.save_as(sharding, root / folder)
        scale = run.optimizer.get_loss_scale()
        losses = run.train(MORE)
        if dist.get_rank() == 0:
            torch.save((scale, losses), root / "after.pt")
            for folder in saved_as(model, name):
                _same(root, folder)
        dist.barrier()

    save.__name__ = f"save_{model}_{name}"
    return save


def _own(root: Path, run: Run) -> None:
    """This rank's weights are what was saved of them, rounded."""
    rank, size = mpu.get_tensor_model_parallel_rank(), run.setup.tp
    with holdfast.open(root / "ours") as saved:
        for name, p in (pair for gpt in run.gpts for pair in gpt.named_parameters()):
            if name.endswith(
                ("final_layernorm.weight", "embeddings.weight", "output_layer.weight")
            ):
                tied = run.setup.tied and name == "output_layer.weight"
                found = saved.read(f"model.{'embedding.word_embeddings.weight' if tied else name}")
                mine = torch.from_numpy(found).to(p.dtype)
                rows = mine if mine.shape == p.shape else mine.chunk(size)[rank]
                assert torch.equal(rows, p.detach()), name


def _same(root: Path, folder: str = "theirs") -> None:
    with holdfast.open(root / "ours") as ours, holdfast.open(root / folder) as theirs:
        names = {t.name for t in theirs.manifest.tensors}
        scalers = [c.extras.get("optim.engine") or {} for c in (ours, theirs)]
        assert str(scalers[0]) == str(scalers[1])
        assert theirs.manifest.aliases.items() <= ours.manifest.aliases.items()
        plain = theirs.extras["optim"]["state"]
        assert {t.name for t in ours.manifest.tensors if t.state != "step"} == {
            t.name for t in theirs.manifest.tensors if t.state != "step"
        }
        for t in ours.manifest.tensors:
            if t.name in names:
                assert np.array_equal(ours.read(t.name), theirs.read(t.name)), t.name
            else:
                param = t.name.removeprefix("optim.").removesuffix(".step")
                assert plain[param]["step"] == ours.read(t.name)
        mine, other = (
            {p: g for g in c.extras["optim"]["param_groups"] for p in g["params"]}
            for c in (ours, theirs)
        )
        for param, group in mine.items():
            same = {k: v for k, v in other[param].items() if k not in ("params", "step")}
            assert {k: v for k, v in group.items() if k != "params"} == same, param


def norms_that_are_equal(root: Path) -> None:
    """All ones still in 16 bit, while their masters differ: told apart by the order of modules."""
    run = Run(replace(FP16, pp=2, virtual=2, distributed=True, lr=1e-5))
    run.train(STEPS)
    holdfast.save(root / "ours", state_of(run), step=STEPS)
    run.save_as("dp_reshardable", root / "theirs")
    norms = [p for gpt in run.gpts for n, p in gpt.named_parameters() if "norm.weight" in n]
    assert all(torch.equal(p, torch.ones_like(p)) for p in norms)
    if dist.get_rank() == 0:
        _same(root)
    dist.barrier()


def _resuming(model: str, source: str, target: str) -> Case:
    def resume(root: Path) -> None:
        """Training goes on as if it had not been interrupted."""
        saved = root.parent / f"save_{model}_{source}"
        setup = ARRANGED[model][target]
        scale, expected = torch.load(saved / "after.pt")
        foreign = list(saved_as(model, source))
        for folder in ("ours", *(foreign[-1:] if source == target else foreign)):
            url = saved / folder
            run = Run(setup, seed=5)
            run.train(1)
            assert holdfast.load(url, state_of(run)) == STEPS
            assert torch.equal(run.optimizer.get_loss_scale(), scale)
            run.iteration = STEPS
            found = run.train(MORE)
            if source == target:
                assert found == expected, (found, expected)
            else:
                close = np.allclose(found, expected, rtol=NOISE[model])
                assert close, (found, expected)

    resume.__name__ = f"resume_{model}_{source}_as_{target}"
    return resume


def training_goes_on_beside_a_save(root: Path) -> None:
    """What is saved is the state at the call, and a run that restores it repeats what followed."""
    for name, setup in (
        ("zero", ARRANGED["bf16"]["tp2_zero"]),
        ("fp32", ARRANGED["fp32"]["tp2_pp2"]),
    ):
        run = Run(setup)
        run.train(1)
        with holdfast.Checkpointer(root / name, state_of(run), deadline_s=240) as ckpt:
            for _ in range(2):  # the second uses the first one's plan
                save = ckpt.save(run.iteration)
                losses = run.train(2)
                save.wait()
        again = Run(setup, seed=5)
        with holdfast.Checkpointer(root / name, state_of(again), deadline_s=240) as ckpt:
            again.iteration = ckpt.restore()
        assert again.iteration == 3
        assert again.train(2) == losses


def another_padding(root: Path) -> None:
    """Rows of the vocabulary that only one of the two has are padding: left out, or zero."""
    source = root.parent / "save_bf16_tp2_pp2"
    for url in (source / "ours", source / "theirs"):
        with holdfast.open(url) as saved:
            for divisible in (26, 128):
                run = Run(replace(BF16, divisible=divisible), seed=5)
                run.train(1)
                holdfast.load(url, state_of(run))
                _check_padded(run, saved)


def _check_padded(run: Run, saved: holdfast.Checkpoint) -> None:
    kept = {f"optim.{HEAD}.{s}": t for s, t in run.states()[HEAD].items() if t.ndim}
    for name, found in (kept | {f"model.{HEAD}": run.masters()[HEAD]}).items():
        expected = torch.from_numpy(saved.read(name))
        rows = min(len(expected), len(found))
        assert (len(found), rows) in ((52, 52), (128, 64))
        assert torch.equal(found[:rows], expected[:rows])
        assert not found[rows:].any()


def another_model_is_refused(root: Path) -> None:
    run = Run(replace(BF16, layers=4), seed=5)
    before = {n: p.clone() for n, p in run.gpt.named_parameters()}
    source = root.parent / "save_bf16_tp2_zero" / "ours"
    with pytest.raises(StateMismatch, match=r"missing.*layers\.3\.mlp"):
        holdfast.load(source, state_of(run))
    assert all(torch.equal(p, before[n]) for n, p in run.gpt.named_parameters())
    with pytest.raises(UsageError, match="without its model"):
        holdfast.load(source, {"optim": run.optimizer})


def what_needs_cuda_is_refused_by_name(root: Path) -> None:
    """Neither can be made here: Megatron-FSDP has streams, precision-aware optimizers are Transformer
    Engine's.  The classes and the configuration are Megatron's own."""
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    run = Run(replace(BF16, distributed=True), seed=5)
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    torch.nn.Module.__init__(wrapper)
    wrapper.module = run.gpt
    with pytest.raises(holdfast.HoldfastError, match=r"Megatron-FSDP \(FullyShardedDataParallel\)"):
        holdfast.save(root / "ours", {"model": wrapper}, step=1)
    run.optimizer.config.use_precision_aware_optimizer = True
    with pytest.raises(
        holdfast.HoldfastError, match="with a precision-aware optimizer cannot be live state"
    ):
        holdfast.save(root / "ours", state_of(run), step=1)


def what_modules_say_besides_is_refused(root: Path) -> None:
    """Their own entries of state_dict() are in no sharded_state_dict(): nothing is left out unsaid."""
    run = Run(BF16, seed=5)
    run.gpt.register_state_dict_post_hook(lambda _, s, p, __: s.update({f"{p}kind": "nf4"}))
    message = r"model\.kind: .* inside an engine(?s:.*)ignore\(model, 'kind'\)"
    with pytest.raises(holdfast.HoldfastError, match=message):
        holdfast.save(root / "ours", state_of(run), step=1)
    holdfast.ignore(run.gpt, "kind")
    holdfast.save(root / "ours", state_of(run), step=1)
    holdfast.load(root / "ours", state_of(run))


def each_optimizer_of_a_chain_has_its_own_loss_scale(root: Path) -> None:
    """One may have backed off alone; in a chain of another length all have the first one's."""
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler

    def scales(run: Run) -> list[tuple[float, int]]:
        scalers = [one.grad_scaler for one in run.optimizer.chained_optimizers]
        return [(float(one.scale), one._growth_tracker) for one in scalers]

    setup = replace(MOE, ep=2, fp16=True, distributed=True)
    run = Run(setup)
    run.train(1)
    assert len(scales(run)) == 2
    holdfast.save(root / "same", state_of(run), step=1)
    same = scales(run)
    for _ in range(2):  # its hysteresis
        run.optimizer.chained_optimizers[1].grad_scaler.update(True)
    saved = scales(run)
    assert saved[1][0] == saved[0][0] / 2
    holdfast.save(root / "other", state_of(run), step=1)
    for folder, expected in (("other", saved), ("same", same)):
        again = Run(setup, seed=5)
        holdfast.load(root / folder, state_of(again))
        assert scales(again) == expected, folder
    one = Run(replace(FP16, layers=2))
    for optimizer in one.optimizer.chained_optimizers:
        optimizer.grad_scaler = ConstantGradScaler(8.0)
    holdfast.save(root / "constant", state_of(one), step=1)
    holdfast.load(root / "constant", state_of(one))
    dynamic = Run(replace(FP16, layers=2), seed=5)
    before, weights = scales(dynamic), [p.detach().clone() for p in dynamic.gpt.parameters()]
    message = r"optim\.engine\.grad_scaler: saved without growth_tracker, .*constant loss_scale"
    with pytest.raises(StateMismatch, match=message):
        holdfast.load(root / "constant", state_of(dynamic))
    assert all(torch.equal(p, w) for p, w in zip(dynamic.gpt.parameters(), weights))
    holdfast.load(root / "constant", state_of(dynamic), strict=False)
    assert scales(dynamic) == before
    assert not all(torch.equal(p, w) for p, w in zip(dynamic.gpt.parameters(), weights))


def into_plain_modules(root: Path) -> None:
    """By names alone, a norm by either of its two: not Megatron's module, and torch's own optimizer."""
    for name in ("save_fp32_tp2_pp2", "save_bf16_tp2_zero", "save_moe_ep2_zero"):
        url = root.parent / name / "ours"
        with holdfast.open(url) as saved:
            first = [t.name for t in saved.manifest.tensors if t.name.startswith("model.")]
            other = {n: a for a, n in saved.manifest.aliases.items()}
            for names in (first, [other.get(n, n) for n in first]):
                _into_plain(url, saved, [n.removeprefix("model.") for n in names])


class Counting(torch.optim.AdamW):
    """May have state that belongs to no parameter, of which it is saved also that there is none."""


def from_a_plain_optimizer_of_ones_own(root: Path) -> None:
    """Its state that belongs to no parameter has no place here: told before anything is written."""
    url = root.parent / "save_fp32_tp2_pp2" / "ours"
    with holdfast.open(url) as saved:
        shapes = {
            t.name.removeprefix("model."): t.shape
            for t in saved.manifest.tensors
            if t.name.startswith("model.")
        }
    tree, adam = _plain(shapes, Counting)
    plain = {"model": tree, "optim": adam}
    holdfast.load(url, plain)
    holdfast.save(root / "none", plain, step=1)
    run = Run(ARRANGED["fp32"]["tp2_pp2"], seed=5)
    holdfast.load(root / "none", state_of(run))
    adam.state["rounds"] = 3  # type: ignore[assignment, index]
    holdfast.save(root / "some", plain, step=1)
    run = Run(ARRANGED["fp32"]["tp2_pp2"], seed=6)
    before = {n: p.clone() for n, p in run.gpt.named_parameters()}
    with pytest.raises(
        StateMismatch, match=r"was saved \('rounds'\); a ChainedOptimizer has no place"
    ):
        holdfast.load(root / "some", state_of(run))
    assert all(torch.equal(p, before[n]) for n, p in run.gpt.named_parameters())


def _plain(
    shapes: dict[str, tuple[int, ...]], kind: type[torch.optim.AdamW]
) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """A module with parameters of these names, and an optimizer of them."""
    tree = torch.nn.Module()
    for name, shape in shapes.items():
        _grow(tree, name.split("."), torch.zeros(shape))
    groups = [[p for p in tree.parameters() if (p.ndim == 1) is v] for v in (False, True)]
    return tree, kind([{"params": g} for g in groups], lr=7.0)


def _into_plain(url: Path, saved: holdfast.Checkpoint, names: list[str]) -> None:
    shapes = {name: saved.info(f"model.{name}").shape for name in names}
    tree, adam = _plain(shapes, torch.optim.AdamW)
    holdfast.load(url, {"model": tree, "optim": adam})
    for name, p in tree.named_parameters():
        assert np.array_equal(p.detach().numpy(), saved.read(f"model.{name}"))
        for state in ("exp_avg", "exp_avg_sq"):
            assert np.array_equal(adam.state[p][state].numpy(), saved.read(f"optim.{name}.{state}"))
        assert adam.state[p]["step"] == STEPS
    assert [g["wd_mult"] for g in adam.param_groups] == [1.0, 0.0]
    assert {g["lr"] for g in adam.param_groups} == {DENSE.lr}


def _grow(tree: torch.nn.Module, words: list[str], value: torch.Tensor) -> None:
    for word in words[:-1]:
        if not hasattr(tree, word):
            tree.add_module(word, torch.nn.Module())
        tree = getattr(tree, word)
    tree.register_parameter(words[-1], torch.nn.Parameter(value))


SAVING = [_saving(model, name) for model, names in ARRANGED.items() for name in names]
RESUMING = [
    _resuming(model, source, target)
    for model, names in ARRANGED.items()
    for i, target in enumerate(names)
    for source in (target, list(names)[i - 1])
]
CASES = [
    *SAVING,
    *RESUMING,
    norms_that_are_equal,
    training_goes_on_beside_a_save,
    another_padding,
    another_model_is_refused,
    what_needs_cuda_is_refused_by_name,
    what_modules_say_besides_is_refused,
    each_optimizer_of_a_chain_has_its_own_loss_scale,
    into_plain_modules,
    from_a_plain_optimizer_of_ones_own,
]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    on_cpu()
    run_all(CASES)
