"""Worker, 8 ranks: Megatron-Core's side of the Universal Checkpointing matrix.

The sources: a dense model and one of experts, each over tensors, pipeline and data with ZeRO-1.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from . import ucp_gpt as gpt
from .cases import run_all
from .megatron_cpu import on_cpu
from .megatron_gpt import Run, Setup
from .ucp_cases import uninterrupted

DENSE = Setup(
    tp=2, pp=2, hidden=gpt.HIDDEN, inner=gpt.INNER, heads=gpt.HEADS, groups=gpt.GROUPS,
    layers=gpt.LAYERS, norm="RMSNorm", positions="rope", biased_qkv=False, tied=True,
    vocab=gpt.VOCAB, divisible=gpt.UNIT, lr=gpt.LR, batch=gpt.BATCH, micro=2, distributed=True,
)  # fmt: skip
MOE = replace(DENSE, ep=2, experts=gpt.EXPERTS, sequence_parallel=True, micro=4)
SOURCE, MOE_SOURCE = "tp2_pp2_dp2_zero1", "moe_tp2_pp2_ep2_zero1"


class Job(Run):
    """A run whose padding takes no part in the loss, and whose values follow from names."""

    def _gpt(self, chunk: int) -> Any:
        model = super()._gpt(chunk)
        with torch.no_grad():
            for name, p in self.named(model):
                p.copy_(self.part(name, p, gpt.value(name, self.full_shape(p))))
        return model

    def _optimizer(self) -> Any:
        optimizer = super()._optimizer()
        for group in optimizer.param_groups:  # as Megatron-LM's scheduler does
            group["weight_decay"] *= group["wd_mult"]
        return optimizer

    def named(self, model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """By the name in a model that lies whole in one process."""
        first_layer = get_transformer_layer_offset(self.config)
        first_expert = 0
        if self.setup.experts:
            here = self.setup.experts // self.setup.ep
            first_expert = here * mpu.get_expert_model_parallel_rank()
        for name, p in model.named_parameters():
            words = name.split(".")
            for i, word in enumerate(words[:-1]):
                if word in ("layers", "local_experts"):
                    first = first_layer if word == "layers" else first_expert
                    words[i + 1] = str(int(words[i + 1]) + first)
            name = ".".join(words)
            yield gpt.EMBEDDING if name == "output_layer.weight" else name, p

    def full_shape(self, p: torch.nn.Parameter) -> tuple[int, ...]:
        shape = list(p.shape)
        if getattr(p, "tensor_model_parallel", False):
            shape[p.partition_dim] *= self.setup.tp
        return tuple(shape)

    # -- values --------------------------------------------------------------------------------------

    def part(self, name: str, p: torch.nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """This rank's part, by the dim that Megatron says; of gate and up a part each."""
        if not getattr(p, "tensor_model_parallel", False):
            return full
        rank, halves = mpu.get_tensor_model_parallel_rank(), 2 if "linear_fc1" in name else 1
        cut = [h.chunk(self.setup.tp, p.partition_dim)[rank] for h in full.chunk(halves)]
        return torch.cat(cut, p.partition_dim)

    def joined(self, name: str, p: torch.nn.Parameter, mine: torch.Tensor) -> torch.Tensor:
        """The ranks' parts: the inverse of `part`."""
        if not getattr(p, "tensor_model_parallel", False):
            return mine.clone()
        parts = [torch.empty_like(mine) for _ in range(self.setup.tp)]
        dist.all_gather(parts, mine.contiguous(), group=mpu.get_tensor_model_parallel_group())
        halves = [part.chunk(2 if "linear_fc1" in name else 1) for part in parts]
        return torch.cat([torch.cat(half, p.partition_dim) for half in zip(*halves)])

    def gathered(self) -> dict[str, torch.Tensor]:
        """Weights and Adam's moments, whole, on every rank: by Megatron's own ranges and groups."""
        found = {}
        for name, p in self.named(self.gpt):
            found[f"model.{name}"] = self.joined(name, p, p.detach())
            for state, tensor in self.moments(p).items():
                found[f"optim.{name}.{state}"] = self.joined(name, p, tensor)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
        merged: dict[str, torch.Tensor] = {}
        for name, tensor in (item for each in every for item in each.items()):
            assert torch.equal(merged.setdefault(name, tensor), tensor), f"copies of {name} differ"
        return merged

    def moments(self, p: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Of this rank's part of a parameter: the ranges that the data-parallel ranks keep of it."""
        found = {s: torch.zeros(p.numel()) for s in gpt.ADAM}
        for holder in self.optimizer.chained_optimizers:
            if p in holder.model_param_gbuf_map:
                at = holder._get_model_param_range_map(p)["param"]
                kept = holder._get_main_param_and_optimizer_states(p)
                for state in gpt.ADAM:
                    found[state][at.start : at.end] = kept[state]
        expert = not getattr(p, "allreduce", True)
        group = mpu.get_expert_data_parallel_group() if expert else mpu.get_data_parallel_group()
        for tensor in found.values():
            dist.all_reduce(tensor, group=group)
        return {s: t.view(p.shape) for s, t in found.items()}

    # -- training ------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer}

    def run(self, first: int, steps: int) -> list[float]:
        self.iteration = first
        return self.train(steps)

    def tokens(self) -> torch.Tensor:
        return gpt.tokens(self.iteration)

    def forward(self, data: Iterator[torch.Tensor], model: Any) -> Any:
        ids = next(data)
        size = gpt.SEQUENCE
        mask = torch.triu(torch.ones(1, 1, size, size), diagonal=1).bool()
        output = model(ids[:, :-1], torch.arange(size).unsqueeze(0), mask)
        return output, partial(self.loss, ids[:, 1:])

    def loss(self, labels: torch.Tensor, logits: torch.Tensor) -> Any:
        """Of logits `[rows, sequence, this rank's part of the vocabulary]`."""
        width = logits.shape[-1]
        at = torch.arange(width) + width * mpu.get_tensor_model_parallel_rank()
        logits = logits.masked_fill(at >= gpt.VOCAB, torch.finfo(logits.dtype).min)
        loss = vocab_parallel_cross_entropy(logits, labels).mean()
        return loss, {"loss": loss.detach().clone()}


ARRANGED = {SOURCE: DENSE, MOE_SOURCE: MOE}
CASES = [uninterrupted(name, partial(Job, setup)) for name, setup in ARRANGED.items()]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    on_cpu()
    run_all(CASES)
