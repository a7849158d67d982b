"""Worker, 1 rank: what Megatron-Core loads of each source is what holdfast reads of it."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core import dist_checkpointing

import holdfast

from .cases import Case, run_all
from .megatron_cpu import on_cpu
from .megatron_gpt import Run, Setup, extra_state
from .megatron_sources import SOURCES, STEPS, whole

Tensors = dict[str, torch.Tensor]


def same(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype, f"{name}: {found.dtype}, expected {expected.dtype}"
    assert torch.equal(found, expected), f"{name} differs"


@dataclass(frozen=True)
class Expected:
    """What Megatron-Core itself has loaded, by a live model's names."""

    setup: Setup
    weights: Tensors
    masters: Tensors
    states: dict[str, Tensors]


def loaded(name: str, folder: Path) -> Expected:
    """Loaded into a run on one rank.  Not the optimizer of experts: Megatron-Core wants them on as many
    ranks as they were saved on; its tensors are read by themselves."""
    run = Run(whole(SOURCES[name]), seed=2)
    if not run.setup.experts:
        run.load(folder)
        return Expected(run.setup, run.weights(), run.masters(), run.states())
    run.load_weights(folder)
    plain = dist_checkpointing.load_plain_tensors(str(folder))

    def stored(state: str, name: str) -> torch.Tensor:
        words, at = [], []
        for word, before in zip(name.split("."), ["", *name.split(".")]):
            if before in ("layers", "local_experts"):
                at.append(int(word))
            else:
                words.append("experts" if word == "local_experts" else word)
        key = ".".join(words).replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        return plain[f"optimizer.state.{state}.{key}"][tuple(at)]

    names = [n for n, _ in run.gpt.named_parameters()]
    states = {n: {s: stored(s, n) for s in ("exp_avg", "exp_avg_sq")} for n in names}
    masters = {n: stored("param", n) for n in names}
    return Expected(run.setup, run.weights(), masters, states)


def _case(name: str) -> Case:
    def read(root: Path) -> None:
        source = root.parent / name
        expected = loaded(name, source / f"iter_{STEPS:07d}")
        _as_read(source, expected)
        _into_live(source, expected)
        _into_plain(source, expected)
        _extra_states(source, root / "universal")

    read.__name__ = f"read_{name}"
    return read


def _as_read(source: Path, expected: Expected) -> None:
    """Every tensor, by the names of a model that lies whole in one process."""
    with holdfast.open(source) as checkpoint:
        assert checkpoint.step == STEPS
        every = {f"model.{n}": t for n, t in (expected.weights | expected.masters).items()}
        every |= {
            f"optim.{n}.{s}": t
            for n, found in expected.states.items()
            for s, t in found.items()
            if s != "step"
        }
        for key, tensor in every.items():
            same(key, torch.from_numpy(checkpoint.read(key)), tensor)
        aliases = checkpoint.manifest.aliases
        assert {aliases.get(k, k) for k in every} == {
            t.name for t in checkpoint.manifest.tensors if t.state != "step"
        }
        assert checkpoint.extras["iteration"] == STEPS
        assert checkpoint.extras["args"]["padded_vocab_size"] == SOURCES[source.name].padded_vocab
        assert checkpoint.extras["opt_param_scheduler"]["num_steps"] == 4 * STEPS
        shards = checkpoint.extras["rng_state"]["shards"]
        assert shards.keys() == {"0", "1", "2", "3"}


def _extra_states(source: Path, converted: Path) -> None:
    """Bytes that nobody has looked into; a conversion keeps them."""
    setup = SOURCES[source.name]
    names = [
        f"decoder.layers.{i}.{part}"
        for i in range(setup.layers if setup.fp8 else 0)
        for part in ("self_attention.linear_qkv", "mlp.linear_fc1")
    ]
    if setup.fp8:
        holdfast.convert(f"megatron:{source}", converted)
    for url in (source, converted) if setup.fp8 else (source,):
        found = holdfast.open(url).extras.get("extra_states", {})
        assert found.keys() == {f"{name}._extra_state" for name in names}
        for name in names:
            value, kept = extra_state(name), found[f"{name}._extra_state"]
            expected = value.getvalue() if isinstance(value, io.BytesIO) else bytes(value.tolist())
            assert bytes(kept) == expected


def _into_live(source: Path, expected: Expected) -> None:
    """Into a live model of Megatron-Core on one rank."""
    fresh = Run(expected.setup, seed=3)
    assert holdfast.load(f"megatron:{source}", {"model": fresh.gpt}, cast=True) == STEPS
    for n, t in fresh.weights().items():
        same(n, t, expected.weights[n])


def _into_plain(source: Path, expected: Expected) -> None:
    """In fp32, with torch's own AdamW: weights are the masters, and groups keep what they had."""
    fresh = Run(replace(expected.setup, bf16=False, distributed=False), seed=3).gpt
    vectors = [p for p in fresh.parameters() if p.ndim == 1]
    matrices = [p for p in fresh.parameters() if p.ndim != 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], lr=7.0)
    holdfast.load(source, {"model": fresh, "optim": optimizer})
    weights = expected.weights | expected.masters
    for n, p in fresh.named_parameters():
        same(n, p.detach(), weights[n])
        assert optimizer.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state[p]["step"] == torch.tensor(float(STEPS))
        for state in ("exp_avg", "exp_avg_sq"):
            same(f"{n}.{state}", optimizer.state[p][state], expected.states[n][state])
    assert [g["lr"] for g in optimizer.param_groups] == [expected.setup.lr] * 2
    assert [g["wd_mult"] for g in optimizer.param_groups] == [1.0, 0.0]
    for p in fresh.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert {float(s["step"]) for s in optimizer.state.values()} == {STEPS + 1.0}


CASES = [_case(name) for name in SOURCES]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    on_cpu()
    run_all(CASES)
