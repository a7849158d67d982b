"""The GPT of the Universal Checkpointing matrix, in plain torch, and what every framework agrees on.

Names and stored tensors are those that Megatron-Core gives the same model on one rank: grouped-query
attention with one fused QKV (query heads of a group, its key, its value; then the next group), a fused gate
and up, a vocabulary padded with rows that take no part, an embedding that is also the head, and optionally
a mixture of experts.  Initial values follow from a tensor's name, so a run of any framework begins with
the same ones and nothing has to be exchanged.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

HIDDEN, INNER, LAYERS, HEADS, GROUPS = 32, 48, 2, 8, 4
EXPERTS, TOP = 4, 2
DIM = HIDDEN // HEADS
VOCAB, UNIT = 100, 4
"""Tokens; the vocabulary is padded to a multiple of `UNIT` times the tensor-parallel size."""
PADDED = 104
"""As two tensor-parallel ranks pad it."""
SEQUENCE, BATCH = 8, 8
LR, DECAY, CLIP = 0.01, 0.1, 1.0
FIRST, MORE = 5, 50
"""Steps before the checkpoint, and after it."""
EMBEDDING = "embedding.word_embeddings.weight"
ADAM = ("exp_avg", "exp_avg_sq")


def tokens(step: int) -> torch.Tensor:
    """Of all ranks, for a step: `[BATCH, SEQUENCE + 1]`; each token mostly follows from the one before."""
    draw = torch.Generator().manual_seed(1000 + step)
    found = [torch.randint(0, VOCAB, (BATCH,), generator=draw)]
    for _ in range(SEQUENCE):
        found.append((7 * found[-1] + torch.randint(0, 4, (BATCH,), generator=draw)) % VOCAB)
    return torch.stack(found, 1)


def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A parameter before the first step, whole; rows of padding are zero."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if len(shape) == 1:
        return 1 + 0.1 * torch.randn(shape, generator=draw)
    if name == EMBEDDING:
        rows = 0.3 * torch.randn((VOCAB, *shape[1:]), generator=draw)
        return torch.cat([rows, torch.zeros(shape[0] - VOCAB, *shape[1:])])
    return torch.randn(shape, generator=draw) / shape[-1] ** 0.5


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = linear(HIDDEN, (HEADS + 2 * GROUPS) * DIM)
        self.linear_proj = linear(HIDDEN, HIDDEN)
        angles = torch.outer(torch.arange(SEQUENCE), 10000.0 ** (-torch.arange(0, DIM, 2) / DIM))
        self.register_buffer("angles", torch.cat([angles, angles], -1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        each = HEADS // GROUPS
        groups = self.linear_qkv(x).view(rows, length, -1, each + 2, DIM).transpose(1, 2)
        q, k, v = groups.split([each, 1, 1], dim=3)
        q, k = self.rotated(q), self.rotated(k)
        q, k, v = (t.transpose(2, 3) for t in (q, k.expand_as(q), v.expand_as(q)))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear_proj(out.permute(0, 3, 1, 2, 4).reshape(rows, length, -1))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        angles = self.angles[:, None]
        low, high = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-high, low], -1) * angles.sin()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = linear(HIDDEN, 2 * INNER)
        self.linear_fc2 = linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(functional.silu(gate) * up)


class Experts(nn.Module):
    """Each token goes to the `TOP` experts that its router finds best."""

    def __init__(self) -> None:
        super().__init__()
        self.router = linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleDict(
            {"local_experts": nn.ModuleList([Mlp() for _ in range(EXPERTS)])}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, which = self.router(x).topk(TOP, -1)
        weights = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, which, best.softmax(-1))
        local = self.experts["local_experts"]
        return sum(e(x) * weights[..., i : i + 1] for i, e in enumerate(local))


class Layer(nn.Module):
    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.self_attention = Attention()
        self.pre_mlp_layernorm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.mlp = Experts() if experts else Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(experts) for _ in range(LAYERS)])
        self.final_layernorm = nn.RMSNorm(HIDDEN, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.final_layernorm(x)


class Gpt(nn.Module):
    """`forward` takes `[rows, SEQUENCE + 1]` tokens and gives their mean loss."""

    def __init__(self, *, experts: bool = False, padded: int = PADDED) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(padded, HIDDEN)})
        self.decoder = Decoder(experts)
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(value(name, tuple(p.shape)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embed = self.embedding["word_embeddings"]
        x = self.decoder(embed(ids[:, :-1]))
        if isinstance(embed.weight, DTensor):
            x = DTensor.from_local(x, embed.weight.device_mesh, [Replicate()], run_check=False)
        logits = functional.linear(x, embed.weight)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        return functional.cross_entropy(logits[..., :VOCAB].flatten(0, 1), ids[:, 1:].flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """As Megatron-Core groups parameters: vectors do not decay."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups(model), lr=LR, foreach=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """As torch gathers it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


@torch.no_grad()
def clip(model: nn.Module) -> None:
    """To the norm `CLIP`, of all ranks' parts: torch's own refuses parameters on different meshes."""
    grads = [p.grad for p in model.parameters()]
    norm = torch.stack([whole(torch.linalg.vector_norm(g)) for g in grads]).norm()
    for g in grads:
        g.mul_(min(1.0, CLIP / (float(norm) + 1e-6)))


@dataclass
class Plain:
    """A model and torch's AdamW; `rank` of `world` takes its rows of each batch."""

    model: nn.Module
    optim: torch.optim.Optimizer
    rank: int = 0
    world: int = 1

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim}

    def run(self, first: int, steps: int) -> list[float]:
        """Losses over all ranks."""
        return [self.step(i) for i in range(first, first + steps)]

    def step(self, number: int) -> float:
        loss = self.model(tokens(number).chunk(self.world)[self.rank])
        loss.backward()
        clip(self.model)
        self.optim.step()
        self.optim.zero_grad()
        return mean(loss.detach(), self.world)

    def save(self, folder: Path) -> None:
        """By torch.distributed.checkpoint."""
        model, optim = get_state_dict(self.model, self.optim)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)

    def gathered(self) -> dict[str, torch.Tensor]:
        """Weights and Adam's moments, as torch gathers them."""
        found = {}
        for name, p in self.model.named_parameters():
            name = name.removeprefix("module.")
            found[f"model.{name}"] = whole(p)
            found |= {f"optim.{name}.{s}": whole(self.optim.state[p][s]) for s in ADAM}
        return found


def mean(loss: torch.Tensor, world: int) -> float:
    """Of the ranks' losses."""
    total = loss.clone()
    if world > 1:
        torch.distributed.all_reduce(total)
    return float(total) / world
