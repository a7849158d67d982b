"""Worker, 4 ranks: Megatron-Core's models and optimizers as live state, on one arrangement and another."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

import holdfast

from .cases import Case, run_all
from .megatron_gpt import Run, Setup, on_cpu

STEPS, MORE = 3, 4
DENSE = Setup(layers=2, heads=8, groups=4, divisible=64)
TIED = replace(DENSE, tied=True)
BF16 = replace(DENSE, bf16=True)
MOE = replace(DENSE, experts=4)
TP2 = {"tp": 2, "divisible": 32}
ARRANGED = {
    "fp32": {
        "tp2_pp2": replace(TIED, **TP2, pp=2),
        "dp4_zero": replace(TIED, distributed=True),
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
}
NOISE = {"fp32": 2e-5, "bf16": 2e-2, "tied": 2e-2, "moe": 2e-5}
"""By how much losses may differ, relatively, where the arithmetic is in another order."""
WRONG = {("tied", "pp2_zero")}
"""Megatron-Core 0.16 itself saves an embedding that is tied between stages shifted (it warns of "data
corruption"), where the distributed optimizer gives it a bucket of its own."""


def state_of(run: Run) -> dict[str, object]:
    return {"model": run.model, "optim": run.optimizer}


def _saving(model: str, name: str) -> Case:
    def save(root: Path) -> None:
        """What holdfast has saved is what it reads of Megatron's own checkpoint of the same moment."""
        run = Run(ARRANGED[model][name])
        run.train(STEPS)
        holdfast.save(root / "ours", state_of(run), step=STEPS)
        _own(root, run)
        if (model, name) not in WRONG:
            run.save(root / "theirs")
        losses = run.train(MORE)
        if dist.get_rank() == 0:
            torch.save(losses, root / "losses.pt")
            if (model, name) not in WRONG:
                _same(root)
        dist.barrier()

    save.__name__ = f"save_{model}_{name}"
    return save


def _own(root: Path, run: Run) -> None:
    """This rank's weights are what was saved of them, rounded."""
    rank, size = mpu.get_tensor_model_parallel_rank(), run.setup.tp
    with holdfast.open(root / "ours") as saved:
        for name, p in run.gpt.named_parameters():
            if name.endswith(
                ("final_layernorm.weight", "embeddings.weight", "output_layer.weight")
            ):
                tied = run.setup.tied and name == "output_layer.weight"
                found = saved.read(f"model.{'embedding.word_embeddings.weight' if tied else name}")
                mine = torch.from_numpy(found).to(p.dtype)
                rows = mine if mine.shape == p.shape else mine.chunk(size)[rank]
                assert torch.equal(rows, p.detach()), name


def _same(root: Path) -> None:
    with holdfast.open(root / "ours") as ours, holdfast.open(root / "theirs") as theirs:
        names = {t.name for t in theirs.manifest.tensors}
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


def _resuming(model: str, source: str, target: str) -> Case:
    def resume(root: Path) -> None:
        """Training goes on as if it had not been interrupted."""
        saved = root.parent / f"save_{model}_{source}"
        setup = ARRANGED[model][target]
        expected = torch.load(saved / "losses.pt")
        for url in (saved / "ours", saved / "theirs")[: 1 + ((model, source) not in WRONG)]:
            run = Run(setup, seed=5)
            run.train(1)
            assert holdfast.load(url, state_of(run)) == STEPS
            run.iteration = STEPS
            found = run.train(MORE)
            if source == target:
                assert found == expected, (found, expected)
            else:
                close = np.allclose(found, expected, rtol=NOISE[model])
                assert close, (found, expected)

    resume.__name__ = f"resume_{model}_{source}_as_{target}"
    return resume


SAVING = [_saving(model, name) for model, names in ARRANGED.items() for name in names]
RESUMING = [
    _resuming(model, source, target)
    for model, names in ARRANGED.items()
    for i, source in enumerate(names)
    for target in (source, list(names)[(i + 1) % len(names)])
]
CASES = [*SAVING, *RESUMING]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    on_cpu()
    run_all(CASES)
